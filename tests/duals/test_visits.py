"""A row's place in its batch, given for its place in the data set, is noticed."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from scent_lightning.data import WithIndex
from tests.helpers import CLASSES, SoftmaxTask, quiet_trainer

ROWS = TensorDataset(torch.randn(40, 4), torch.arange(40) % CLASSES)


class PlaceInBatch(SoftmaxTask):
    def training_step(self, batch, batch_idx):
        features, labels, *_ = batch
        return self.loss((features, labels, torch.arange(len(labels))))


def fit(task, batch_size=8, shuffle=True, **arguments):
    loader = DataLoader(WithIndex(ROWS), batch_size=batch_size, shuffle=shuffle)
    quiet_trainer(**{"max_epochs": 2, **arguments}).fit(task, loader)


def messages(record):
    return [str(each.message) for each in record if "place in its batch" in str(each.message)]


@pytest.mark.parametrize("batch_size", [8, 9, 12])  # 9 and 12: a shorter batch at the end
def test_places_in_batches_are_noticed_once(batch_size):
    with pytest.warns(UserWarning, match="place in its batch") as record:
        fit(PlaceInBatch(40), batch_size)
    (message,) = messages(record)
    assert f"only the anchors 0 to {batch_size - 1} of 40 of dual variable 'nu'" in message
    assert "WithIndex" in message


class SomeRows(SoftmaxTask):
    """Only every third row is an anchor."""

    def training_step(self, batch, batch_idx):
        features, labels, index = batch
        chosen = index % 3 == 0
        return self.loss((features[chosen], labels[chosen], index[chosen]))


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        (SoftmaxTask(40), {}),
        (SomeRows(40), {}),
        (SoftmaxTask(40), {"limit_train_batches": 2}),
        (SoftmaxTask(40), {"limit_train_batches": 3}),
        (SoftmaxTask(40), {"limit_train_batches": 3, "shuffle": False, "batch_size": 4}),
        (SoftmaxTask(40), {"overfit_batches": 3, "batch_size": 4}),
        (SoftmaxTask(1000), {"shuffle": False}),
        (SoftmaxTask(40), {"max_steps": 1, "max_epochs": -1}),
    ],
)
def test_dataset_indices_are_not(task, arguments):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fit(task, **arguments)
    assert not messages(record)
