"""Momentum that increases over the run, in the tasks."""

import pytest
import torch

from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.optim import IncreasingMomentumSGD, increasing_momentum
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask
from tests.helpers import quiet_trainer


def regression(momentum="auto", **arguments):
    """A regression, its rows in batches of two, and what trains it."""
    data = TabularRegressionDataModule("diabetes", batch_size=2)
    task = DRORegressionTask(10, SCENT(), tau=5.0, momentum=momentum)
    trainer = quiet_trainer(limit_val_batches=0, **arguments)
    return task, data, trainer


def test_of_a_task_it_increases_with_the_steps():
    task, data, trainer = regression(max_epochs=10)
    trainer.fit(task, data)
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is IncreasingMomentumSGD
    (group,) = optimizer.param_groups
    assert group["steps"] == trainer.global_step == 2210
    assert (group["momentum"], group["dampening"]) == increasing_momentum(2209)
    assert group["momentum"] == pytest.approx(1 - 150 / 2209)


def test_a_resumed_run_is_the_same(tmp_path):
    whole, data, trainer = regression(max_epochs=10)
    trainer.fit(whole, data)
    first, data, trainer = regression(max_epochs=10)
    first.on_train_epoch_end = lambda: setattr(trainer, "should_stop", trainer.current_epoch == 7)
    trainer.fit(first, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    second, data, trainer = regression(max_epochs=10)
    trainer.fit(second, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert trainer.optimizers[0].param_groups[0]["steps"] == 2210
    assert torch.equal(second.network.weight, whole.network.weight)
    assert not torch.equal(first.network.weight, whole.network.weight)


def test_a_checkpoint_of_another_momentum_goes_on_with_it(tmp_path):
    first, data, trainer = regression(0.9, max_epochs=1)
    trainer.fit(first, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    second, data, trainer = regression(max_epochs=2)
    trainer.fit(second, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["momentum"], group["nesterov"], group["steps"]) == (0.9, True, 221)


def test_where_it_is_no_number():
    def of(**given):
        task = DRORegressionTask(3, SCENT(), **given)
        return task.momentum, task.nesterov

    assert of() == of(momentum="auto") == of(lr=0.1) == of(lr="auto") == ("auto", False)
    assert of(weight_step="gradient") == (0.9, True)
    assert of(weight_step="gradient", momentum="auto") == ("auto", False)
    assert of(momentum=0.8) == (0.8, True)
    assert of(momentum=0.0) == (0.0, False)
    with pytest.raises(InputError, match=r"^momentum must be one of auto, got 'epoch'$"):
        DRORegressionTask(3, SCENT(), momentum="epoch")
    with pytest.raises(InputError, match=r"^momentum must be a number in \[0, 1\), got 'auto'$"):
        ExtremeClassificationTask(3, 7, 4, SCENT(), momentum="auto")
