"""Batches of every kind, right and wrong, through every update: what must hold holds, and an error writes nothing."""

import copy
import math
from functools import partial

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scent_lightning import functional as F
from scent_lightning.duals import (
    ASGD,
    BSGD,
    MSVR,
    SCENT,
    SOX,
    DualDivergenceError,
    DualVariable,
    DualVariableMixin,
    SoftplusASGD,
    UMax,
)

UPDATES = [
    SCENT(0.0),
    SCENT(-23.0),
    SCENT(60.0),
    SCENT(-60.0, max_log_weight=5.0),
    SCENT(2.0, "cosine"),
    SCENT(1.0, "cosine", final=-5.0, max_log_weight=1.0),
    SCENT(math.inf),
    SCENT(-math.inf, max_log_weight=0.0),
    SOX(0.5),
    SOX(0.0),
    SOX(1.0),
    SOX(0.1, "cosine"),
    SOX(0.9, "cosine", final=0.01, max_log_weight=2.0),
    BSGD(),
    BSGD(max_log_weight=0.0),
    ASGD(0.1),
    ASGD(2.0, "cosine", max_log_weight=2.0),
    SoftplusASGD(0.1, 1e-3),
    SoftplusASGD(1.0, 1.0, "cosine", final=0.5, max_log_weight=3.0),
    UMax(0.1, 1.0),
    UMax(1.0, 0.0, "cosine", max_log_weight=0.5),
    UMax(0.5, 2.0, compare="old"),
    MSVR(0.3, 0.7),
    MSVR(0.9, 30.0, "cosine", max_log_weight=1.0, floor=1.0),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class Case:
    """One batch, a table, and what is wrong with the batch."""

    def __init__(self, seed, size, rows, samples, dtype, integer, scale, masked, special, bad, progress):
        generator = torch.Generator().manual_seed(seed)
        self.progress, self.bad = progress, bad
        self.nu = scale * torch.randn(size, generator=generator).clamp(-3, 3)
        self.visited = torch.rand(size, generator=generator) < 0.6
        self.nu[~self.visited] = 0.0
        scores = scale * torch.randn(rows, samples, generator=generator, dtype=torch.float64)
        self.mask = None
        if masked is not None:
            self.mask = torch.rand(rows, samples, generator=generator) < masked
        if special is not None and rows * samples:
            place = torch.randint(rows * samples, (1,), generator=generator)
            scores.view(-1)[place] = special
        self.previous = scores + 0.3 * scale * torch.randn(rows, samples, generator=generator, dtype=torch.float64)
        self.previous = self.previous.nan_to_num()
        self.scores = scores.to(dtype)
        self.index = torch.randint(size, (rows,), generator=generator).to(integer)
        self._spoil(size, rows, generator)

    def _spoil(self, size, rows, generator):
        bad = self.bad
        if bad in ("negative", "too large") and rows == 0:
            bad = self.bad = "too long"
        if bad in ("negative", "too large"):
            self.index = self.index.long()
            self.index[torch.randint(rows, (1,), generator=generator)] = -1 if bad == "negative" else size
        elif bad == "too short" and rows == 0:
            self.bad = "too long"
        if self.bad == "float index":
            self.index = self.index.float()
        elif self.bad == "bool index":
            self.index = self.index.bool()
        elif self.bad == "list index":
            self.index = self.index.tolist()
        elif self.bad == "too long":
            self.index = torch.cat([self.index, self.index.new_zeros(1)])
        elif self.bad == "too short":
            self.index = self.index[1:]
        elif self.bad == "matrix index":
            self.index = self.index[None]
        elif self.bad == "scalar index":
            self.index = torch.tensor(0)
        elif self.bad == "integer scores":
            self.scores = torch.zeros(self.scores.shape, dtype=torch.int64)
        elif self.bad == "vector of scores":
            self.scores = self.scores.flatten()
        elif self.bad == "cube of scores":
            self.scores = self.scores[None]
        elif self.bad == "list of scores":
            self.scores = self.scores.tolist()
        elif self.bad == "float mask":
            self.mask = torch.ones(self.scores.shape)
        elif self.bad == "shape of mask":
            self.mask = torch.ones(self.scores.shape[0], self.scores.shape[1] + 1, dtype=torch.bool)
        elif self.bad == "list mask":
            self.mask = torch.ones(self.scores.shape, dtype=torch.bool).tolist()

    def given(self, update):
        """What an update needs beside the scores."""
        return {"previous_scores": self.previous} if update.needs_previous_scores else {}

    def table(self, update):
        variable = DualVariable(len(self.nu), update)
        variable.nu.copy_(self.nu)
        variable.visited.copy_(self.visited)
        return variable


BAD = [
    "float index",
    "bool index",
    "list index",
    "negative",
    "too large",
    "too long",
    "too short",
    "matrix index",
    "scalar index",
    "integer scores",
    "vector of scores",
    "cube of scores",
    "list of scores",
    "float mask",
    "shape of mask",
    "list mask",
]

cases = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    size=st.integers(1, 12),
    rows=st.sampled_from([0, 1, 2, 2, 3, 3, 4, 5, 6]),
    samples=st.sampled_from([0, 1, 1, 2, 3, 4, 5, 5, 7]),
    dtype=st.sampled_from(DTYPES),
    integer=st.sampled_from(INTEGERS),
    scale=st.sampled_from([0.0, 0.1, 1.0, 1.0, 5.0, 30.0, 300.0, 3333.0, 1e6, 1e30, 1e38]),
    masked=st.sampled_from([None, None, None, None, 0.0, 0.3, 0.6, 0.9, 1.0]),
    special=st.sampled_from([*[None] * 16, math.nan, math.inf, -math.inf]),
    bad=st.sampled_from([None] * 40 + BAD),
    progress=st.sampled_from([0.0, 0.3, 1.0]),
)
# As many for each update, and in the two tests of all, as the profile says: 100, or 950 in the thorough one.
many = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Module(DualVariableMixin, L.LightningModule):
    def __init__(self, variable):
        super().__init__()
        self.add_dual("nu", variable.num_anchors, variable.update)
        self.duals["nu"].load_state_dict(variable.state_dict())


