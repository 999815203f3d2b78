"""The update objects: ranges, schedules, guard, configuration, a user's own update."""

import math

import pytest
import torch

from scent_lightning import functional as F
from scent_lightning.duals import (
    ASGD,
    BSGD,
    MSVR,
    SCENT,
    SOX,
    DualUpdate,
    DualVariable,
    ProximalPoint,
    SoftplusASGD,
    UMax,
)
from scent_lightning.errors import InputError

ALL = [
    BSGD(),
    SCENT(-1.0),
    SCENT(-1.0, alpha_multiplier=0.5),
    SOX(0.4),
    ASGD(0.1),
    ASGD(0.1, bounds=(-2e4, 2e4)),
    UMax(0.1, 1.0),
    ProximalPoint(0.5),
    MSVR(0.4, 2.0),
    SoftplusASGD(0.1, 1e-3),
]


class HalfWay(DualUpdate):
    def step_from_log_mean(self, nu, log_mean, progress=0.0):
        return (nu + log_mean) / 2


class HeldBack(DualUpdate):
    def __init__(self, share: float, max_log_weight: float | None = None):
        super().__init__(max_log_weight)
        self.share = share

    def step_from_log_mean(self, nu, log_mean, progress=0.0):
        return nu + self.share * (log_mean - nu)


