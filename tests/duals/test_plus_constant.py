"""A constant inside the logarithm: ℓ, objective, gradient and moments, for dense scores and for exponentials."""

import math

import pytest
import torch

from scent_lightning.duals import DenseScores, DualVariable, Exponentials, SoftplusASGD
from scent_lightning.duals.contrastive import ContrastiveSamples
from scent_lightning.duals.samples import Place
from scent_lightning.errors import InputError
from scent_lightning.functional import mean_over, shift_by_largest, softplus_objective, with_gradient
from scent_lightning.updates import BSGD


def exponentials_of(scores, mask):
    counts = mask.sum(dim=1)
    largest, shifted = shift_by_largest(scores.detach(), mask)
    exponentials = shifted.exp()
    return Exponentials(
        largest,
        mean_over(exponentials, counts),
        counts,
        True,
        lambda loss, weight: with_gradient(scores, loss, exponentials, weight),
        lambda: DenseScores(scores, mask),
        squares=lambda: mean_over(exponentials.square(), counts),
    )


@pytest.mark.parametrize("log_constant", [-300.0, -3.0, 0.0, 40.0])
@pytest.mark.parametrize("kind", [exponentials_of, DenseScores])
def test_constant_in_the_logarithm(kind, log_constant):
    torch.manual_seed(0)
    scores = (5 * torch.randn(5, 4, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    there = mask.any(dim=1)
    nu = torch.tensor([1.0, -2.0, 3.0, 0.5, 40.0])
    samples = kind(scores, mask).plus_constant(log_constant)
    (side,) = samples.sides()
    mean = scores.exp().masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1) + math.exp(log_constant)
    expected = torch.where(there, mean.log(), -math.inf)
    torch.testing.assert_close(side.log_mean, expected.detach())
    loss, (objective,) = samples.loss([Place(nu, None, BSGD())])
    direct = torch.where(there, mean * torch.exp(-nu) + nu - 1, 0.0)
    torch.testing.assert_close(objective, direct.detach())
    torch.testing.assert_close(loss, direct.sum() / 4)
    found, exact = (torch.autograd.grad(value, scores)[0] for value in (loss, direct.sum() / 4))
    torch.testing.assert_close(found, exact)
    moving = scores.exp().masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    torch.testing.assert_close(samples.moving(0), torch.where(there, moving.log(), -math.inf).detach())
    twice = samples.plus_constant(1.0)
    twice.sides()
    torch.testing.assert_close(twice.moving(0), samples.moving(0))
    moments = samples.moments(0)
    torch.testing.assert_close(moments.log_mean[there], expected[there].detach())
    z = (scores.exp() + math.exp(log_constant)).detach()
    second = (z.square() * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    if kind is exponentials_of:
        torch.testing.assert_close(moments.log_mean_square[there], second[there].log())


@pytest.mark.parametrize("kind", [exponentials_of, DenseScores])
def test_what_moves_is_exact_where_the_constant_is_nearly_all(kind):
    """By a difference of the sums it would be lost in rounding."""
    scores = torch.tensor([[-60.0, -61.0], [-80.0, -81.0]])
    samples = kind(scores, torch.ones(2, 2, dtype=torch.bool)).plus_constant(0.0)
    samples.sides()
    exact = scores.double().logsumexp(dim=1) - math.log(2)
    torch.testing.assert_close(samples.moving(0), exact, rtol=1e-6, atol=0.0)


def test_without_a_constant_all_moves():
    for kind in (exponentials_of, DenseScores):
        samples = kind(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
        samples.sides()
        assert samples.moving(0) is None


def test_row_without_a_sample_is_still_none():
    variable = DualVariable(3, BSGD())
    samples = DenseScores(torch.zeros(3, 2), torch.tensor([[True, False], [False, False], [True, True]]))
    variable.entropic_risk(samples.plus_constant(0.0), torch.arange(3))
    assert variable.visited.tolist() == [True, False, True]
    assert variable.nu.tolist() == pytest.approx([math.log(2), 0, math.log(2)])


def test_update_that_needs_the_scores_has_the_constant_as_one():
    scores = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.ones_like(scores, dtype=torch.bool)
    update, nu = SoftplusASGD(0.1, rho=1e-6), torch.zeros(3, dtype=torch.float64)
    dense = exponentials_of(scores, mask).plus_constant(-1.0).dense()
    found = softplus_objective(nu, dense.values, update.rho, dense.mask)
    torch.testing.assert_close(found, scores.exp().mean(dim=1) + math.exp(-1) - 1, rtol=1e-4, atol=1e-4)


def test_samples_that_cannot():
    with pytest.raises(InputError, match="ContrastiveSamples has no way to add a constant"):
        ContrastiveSamples(torch.eye(2), torch.eye(2), 1.0).plus_constant(0.0)