def same(variable, before):
    return torch.equal(variable.nu, before.nu) and torch.equal(variable.visited, before.visited)


def counted(case):
    """Which scores count as samples: −∞ does, with weight 0, but a row of nothing else has none."""
    mask = torch.ones_like(case.scores, dtype=torch.bool) if case.mask is None else case.mask
    # NaN and +∞ are samples, though wrong ones.
    return mask & (mask & (case.scores != -math.inf)).any(dim=1, keepdim=True)


def log_means(case):
    """ℓ in float64 of each row's anchor, over all its samples."""
    values = case.scores.detach().to(torch.float32 if case.scores.dtype != torch.float64 else torch.float64).double()
    mask = counted(case)
    index = case.index.long()

    def log_mean(rows):
        chosen = values[rows][mask[rows]]
        return torch.logsumexp(chosen, 0).item() - math.log(len(chosen)) if len(chosen) else -math.inf

    merged = [log_mean((index == i).nonzero().flatten()) for i in index.tolist()]
    return torch.tensor(merged, dtype=torch.float64)


def run(variable, case):
    """Loss and gradient of a step, or the exception."""
    scores = case.scores.clone().requires_grad_() if case.bad is None else case.scores
    try:
        given = case.given(variable.update)
        loss = variable.entropic_risk(scores, case.index, case.mask, progress=case.progress, **given)
    except Exception as error:
        return error, None
    loss.backward()
    return loss.detach(), scores.grad


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES, ids=repr)
@given(case=cases)
@many
def test_any_batch(update, case):
    before, variable = case.table(update), case.table(update)
    found, gradient = run(variable, case)
    if case.bad is not None:
        assert isinstance(found, TypeError | ValueError | IndexError), (case.bad, found)
        assert same(variable, before)
        with pytest.raises(type(found)):
            variable.evaluate(case.scores, case.index, case.mask)
        return
    evaluated = before.evaluate(case.scores, case.index, case.mask)
    assert torch.equal(before.nu, case.nu)
    assert evaluated.ndim == 0
    counts = counted(case)
    valid = case.scores[counts]
    moderate = bool(((valid.abs() <= 1e4) | (valid == -math.inf)).all())
    if isinstance(found, Exception):
        assert isinstance(found, DualDivergenceError), found
        assert same(variable, before)
        assert found.num_anchors >= 1
        assert found.first_index in case.index.tolist()
        bounded = type(update) is BSGD or (type(update) in (SCENT, SOX, MSVR) and update.max_log_weight is not None)
        assert not (moderate and bounded), "moderate scores, a bounded weight, and yet an error"
        return
    index = case.index.long()
    merged = log_means(case)
    has_samples = counts.any(dim=1)
    sampled = torch.zeros(len(case.nu), dtype=torch.bool)
    sampled[index[has_samples]] = True
    # What was written, and what was not.
    assert variable.nu.dtype == torch.float32
    assert bool(torch.isfinite(variable.nu).all())
    assert torch.equal(variable.nu[~sampled], before.nu[~sampled])
    assert torch.equal(variable.visited, before.visited | sampled)
    assert bool(torch.isfinite(found))
    assert gradient.dtype == case.scores.dtype
    assert not gradient[~counts].any()
    if not has_samples.any():
        assert found == 0
        return
    assert bool((valid < math.inf).all())
    # Between ν and ℓ; not below the guard; the objective not below ℓ.
    index, merged = index[has_samples], merged[has_samples]
    start = torch.where(before.visited[index], before.nu[index].double(), merged)
    new = variable.nu[index].double()
    tolerance = 4e-6 * (1 + merged.abs() + start.abs())
    if type(update) in (SCENT, SOX, BSGD):
        assert bool((new >= torch.minimum(start, merged) - tolerance).all())
        assert bool((new <= torch.maximum(start, merged) + tolerance).all())
    if update.max_log_weight is not None:
        assert bool((new >= merged - update.max_log_weight - tolerance).all())
    if update.has_exponential_objective:
        # Each anchor counts once, by all its samples, however many rows it has.
        anchors = dict(zip(index.tolist(), merged.tolist(), strict=True))
        assert found.double() >= sum(anchors.values()) / len(anchors) - tolerance.max()
    if valid.abs().max() > 1e36:
        return  # whether a sum of such numbers overflows depends on their order
    # A permutation changes nothing but the rounding of the loss.
    order = torch.randperm(len(case.index), generator=torch.Generator().manual_seed(len(case.index)))
    other = copy.copy(case)
    other.scores, other.index, other.previous = case.scores[order], case.index[order], case.previous[order]
    other.mask = None if case.mask is None else case.mask[order]
    permuted = case.table(update)
    again, _ = run(permuted, other)
    assert not isinstance(again, Exception)
    assert torch.equal(permuted.visited, variable.visited)
    torch.testing.assert_close(permuted.nu, variable.nu, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again, found, rtol=1e-4, atol=1e-4)
    # Where no index repeats, the table does what the update says.
    if len(set(index.tolist())) == len(index):
        # An anchor that was never seen takes no part in what compares with the weights before.
        previous = torch.where(before.visited[index].unsqueeze(1), case.previous[has_samples], case.scores[has_samples])
        mask = None if case.mask is None else case.mask[has_samples]
        row = update.step(start, case.scores[has_samples], mask, case.progress, previous)
        assert row.dtype == torch.float32
        torch.testing.assert_close(row.double(), new, rtol=1e-5, atol=4e-6)


