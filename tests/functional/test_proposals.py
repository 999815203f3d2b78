"""Inclusion probabilities against enumeration and mpmath; corrected scores against the full sum."""

import itertools
import math

import mpmath
import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.functional import (
    correct_scores,
    log_expected_occurrences,
    log_inclusion_probability,
    log_inclusion_probability_with_repetition,
    log_mean_exp,
)

LABELS = [0, 0, 0, 1, 1, 2, 3]  # class 4 has no row
COUNTS = torch.tensor([3, 2, 1, 1, 0])


@pytest.mark.parametrize("draws", range(len(LABELS) + 1))
def test_without_replacement_against_every_batch(draws):
    batches = [[LABELS[row] for row in batch] for batch in itertools.combinations(range(len(LABELS)), draws)]
    occurs = torch.tensor([[float(k in batch) for k in range(5)] for batch in batches], dtype=torch.float64)
    times = torch.tensor([[float(batch.count(k)) for k in range(5)] for batch in batches], dtype=torch.float64)
    included = log_inclusion_probability(COUNTS, len(LABELS), draws)
    torch.testing.assert_close(included.exp(), occurs.mean(dim=0), rtol=1e-12, atol=1e-15)
    expected = log_expected_occurrences(COUNTS, len(LABELS), draws)
    torch.testing.assert_close(expected.exp(), times.mean(dim=0), rtol=1e-12, atol=1e-15)
    assert included.dtype == expected.dtype == torch.float64


@pytest.mark.parametrize("draws", [0, 1, 2, 4])
def test_with_repetition_against_every_draw(draws):
    draws_of_rows = list(itertools.product(LABELS, repeat=draws))
    occurs = [sum(k in drawn for drawn in draws_of_rows) / len(draws_of_rows) for k in range(5)]
    found = log_inclusion_probability_with_repetition(COUNTS / len(LABELS), draws).exp()
    torch.testing.assert_close(found, torch.tensor(occurs, dtype=torch.float64), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("draws", [1, 127, 8191, 16_999_999])
def test_digits_kept_where_there_are_many_rows(draws):
    rows, counts = 17_091_657, [1, 2, 49, 5_000, 200_000]
    found = log_inclusion_probability(torch.tensor(counts), rows, draws)
    with mpmath.workdps(60):

        def log_factorial(number):
            return mpmath.loggamma(number + 1)

        for count, value in zip(counts, found.tolist(), strict=True):
            absent = -mpmath.inf
            if rows - count >= draws:
                absent = log_factorial(rows - count) + log_factorial(rows - draws)
                absent -= log_factorial(rows - count - draws) + log_factorial(rows)
            exact = float(mpmath.log(1 - mpmath.exp(absent)))
            assert value == pytest.approx(exact, rel=1e-11, abs=1e-15)


def test_certain_and_impossible():
    found = log_inclusion_probability(torch.tensor([0, 1, 5, 9, 10]), num_rows=10, draws=6)
    assert found[0] == -math.inf
    assert found[1] == pytest.approx(math.log(0.6))
    assert found[2:].tolist() == [0.0, 0.0, 0.0]
    assert log_inclusion_probability(torch.tensor([0, 3]), 3, 3).tolist() == [-math.inf, 0.0]
    assert log_inclusion_probability(torch.tensor([3]), 3, 0).tolist() == [-math.inf]
    assert log_inclusion_probability_with_repetition(torch.tensor([0.0, 1.0]), 3).tolist() == [-math.inf, 0.0]
    assert log_inclusion_probability(torch.zeros(0, dtype=torch.int64), 3, 3).shape == (0,)


@pytest.mark.parametrize("sign", [1, -1])
def test_corrected_mean_is_that_of_all(sign):
    torch.manual_seed(0)
    scores = torch.randn(5, dtype=torch.float64)
    means = []
    for batch in itertools.combinations(range(len(LABELS)), 3):
        classes = torch.tensor(sorted({LABELS[row] for row in batch}))
        log_q = sign * log_inclusion_probability(COUNTS, len(LABELS), 3)[classes]
        # A masked column, whatever is in it, and the number of columns change nothing.
        padded = torch.cat([scores[classes], scores.new_tensor([math.nan])]).unsqueeze(0)
        mask = torch.tensor([[True] * len(classes) + [False]])
        corrected = correct_scores(padded, torch.cat([log_q, log_q.new_zeros(1)]), 4, mask)
        means.append(log_mean_exp(corrected, mask).exp().item())
    exact = scores[:4].exp().mean().item()
    assert (sum(means) / len(means) == pytest.approx(exact, rel=1e-12)) == (sign == 1)


def test_gradient_of_corrected_scores_is_that_of_the_scores():
    scores = torch.randn(2, 3, requires_grad=True)
    correct_scores(scores, torch.rand(3).log(), 7).sum().backward()
    assert torch.equal(scores.grad, torch.ones(2, 3))
    assert correct_scores(scores.half(), torch.rand(2, 3).log(), 7).dtype == torch.float32


@pytest.mark.parametrize(
    ("counts", "num_rows", "draws", "message"),
    [
        ([1, -2], 5, 2, r"counts must be from 0 to num_rows = 5, got -2"),
        ([6], 5, 2, r"counts must be from 0 to num_rows = 5, got 6"),
        ([0.5], 5, 2, r"counts must be integers of shape \(K,\), got torch.float32 of shape \(1,\)"),
        ([[1]], 5, 2, r"counts must be integers of shape \(K,\), got torch.int64 of shape \(1, 1\)"),
        ([True], 5, 2, r"counts must be integers of shape \(K,\), got torch.bool of shape \(1,\)"),
        ([1], 0, 0, r"num_rows must be an integer of at least 1, got 0"),
        ([1], 5, 6, r"draws must be an integer from 0 to 5, got 6"),
        ([1], 5, -1, r"draws must be an integer from 0 to 5, got -1"),
    ],
)
@pytest.mark.parametrize("function", [log_inclusion_probability, log_expected_occurrences])
def test_what_does_not_fit(function, counts, num_rows, draws, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        function(torch.tensor(counts), num_rows, draws)


def test_what_does_not_fit_elsewhere():
    with pytest.raises(InputError, match=r"^draws must be an integer of at least 0, got -1$"):
        log_inclusion_probability_with_repetition(torch.tensor([0.5]), -1)
    with pytest.raises(InputError, match=r"^population must be an integer of at least 1, got 0$"):
        correct_scores(torch.zeros(1, 1), torch.zeros(1), 0)
