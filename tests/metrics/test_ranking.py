"""NDCG against scikit-learn's, reciprocal rank against a loop over the documents."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from scent_lightning.errors import InputError
from scent_lightning.metrics import GradedNDCG, ListMRR, graded_ndcg, list_reciprocal_rank
from tests.helpers import in_two_processes


def lists(seed, rows=40, longest=12, distinct=None):
    """Scores (few distinct ones: ties), relevance of 0 to 4, and lengths from 1 on; beyond a list is noise."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, longest, generator=generator)
    if distinct is not None:
        scores = (scores * distinct).round() / distinct
    relevance = torch.randint(-3, 5, (rows, longest), generator=generator).clamp(min=0).float()
    lengths = torch.randint(1, longest + 1, (rows, 1), generator=generator)
    return scores, relevance, torch.arange(longest) < lengths


@pytest.mark.parametrize("distinct", [None, 1, 0.5])
@pytest.mark.parametrize("k", [1, 3, 10, 50])
@pytest.mark.parametrize("gain", ["exponential", "linear"])
def test_ndcg_is_scikit_learns(distinct, k, gain):
    scores, relevance, mask = lists(0, distinct=distinct)
    found = graded_ndcg(scores, relevance, mask, k, gain)
    for row, (score, relevant, there) in enumerate(zip(scores, relevance, mask, strict=True)):
        score, relevant = score[there].numpy()[None], relevant[there].numpy()[None]
        gains = 2**relevant - 1 if gain == "exponential" else relevant
        if not relevant.any():
            assert math.isnan(found[row])
        elif score.shape[1] == 1:  # scikit-learn takes lists of two or more
            assert found[row] == 1
        else:
            assert found[row].item() == pytest.approx(ndcg_score(gains, score, k=k), rel=1e-5)


@pytest.mark.parametrize("distinct", [None, 1])
def test_reciprocal_rank(distinct):
    scores, relevance, mask = lists(1, distinct=distinct)
    found = list_reciprocal_rank(scores, relevance, mask)
    for row, (score, relevant, there) in enumerate(zip(scores, relevance, mask, strict=True)):
        documents = [(-s.item(), r.item() > 0) for s, r in zip(score[there], relevant[there], strict=True)]
        places = [place for place, (_, right) in enumerate(sorted(documents), start=1) if right]
        assert math.isnan(found[row]) if not places else found[row].item() == pytest.approx(1 / places[0])


@pytest.mark.parametrize(
    ("make", "of_lists"), [(lambda: GradedNDCG(3), lambda *x: graded_ndcg(*x, 3)), (ListMRR, list_reciprocal_rank)]
)
def test_metrics_are_means_over_all_batches(make, of_lists):
    metric = make()
    values = []
    for seed in (2, 3):
        batch = lists(seed, rows=5 + seed)
        metric.update(*batch)
        values.append(of_lists(*batch))
    values = torch.cat(values)
    assert metric.compute().item() == pytest.approx(values.nanmean().item(), rel=1e-6)
    assert metric.left_out == values.isnan().sum()
    assert metric.left_out > 0
    metric.reset()
    metric.update(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert metric.compute().isnan()


def _share(rank):
    metric = GradedNDCG(3)
    metric.update(*(part[rank::2] for part in lists(4, rows=9)))
    return metric.compute().item(), int(metric.left_out)


def test_two_processes_are_as_one(tmp_path):
    metric = GradedNDCG(3)
    metric.update(*lists(4, rows=9))
    expected = metric.compute().item()
    for value, _ in in_two_processes(_share, tmp_path):
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"k": 0}, "k must be an integer of at least 1, got 0"),
    ({"k": 2.0}, "k must be an integer of at least 1, got 2.0"),
    ({"k": 2, "gain": "square"}, "gain must be one of exponential, linear, got 'square'"),
])  # fmt: skip
def test_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        GradedNDCG(**arguments)


def test_half_precision_and_an_empty_batch():
    metric = ListMRR()
    metric.update(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))
    metric.update(*(part.half() if part.is_floating_point() else part for part in lists(5)))
    assert 0 < metric.compute() <= 1
    assert np.isfinite(metric.compute().item())