@pytest.mark.parametrize("update", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_step_gives_float32_and_keeps_rows_without_samples(update, dtype):
    nu = torch.tensor([0.5, -0.5, 2.0])
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    new = update.step(nu, scores, mask, previous_scores=scores - 0.5)
    assert new.dtype == torch.float32
    assert new.shape == (3,)
    assert new[1] == -0.5
    assert torch.isfinite(new).all()
    assert not new.requires_grad
    objective = update.objective(new, scores, mask)
    assert objective.shape == (3,)
    assert objective[1] == 0


@pytest.mark.parametrize("update", ALL[:-1], ids=repr)
def test_step_is_log_mean_exp_then_step(update):
    nu, scores = torch.zeros(3), torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    log_mean, previous = F.log_mean_exp(scores), F.log_mean_exp(0.5 * scores)
    expected = update.step_with_previous(nu, log_mean, previous).float()
    assert torch.equal(update.step(nu, scores, previous_scores=0.5 * scores), expected)
    if not update.needs_previous_scores:
        assert torch.equal(update.step_from_log_mean(nu, log_mean).float(), expected)
        assert torch.equal(update.step(nu, scores), expected)


@pytest.mark.parametrize("update", ALL, ids=repr)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_finite_scores_never_give_nan(update, scale):
    generator = torch.Generator().manual_seed(2)
    nu = scale * (2 * torch.rand(64, generator=generator) - 1)
    scores = scale * (2 * torch.rand(64, 9, generator=generator) - 1)
    assert not torch.isnan(update.step(nu, scores, previous_scores=-scores)).any()
    assert not torch.isnan(update.objective(nu, scores)).any()


def test_softplus_needs_scores():
    assert SoftplusASGD(0.1, 1e-3).needs_scores
    assert not any(update.needs_scores for update in ALL[:-1])
    with pytest.raises(NotImplementedError, match="needs the scores"):
        SoftplusASGD(0.1, 1e-3).step_from_log_mean(torch.zeros(1), torch.zeros(1))


def test_msvr_needs_the_previous_scores():
    assert [type(update) for update in ALL if update.needs_previous_scores] == [MSVR]
    with pytest.raises(InputError, match=r"MSVR\(gamma=0.4, beta=2.0\) needs previous_scores, the scores of the same"):
        MSVR(0.4, 2.0).step(torch.zeros(1), torch.zeros(1, 2))
    with pytest.raises(InputError, match="needs the scores at the previous weights, too"):
        MSVR(0.4, 2.0).step_from_log_mean(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ProximalPoint(0.0), "alpha must be a finite number above 0, got 0.0"),
        (lambda: ASGD(0.1, bounds=(1.0, 1.0)), r"bounds must rise, the least ν before the largest, got \(1.0, 1.0\)"),
        (lambda: ASGD(0.1, bounds=(2.0, -1.0)), "bounds must rise"),
        (lambda: ASGD(0.1, bounds=(0.0, math.inf)), "bounds must be a finite number, got inf"),
        (lambda: ASGD(0.1, bounds=3.0), "bounds must be None or two numbers, the least and the largest ν, got 3.0"),
        (lambda: SCENT(0.0, alpha_multiplier=-1.0), "alpha_multiplier must be a finite number of at least 0, got -1.0"),
        (lambda: SCENT(alpha_multiplier=0.5), "alpha_multiplier needs a number for log_alpha, not 'auto'; got 0.5"),
        (lambda: SCENT("1/S", window=1), "window must be None or an integer of at least 2, got 1"),
        (lambda: SCENT(0.0, window=5), 'window is for log_alpha="1/S" alone, got 5 with log_alpha=0.0'),
        (
            lambda: SCENT("1/S", alpha_multiplier=0.0),
            "alpha_multiplier needs a number for log_alpha, not '1/S'; got 0.0",
        ),
        (lambda: MSVR(1.5, 0.5), r"gamma must be a number in \[0, 1\], got 1.5"),
        (lambda: MSVR(0.5, -0.5), "beta must be a finite number of at least 0, got -0.5"),
        (lambda: MSVR(0.5, math.inf), "beta must be a finite number of at least 0, got inf"),
        (lambda: MSVR(0.5, 0.5, floor=0.0), r"floor must be a number in \(0, 1\], got 0.0"),
        (lambda: SOX(-0.1), r"gamma must be a number in \[0, 1\], got -0.1"),
        (lambda: SOX(1.5), r"gamma must be a number in \[0, 1\]"),
        (lambda: SOX(0.5, final=2.0), "final must be None or a number in"),
        (lambda: SOX(math.nan), "gamma"),
        (lambda: SCENT(math.nan), "log_alpha must be a number"),
        (lambda: SCENT("1"), 'log_alpha must be a number, "auto" or "1/S", got \'1\''),
        (lambda: SCENT(1.0, schedule="linear"), "schedule must be one of constant, cosine, got 'linear'"),
        (lambda: SCENT(1.0, max_log_weight=-1.0), "max_log_weight must be None or a number of at least 0, got -1.0"),
        (lambda: ASGD(0.0), "alpha must be a finite number above 0, got 0.0"),
        (lambda: ASGD(math.inf), "alpha"),
        (lambda: UMax(0.1, -1.0), "delta must be a number of at least 0, got -1.0"),
        (lambda: UMax(0.1, 1.0, compare="both"), "compare must be one of new, old, got 'both'"),
        (lambda: SoftplusASGD(0.1, 0.0), "rho must be a finite number above 0, got 0.0"),
    ],
)
def test_arguments_out_of_range(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_base_class_is_not_an_update():
    with pytest.raises(TypeError, match="must implement step_from_log_mean"):
        DualUpdate()


def test_cosine_schedules():
    scent = SCENT(2.0, schedule="cosine")
    assert scent.step_sizes(0.0)["log_alpha"] == pytest.approx(2.0)
    assert scent.step_sizes(0.5)["log_alpha"] == pytest.approx(2.0 + math.log(0.5))
    assert scent.step_sizes(1.0)["log_alpha"] == -math.inf
    assert SCENT(2.0, schedule="cosine", final=-3.0).step_sizes(1.0)["log_alpha"] == pytest.approx(-3.0)
    assert SCENT(700.0, "cosine").step_sizes(0.5)["log_alpha"] == pytest.approx(700 + math.log(0.5))
    assert SCENT(2.0).step_sizes(0.7) == {"log_alpha": 2.0}
    # Published practice for SOX: from 1 to γ.
    assert [SOX(0.4, "cosine").step_sizes(p)["gamma"] for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.7, 0.4])
    assert [SOX(0.8, "cosine", final=0.2).step_sizes(p)["gamma"] for p in (0.0, 1.0)] == pytest.approx([0.8, 0.2])
    assert [ASGD(2.0, "cosine").step_sizes(p)["alpha"] for p in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.0, 0.0])
    assert [MSVR(0.4, 1.0, "cosine").step_sizes(p)["gamma"] for p in (0.0, 1.0)] == pytest.approx([1.0, 0.4])
    assert UMax(2.0, 1.0, "cosine", final=1.0).step_sizes(1.0)["alpha"] == pytest.approx(1.0)
    assert BSGD().step_sizes(0.3) == {}


