"""The last checkpoint within long epochs, at the ends of others, and never of infinite weights."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scent_lightning.callbacks import LastCheckpoint
from scent_lightning.callbacks import last_checkpoint as module
from scent_lightning.errors import DivergenceError, InputError
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer


class Written(LastCheckpoint):
    """Keeps the steps at which a file was written."""

    def __init__(self, folder, **arguments):
        super().__init__(**arguments)
        self.dirpath = str(folder)
        self.steps = []

    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        saved = torch.load(filepath, weights_only=True)
        assert saved["global_step"] == trainer.global_step
        self.steps.append(trainer.global_step)


def fit(callback, epochs=3, rows=80):
    trainer = quiet_trainer(
        max_epochs=epochs, limit_val_batches=0, callbacks=[callback], enable_checkpointing=True, num_sanity_val_steps=0
    )
    trainer.fit(SoftmaxTask(rows), SoftmaxData(rows=rows))  # 10 steps an epoch
    return callback.steps


def test_at_the_ends_of_epochs(tmp_path):
    assert fit(Written(tmp_path, at_most_every_s=0.0)) == [0, 10, 20, 30]
    # An epoch takes no hour: the start and the end.
    assert fit(Written(tmp_path, at_most_every_s=3600.0)) == [0, 30]


def test_within_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY", 4)
    found = fit(Written(tmp_path, at_most_every_s=3600.0, at_least_every_s=1e-9))
    assert found == [0, 4, 8, 14, 18, 24, 28, 30]


class Clock(Callback):
    """An hour passes in a step, or in the steps of some epochs."""

    def __init__(self, monkeypatch, long=(0, 1, 2), stop_at=None):
        self.now, self.long, self.stop_at = 0.0, long, stop_at
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "LOOK_EVERY", 4)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.stop_at:
            raise RuntimeError("stopped")
        if trainer.current_epoch in self.long:
            self.now += 3600.0


def fit_by(clock, callback, ckpt_path=None, epochs=3):
    trainer = quiet_trainer(
        max_epochs=epochs, limit_val_batches=0, callbacks=[clock, callback], enable_checkpointing=True
    )
    trainer.fit(SoftmaxTask(80), SoftmaxData(rows=80), ckpt_path=ckpt_path)  # 10 steps an epoch
    return callback.steps


def test_within_an_epoch_where_a_run_was_resumed_at_the_end_of_one(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="stopped"):
        fit_by(Clock(monkeypatch, stop_at=9), Written(tmp_path, at_least_every_s=7200.0))
    # One step is left of the epoch, in which no time passes: that says nothing of the next.
    steps = fit_by(Clock(monkeypatch, (1, 2)), Written(tmp_path, at_least_every_s=7200.0), tmp_path / "last.ckpt")
    assert [step for step in steps if 10 < step < 20] == [14, 18]


def test_within_epochs_that_become_long(tmp_path, monkeypatch):
    steps = fit_by(Clock(monkeypatch, (1, 2)), Written(tmp_path, at_most_every_s=1e9, at_least_every_s=7200.0))
    assert steps == [0, 24, 28, 30]  # the first long one is not known to be


def test_within_the_epochs_of_a_second_run(tmp_path, monkeypatch):
    callback = Written(tmp_path, at_most_every_s=1e9, at_least_every_s=7200.0)
    fit_by(Clock(monkeypatch, ()), callback)
    callback.steps.clear()
    assert fit_by(Clock(monkeypatch), callback, epochs=1) == [0, 4, 8, 10]


def test_never_of_infinite_weights(tmp_path):
    class Spoil(Written):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.linear.bias.data[0] = math.nan
            super().on_train_epoch_end(trainer, pl_module)

    callback = Spoil(tmp_path, at_most_every_s=0.0)
    with pytest.raises(DivergenceError, match=r"linear.bias is not finite at the end of epoch 1"):
        fit(callback)
    assert callback.steps == [0, 10]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 10


@pytest.mark.parametrize(("name", "value"), [("at_most_every_s", -1.0), ("at_least_every_s", 0.0)])
def test_errors(name, value):
    with pytest.raises(InputError, match=f"{name} must be"):
        LastCheckpoint(**{name: value})
