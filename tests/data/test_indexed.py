"""The sampler gives torch's own order, on every rank and epoch."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.data.indexed import CHUNK, ShuffledSampler


@pytest.mark.parametrize("rows", [1, 2, 10, 11, CHUNK + 3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_order_is_distributed_samplers(rows, replicas):
    dataset = IndexedTensorDataset(torch.zeros(rows))
    for rank in range(replicas):
        ours = ShuffledSampler(dataset, replicas, rank, seed=5)
        theirs = DistributedSampler(dataset, replicas, rank, shuffle=True, seed=5)
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_whole_batches_and_workers():
    dataset = IndexedTensorDataset(torch.arange(10.0), torch.arange(10))
    for workers in (0, 1):
        batches = list(batch_loader(dataset, 4, shuffle=False, num_workers=workers))
        assert [batch[2].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(torch.equal(batch[0], batch[2].float()) for batch in batches)
    single = dataset[3]
    assert (single[0].item(), single[2].item()) == (3.0, 3)
