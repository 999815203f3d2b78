"""Accuracy of zero-shot classification against scikit-learn."""

import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, top_k_accuracy_score

from scent_lightning.errors import InputError
from scent_lightning.metrics import ZeroShotAccuracy


def test_accuracy_is_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(90, 9, generator=generator)
    labels = torch.randint(0, 7, (90,), generator=generator)  # two classes without rows, which are predicted
    metric = ZeroShotAccuracy(9)
    for rows in torch.arange(90).split(40):
        metric.update(scores[rows], labels[rows])
    metric.update(torch.empty(0, 9), torch.empty(0, dtype=torch.int64))
    predicted = scores.argmax(dim=1)
    assert set(predicted.tolist()) == set(range(9))
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        recall = balanced_accuracy_score(labels, predicted)
    expected = {
        "top1": accuracy_score(labels, predicted),
        "top5": top_k_accuracy_score(labels, scores, k=5, labels=range(9)),
        "mean_per_class_recall": recall,
    }
    assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(expected)


def test_top5_needs_more_than_five_classes():
    assert [set(ZeroShotAccuracy(classes).ks) for classes in (2, 5, 6)] == [{1}, {1}, {1, 5}]


def test_nothing_is_not_a_number():
    metric = ZeroShotAccuracy(6)
    metric.update(torch.empty(0, 6), torch.empty(0, dtype=torch.int64))
    assert all(value.isnan() for value in metric.compute().values())


def test_bad_input():
    with pytest.raises(InputError, match="num_classes must be an integer of at least 2, got 1"):
        ZeroShotAccuracy(1)
    with pytest.raises(InputError, match=r"must have shapes \(B, 3\) and \(B,\), got \(4, 2\) and \(4,\)"):
        ZeroShotAccuracy(3).update(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
