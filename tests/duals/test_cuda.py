"""The table on a GPU, and in main memory beside a module on a GPU."""

import math

import lightning as L
import pytest
import torch

from scent_lightning.duals import ASGD, BSGD, MSVR, SCENT, SOX, DualDivergenceError, DualVariable, SoftplusASGD
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        scores = 3 * torch.randn(16, 9, generator=generator)
        mask = torch.rand(16, 9, generator=generator) < 0.8
        yield scores, torch.randint(0, 20, (16,), generator=generator), mask


@pytest.mark.parametrize(
    "update", [SCENT(0.5), SOX(0.4), MSVR(0.4, 0.6), BSGD(), ASGD(0.1), SoftplusASGD(0.2, 1e-3)], ids=repr
)
@pytest.mark.parametrize("placement", ["module", "cpu"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_same_table_as_on_the_cpu(update, placement, separate, index_device):
    here, there = DualVariable(20, update), DualVariable(20, update, placement=placement).cuda()
    assert there.nu.device.type == ("cpu" if placement == "cpu" else "cuda")
    for scores, index, mask in batches():
        on_gpu = scores.cuda().requires_grad_()
        given = {"previous_scores": scores - 0.2}
        if separate:
            given["dual_scores"] = scores[:, :5] + 0.1
            given["previous_scores"] = scores[:, :5]
        of_gpu = {name: values.cuda() for name, values in given.items()}
        loss = there.entropic_risk(on_gpu, index.to(index_device), mask.cuda(), **of_gpu)
        loss.backward()
        expected = here.entropic_risk(scores, index, mask, **given)
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(there.nu.cpu(), here.nu, rtol=1e-5, atol=1e-6)
    assert torch.equal(there.visited.cpu(), here.visited)
    assert math.isfinite(there.evaluate(on_gpu, index.to(index_device)).item())


@pytest.mark.parametrize("placement", ["module", "cpu"])
def test_faults_leave_the_table_and_the_device_usable(placement):
    variable = DualVariable(5, SCENT(0.0), placement=placement).cuda()
    variable.entropic_risk(torch.zeros(1, 2, device="cuda"), torch.tensor([1]))
    before = variable.nu.clone(), variable.visited.clone()
    with pytest.raises(IndexError, match="index 5 of dual variable 'nu' is out of range"):
        variable.entropic_risk(torch.zeros(1, 2, device="cuda"), torch.tensor([5], device="cuda"))
    with pytest.raises(DualDivergenceError, match="scores are not finite"):
        variable.entropic_risk(torch.full((1, 2), math.nan, device="cuda"), torch.tensor([2], device="cuda"))
    assert torch.equal(variable.nu, before[0])
    assert torch.equal(variable.visited, before[1])
    variable.entropic_risk(torch.zeros(1, 2, device="cuda"), torch.tensor([2], device="cuda"))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_trainer(precision, tmp_path):
    L.seed_everything(0, verbose=False)
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, lr=0.03)
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision, max_epochs=5)
    trainer.fit(task, data)
    assert task.duals["nu"].nu.dtype == torch.float32
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = SoftmaxTask.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert torch.equal(loaded.duals["nu"].nu, task.duals["nu"].nu.cpu())
    assert loaded.duals["nu"].visited.all()
