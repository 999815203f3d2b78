"""The index of each row, whatever a row is."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from scent_lightning.data import WithIndex
from scent_lightning.errors import InputError


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


class Fetching(Dataset):
    """Fetches several rows at once."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        raise AssertionError("fetched one by one")

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [(torch.tensor(float(i)), -i) for i in indices]


class Endless(IterableDataset):
    def __iter__(self):
        yield 0


ROWS = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (ROWS, 1),
        (list(range(6)), 1),
        (np.arange(6), 1),
        (TensorDataset(ROWS), 1),
        (TensorDataset(ROWS, torch.arange(6)), 2),
        ([[row, 1] for row in ROWS], 2),
        ([Pair(row, 1) for row in ROWS], 2),
        (Subset(TensorDataset(ROWS, torch.arange(6), torch.ones(6)), [5, 3, 1, 0, 2, 4]), 3),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_index_is_the_last_part_of_a_batch(dataset, parts, workers):
    loader = DataLoader(WithIndex(dataset), batch_size=4, shuffle=True, num_workers=workers)
    seen = []
    for batch in loader:
        assert len(batch) == parts + 1
        *_, index = batch
        assert index.dtype == torch.int64
        for place, row in enumerate(index.tolist()):
            expected = dataset[row]
            first = expected[0] if isinstance(expected, tuple | list) else expected
            assert torch.equal(torch.as_tensor(batch[0][place]), torch.as_tensor(first))
        seen += index.tolist()
    assert sorted(seen) == list(range(6))


def test_index_of_a_mapping_is_under_its_key():
    rows = [{"image": row, "text": str(i)} for i, row in enumerate(ROWS)]
    batch = next(iter(DataLoader(WithIndex(rows), batch_size=3)))
    assert batch["index"].tolist() == [0, 1, 2]
    assert batch["text"] == ["0", "1", "2"]
    assert "index" not in rows[0]
    assert WithIndex([{"index": 5}], key="row")[0] == {"index": 5, "row": 0}
    with pytest.raises(InputError, match=r"row 0 of list has 'index' already: give another key"):
        WithIndex([{"index": 5}])[0]


def test_rows_are_fetched_together_where_the_data_set_can():
    dataset = Fetching()
    values, labels, index = next(iter(DataLoader(WithIndex(dataset), batch_size=4)))
    assert dataset.asked == [[0, 1, 2, 3]]
    assert (values.tolist(), labels.tolist(), index.tolist()) == ([0, 1, 2, 3], [0, -1, -2, -3], [0, 1, 2, 3])


def test_negative_index_is_the_row_it_stands_for():
    assert WithIndex(["a", "b", "c"])[-1] == ("c", 2)


@pytest.mark.parametrize("dataset", [Endless(), iter([1]), 3])
def test_a_data_set_without_numbers_is_refused(dataset):
    with pytest.raises(InputError, match=f"numbered rows.*got {type(dataset).__name__}"):
        WithIndex(dataset)
