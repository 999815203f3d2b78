"""Precision, recall and propensity-scored precision against loops over the rows in NumPy."""

import numpy as np
import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.metrics import PrecisionAtK, PropensityScoredPrecision, RecallAtK, label_propensities
from tests.helpers import in_two_processes

K = 12


def rows(seed, count=30, widest=5):
    """Ranked classes, and right ones of up to five a row, −1 anywhere among them; some rows have none."""
    generator = np.random.default_rng(seed)
    ranked = np.array([generator.permutation(K)[:7] for _ in range(count)])
    answers = np.full((count, widest), -1)
    for row in answers:
        places = generator.permutation(widest)[: generator.integers(0, widest + 1)]
        row[places] = generator.permutation(K)[: len(places)]
    return torch.from_numpy(ranked), torch.from_numpy(answers)


PROPENSITIES = label_propensities(torch.tensor([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 100]), 120)


def oracle(kind, k, ranked, answers):
    above, below = [], []
    inverse = 1 / PROPENSITIES.double().numpy()
    for row, right in zip(ranked.numpy(), answers.numpy(), strict=True):
        right = set(right[right >= 0].tolist())
        if not right:
            continue
        hits = [label for label in row[:k].tolist() if label in right]
        if kind == "precision":
            above.append(len(hits)), below.append(k)
        elif kind == "recall":
            above.append(len(hits) / len(right)), below.append(1)
        else:
            above.append(sum(inverse[label] for label in hits))
            below.append(sum(sorted((inverse[label] for label in right), reverse=True)[:k]))
    return sum(above) / sum(below)


KINDS = {"precision": PrecisionAtK, "recall": RecallAtK, "psp": PropensityScoredPrecision}


def added(kind, metric, ranked, answers):
    metric.update(ranked, answers, *([PROPENSITIES] if kind == "psp" else []))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5, 10])
def test_against_a_loop(kind, k):
    metric, batches = KINDS[kind](k), [rows(0), rows(1, 7)]
    for batch in batches:
        added(kind, metric, *batch)
    together = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    assert metric.compute().item() == pytest.approx(oracle(kind, k, *together), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_order_is_1_where_there_are_enough(kind):
    answers = torch.tensor([[3, 0, 9], [11, 2, 5]])
    best = torch.gather(answers, 1, PROPENSITIES[answers].argsort(dim=1))
    metric = KINDS[kind](3)
    added(kind, metric, best, answers)
    assert metric.compute() == 1


def test_propensities_are_those_of_the_paper():
    """A label of more rows is noted down more often; a row for row the formula."""
    counts = np.array([0, 1, 7, 100])
    c = (np.log(500) - 1) * 2.5**0.55
    expected = 1 / (1 + c * np.exp(-0.55 * np.log(counts + 1.5)))
    found = label_propensities(torch.from_numpy(counts), 500)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert (found.diff() > 0).all()
    np.testing.assert_allclose(label_propensities(torch.from_numpy(counts), 2).numpy(), 1)


def _share(rank):
    found = []
    for kind, make in KINDS.items():
        metric = make(3)
        added(kind, metric, *(part[rank::2] for part in rows(2, 9)))
        found.append(metric.compute().item())
    return found


def test_two_processes_are_as_one(tmp_path):
    expected = [pytest.approx(oracle(kind, 3, *rows(2, 9)), rel=1e-6) for kind in KINDS]
    for found in in_two_processes(_share, tmp_path):
        assert found == expected


def test_without_propensities_and_without_right_classes():
    metric = PropensityScoredPrecision(1)
    metric.update(*rows(0), None)
    assert metric.compute().isnan()
    metric = RecallAtK(2)
    metric.update(torch.tensor([[1, 2]]), torch.tensor([[-1, -1]]))
    assert metric.compute().isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_arguments(kind):
    with pytest.raises(InputError, match="k must be an integer of at least 1, got 0"):
        KINDS[kind](0)
    with pytest.raises(InputError, match=r"must have shape \(B, k\) and \(B, P\), got \(3,\) and \(3, 2\)"):
        added(kind, KINDS[kind](1), torch.arange(3), torch.zeros(3, 2, dtype=torch.int64))
    for wrong, message in (({"rows": 0}, "rows must be"), ({"a": 0.0}, "a must be"), ({"b": -1}, "b must be")):
        with pytest.raises(InputError, match=message):
            label_propensities(torch.ones(2), **{"rows": 3, **wrong})
