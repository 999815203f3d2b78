"""The table: what it promises, one thing at a time."""

import math

import pytest
import torch

from scent_lightning import functional as F
from scent_lightning.duals import ASGD, BSGD, SCENT, SOX, DualDivergenceError, DualUpdate, DualVariable, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.functional.repeats import look_at

UPDATES = [SCENT(0.0), SOX(0.5), BSGD(), ASGD(0.1), SoftplusASGD(0.1, 1e-3)]


def filled(update, n=10, seed=0):
    """A table in which half the anchors were visited."""
    variable = DualVariable(n, update)
    generator = torch.Generator().manual_seed(seed)
    variable.nu[: n // 2] = torch.randn(n // 2, generator=generator)
    variable.visited[: n // 2] = True
    return variable


def unchanged(variable, before):
    return torch.equal(variable.nu, before[0]) and torch.equal(variable.visited, before[1])


def snapshot(variable):
    return variable.nu.clone(), variable.visited.clone()


def scores_of(rows, samples=6, seed=1, scale=1.0):
    return (scale * torch.randn(rows, samples, generator=torch.Generator().manual_seed(seed))).requires_grad_()


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_step_writes_and_weighs_with_the_new_nu(update, index_dtype):
    variable = filled(update)
    before, _ = snapshot(variable)
    scores, index = scores_of(3), torch.tensor([1, 7, 4], dtype=index_dtype)
    loss = variable.entropic_risk(scores, index)
    log_mean = F.log_mean_exp(scores)
    start = torch.tensor([before[1], log_mean[1], before[4]])  # 7 was never seen: it starts at ℓ
    expected = update.step(start, scores)
    rows = index.long()
    torch.testing.assert_close(variable.nu[rows], expected)
    assert variable.visited.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 7]
    untouched = [i for i in range(10) if i not in (1, 7, 4)]
    assert torch.equal(variable.nu[untouched], before[untouched])
    torch.testing.assert_close(loss, update.objective(expected, scores).mean())
    (gradient,) = torch.autograd.grad(loss, scores)
    (direct,) = torch.autograd.grad(update.objective(expected, scores).mean(), scores)
    torch.testing.assert_close(gradient, direct)


MASKS = {
    "same number": [[True, True, False, True], [False, True, True, True], [True, True, True, False]],
    "other numbers": [[True, True, False, False], [False, True, True, True], [True, True, True, True]],
    "an empty row": [[True, True, False, True], [False] * 4, [True, False, False, False]],
}


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masked_gradient_is_the_objectives(update, mask):
    variable, mask = filled(update), torch.tensor(mask)
    scores, index = scores_of(3)[:, :4].detach(), torch.tensor([1, 0, 4])
    scores = scores.masked_fill(~mask, math.nan).requires_grad_()
    loss = variable.entropic_risk(scores, index, mask)
    direct = update.objective(variable.nu[index], scores, mask).sum() / mask.any(dim=1).sum()
    torch.testing.assert_close(loss, direct)
    torch.testing.assert_close(*(torch.autograd.grad(value, scores)[0] for value in (loss, direct)))


def test_first_visit_starts_at_the_log_mean_even_where_zero_is_stored():
    variable = DualVariable(3, SCENT(-2.0))
    scores = torch.full((1, 4), 5.0)
    variable.entropic_risk(scores, torch.tensor([1]))
    assert variable.nu[1].item() == pytest.approx(5.0)
    seen_at_zero = DualVariable(3, SCENT(-2.0))
    seen_at_zero.visited[1] = True
    seen_at_zero.entropic_risk(scores, torch.tensor([1]))
    assert 0 < seen_at_zero.nu[1].item() < 4.9


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_repeated_index_is_one_update_with_all_its_samples(update):
    """Rows of the same anchor act like one row with all the samples."""
    scores = scores_of(4, scale=2.0)
    index = torch.tensor([2, 8, 2, 2])
    repeated, merged = filled(update), filled(update)
    repeated.entropic_risk(scores, index)
    joined = torch.full((2, 18), math.nan)
    mask = torch.zeros(2, 18, dtype=torch.bool)
    joined[0], mask[0] = scores.detach()[[0, 2, 3]].flatten(), True
    joined[1, :6], mask[1, :6] = scores.detach()[1], True
    merged.entropic_risk(joined, torch.tensor([2, 8]), mask)
    torch.testing.assert_close(repeated.nu, merged.nu)
    assert torch.equal(repeated.visited, merged.visited)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_repeated_index_does_not_depend_on_order(update):
    generator = torch.Generator().manual_seed(3)
    scores = 5 * torch.randn(40, 7, generator=generator)
    mask = torch.rand(40, 7, generator=generator) < 0.7
    mask[5] = False
    index = torch.randint(0, 10, (40,), generator=generator)
    tables = []
    for seed in range(5):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        variable = filled(update)
        variable.entropic_risk(scores[order], index[order], mask[order])
        tables.append(variable.nu.clone())
    assert all(torch.equal(table, tables[0]) for table in tables)


def test_repeats_weigh_by_their_number_of_samples():
    variable = DualVariable(1, BSGD())
    scores = torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    mask = torch.tensor([[True, False, False], [True, True, False]])
    variable.entropic_risk(scores, torch.tensor([0, 0]), mask)
    expected = math.log((math.exp(1) + math.exp(3) + math.exp(4)) / 3)
    assert variable.nu.item() == pytest.approx(expected, rel=1e-6)


BAD_INDEX = [
    (torch.tensor([0, 10]), IndexError, r"index 10 of dual variable 'nu' is out of range: valid are 0 to 9"),
    (torch.tensor([0, -1]), IndexError, r"index -1 of dual variable 'nu' is out of range: valid are 0 to 9"),
    (torch.tensor([0.0, 1.0]), TypeError, r"dual variable 'nu' must be a tensor of integers, got torch.float32"),
    (torch.tensor([True, False]), TypeError, "must be a tensor of integers, got torch.bool"),
    ([0, 1], TypeError, "must be a tensor of integers, got list"),
    (torch.tensor([0, 1, 2]), ValueError, r"must have shape \(2,\), one index for each row of the scores, got \(3,\)"),
    (torch.tensor([[0, 1]]), ValueError, r"must have shape \(2,\)"),
]


@pytest.mark.parametrize(("index", "error", "message"), BAD_INDEX)
@pytest.mark.parametrize("reading", [False, True])
def test_bad_index(index, error, message, reading):
    variable = filled(SCENT(0.0))
    before = snapshot(variable)
    with pytest.raises(error, match=message):
        (variable.evaluate if reading else variable.entropic_risk)(scores_of(2), index)
    assert unchanged(variable, before)


@pytest.mark.parametrize(
    ("scores", "mask", "message"),
    [
        (torch.zeros(2), None, r"scores of dual variable 'nu' must be floating with shape \(B, m\), got torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), None, "must be floating"),
        (torch.zeros(2, 3), torch.ones(2, 3), "mask of dual variable 'nu' must be bool"),
        (torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool), "mask"),
        (
            torch.zeros(2, 3),
            [[True] * 3] * 2,
            r"must be bool with the shape of the scores \(2, 3\), got \[\[True, True",
        ),
    ],
)
def test_bad_scores_and_masks(scores, mask, message):
    variable = filled(SCENT(0.0))
    before = snapshot(variable)
    with pytest.raises(ValueError, match=message):
        variable.entropic_risk(scores, torch.tensor([0, 1]), mask)
    assert unchanged(variable, before)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_score(update, value):
    variable = filled(update)
    before = snapshot(variable)
    scores = torch.zeros(3, 4)
    scores[1, 2] = scores[2, 0] = value
    with pytest.raises(DualDivergenceError, match="the scores are not finite") as caught:
        variable.entropic_risk(scores, torch.tensor([9, 5, 4]))
    assert unchanged(variable, before)
    error = caught.value
    assert (error.dual, error.num_anchors, error.first_index) == ("nu", 2, 4)
    assert repr(update) in str(error)
    assert "learning rate" in str(error)


def test_update_that_overflows():
    variable = DualVariable(4, ASGD(1.0))
    variable.visited[:] = True
    before = snapshot(variable)
    with pytest.raises(DualDivergenceError, match="float32 cannot hold") as caught:
        variable.entropic_risk(torch.full((2, 3), 200.0), torch.tensor([3, 1]))
    assert caught.value.first_index == 1
    assert "max_log_weight" in str(caught.value)
    assert unchanged(variable, before)


def test_weight_that_overflows():
    """SCENT with a tiny step leaves ν behind: exp(100) fits no float32 weight."""
    variable = DualVariable(4, SCENT(-200.0))
    variable.visited[:] = True
    before = snapshot(variable)
    with pytest.raises(DualDivergenceError, match=r"weight exp\(score − ν\) is too large"):
        variable.entropic_risk(torch.full((1, 3), 100.0), torch.tensor([2]))
    assert unchanged(variable, before)
    guarded = DualVariable(4, SCENT(-200.0, max_log_weight=2.0))
    guarded.visited[:] = True
    assert math.isfinite(guarded.entropic_risk(torch.full((1, 3), 100.0), torch.tensor([2])).item())


def test_loss_whose_terms_are_finite_and_whose_sum_is_not():
    variable = DualVariable(9, SCENT(0.0))
    before = snapshot(variable)
    with pytest.raises(DualDivergenceError, match="the sum of the objective is too large for float32") as caught:
        variable.entropic_risk(torch.full((6, 1), 1e38), torch.arange(2, 8))
    assert (caught.value.num_anchors, caught.value.first_index) == (6, 2)
    assert unchanged(variable, before)


def test_large_finite_scores_are_not_divergence():
    variable = DualVariable(2, SCENT(0.0))
    scores = torch.full((2, 4), -3e38)
    scores[:, 0] = 1e4
    variable.entropic_risk(scores, torch.tensor([0, 1]))
    assert variable.nu.tolist() == pytest.approx([1e4 - math.log(4)] * 2)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_row_without_samples_is_left_alone_and_contributes_nothing(update):
    with_empty, without = filled(update), filled(update)
    scores = scores_of(3)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    loss = with_empty.entropic_risk(scores, torch.tensor([0, 8, 3]), mask)
    expected = without.entropic_risk(scores[[0, 2]], torch.tensor([0, 3]))
    torch.testing.assert_close(loss, expected)
    assert torch.equal(with_empty.nu, without.nu)
    assert not with_empty.visited[8]
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient[1].abs().max() == 0


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_nothing_to_learn_from_gives_zero_with_a_gradient(update, shape):
    variable = filled(update)
    before = snapshot(variable)
    scores = torch.zeros(shape, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool) if shape == (3, 5) else None
    loss = variable.entropic_risk(scores, torch.arange(shape[0]), mask)
    assert loss.item() == 0
    loss.backward()
    assert scores.grad.abs().sum() == 0
    assert unchanged(variable, before)


def test_evaluate_reads_only():
    variable = filled(SCENT(0.0))
    before = snapshot(variable)
    scores = scores_of(2)
    loss = variable.evaluate(scores, torch.tensor([1, 9]))
    nu = torch.stack([before[0][1], F.log_mean_exp(scores)[1].float()])
    torch.testing.assert_close(loss, F.exponential_objective(nu, scores).mean())
    assert unchanged(variable, before)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_the_module_leaves_nu_as_it_is(cast):
    variable = filled(SCENT(0.0))
    variable.nu[0] = 1.0000001
    before = snapshot(variable)
    parent = torch.nn.ModuleList([variable, torch.nn.Linear(2, 2)]).to(cast)
    assert parent[1].weight.dtype == cast
    assert variable.nu.dtype == torch.float32
    assert unchanged(variable, before)


def test_new_under_a_half_precision_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert DualVariable(3, BSGD()).nu.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_placement_on_the_cpu_stays():
    variable = DualVariable(3, SCENT(0.0), placement="cpu")
    moved = variable.to("meta")
    assert moved.nu.device.type == "cpu"
    assert DualVariable(3, SCENT(0.0)).to("meta").nu.device.type == "meta"


def test_state_dict_round_trip_and_half_precision_state():
    variable, other = filled(SCENT(0.0)), DualVariable(10, SCENT(0.0))
    state = variable.state_dict()
    assert set(state) == {"nu", "visited"}
    other.load_state_dict(state)
    assert unchanged(other, snapshot(variable))
    other.load_state_dict({"nu": variable.nu.bfloat16(), "visited": variable.visited}, assign=True)
    assert other.nu.dtype == torch.float32


def test_state_of_another_size_reads_but_does_not_train():
    variable = filled(SCENT(0.0), n=10)
    other = DualVariable(7, SCENT(0.0))
    other.load_state_dict(variable.state_dict())
    assert not other.visited.any()
    assert math.isfinite(other.evaluate(scores_of(2), torch.tensor([0, 6])).item())
    with pytest.raises(InputError, match=r'holds 10 anchors and this model has 7.*"grow" if rows were appended'):
        other.entropic_risk(scores_of(2), torch.tensor([0, 6]))
    other.reset()
    other.entropic_risk(scores_of(2), torch.tensor([0, 6]))
    assert other.visited.sum() == 2


def test_gather_and_scatter():
    variable = DualVariable(5, SCENT(0.0))
    variable.scatter(torch.tensor([3, 1], dtype=torch.int32), torch.tensor([2.5, -1.0]))
    nu, visited = variable.gather(torch.tensor([1, 2, 3]))
    assert nu.tolist() == [-1.0, 0.0, 2.5]
    assert visited.tolist() == [True, False, True]
    with pytest.raises(IndexError, match="valid are 0 to 4"):
        variable.scatter(torch.tensor([5]), torch.tensor([0.0]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DualVariable(0, BSGD()), "num_anchors of dual variable 'nu' must be an integer of at least 1, got 0"),
        (lambda: DualVariable(2.5, BSGD()), "num_anchors"),
        (lambda: DualVariable(2, "SCENT"), "update of dual variable 'nu' must be a DualUpdate, got str"),
        (lambda: DualVariable(2, BSGD(), placement="gpu"), "placement of dual variable 'nu' must be"),
    ],
)
def test_bad_construction(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_a_users_update_with_its_own_objective():
    class Squared(DualUpdate):
        def step(self, nu, scores, mask=None, progress=0.0):
            return nu + 0.5 * (scores.float().mean(dim=1) - nu)

        def objective(self, nu, scores, mask=None):
            return (scores - nu.unsqueeze(1)).square().mean(dim=1)

    variable = DualVariable(3, Squared())
    variable.visited[:] = True
    scores = torch.full((1, 4), 2.0, requires_grad=True)
    loss = variable.entropic_risk(scores, torch.tensor([1]))
    assert variable.nu[1].item() == 1.0
    assert loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "update", [SCENT(-3.0, "cosine", max_log_weight=1.0), SCENT(math.inf), SCENT(-math.inf), BSGD()]
)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_anchor_in_plain_numbers_is_the_general_step(update, scale, dtype):
    """A single row takes a shorter way; with a mask of True it takes the general one."""
    short, general = DualVariable(3, update), DualVariable(3, update)
    for step in range(5):
        scores = scores_of(1, samples=7, seed=step, scale=scale).detach().to(dtype).requires_grad_()
        losses = []
        for variable, mask in ((short, None), (general, torch.ones(1, 7, dtype=torch.bool))):
            try:
                loss = variable.entropic_risk(scores, torch.tensor([2]), mask, progress=step / 5)
            except DualDivergenceError:
                loss = None
            losses.append(loss)
        assert (losses[0] is None) == (losses[1] is None)
        if losses[0] is not None:
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
            gradients = [torch.autograd.grad(loss, scores)[0] for loss in losses]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
            for first, second in zip(short.last_step[:5], general.last_step[:5], strict=True):
                torch.testing.assert_close(first.double(), second.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(short.nu, general.nu, rtol=1e-6, atol=1e-6)
        assert torch.equal(short.visited, general.visited)


def test_float64_scores_keep_their_precision():
    variable = filled(SCENT(0.0))
    loss = variable.entropic_risk(scores_of(2).double(), torch.tensor([0, 1]))
    assert loss.dtype == torch.float64
    assert variable.nu.dtype == torch.float32


def test_rows_that_were_appended():
    variable = filled(SCENT(0.0), n=10)
    before = variable.nu.clone(), variable.visited.clone()
    grown = DualVariable(13, SCENT(0.0))
    grown.if_changed = "grow"
    grown.load_state_dict(variable.state_dict())
    variable.grow(13)
    for table in (grown, variable):
        assert table.num_anchors == 13
        assert torch.equal(table.nu[:10], before[0])
        assert torch.equal(table.visited, torch.cat([before[1], torch.zeros(3, dtype=torch.bool)]))
        table.entropic_risk(scores_of(2), torch.tensor([0, 12]))
        assert table.visited[12]
    with pytest.raises(InputError, match="must be an integer of at least 13, got 12; it has 13"):
        variable.grow(12)
    # Rows cannot have been appended where there are fewer.
    smaller = DualVariable(7, SCENT(0.0))
    smaller.if_changed = "grow"
    smaller.load_state_dict(variable.state_dict())
    with pytest.raises(InputError, match="holds 13 anchors and this model has 7"):
        smaller.entropic_risk(scores_of(2), torch.tensor([0, 6]))


def test_rows_that_were_replaced():
    other = filled(SCENT(0.0), n=7)
    other.if_changed = "reset"
    other.load_state_dict(filled(SCENT(0.0), n=10).state_dict())
    assert not other.visited.any()
    other.entropic_risk(scores_of(2), torch.tensor([0, 6]))


def test_an_anchor_that_occurs_twice_counts_once():
    """The loss is the mean over the anchors of the objective over all samples each has."""
    scores = scores_of(4).requires_grad_()
    m = scores.shape[1]
    mask = torch.ones_like(scores, dtype=torch.bool)
    mask[1, : m // 2] = False
    mask[3] = False
    for update in (SCENT(0.5), SoftplusASGD(0.2, 1e-3)):
        found, expected = DualVariable(9, update), DualVariable(9, update)
        loss = found.entropic_risk(scores, torch.tensor([4, 2, 4, 8]), mask)
        both = torch.cat([scores[[0, 2]].flatten(), scores[1]])
        rows = torch.stack([both[: 2 * m], torch.cat([both[2 * m :], torch.zeros(m)])])
        counts = torch.stack([torch.ones(2 * m, dtype=torch.bool), torch.cat([mask[1], torch.zeros(m).bool()])])
        direct = expected.entropic_risk(rows, torch.tensor([4, 2]), counts)
        torch.testing.assert_close(loss, direct)
        torch.testing.assert_close(found.nu, expected.nu)
        gradient, theirs = (torch.autograd.grad(value, scores)[0] for value in (loss, direct))
        torch.testing.assert_close(gradient, theirs)


@pytest.mark.parametrize("count", [1, 2, 5, 1500])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_one_look_at_an_index_says_all(count, dtype):
    """Few indices and many are looked at in different ways."""
    index = torch.arange(3, 3 + count).remainder(200 if dtype == torch.uint8 else 10**6).to(dtype)
    index = index[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    for numbers in (index.tolist(), [*index.tolist(), int(index[0])]):
        expected = min(numbers), max(numbers), len(set(numbers)) == len(numbers)
        assert look_at(torch.tensor(numbers, dtype=dtype)) == expected
