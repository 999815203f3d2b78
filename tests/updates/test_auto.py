"""SCENT with no step size set: where it converges, what does not matter to it, and its state."""

import copy
import functools
import io
import math

import pytest
import torch

from scent_lightning.duals import BSGD, SCENT, DualVariable
from scent_lightning.errors import InputError
from scent_lightning.functional import log_mean_exp
from scent_lightning.updates.windows import FEW_ANCHORS
from tests.helpers import SoftmaxData, SoftmaxTask, in_two_processes, quiet_trainer

MEAN, DEVIATION, SAMPLES = 1.5, 2.0, 8
EXACT = MEAN + DEVIATION**2 / 2  # log E e^s of normal scores


def batches(anchors, steps, rows, shift=0.0, seed=0):
    """Scores of anchors that are drawn evenly, all with the same distribution."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(anchors, generator=generator) for _ in range(-(-steps * rows // anchors))])
    for step in range(steps):
        scores = MEAN + DEVIATION * torch.randn(rows, SAMPLES, generator=generator)
        yield scores + shift, order[step * rows : (step + 1) * rows], step / steps


def train(variable, anchors, steps, rows, **arguments):
    for scores, index, progress in batches(anchors, steps, rows, **arguments):
        variable.entropic_risk(scores, index, progress=progress)
    return variable


# Anchors, steps and rows of each kind: one, few, and many.
KINDS = {"one": (1, 3000, 1), "few": (20, 3000, 10), "many": (FEW_ANCHORS + 176, 3000, 80)}


@pytest.mark.parametrize("kind", KINDS)
def test_converges_to_the_objective(kind):
    anchors, steps, rows = KINDS[kind]
    seeds = range(6 if kind == "one" else 1)  # one ν is one draw
    errors = []
    for update in (SCENT("auto"), BSGD()):
        tables = [train(DualVariable(anchors, update), anchors, steps, rows, seed=seed) for seed in seeds]
        assert all(bool(table.visited.all()) for table in tables)
        errors.append(torch.cat([table.nu.double() - EXACT for table in tables]).square().mean().sqrt())
    # BSGD's ν is noise around a value that is too low.
    assert errors[0] < 0.25
    assert errors[0] < 0.25 * errors[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-300.0, 40.0])
def test_a_shift_of_all_scores_shifts_nu(kind, shift):
    anchors, steps, rows = KINDS[kind]
    there, shifted = (
        train(DualVariable(anchors, SCENT("auto")), anchors, steps // 5, rows, shift=by) for by in (0.0, shift)
    )
    torch.testing.assert_close(shifted.nu - shift, there.nu, rtol=0, atol=2e-3)  # float32 at 300 holds 3e-5


@functools.cache
def from_the_first_visit(kind):
    anchors, steps, rows = KINDS[kind]
    return train(DualVariable(anchors, SCENT("auto")), anchors, steps, rows).nu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [-60.0, 60.0])
def test_the_start_does_not_matter(kind, start):
    anchors, steps, rows = KINDS[kind]
    variable = DualVariable(anchors, SCENT("auto"))
    variable.nu.fill_(start)
    variable.visited.fill_(True)
    elsewhere = train(variable, anchors, steps, rows)
    assert (elsewhere.nu - from_the_first_visit(kind)).abs().max() < 1e-3


def test_the_size_of_the_data_set_does_not_matter():
    """As many visits of each anchor, four times as many anchors: the same errors but for chance."""
    errors = []
    for anchors, rows in ((2000, 80), (8000, 320)):
        variable = train(DualVariable(anchors, SCENT("auto")), anchors, 2000, rows)
        errors.append((variable.nu.double() - EXACT).square().mean().sqrt().item())
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_without_noise_it_is_bsgd():
    """ℓ is exact where each batch has all samples, and then an average could only lag."""
    variable = DualVariable(1, SCENT("auto"))
    for step in range(1000):
        log_mean = 5.0 + 3.0 * math.exp(-step / 300)
        variable.entropic_risk(torch.full((1, 4), log_mean), torch.tensor([0]), progress=step / 1000)
        if 100 < step < 700:
            assert abs(variable.nu.item() - log_mean) < 0.02
            assert variable.auto.variance < 1e-3
    assert variable.auto.log_alpha(0.75) > -variable.auto.reference - 1.0


@pytest.mark.parametrize(("fall", "scale"), [(0.5, 1.0), (1.0, 1.0), (3.0, 8.0)])
def test_a_fall_of_nu_at_each_visit_shortens_the_average(fall, scale):
    """The average lags by at most 0.18 of how far ℓ and ν are apart."""
    falling, squares = DualVariable(2000, SCENT("auto")), []
    for scores, index, progress in batches(2000, 1600, 20):
        scores = scale * scores - fall * math.floor(16 * progress)
        nu, _ = falling.gather(index)
        falling.entropic_risk(scores, index, progress=0.8 * progress)  # then α would fall
        squares.append((log_mean_exp(scores) - nu).square().mean().item())
    assert falling.auto.visits_of_each == pytest.approx(16, rel=0.05)
    apart = math.sqrt(sum(squares[-100:]) / 100)
    c = -falling.auto.log_alpha(0.8) - falling.auto.reference
    assert math.exp(c) == pytest.approx(0.18 * apart / fall, rel=0.1)


def test_a_fall_that_is_over_no_longer_shortens_it():
    """It falls by 5 in the first 7 of 16 visits: from the 14th on it does not count."""
    fallen = DualVariable(2000, SCENT("auto"))
    for scores, index, progress in batches(2000, 1600, 20):
        fallen.entropic_risk(scores - 5 * min(progress / 0.4, 1.0), index, progress=0.8 * progress)
    c = -fallen.auto.log_alpha(0.8) - fallen.auto.reference
    assert c == pytest.approx(fallen.auto._c_of_visits(), abs=1e-6)


def test_where_nothing_falls_the_visits_limit_the_average():
    """A tenth of the 16 visits, and a little more."""
    resting = DualVariable(2000, SCENT("auto"))
    for scores, index, progress in batches(2000, 1600, 20):
        resting.entropic_risk(scores, index, progress=0.8 * progress)
    c = -resting.auto.log_alpha(0.8) - resting.auto.reference
    assert c == pytest.approx(math.log(1.6 * (1 + 16 / 30)), abs=0.03)


def c_when_risen(anchors, steps, rows=1):
    variable = DualVariable(anchors, SCENT("auto"))
    for scores, index, progress in batches(anchors, steps, rows):
        variable.entropic_risk(scores, index, progress=0.8 * progress)
    return -variable.auto.log_alpha(0.8) - variable.auto.reference


@pytest.mark.parametrize(("anchors", "rows"), [(2, 1), (20, 10)])
def test_in_the_end_the_average_is_over_150_visits(anchors, rows):
    assert c_when_risen(anchors, 2000, rows) == pytest.approx(5.0)


@pytest.mark.parametrize(("steps", "c"), [(300, 1.504), (2000, 3.401), (15_000, 5.0)])
def test_one_anchor_is_averaged_over_a_share_of_the_run_at_most(steps, c):
    # ``steps`` are four fifths of the run, and 1.2 % of it are 4.5, 30 and 225.
    assert c_when_risen(1, steps) == pytest.approx(c, abs=0.01)


def test_one_anchor_of_a_run_that_goes_on_is_averaged_over_a_share_of_all_its_steps():
    variable = DualVariable(1, SCENT("auto"))
    for scores, index, progress in batches(1, 2000, 1):
        variable.entropic_risk(scores, index, progress=progress)
    variable.auto.move(-0.75)  # 2,000 steps are a quarter of the run now
    for scores, index, progress in batches(1, 4000, 1, seed=1):
        variable.entropic_risk(scores, index, progress=0.25 + 0.5 * progress)
    c = -variable.auto.log_alpha(0.75) - variable.auto.reference
    assert c == pytest.approx(math.log(0.012 * 8000) * 0.75 / 0.8, abs=0.01)


def test_only_the_anchors_in_use_count():
    """A tenth of the rows are anchors: they have been seen ten times as often as rows of the table."""
    variable = train(DualVariable(20_000, SCENT("auto")), 2000, 1000, 20)
    assert variable.auto.visits_of_each == pytest.approx(10, rel=0.02)


def test_the_reference_never_rises_and_an_outlier_leaves_it_alone():
    variable = DualVariable(1, SCENT("auto"))
    references = []
    for step, (scores, index, progress) in enumerate(batches(1, 1000, 1)):
        variable.entropic_risk(scores + 80.0 * (step % 100 == 50), index, progress=progress)
        if variable.auto.reference is not None:
            references.append(variable.auto.reference)
    assert references == sorted(references, reverse=True)
    assert references[-1] < EXACT
    assert math.isfinite(variable.nu.item())


def test_without_progress_it_is_bsgd():
    found, biased = DualVariable(6, SCENT("auto")), DualVariable(6, BSGD())
    for scores, index, _ in batches(6, 20, 3):
        assert found.entropic_risk(scores, index) == biased.entropic_risk(scores, index)
    assert torch.equal(found.nu, biased.nu)


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_exactly_from_its_state(kind):
    anchors, steps, rows = KINDS[kind]
    steps //= 10
    variable = DualVariable(anchors, SCENT("auto"))
    for step, (scores, index, progress) in enumerate(batches(anchors, steps, rows)):
        if step == steps // 2 + 1:  # within a window
            file = io.BytesIO()
            torch.save(variable.state_dict(), file)
            file.seek(0)
            resumed = DualVariable(anchors, SCENT("auto"))
            resumed.load_state_dict(torch.load(file, weights_only=True))
        variable.entropic_risk(scores, index, progress=progress)
        if step > steps // 2:
            resumed.entropic_risk(scores, index, progress=progress)
    assert torch.equal(variable.nu, resumed.nu)
    assert variable.auto.reference == resumed.auto.reference
    copied = copy.deepcopy(variable)
    assert copied.auto is not variable.auto
    variable.reset()
    assert variable.auto.reference is None
    assert copied.auto.reference is not None


def test_states_with_and_without():
    fixed, auto = DualVariable(4, SCENT(0.0)), train(DualVariable(4, SCENT("auto")), 4, 50, 2)
    state = auto.state_dict()
    fixed.load_state_dict(state)
    assert torch.equal(fixed.nu, auto.nu)
    other = DualVariable(4, SCENT("auto"))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(other.nu, auto.nu)
    assert other.auto.reference is None
    old = {**auto.state_dict(), "auto._extra_state": {"reference": 1.0, "rise": 4.0}}  # another rule's
    other = train(DualVariable(4, SCENT("auto")), 4, 50, 2)
    other.load_state_dict(old)
    assert other.auto.reference is None
    auto.grow(7)
    assert auto.auto.num_anchors == 7


def _ranks(rank):
    variable = DualVariable(8, SCENT("auto"))
    for scores, index, progress in batches(8, 60, 4):
        share = slice(0, 3) if rank == 0 else slice(3, 4)
        variable.entropic_risk(scores[share], index[share], progress=progress)
    return variable.nu.tolist(), variable.auto.reference


def test_the_same_in_every_process(tmp_path):
    first, second = in_two_processes(_ranks, tmp_path)
    assert first == second
    alone = train(DualVariable(8, SCENT("auto")), 8, 60, 4)
    torch.testing.assert_close(torch.tensor(first[0]), alone.nu, rtol=1e-5, atol=1e-5)
    assert first[1] == pytest.approx(alone.auto.reference)


def test_under_a_trainer(tmp_path):
    data = SoftmaxData(rows=48)
    task = SoftmaxTask(data.num_anchors, SCENT("auto"))
    trainer = quiet_trainer(max_epochs=30, limit_val_batches=0)
    trainer.fit(task, data)
    auto = task.duals["nu"].auto
    assert auto.epoch == pytest.approx(1 / 30)
    assert auto.reference is not None
    assert auto.visits_of_each == 29  # the last window is not over
    assert 0 < auto.variance < math.inf
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = SoftmaxTask.load_from_checkpoint(tmp_path / "a.ckpt")
    assert repr(loaded.duals["nu"].update) == "SCENT()"
    assert loaded.duals["nu"].auto.reference == auto.reference
    with pytest.raises(InputError, match="needs to know how long the run is"):
        quiet_trainer(max_epochs=-1, limit_val_batches=0).fit(SoftmaxTask(data.num_anchors, SCENT("auto")), data)


def test_nothing_to_set():
    assert SCENT().log_alpha == "auto"
    variable = DualVariable(4, SCENT(max_log_weight=2.5))
    assert variable.update_at(0.0).max_log_weight == 2.5
    assert DualVariable(4, SCENT()).update_at(0.0).max_log_weight == 1.0  # an anchor seen once
    assert train(DualVariable(20, SCENT()), 20, 1000, 10).update_at(1.0).max_log_weight == 4.0


def test_errors():
    with pytest.raises(InputError, match='log_alpha must be a number, "auto" or "1/S", got \'automatic\''):
        SCENT("automatic")
    with pytest.raises(InputError, match="step by a DualVariable"):
        SCENT("auto").step(torch.zeros(1), torch.zeros(1, 3))
