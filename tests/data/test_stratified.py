"""Batches with a fixed number of rows of each class: balance, no repeats, processes, continuation, bad input."""

import itertools

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from scent_lightning.data.stratified import StratifiedBatchSampler
from scent_lightning.errors import InputError
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers

KNOWN = [[21, 0, 9, 3, 8, 4, 20], [5, 28, 12, 14, 17, 10, 25]]


def labels_of(positives, negatives, seed=0):
    labels = np.repeat([1, 0], [positives, negatives])
    return torch.from_numpy(np.random.default_rng(seed).permutation(labels))


def sampler_of(**arguments):
    return StratifiedBatchSampler(**{"labels": labels_of(7, 23), "positives": 3, "negatives": 4, **arguments})


class Rows(torch.utils.data.Dataset):
    """Item ``i`` is ``i``, alone or in a list."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.as_tensor(index)


def as_it_is(batch):
    return batch


def loader_of(sampler, kind=DataLoader, form="sampler", **arguments):
    dataset = Rows(len(sampler.dataset))
    if form == "batch_sampler":
        return kind(dataset, batch_sampler=sampler, **arguments)
    return kind(dataset, sampler=sampler, batch_size=None, collate_fn=as_it_is, **arguments)


@settings(deadline=None)
@given(data=st.data())
def test_balance(data):
    """Each batch has the classes' numbers, no row twice; in an epoch rows of a class are even to within one."""
    sizes = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    replicas = data.draw(st.integers(1, 1 + min(sizes) // 2))
    replicas = min(replicas, *sizes)
    counts = [data.draw(st.integers(1, size // replicas)) for size in sizes]
    num_batches = data.draw(st.none() | st.integers(1, 40))
    seed, epoch = data.draw(st.integers(0, 2**40)), data.draw(st.integers(0, 1000))
    labels = labels_of(*sizes, seed)
    samplers = [StratifiedBatchSampler(labels, *counts, num_batches, seed, replicas, rank) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    seen = torch.zeros(len(labels), dtype=torch.int64)
    length = 0
    for batches in zip(*samplers, strict=True):
        length += 1
        for batch in batches:
            assert labels[batch].tolist() == [1] * counts[0] + [0] * counts[1]
        rows = list(itertools.chain(*batches))
        assert len(set(rows)) == len(rows)
        seen[rows] += 1
    for label in (0, 1):
        assert seen[labels == label].max() - seen[labels == label].min() <= 1
    assert length == len(samplers[0])
    assert length == (num_batches or max(1, len(labels) // (replicas * sum(counts))))


@settings(deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    counts=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    num_batches=st.none() | st.integers(1, 30),
    epochs=st.integers(2, 40),
    seed=st.integers(0, 2**40),
)
def test_balance_over_epochs(sizes, counts, num_batches, epochs, seed):
    """What an epoch leaves out has its turn later: after any number of epochs rows are even to within one."""
    labels = labels_of(*sizes, seed)
    sampler = StratifiedBatchSampler(labels, *map(min, counts, sizes), num_batches, seed)
    seen = torch.zeros(len(labels), dtype=torch.int64)
    classes = [labels == label for label in (0, 1)]
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen += torch.tensor(list(itertools.chain(*sampler))).bincount(minlength=len(labels))
        for rows in classes:
            assert seen[rows].max() - seen[rows].min() <= 1


@settings(deadline=None)
@given(
    replicas=st.sampled_from([2, 3]),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.tuples(st.integers(9, 15), st.integers(9, 15)),
    seed=st.integers(0, 99),
)
def test_processes_share_the_batches_of_one(replicas, counts, sizes, seed):
    labels = labels_of(*sizes)
    positives, negatives = counts
    alone = StratifiedBatchSampler(labels, replicas * positives, replicas * negatives, 20, seed)
    parts = [StratifiedBatchSampler(labels, *counts, 20, seed, replicas, rank) for rank in range(replicas)]
    for whole, *batches in zip(alone, *parts, strict=True):
        together = [row for batch in batches for row in batch[:positives]]
        together += [row for batch in batches for row in batch[positives:]]
        assert together == whole


@settings(deadline=None)
@given(
    sizes=st.tuples(st.integers(3, 12), st.integers(4, 30)),
    done=st.integers(0, 59),
    epoch=st.integers(0, 5),
)
def test_continuation(sizes, done, epoch):
    """A state continues the epoch it was taken in, wherever that is, and the next iteration starts anew."""
    sampler = sampler_of(labels=labels_of(*sizes), num_batches=60)
    sampler.set_epoch(epoch)
    iterator = iter(sampler)
    for _ in range(done):
        next(iterator)
    state = sampler.state_dict()
    other = sampler_of(labels=labels_of(*sizes), num_batches=60)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert list(other) == list(iterator)
    assert list(other) == list(sampler)


def test_state_at_the_end_of_an_epoch():
    sampler = sampler_of()
    sampler.set_epoch(3)
    list(sampler)
    state = sampler.state_dict()
    for epoch, expected in ((None, 4), (4, 4), (7, 7), (3, None)):
        other = sampler_of()
        if epoch is not None:
            other.set_epoch(epoch)
        other.load_state_dict(state)
        assert list(other) == ([] if expected is None else expected_epochs(8)[expected])


def test_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(0)
    first = [list(sampler_of())]
    for arguments, epoch in (({"seed": 1}, 0), ({}, 1), ({"seed": 1}, 1)):
        sampler = sampler_of(**arguments)
        sampler.set_epoch(epoch)
        first.append(list(sampler))
    assert all(a != b for a, b in itertools.combinations(first, 2))
    torch.manual_seed(5)
    sampler = sampler_of()
    assert list(sampler) == first[0]
    sampler.set_epoch(1)
    assert list(sampler) == first[2]
    sampler.set_epoch(0)
    assert list(sampler) == first[0]


def test_known_batches():
    """A run that is resumed with a later version must see the same batches."""
    assert list(sampler_of(num_batches=2, seed=7)) == KNOWN


def test_orders_are_uniform():
    """Each row is as likely as any other at each place of a permutation, also after the end of one before."""
    labels = labels_of(5, 5)
    counts = torch.zeros(4, 3, 10)
    for seed in range(3000):
        for i, batch in enumerate(StratifiedBatchSampler(labels, 3, 3, 4, seed)):
            for j in range(3):
                counts[i, j, batch[j]] += 1
    frequencies = counts[..., labels == 1] / 3000
    assert frequencies.sum(-1).allclose(torch.ones(4, 3))
    assert (frequencies - 0.2).abs().max() < 5 * (0.16 / 3000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_types_of_labels(dtype):
    assert list(sampler_of(labels=labels_of(7, 23).to(dtype))) == list(sampler_of())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["sampler", "batch_sampler"])
def test_plain_loader(form, workers):
    sampler = sampler_of()
    loader = loader_of(sampler, form=form, num_workers=workers)
    assert len(loader) == len(sampler) == 4
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch) if form == "sampler" else sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == list(sampler)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.parametrize("form", ["sampler", "batch_sampler"])
def test_stateful_loader_continues(form, workers, persistent):
    arguments = {"kind": StatefulDataLoader, "form": form, "num_workers": workers, "persistent_workers": persistent}
    epochs = []
    for epoch in range(3):
        sampler = sampler_of(num_batches=9)
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    for stop in (5, 8, 9) if workers else (0, 1, 5, 8, 9):
        sampler = sampler_of(num_batches=9)
        loader = loader_of(sampler, **arguments)
        assert [batch.tolist() for batch in loader] == epochs[0]
        sampler.set_epoch(1)
        iterator = iter(loader)
        found = [next(iterator).tolist() for _ in range(stop)]
        state = loader.state_dict()
        assert found == epochs[1][:stop]

        sampler = sampler_of(num_batches=9)
        loader = loader_of(sampler, **arguments)
        loader.load_state_dict(state)
        if stop % 2:  # with and without
            sampler.set_epoch(1)
        assert [batch.tolist() for batch in loader] == epochs[1][stop:]
        sampler.set_epoch(2)
        assert [batch.tolist() for batch in loader] == epochs[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_loader_after_a_whole_epoch(workers):
    """The state after the last batch was asked for in vain starts the next epoch."""
    sampler = sampler_of()
    loader = loader_of(sampler, StatefulDataLoader, num_workers=workers)
    list(loader)
    state = loader.state_dict()
    sampler.set_epoch(1)
    expected = list(sampler)
    sampler = sampler_of()
    loader = loader_of(sampler, StatefulDataLoader, num_workers=workers)
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == expected


# Under Lightning


class Steps(L.LightningModule):
    """Keeps the rows of each training step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.weight * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected_epochs(epochs, **arguments):
    sampler = sampler_of(**arguments)
    batches = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches.append(list(sampler))
    return batches


def joined(epochs):
    return list(itertools.chain(*epochs))


@pytest.mark.parametrize("form", ["sampler", "batch_sampler"])
def test_trainer_sets_the_epoch(form):
    model = Steps()
    quiet_trainer(max_epochs=3).fit(model, loader_of(sampler_of(), form=form))
    expected = expected_epochs(3)
    assert model.seen == joined(expected)
    assert expected[0] != expected[1] != expected[2]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [1, 3, 4, 6, 8])
def test_trainer_resumes_within_an_epoch(tmp_path, stop, workers):
    expected = joined(expected_epochs(3))
    model = Steps()
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    trainer = quiet_trainer(max_steps=stop, max_epochs=3, callbacks=[save], enable_checkpointing=True)
    trainer.fit(model, loader_of(sampler_of(), StatefulDataLoader, num_workers=workers))
    assert model.seen == expected[:stop]
    model = Steps()
    loader = loader_of(sampler_of(), StatefulDataLoader, num_workers=workers)
    quiet_trainer(max_epochs=3).fit(model, loader, ckpt_path=tmp_path / f"step={stop}.ckpt")
    assert model.seen == expected[stop:]


def _train(rank):
    sampler = sampler_of(positives=2, negatives=3, num_batches=6, num_replicas=2, rank=rank)
    loader = loader_of(sampler)
    model = Steps()
    trainer = ddp_trainer(max_epochs=2)
    trainer.fit(model, loader)
    return model.seen, trainer.train_dataloader.sampler is sampler


def test_two_trainers():
    """Lightning leaves the sampler alone and sets its epoch; the processes' rows are disjoint parts of one batch."""
    (first, kept), (second, also_kept) = under_two_trainers(_train)
    assert kept
    assert also_kept
    expected = joined(expected_epochs(2, positives=4, negatives=6, num_batches=6))
    for one, other, whole in zip(first, second, expected, strict=True):
        assert not set(one) & set(other)
        assert one[:2] + other[:2] + one[2:] + other[2:] == whole
    assert first[:6] != first[6:]


# Size and bad input


def test_many_rows_are_no_lists():
    labels = torch.zeros(3_000_000, dtype=torch.uint8)
    labels[::10] = 1
    sampler = StratifiedBatchSampler(labels, 64, 64)
    batch = next(iter(sampler))
    assert len(sampler) == 3_000_000 // 128
    assert labels[batch].tolist() == [1] * 64 + [0] * 64
    sizes = [rows.element_size() * rows.numel() for rows, _ in sampler.groups]
    assert sum(sizes) == 8 * 3_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": torch.tensor([0, 1, 2])}, r"labels must be 0 or 1, got 2 in row 2 \(counted from 0\)"),
        ({"labels": torch.tensor([0.0, float("nan"), 1.0])}, "labels must be 0 or 1, got nan in row 1"),
        ({"labels": torch.tensor([-1, 1])}, "labels must be 0 or 1, got -1 in row 0"),
        ({"labels": torch.zeros(3, 2)}, r"labels must have shape \(n,\), got \(3, 2\)"),
        ({"labels": torch.zeros(9)}, r"got no positive row \(label 1\)"),
        ({"labels": torch.ones(9)}, r"got no negative row \(label 0\)"),
        ({"labels": torch.ones(0)}, "got no positive row"),
        ({"positives": 8}, "positives 8 is more than the 7 positive rows there are; allowed: 1 to 7"),
        ({"negatives": 24}, "negatives 24 is more than the 23 negative rows there are; allowed: 1 to 23"),
        ({"positives": 4, "num_replicas": 2}, "positives 4 in each of 2 processes is more than the 7 positive rows"),
        ({"num_replicas": 8, "positives": 1}, "positives 1 in each of 8 processes .* at most 7 processes"),
        ({"positives": 0}, "positives must be an integer of at least 1, got 0"),
        ({"negatives": -1}, "negatives must be an integer of at least 1, got -1"),
        ({"negatives": 2.0}, "negatives must be an integer of at least 1, got 2.0"),
        ({"num_batches": 0}, "num_batches must be None or an integer of at least 1, got 0"),
        ({"num_replicas": True}, "num_replicas must be an integer of at least 1, got True"),
        ({"rank": 1}, "rank must be an integer from 0 to 0, got 1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        sampler_of(**arguments)
    assert "\n" not in str(caught.value)
