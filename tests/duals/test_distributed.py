"""Two gloo processes: one table, and the same as one process with the whole batch."""

import lightning as L
import pytest
import torch

from scent_lightning.duals import BSGD, SCENT, SOX, DualDivergenceError, DualVariable, SoftplusASGD
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, in_two_processes, under_two_trainers

UPDATES = [SCENT(0.5), SOX(0.4), BSGD(), SoftplusASGD(0.2, 1e-3)]


def batches(steps=6, rows=8, anchors=12):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        scores = 2 * torch.randn(rows, 5, generator=generator)
        mask = torch.rand(rows, 5, generator=generator) < 0.8
        yield scores, torch.randint(0, anchors, (rows,), generator=generator), mask


def _tables(rank):
    """Ranks take uneven shares: 5 and 3 rows of each batch, with repeats inside and across ranks."""
    tables, losses = [], []
    for update in UPDATES:
        variable = DualVariable(12, update)
        for scores, index, mask in batches():
            share = slice(0, 5) if rank == 0 else slice(5, 8)
            losses.append(variable.entropic_risk(scores[share], index[share], mask[share]).item())
        tables.append((variable.nu.tolist(), variable.visited.tolist()))
    return tables


def test_ranks_hold_the_table_of_one_process(tmp_path):
    first, second = in_two_processes(_tables, tmp_path)
    assert first == second
    for update, (nu, visited) in zip(UPDATES, first, strict=True):
        alone = DualVariable(12, update)
        for scores, index, mask in batches():
            alone.entropic_risk(scores, index, mask)
        torch.testing.assert_close(torch.tensor(nu), alone.nu, rtol=1e-6, atol=1e-6)
        assert visited == alone.visited.tolist()


def _one_anchor(rank):
    variable = DualVariable(1, SCENT(-1.0))
    losses = []
    for scores, _, _ in batches():
        flat = scores.flatten()
        share = flat[:25] if rank == 0 else flat[25:]
        losses.append(variable.entropic_risk(share.unsqueeze(0), torch.tensor([0])).item())
    return variable.nu.item(), losses


def test_one_anchor_sees_the_samples_of_all_ranks(tmp_path):
    results = in_two_processes(_one_anchor, tmp_path)
    alone = DualVariable(1, SCENT(-1.0))
    for step, (scores, _, _) in enumerate(batches()):
        loss = alone.entropic_risk(scores.flatten().unsqueeze(0), torch.tensor([0])).item()
        shares = (results[0][1][step] + results[1][1][step]) / 2
        assert shares == pytest.approx(loss, rel=1e-5)
    assert results[0][0] == results[1][0] == pytest.approx(alone.nu.item(), rel=1e-6)


def _faults(rank):
    variable = DualVariable(4, SCENT(0.0))
    variable.entropic_risk(torch.zeros(1, 2), torch.tensor([rank]))
    before = variable.nu.clone(), variable.visited.clone()
    messages = []
    bad_index = torch.tensor([4 if rank == 0 else 1])
    bad_scores = torch.full((1, 2), float("nan") if rank == 1 else 0.0)
    for scores, index in ((torch.zeros(1, 2), bad_index), (bad_scores, torch.tensor([2]))):
        try:
            variable.entropic_risk(scores, index)
            messages.append("none")
        except (IndexError, RuntimeError, DualDivergenceError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    kept = torch.equal(before[0], variable.nu) and torch.equal(before[1], variable.visited)
    return messages, kept


def test_a_fault_in_one_rank_stops_all_and_writes_nothing(tmp_path):
    (first, first_kept), (second, second_kept) = in_two_processes(_faults, tmp_path)
    assert "IndexError: index 4 of dual variable 'nu' is out of range" in first[0]
    assert "RuntimeError: another process" in second[0]
    assert all("DualDivergenceError" in message for message in (first[1], second[1]))
    assert first_kept
    assert second_kept


def _fit(rank):
    L.seed_everything(3, verbose=False)
    data = SoftmaxData(rows=21, batch_size=4)  # 21 rows do not divide by 2: the sampler repeats one
    task = SoftmaxTask(data.num_anchors, SOX(0.5))
    ddp_trainer(max_epochs=3, limit_val_batches=0).fit(task, data)
    return {key: value.tolist() for key, value in task.state_dict().items()}


@pytest.mark.slow
def test_trainer_with_ddp():
    first, second = under_two_trainers(_fit)
    assert first == second
    assert all(first["duals.nu.visited"])
    assert len(set(first["duals.nu.nu"])) > 10
