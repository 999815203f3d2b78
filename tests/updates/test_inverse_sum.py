"""SCENT with α = 1/S: the logarithm of the mean of all e^ℓ so far."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus

from scent_lightning.callbacks.dual_variable_monitor import batch_statistics
from scent_lightning.duals import SCENT, DualVariable
from scent_lightning.errors import InputError
from tests.helpers import SoftmaxData, SoftmaxTask, in_two_processes, quiet_trainer


def scores_of(steps, rows=3, seed=0):
    return 3 * torch.randn(steps, rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_means(scores):
    return torch.logsumexp(scores, dim=-1) - math.log(scores.shape[-1])


@given(st.integers(1, 30), st.floats(-300, 300), st.floats(0.1, 30))
@settings(deadline=None, max_examples=30)
def test_it_is_the_running_mean(steps, shift, scale):
    table, scores = DualVariable(3, SCENT("1/S")), scale * scores_of(steps) + shift
    for batch in scores:
        table.entropic_risk(batch, torch.arange(3))
    exact = torch.logsumexp(log_means(scores), dim=0) - math.log(steps)
    assert ((table.nu - exact).abs() <= 1e-6 * exact.abs().clamp(min=1)).all()


def test_alpha_is_one_over_the_sum():
    """Against SCENT's own step with that α, in float64."""
    table, scores = DualVariable(1, SCENT("1/S")), scores_of(12, rows=1)
    nu, total = log_means(scores[0]), log_means(scores[0]).exp()
    table.entropic_risk(scores[0], torch.tensor([0]))
    for batch in scores[1:]:
        log_alpha = -total.log()
        nu = nu + softplus(log_means(batch) + log_alpha) - softplus(nu + log_alpha)
        total = total + log_means(batch).exp()
        table.entropic_risk(batch, torch.tensor([0]))
    torch.testing.assert_close(table.nu.double(), nu, rtol=1e-6, atol=1e-6)


def test_a_window_keeps_the_average_short():
    table, whole = DualVariable(1, SCENT("1/S", window=5)), DualVariable(1, SCENT("1/S"))
    nu = None
    for step, batch in enumerate(scores_of(40, rows=1)):
        new = log_means(batch)
        gamma = 1 / min(step + 1, 5)
        nu = new if nu is None else torch.logaddexp(nu + math.log1p(-gamma), new + math.log(gamma))
        for each in (table, whole):
            each.entropic_risk(batch, torch.tensor([0]))
    torch.testing.assert_close(table.nu.double(), nu, rtol=1e-5, atol=1e-5)
    assert (table.nu - whole.nu).abs().item() > 1e-2


def test_each_anchor_has_its_own_visits():
    """Repeats are one visit, rows without a sample are none."""
    table = DualVariable(5, SCENT("1/S"))
    scores = scores_of(3)
    table.entropic_risk(scores[0], torch.tensor([4, 1, 4]))
    mask = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    table.entropic_risk(scores[1], torch.tensor([1, 2, 4]), mask)
    assert table.auto.visits.tolist() == [0, 2, 0, 0, 2]
    assert table.visited.tolist() == [False, True, False, False, True]
    exact = torch.logaddexp(log_means(scores[0, 1]), log_means(scores[1, 0])) - math.log(2)
    assert table.nu[1].item() == pytest.approx(exact.item(), rel=1e-6)
    both = torch.cat([scores[0, 0], scores[0, 2]])
    exact = torch.logaddexp(log_means(both), log_means(scores[1, 2])) - math.log(2)
    assert table.nu[4].item() == pytest.approx(exact.item(), rel=1e-6)
    found = batch_statistics(table, table.last_step)
    assert found["effective_gamma"] == pytest.approx(1 / 3)  # of the next visit, the third
    assert "log_alpha" not in found


def test_its_state_and_appended_rows():
    table, scores = DualVariable(3, SCENT("1/S")), scores_of(8)
    for batch in scores[:4]:
        table.entropic_risk(batch, torch.arange(3))
    resumed, longer = DualVariable(3, SCENT("1/S")), DualVariable(5, SCENT("1/S"))
    longer.if_changed = "grow"
    for each in (resumed, longer):
        each.load_state_dict(table.state_dict())
    for batch in scores[4:]:
        for each in (table, resumed, longer):
            each.entropic_risk(batch, torch.arange(3))
    assert torch.equal(table.nu, resumed.nu)
    assert torch.equal(table.nu, longer.nu[:3])
    assert longer.auto.visits.tolist() == [8, 8, 8, 0, 0]
    table.grow(4)
    assert table.auto.visits.tolist() == [8, 8, 8, 0]


def test_a_checkpoint_without_counts_can_be_evaluated_but_not_trained_on():
    other, table = DualVariable(3, SCENT(0.0)), DualVariable(3, SCENT("1/S"))
    other.entropic_risk(scores_of(1)[0], torch.arange(3))
    for state in (other.state_dict(), {**other.state_dict(), "auto._extra_state": {"reference": 1.0}}):
        table.load_state_dict(state)
        table.evaluate(scores_of(1)[0], torch.arange(3))
        with pytest.raises(InputError, match="needs to know how often each anchor was visited, and the checkpoint"):
            table.entropic_risk(scores_of(1)[0], torch.arange(3))
        assert torch.equal(table.nu, other.nu)
    table.reset()
    table.entropic_risk(scores_of(1)[0], torch.arange(3))
    fresh = DualVariable(3, SCENT("1/S"))
    fresh.load_state_dict(DualVariable(3, SCENT(0.0)).state_dict())  # of a run that has not begun
    fresh.entropic_risk(scores_of(1)[0], torch.arange(3))


def test_it_needs_no_length_of_the_run():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, SCENT("1/S", window=20))
    quiet_trainer(max_epochs=-1, max_time="00:00:00:01", limit_val_batches=0).fit(task, data)
    assert (task.duals["nu"].auto.visits > 0).all()


def _ranks(rank):
    table = DualVariable(4, SCENT("1/S"))
    for batch in scores_of(6, rows=4):
        share = slice(0, 3) if rank == 0 else slice(3, 4)
        table.entropic_risk(batch[share], torch.tensor([0, 1, 2, 1])[share])
    return table.nu.tolist(), table.auto.visits.tolist()


def test_the_same_in_every_process(tmp_path):
    first, second = in_two_processes(_ranks, tmp_path)
    assert first == second
    alone = DualVariable(4, SCENT("1/S"))
    for batch in scores_of(6, rows=4):
        alone.entropic_risk(batch, torch.tensor([0, 1, 2, 1]))
    assert first[1] == alone.auto.visits.tolist() == [6, 6, 6, 0]
    torch.testing.assert_close(torch.tensor(first[0]), alone.nu, rtol=1e-5, atol=1e-5)
