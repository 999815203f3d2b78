"""Samples that move ν beside those of the loss."""

import math

import pytest
import torch

from scent_lightning.callbacks.dual_variable_monitor import batch_statistics
from scent_lightning.duals import (
    ASGD,
    BSGD,
    SCENT,
    SOX,
    ContrastiveSamples,
    DenseScores,
    DualDivergenceError,
    DualVariable,
    DualVariableMixin,
    SoftplusASGD,
    UMax,
)
from scent_lightning.duals.weight_step import exponential_part
from scent_lightning.errors import InputError
from scent_lightning.functional import log_mean_exp
from tests.helpers import in_two_processes

UPDATES = [SCENT(0.5), SCENT("auto"), SOX(0.4), BSGD(), ASGD(0.1), UMax(0.1, 1.0), SoftplusASGD(0.1, 1e-3)]
INDEX = torch.tensor([2, 0, 4, 5])


def scores_of(rows, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, samples, generator=generator, dtype=torch.float64)


def in_turn(update, index, scores, moving):
    """ν by the samples that move it, then the loss there, each by the way of one kind of samples."""
    mover, reader = DualVariable(6, update), DualVariable(6, update)
    for seed in (7, 8):
        mover.entropic_risk(scores_of(len(index), 3, seed), index, progress=0.5)
    mover.entropic_risk(moving, index, progress=0.5)
    reader.load_state_dict(mover.state_dict())
    return mover.nu.clone(), reader.evaluate(scores, index)


