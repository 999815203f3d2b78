"""The softmax cross-entropy from a mean over all classes, and its estimate from one over some."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.functional import softmax_cross_entropy, softmax_cross_entropy_estimate

K = 6


@pytest.mark.parametrize("includes_target", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_expectation_over_every_pair_of_classes_is_a_bound_that_is_tight_at_the_true_nu(seed, includes_target):
    logits = 3 * torch.randn(1, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact = F.cross_entropy(logits, torch.tensor([0]))
    terms = (logits[0, 1:] - logits[0, 0]).exp()
    epsilon = includes_target / (K - 1)
    true = (epsilon + terms.mean()).log()
    torch.testing.assert_close(softmax_cross_entropy(true, K, includes_target), exact)
    log_means = torch.stack(
        [(epsilon + terms[list(pair)].mean()).log() for pair in itertools.combinations(range(5), 2)]
    )
    for away in (-0.05, 0.0, 0.1, 2.0):
        nu = (true + away).expand_as(log_means)
        found = softmax_cross_entropy_estimate(log_means, nu, K, includes_target).mean()
        if away == 0:
            torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
        else:
            assert found > exact
    # The logarithm of the estimated mean is below.
    assert softmax_cross_entropy(log_means, K, includes_target).mean() < exact


def test_nu_far_below_does_not_count_for_more_than_the_logarithm():
    log_mean = torch.tensor([5.0, 700.0])
    found = softmax_cross_entropy_estimate(log_mean, torch.full((2,), -50.0), K)
    torch.testing.assert_close(found, log_mean + math.log(K - 1) + math.e - 2, rtol=1e-3, atol=1e-3)


def test_small_values_keep_their_digits():
    log_mean = torch.tensor([-60.0], dtype=torch.float64)
    assert softmax_cross_entropy(log_mean, K).item() == pytest.approx(5 * math.exp(-60), rel=1e-12)