def test_schedules_reach_the_step():
    nu, scores = torch.zeros(1), torch.full((1, 2), 3.0)
    for update in (
        SCENT(1.0, "cosine"),
        ASGD(0.5, "cosine"),
        SoftplusASGD(0.5, 1e-3, "cosine"),
        UMax(0.5, 9, "cosine"),
    ):
        assert update.step(nu, scores, progress=1.0).item() == pytest.approx(0.0, abs=1e-6)
        assert update.step(nu, scores, progress=0.0).item() > 0.1
    assert SOX(0.0, "cosine").step(nu, scores, progress=0.0).item() == pytest.approx(3.0)


@pytest.mark.parametrize("kind", [SCENT, HeldBack])
def test_guard_is_part_of_every_step(kind):
    update = kind(-50.0, max_log_weight=2.0) if kind is SCENT else kind(0.0, max_log_weight=2.0)
    new = update.step(torch.tensor([0.0, 9.0]), torch.full((2, 3), 10.0))
    assert new.tolist() == pytest.approx([8.0, 9.0])
    softplus = SoftplusASGD(1e-6, 1e-3, max_log_weight=2.0).step(torch.zeros(1), torch.full((1, 3), 10.0))
    assert softplus.item() == pytest.approx(8.0)


@pytest.mark.parametrize("update", [*ALL, SCENT(3.0, "cosine", -2.0, 1.0), HeldBack(0.3, 2.0)], ids=repr)
def test_configuration_round_trip(update):
    config = update.config()
    again = DualUpdate.from_config(config)
    assert type(again) is type(update)
    assert again.config() == config
    assert repr(again) == repr(update)


def test_configuration_errors():
    with pytest.raises(InputError, match="no dual update at class_path"):
        DualUpdate.from_config({"class_path": "scent_lightning.duals.Nothing"})
    with pytest.raises(InputError, match="not a subclass of DualUpdate"):
        DualUpdate.from_config({"class_path": "torch.nn.Linear"})
    assert isinstance(DualUpdate.from_config({"class_path": "SOX", "init_args": {"gamma": 0.5}}), SOX)

    class Forgetful(DualUpdate):
        def __init__(self, factor):
            super().__init__()

        def step_from_log_mean(self, nu, log_mean, progress=0.0):
            return nu

    with pytest.raises(TypeError, match="keep its argument 'factor'"):
        Forgetful(1.0).config()


def test_scent_statistics():
    update = SCENT(1.0)
    nu = torch.tensor([-1.0, 0.0, 2.0])
    gamma = torch.sigmoid(nu + 1.0)
    found = update.statistics(nu, nu)
    assert found["effective_gamma"].item() == pytest.approx(gamma.mean().item())
    assert found["effective_gamma_min"].item() == pytest.approx(gamma.min().item())
    assert found["effective_gamma_max"].item() == pytest.approx(gamma.max().item())


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_a_table_takes_every_update(update):
    """Repeats, and a state that another table takes; then the same step by the update itself."""
    table, again = DualVariable(6, update), DualVariable(6, DualUpdate.from_config(update.config()))
    assert repr(again.update) == repr(update)
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table.entropic_risk(scores, torch.tensor([0, 3, 3, 5]), previous_scores=scores / 2)
    again.load_state_dict(table.state_dict())
    index = torch.tensor([5, 0])
    expected = update.step(table.nu[index].clone(), scores[:2], previous_scores=scores[:2] - 0.3)
    for each in (table, again):
        each.entropic_risk(scores[:2], index, previous_scores=scores[:2] - 0.3)
        torch.testing.assert_close(each.nu[index], expected)


def test_asgd_stays_within_its_bounds():
    free, bound = ASGD(1.0), ASGD(1.0, bounds=(-1.0, 2.0))
    nu, scores = torch.tensor([-0.5, 1.5, 0.0]), torch.tensor([[-9.0], [9.0], [0.5]])
    assert bound.step(nu, scores).tolist() == free.step(nu, scores).clamp(-1.0, 2.0).tolist()
    assert ASGD(1.0, bounds=[-1, 2]).bounds == (-1.0, 2.0)