def at_once(update, index, scores, moving):
    table = DualVariable(6, update)
    for seed in (7, 8):
        table.entropic_risk(scores_of(len(index), 3, seed), index, progress=0.5)
    return table, table.entropic_risk(scores, index, progress=0.5, dual_scores=moving)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("samples", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_it_is_a_step_and_then_a_loss(update, samples, rows):
    index, scores, moving = INDEX[:rows], scores_of(rows, 3), scores_of(rows, samples, 1)
    nu, expected = in_turn(update, index, scores.clone().requires_grad_(), moving)
    leaf, leaf_of_moving = scores.clone().requires_grad_(), moving.clone().requires_grad_()
    table, loss = at_once(update, index, leaf, leaf_of_moving)
    torch.testing.assert_close(table.nu, nu)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert leaf_of_moving.grad is None
    if update.has_exponential_objective:
        weights = torch.exp(scores - nu[index].unsqueeze(1)) / (3 * rows)
        torch.testing.assert_close(leaf.grad, weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_an_anchor_with_several_rows(update):
    """It moves once, by all of its samples, and counts once."""
    index = torch.tensor([2, 0, 2, 5])
    scores, moving = scores_of(4, 3), scores_of(4, 5, 1)
    table, loss = at_once(update, index, scores, moving)
    nu = in_turn(update, index, scores, moving)[0]
    torch.testing.assert_close(table.nu, nu)
    each = [update.objective(nu[[i]], scores[index == i].reshape(1, -1)) for i in (0, 2, 5)]
    torch.testing.assert_close(loss, torch.cat(each).mean())


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_rows_without_samples_of_either_kind(update):
    mask = torch.tensor([[True] * 3, [False] * 3, [True, False, False], [False] * 3])
    moving_mask = torch.tensor([[False] * 2, [True] * 2, [True, False], [False] * 2])
    scores, moving = scores_of(4, 3).masked_fill(~mask, math.nan), scores_of(4, 2, 1).masked_fill(~moving_mask, -9.0)
    table = DualVariable(6, update)
    table.entropic_risk(scores_of(1, 3), torch.tensor([2]), progress=0.5)
    leaf = scores.clone().requires_grad_()
    loss = table.entropic_risk(leaf, INDEX, mask, progress=0.5, dual_scores=DenseScores(moving, moving_mask))
    loss.backward()
    # 2: ν as it was, in the loss; 0: moved, not in the loss; 4: both; 5: neither.
    assert table.visited.tolist() == [True, False, True, False, True, False]
    assert table.nu[5] == 0
    torch.testing.assert_close(table.nu[0].double(), log_mean_exp(moving[1:2])[0], rtol=1e-3, atol=1e-3)
    seen = [update.objective(table.nu[[2]], scores[:1]), update.objective(table.nu[[4]], scores[2:3, :1])]
    torch.testing.assert_close(loss.detach(), torch.cat(seen).mean())
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[~mask].any()
    # An anchor without a ν takes ℓ, and stays without one.
    fresh = DualVariable(6, update)
    loss = fresh.entropic_risk(
        scores[:1], INDEX[:1], progress=0.5, dual_scores=DenseScores(moving, moving_mask).values[:1, :0]
    )
    torch.testing.assert_close(loss, update.objective(log_mean_exp(scores[:1]), scores[:1])[0])
    assert not fresh.visited.any()


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (
            InputError,
            "dual_scores of dual variable 'nu' must have a row for each of the 4 rows of the .*, got 3",
            [3, 5],
        ),
        (
            InputError,
            "dual_scores of dual variable 'nu' must have a row for each of the 4 rows of the .*, got 0",
            [0, 5],
        ),
        (ValueError, r"dual_scores of dual variable 'nu' must be floating with shape \(B, m\), got .* \(4,\)", [4]),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_those_that_do_not_fit(error, message, given, training):
    class Module(DualVariableMixin):
        pass

    module = Module().train(training)
    table = module.add_dual("nu", 6, SCENT(0.0))
    with pytest.raises(error, match=message):
        module.entropic_risk("nu", scores_of(4, 3), INDEX, dual_scores=torch.zeros(given))
    assert not table.visited.any()


@pytest.mark.parametrize("update", [SCENT(0.0), BSGD(), SoftplusASGD(0.1, 1e-3)], ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["scores", "dual_scores"])
def test_what_is_not_finite(update, value, where):
    table, given = DualVariable(6, update), {"scores": scores_of(4, 3), "dual_scores": scores_of(4, 2, 1)}
    given[where][2, 1] = value
    with pytest.raises(DualDivergenceError, match=r"the scores are not finite .* first at index 4"):
        table.entropic_risk(given["scores"], INDEX, dual_scores=given["dual_scores"])
    assert not table.visited.any()


def test_outside_training_nu_is_read():
    class Module(DualVariableMixin):
        pass

    module = Module()
    module.add_dual("nu", 6, SCENT(0.0))
    module.entropic_risk("nu", scores_of(2, 3), INDEX[:2], dual_scores=scores_of(2, 9, 1))
    before = module.duals["nu"].nu.clone()
    module.eval()
    found = module.entropic_risk("nu", scores_of(4, 3), INDEX, dual_scores=scores_of(4, 9, 2))
    torch.testing.assert_close(found, module.duals["nu"].evaluate(scores_of(4, 3), INDEX))
    assert torch.equal(module.duals["nu"].nu, before)


def test_both_sides_of_pairs():
    class Module(DualVariableMixin):
        def __init__(self):
            super().__init__()
            for name in ("image", "text"):
                self.add_dual(name, 6, SCENT(1.0))

    def embeddings(seed):
        return (torch.nn.functional.normalize(scores_of(4, 5, seed + i), dim=1) for i in (0, 1))

    module, other = Module(), Module()
    loss_pairs, moving = (ContrastiveSamples(*embeddings(seed), tau=0.3) for seed in (0, 5))
    loss = module.entropic_risk(("image", "text"), loss_pairs, INDEX, dual_scores=moving)
    other.entropic_risk(("image", "text"), moving, INDEX)
    other.eval()
    for name in ("image", "text"):
        assert torch.equal(module.duals[name].nu, other.duals[name].nu)
    torch.testing.assert_close(loss, other.entropic_risk(("image", "text"), loss_pairs, INDEX))


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("repeats", [False, True])
def test_the_exponential_part_is_the_losss(update, repeats):
    """What the proximal step and the monitor look at is what the loss has."""
    index = torch.tensor([2, 0, 2, 5]) if repeats else INDEX
    table, loss = at_once(update, index, scores_of(4, 3), scores_of(4, 5, 1))
    part = exponential_part([table], DenseScores(scores_of(4, 3)), loss)
    anchors = sorted(set(index.tolist()))
    assert part == pytest.approx((loss - (table.nu[anchors].double() - 1).mean()).item(), rel=1e-5)
    found = batch_statistics(table, table.last_step)
    expected = torch.exp(log_mean_exp(scores_of(4, 3)) - table.nu[index].double())
    assert found["weight_max"] == pytest.approx(expected.max().item(), rel=1e-5)


def _ranks(rank):
    table = DualVariable(6, SCENT(0.5))
    share = slice(0, 3) if rank == 0 else slice(3, 5)
    index = torch.tensor([0, 1, 2, 1, 5])
    losses = []
    for seed in range(3):
        scores, moving = scores_of(5, 3, seed)[share], scores_of(5, 4, seed + 9)[share]
        if rank and seed == 2:
            scores = scores[:, :0]
        losses.append(table.entropic_risk(scores, index[share], dual_scores=moving).item())
    return table.nu.tolist(), losses


def test_the_same_in_every_process(tmp_path):
    (first, losses), (second, others) = in_two_processes(_ranks, tmp_path)
    assert first == second
    alone, index = DualVariable(6, SCENT(0.5)), torch.tensor([0, 1, 2, 1, 5])
    for seed in range(3):
        mask = torch.ones(5, 3, dtype=torch.bool)
        mask[3:] = seed < 2
        moving = scores_of(5, 4, seed + 9)
        loss = alone.entropic_risk(scores_of(5, 3, seed), index, mask, dual_scores=moving).item()
        assert (losses[seed] + others[seed]) / 2 == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(torch.tensor(first), alone.nu, rtol=1e-6, atol=1e-6)
