"""Measures of ranks against torchmetrics, which takes scores of one query."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.retrieval import (
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from scent_lightning.errors import InputError
from scent_lightning.metrics import RankHitRate, RankNDCG, RankRecall, ReciprocalRank

ITEMS = 12


def drawn(count, generator):
    """Scores and right items of some queries, and the ranks of the latter."""
    scores, targets, ranks = [], [], torch.full((count, ITEMS), -1)
    for row in range(count):
        # In some versions of torchmetrics an item of a score of 0 or less is never found.
        score = 1.0 + torch.from_numpy(generator.permutation(ITEMS)).float()
        target = torch.zeros(ITEMS, dtype=torch.bool)
        target[generator.permutation(ITEMS)[: generator.integers(1, ITEMS)]] = True
        found = torch.argsort(torch.argsort(score, descending=True))[target]
        ranks[row, : len(found)] = found
        scores.append(score)
        targets.append(target)
    return scores, targets, ranks


@pytest.mark.parametrize("k", [1, 2, 5, 12, 40])
def test_against_torchmetrics(k):
    scores, targets, ranks = drawn(40, np.random.default_rng(k))
    for metric, function, arguments in (
        (RankRecall(k), retrieval_recall, {"top_k": k}),
        (RankNDCG(k), retrieval_normalized_dcg, {"top_k": k}),
        (RankHitRate(k), retrieval_hit_rate, {"top_k": k}),
        (ReciprocalRank(), retrieval_reciprocal_rank, {}),
    ):
        for part in ranks.split([1, 30, 9]):
            metric.update(part)
        metric.update(ranks[:0])
        expected = [float(function(*pair, **arguments)) for pair in zip(scores, targets, strict=True)]
        assert metric.compute().item() == pytest.approx(np.mean(expected), abs=1e-6), metric


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (torch.tensor([1, 2]), "ranks must be integers of shape"),
        (torch.tensor([[1.0]]), "ranks must be integers of shape"),
        (torch.tensor([[0, 1], [-1, -1]]), "right item for each query, row 1 has none"),
    ],
)
def test_bad_ranks(ranks, message):
    with pytest.raises(InputError, match=message):
        RankRecall(1).update(ranks)
    with pytest.raises(InputError, match="k must be an integer of at least 1, got 0"):
        RankNDCG(0)
