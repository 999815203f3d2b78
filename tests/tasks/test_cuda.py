"""Every task with a network trains on a GPU, in each precision, and its checkpoint loads on a CPU."""

import pytest
import torch

from scent_lightning.data import batch_loader
from scent_lightning.duals import MSVR, SCENT, SOX, DualVariable
from tests.helpers import quiet_trainer
from tests.tasks import test_clip, test_extreme_classification, test_partial_auc

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def clip():
    return test_clip.task_of(SOX(0.5), chunk=5), test_clip.loader()


def partial_auc():
    return test_partial_auc.task_of(), test_partial_auc.training_loader(test_partial_auc.rows())


def extreme_classification():
    rows = test_extreme_classification.rows_and_labels()
    return test_extreme_classification.task_of(), batch_loader(rows, 60, True, seed=0)


def following():
    """An update that compares with the weights before, and the halves of a batch."""
    rows = test_partial_auc.rows()
    task = test_partial_auc.task_of(MSVR(0.5, 0.5), independent_sample=True)
    return task, test_partial_auc.training_loader(rows)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("setting", [clip, partial_auc, extreme_classification, following])
def test_trains(setting, precision, tmp_path):
    torch.manual_seed(0)
    task, rows = setting()
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision, max_epochs=3, limit_val_batches=0)
    trainer.fit(task, rows)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = type(task).load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    for name, variable in task.duals.items():
        assert isinstance(variable, DualVariable)
        assert variable.nu.dtype == torch.float32
        assert variable.nu.isfinite().all()
        assert variable.visited.any()
        assert torch.equal(loaded.duals[name].nu, variable.nu.cpu())


def test_contrastive_gradients_equal_those_of_the_cpu():
    images, texts = (tensor[:12] for tensor in test_clip.pairs().tensors)
    index = torch.arange(12)
    found = []
    for device in ("cpu", "cuda"):
        task = test_clip.task_of(SCENT(2.0)).to(device)
        image, text = (rows.detach().requires_grad_() for rows in task(images.to(device), texts.to(device)))
        if device == "cuda":
            image, text = (rows.cuda().requires_grad_() for rows in found[0][1:3])
        loss = task.contrastive_risk(image, text, index.to(device))
        loss.backward()
        found.append((loss.detach(), image.detach(), text.detach(), image.grad, text.grad, task.tau.grad))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-6)
