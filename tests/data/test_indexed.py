"""Loaders: torch's own order shared by processes without repeats, continued within an epoch; augmentation by row."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.data.augmentation import at_random
from scent_lightning.data.batch_sampler import BatchRows, ShuffledBatchSampler
from scent_lightning.errors import InputError
from tests.helpers import SoftmaxData, SoftmaxTask, Steps, quiet_trainer
from tests.settings import SETTINGS, images


@pytest.mark.parametrize("rows", [1, 2, 10, 11, 29])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_share_the_batches_of_one(rows, replicas, drop_last):
    alone = ShuffledBatchSampler(rows, 4, seed=5, drop_last=drop_last)
    shares = [ShuffledBatchSampler(rows, 4 // replicas, replicas, rank, 5, drop_last) for rank in range(replicas)]
    for epoch in (0, 3):
        for sampler in (alone, *shares):
            sampler.set_epoch(epoch)
        whole = list(alone)
        taken = [row for batch in whole for row in batch]
        assert len(set(taken)) == len(taken) == (rows // 4 * 4 if drop_last else rows)
        parts = [list(sampler) for sampler in shares]
        assert {len(part) for part in parts} == {len(whole)} == {len(alone)}
        for batch, *pieces in zip(whole, *parts, strict=True):
            assert sorted(row for piece in pieces for row in piece) == sorted(batch)
            sizes = [len(piece) for piece in pieces]
            assert max(sizes) - min(sizes) <= 1


def test_no_order_is_that_of_another_epoch_or_another_seed():
    """Of seed + epoch runs of neighbouring seeds would share all orders but one, and say little of the noise."""
    orders = set()
    for seed in range(5):
        sampler = ShuffledBatchSampler(50, 50, seed=seed)
        for epoch in range(5):
            sampler.set_epoch(epoch)
            orders.add(tuple(next(iter(sampler))))
    assert len(orders) == 25


def test_rows_of_a_batch_know_their_epoch():
    batch = pickle.loads(pickle.dumps(BatchRows([3, 1], 7)))
    assert batch == [3, 1]
    assert batch.epoch == 7


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5])
def test_continues_within_an_epoch(stop, workers):
    dataset = IndexedTensorDataset(torch.arange(18.0))

    def loader(batch_size=4, replicas=1):
        return batch_loader(dataset, batch_size, True, num_replicas=replicas, num_workers=workers, seed=1)

    def rest(found):
        return [batch[1].tolist() for batch in found]

    first = loader()
    epochs = []
    for epoch in range(3):
        first.sampler.set_epoch(epoch)
        epochs.append(rest(first))
    second = loader()
    second.sampler.set_epoch(1)
    batches = iter(second)
    assert [next(batches)[1].tolist() for _ in range(stop)] == epochs[1][:stop]
    state = second.state_dict()  # loader processes have fetched further
    assert state == ({"epoch": 1, "batches": stop, "global_batch": 4})
    third = loader()
    third.sampler.set_epoch(1)
    third.load_state_dict(state)
    assert third.state_dict() == state or stop == 5
    assert rest(third) == epochs[1][stop:]
    third.sampler.set_epoch(2)
    assert rest(third) == epochs[2]
    # Twice as many rows at a time: on from the last whole batch.
    fourth = loader(4, 2)
    fourth.sampler.set_epoch(1)
    fourth.load_state_dict(state)
    assert len(rest(fourth)) == 3 - min(stop // 2, 3)


def test_takes_no_random_number():
    dataset = IndexedTensorDataset(torch.arange(8.0))
    before = torch.get_rng_state()
    for shuffle in (True, False):
        for workers in (0, 1):
            list(batch_loader(dataset, 4, shuffle, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_at_random():
    def draws(rows, seed=1, epoch=2):
        return [value.item() for value in at_random(rows, lambda row: row + torch.rand(()), seed, epoch)]

    before = torch.get_rng_state()
    found = draws([5, 0, 3])
    assert draws([3, 5]) == [found[2], found[0]]
    assert torch.equal(torch.get_rng_state(), before)
    assert len({value % 1 for value in found + draws([5], seed=2) + draws([5], epoch=3)}) == 5


def test_whole_batches_and_workers():
    dataset = IndexedTensorDataset(torch.arange(10.0), torch.arange(10))
    for workers in (0, 1):
        batches = list(batch_loader(dataset, 4, shuffle=False, num_workers=workers))
        assert [batch[2].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(torch.equal(batch[0], batch[2].float()) for batch in batches)
    single = dataset[3]
    assert (single[0].item(), single[2].item()) == (3.0, 3)


# overfit_batches: the same batches each epoch


@pytest.mark.parametrize("name", [*SETTINGS, "images"])
def test_overfit_batches_of_every_data_module(name, tmp_path):
    _, data = {**SETTINGS, "images": images}[name](tmp_path, 8)
    model = Steps()
    quiet_trainer(max_epochs=3, overfit_batches=2).fit(model, datamodule=data)
    first, *others = (model.seen["train"][start : start + 2] for start in (0, 2, 4))
    assert [len(batch) for batch in first] == [8, 8]
    assert others == [first, first]
    if name not in ("ranking", "images"):
        assert first == [[*range(8)], [*range(8, 16)]]


@pytest.mark.parametrize(("amount", "batches"), [(1, 1), (0.5, 1), (1.0, 3), (3, 3)])
def test_overfit_batches_of_ones_own_loader(amount, batches):
    data = IndexedTensorDataset(torch.arange(20.0), torch.zeros(20))
    model = Steps()
    quiet_trainer(max_epochs=3, overfit_batches=amount).fit(model, batch_loader(data, 8, True))
    assert model.seen["train"] == 3 * [[*range(8)], [*range(8, 16)], [*range(16, 20)]][:batches]


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"num_workers": 1}, {"drop_last": True}])
@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_an_ordinary_loader_gives_the_same_batches(arguments, tensors):
    """Of a single tensor of integers too, which has the shape of its index."""
    dataset = IndexedTensorDataset(torch.arange(10, 20), torch.randn(10, 3), torch.arange(10.0)[:, None])
    dataset = IndexedTensorDataset(*dataset.tensors[:tensors])
    seen = []
    for *batch, index in DataLoader(dataset, batch_size=4, **arguments):
        seen += index.tolist()
        assert len(batch) == tensors
        assert all(torch.equal(*pair) for pair in zip(batch, dataset[index.tolist()][:-1], strict=True))
        assert index.dtype == torch.int64
    assert len(set(seen)) == (8 if "drop_last" in arguments else 10)
    (ours,) = batch_loader(dataset, 10, False)
    (theirs,) = DataLoader(dataset, batch_size=10)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_task_trains_with_an_ordinary_loader():
    data = SoftmaxData(rows=24)
    task = SoftmaxTask(24)
    quiet_trainer(max_epochs=1).fit(task, DataLoader(data.dataset, batch_size=5, shuffle=True))
    assert task.duals["nu"].visited.all()


def test_tensors_of_different_lengths():
    with pytest.raises(InputError, match="tensors must be of equal length, got 3, 4 rows"):
        IndexedTensorDataset(torch.zeros(3), torch.zeros(4))
