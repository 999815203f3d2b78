"""Training curves in other precisions stay near those in float32, and ν is float32 in all."""

import lightning as L
import pytest
import torch

from tests.helpers import quiet_trainer
from tests.settings import SETTINGS

EPOCHS = 6
# Largest difference of an epoch's mean loss, as a fraction of the range that the float32 curve goes through.
CPU = {"64-true": 1e-3, "bf16-mixed": 0.05, "bf16-true": 0.15}
# The scaler of 16-mixed passes over the first steps until its scale fits, so that the start lags behind.
GPU = {**CPU, "16-mixed": 0.1}


class Losses(L.Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append([])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.epochs[-1].append(outputs["loss"].double().item())


def curve(setting, folder, precision, accelerator="cpu"):
    L.seed_everything(1, verbose=False)
    task, data = setting(folder, 16)
    losses = Losses()
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        precision=precision,
        limit_val_batches=0,
        callbacks=[losses],
        accelerator=accelerator,
        devices=1,
    )
    trainer.fit(task, datamodule=data)
    for variable in task.duals.values():
        assert variable.nu.dtype == torch.float32
        assert variable.nu.isfinite().all()
    return torch.tensor(losses.epochs).mean(dim=1)


def assert_near(name, precision, tolerance, folder, accelerator):
    exact = curve(SETTINGS[name], folder, "32-true")
    found = curve(SETTINGS[name], folder, precision, accelerator)
    compared = slice(EPOCHS // 2, None) if precision == "16-mixed" else slice(None)
    assert (found - exact)[compared].abs().max() <= tolerance * (exact.max() - exact.min())


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("name", SETTINGS)
def test_curve_is_near_that_of_float32(name, precision, tmp_path):
    assert_near(name, precision, CPU[precision], tmp_path, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", GPU)
@pytest.mark.parametrize("name", SETTINGS)
def test_curve_on_a_gpu(name, precision, tmp_path):
    assert_near(name, precision, GPU[precision], tmp_path, "gpu")