@pytest.mark.slow
@given(case=cases, training=st.booleans(), update=st.sampled_from(UPDATES))
@many
def test_any_batch_through_the_mixin(case, training, update):
    """In training what the table does; out of it nothing is written, and no divergence is an error."""
    variable = case.table(update)
    module = Module(variable).train(training)
    before = copy.deepcopy(variable)
    case.progress = 0.0

    def of(call):
        try:
            return call()
        except Exception as error:
            return error

    found = of(lambda: module.entropic_risk("nu", case.scores, case.index, case.mask, **case.given(update)))
    step = partial(variable.entropic_risk, **case.given(update)) if training else variable.evaluate
    expected = of(lambda: step(case.scores, case.index, case.mask))
    if isinstance(expected, Exception):
        assert type(found) is type(expected)
        assert str(found) == str(expected)
    else:
        assert torch.equal(found, expected) or (torch.isnan(found) and torch.isnan(expected))
    assert same(module.duals["nu"], variable)
    if not training:
        assert same(variable, before)
        assert not isinstance(found, DualDivergenceError)


@pytest.mark.slow
@given(case=cases, update=st.sampled_from(UPDATES))
@many
def test_any_rows_through_the_functions(case, update):
    """Without a table: shapes, dtypes, and rows without samples, whatever the values."""
    if case.bad is not None:
        return
    nu = case.nu[case.index.long()]
    new = update.step(nu, case.scores, case.mask, case.progress, **case.given(update))
    objective = update.objective(nu, case.scores, case.mask)
    assert new.shape == objective.shape == nu.shape
    assert new.dtype == torch.float32
    empty = ~counted(case).any(dim=1)
    assert torch.equal(new[empty], nu[empty])
    assert not objective[empty].any()
    log_mean = F.log_mean_exp(case.scores, case.mask)
    assert bool((log_mean[empty] == -math.inf).all())
