"""Losses of pairs against their definition."""

import math

import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.functional import SURROGATES, check_surrogate, pairwise_scores, pairwise_surrogate


def by_hand(difference, surrogate, margin):
    if surrogate == "logistic":
        return math.log(1 + math.exp(difference))
    if surrogate == "squared":
        return (margin + difference) ** 2
    hinge = max(0.0, margin + difference)
    return hinge**2 if surrogate == "squared_hinge" else hinge


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogate_is_its_definition(surrogate):
    differences = torch.linspace(-3, 3, 41, dtype=torch.float64)
    found = pairwise_surrogate(differences, surrogate, 0.7)
    for difference, value in zip(differences.tolist(), found.tolist(), strict=True):
        assert value == pytest.approx(by_hand(difference, surrogate, 0.7), abs=1e-12)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_scores_of_pairs_and_their_gradient(surrogate):
    generator = torch.Generator().manual_seed(0)
    positives, negatives = (
        torch.randn(count, generator=generator, dtype=torch.float64).requires_grad_() for count in (4, 7)
    )
    found = pairwise_scores(positives, negatives, surrogate, 0.7, 0.3)
    for i in range(4):
        for j in range(7):
            expected = by_hand((negatives[j] - positives[i]).item(), surrogate, 0.7) / 0.3
            assert found[i, j].item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(lambda p, n: pairwise_scores(p, n, surrogate, 0.7, 0.3), (positives, negatives))


def test_bad_settings():
    with pytest.raises(InputError, match="surrogate must be one of squared_hinge, squared, hinge, logistic, got 'x'"):
        check_surrogate("x", 0.5)
    with pytest.raises(InputError, match="margin must be a finite number of at least 0, got inf"):
        check_surrogate("hinge", math.inf)
