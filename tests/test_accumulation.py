"""A checkpoint between two optimiser steps holds the gradient so far; one of a resumed run's start loses nothing."""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scent_lightning.duals import MSVR
from scent_lightning.duals.gradients import gathered_gradients, restore_gradients
from tests.helpers import ddp_trainer, quiet_trainer, under_trainers
from tests.kill_and_resume import SETTINGS, differences
from tests.settings import moved_by

BATCH, EPOCHS = 16, 2  # 101 rows: 7 batches an epoch
TASKS = ("regression", "classification", "uniform", "ranking", "contrastive")


class SaveEach(Callback):
    """A checkpoint at the start, and after each batch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / "start.ckpt")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}_{batch_idx}.ckpt")


def fit(setting, data, folder=None, resumed=None, accumulate=3, world=1, callbacks=(), **arguments):
    """The state at the end."""
    L.seed_everything(5, verbose=False)
    task, data = setting(data, BATCH // world)
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    trainer = make(
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        callbacks=[*callbacks, *([SaveEach(folder)] if folder else [])],
        **arguments,
    )
    trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "weights": {name: value.clone() for name, value in task.state_dict().items()},
        "optimizer": {"state": optimizer["state"], "lr": [group["lr"] for group in optimizer["param_groups"]]},
        "random": torch.get_rng_state(),
    }


@pytest.fixture
def folders(tmp_path):
    for name in ("data", "run", "resumed"):
        (tmp_path / name).mkdir()
    return tmp_path / "data", tmp_path / "run", tmp_path / "resumed"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_resumed_between_steps(name, folders):
    data, run, _ = folders
    whole = fit(SETTINGS[name], data, run)
    batches = len(list(run.glob("0_*")))
    for place in ("0_0", "0_1", "0_2", "0_4", "0_6", "1_3"):
        if int(place[-1]) >= batches:  # 5 batches where each needs 8 positives
            continue
        checkpoint = torch.load(run / f"{place}.ckpt", weights_only=True)
        accumulates = int(place[-1]) % 3 != 2 and int(place[-1]) != batches - 1
        assert ("accumulated" in checkpoint["scent_lightning"]) == accumulates, place
        assert not differences(whole, fit(SETTINGS[name], data, resumed=str(run / f"{place}.ckpt"))), place


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_the_weights_before_a_step_are_state(name, folders):
    """Of an update that compares with them: whole, or rows of them, and which anchors have had the change."""
    data, run, _ = folders
    setting = moved_by(MSVR(0.4, 0.9), SETTINGS[name])
    whole = fit(setting, data, run)
    for place in ("0_0", "0_1", "0_3", "0_6", "1_4"):
        kept = torch.load(run / f"{place}.ckpt", weights_only=True)["scent_lightning"]
        assert ("previous_weights" in kept) == (place not in ("0_0", "0_1"))
        assert not differences(whole, fit(setting, data, resumed=str(run / f"{place}.ckpt"))), place
    kept = torch.load(run / "1_4.ckpt", weights_only=True)["scent_lightning"]["previous_weights"]
    assert len(kept["moved"]["nu"]) == 2 * (BATCH if name == "classification" else 1)
    # Without it there is no correction until the next step.
    checkpoint = torch.load(run / "1_2.ckpt", weights_only=True)
    del checkpoint["scent_lightning"]["previous_weights"]
    torch.save(checkpoint, run / "without.ckpt")
    assert differences(whole, fit(setting, data, resumed=str(run / "without.ckpt")))
    fit(SETTINGS[name], data, resumed=str(run / "1_4.ckpt"))


@pytest.mark.parametrize(
    "arguments", [{"precision": "bf16-mixed"}, {"precision": "64-true"}, {"gradient_clip_val": 0.1}]
)
def test_in_other_settings(arguments, folders):
    data, run, _ = folders
    setting = SETTINGS["ranking"]
    whole = fit(setting, data, run, **arguments)
    assert not differences(whole, fit(setting, data, resumed=str(run / "1_3.ckpt"), **arguments))


def test_the_checkpoint_of_a_resumed_runs_start(folders):
    """It is written before the module is where the run was."""
    data, run, resumed = folders
    setting = SETTINGS["classification"]
    whole = fit(setting, data, run)
    for place in ("0_1", "0_6", "1_2"):
        fit(setting, data, resumed, str(run / f"{place}.ckpt"))
        kept, written = (
            torch.load(path, weights_only=True) for path in (run / f"{place}.ckpt", resumed / "start.ckpt")
        )
        for key in ("scent_lightning", "state_dict", "optimizer_states", "lr_schedulers"):
            assert not differences(kept[key], written[key]), key
        assert not differences(whole, fit(setting, data, resumed=str(resumed / "start.ckpt"))), place


def test_a_step_of_another_number_of_batches(folders):
    """Its gradient is a mean over the batches: that of those done weighs what it is worth in the new step."""
    data, run, _ = folders
    setting = SETTINGS["regression"]
    fit(setting, data, run, precision="64-true")

    class Stop(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.gradients = [parameter.grad.clone() for parameter in pl_module.parameters()]
            trainer.should_stop = True

    def gradients(accumulate, resumed=None):
        stop = Stop()
        fit(setting, data, resumed=resumed, accumulate=accumulate, callbacks=[stop], precision="64-true")
        return stop.gradients

    torch.testing.assert_close(gradients(6, str(run / "0_1.ckpt")), gradients(6), rtol=1e-12, atol=1e-12)
    # A step of two batches begins here: nothing of the old one is in it.
    checkpoint = torch.load(run / "0_1.ckpt", weights_only=True)
    del checkpoint["scent_lightning"]["accumulated"]
    torch.save(checkpoint, run / "without.ckpt")
    fresh, without = (gradients(2, str(run / f"{name}.ckpt")) for name in ("0_1", "without"))
    assert not differences(fresh, without)


def test_without_optimizer_states_there_is_no_gradient(folders):
    data, run, _ = folders

    class Weights(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(run / "weights.ckpt", weights_only=True)
            trainer.should_stop = batch_idx == 1

    L.seed_everything(5, verbose=False)
    task, data_module = SETTINGS["regression"](data, BATCH)
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=4, limit_val_batches=0, callbacks=[Weights()])
    trainer.fit(task, datamodule=data_module)
    assert "accumulated" not in torch.load(run / "weights.ckpt", weights_only=True)["scent_lightning"]


def _in_two(rank, data, run, names):
    found = {}
    for name in names:
        folder, of_name = run / name, data / name
        for place in (folder, of_name):
            place.mkdir(exist_ok=True)
        precision = "64-true" if name == "contrastive" else "32-true"
        whole = fit(SETTINGS[name], of_name, folder, world=2, precision=precision)
        resumed = fit(SETTINGS[name], of_name, resumed=str(folder / "1_1.ckpt"), world=2, precision=precision)
        found[name] = (differences(whole, resumed), {k: v.double().numpy() for k, v in whole["weights"].items()})
    return found


@pytest.mark.slow
def test_under_two_processes(folders):
    """Bit for bit with two again; with one, which takes the mean of what the two had, to rounding."""
    data, run, _ = folders
    names = ("classification", "ranking", "contrastive")
    found = under_trainers(partial(_in_two, data=data, run=run, names=names), 2)
    for name in names:
        for of_rank in found:
            assert not of_rank[name][0], name
        kept = torch.load(run / name / "1_1.ckpt", weights_only=True)["scent_lightning"]["accumulated"]["gradients"]
        assert kept
        assert all(len(of_processes) == 2 for of_processes in kept.values())
        precision = "64-true" if name == "contrastive" else "32-true"
        alone = fit(SETTINGS[name], data / name, resumed=str(run / name / "1_1.ckpt"), precision=precision)["weights"]
        for key, value in found[0][name][1].items():
            if key in alone and name != "classification":  # its dropout draws by process
                torch.testing.assert_close(alone[key].double(), torch.from_numpy(value), rtol=1e-4, atol=1e-5)


def test_gradients_of_all_kinds_come_back():
    """Dense, row-sparse with repeated rows, none, frozen; and the mean where there were more processes."""
    module = torch.nn.ModuleDict(
        {
            "dense": torch.nn.Linear(3, 2),
            "sparse": torch.nn.Embedding(5, 2, sparse=True),
            "unused": torch.nn.Linear(2, 2),
            "frozen": torch.nn.Linear(2, 2).requires_grad_(False),
        }
    )
    rows = module["sparse"](torch.tensor([1, 3, 1]))
    (module["dense"](torch.ones(3)).sum() + rows.square().sum()).backward()
    gradients = gathered_gradients(module)
    assert set(gradients) == {"dense.weight", "dense.bias", "sparse.weight"}
    kept = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    restore_gradients(module, gradients, rank=0, processes=1)
    for name, parameter in module.named_parameters():
        if kept[name] is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad.to_dense(), kept[name].to_dense())
            assert parameter.grad.is_sparse == kept[name].is_sparse
    of_three = {name: [of_one[0], None, of_one[0]] for name, of_one in gradients.items()}
    restore_gradients(module, of_three, rank=0, processes=2, scale=0.5)
    for name in gradients:
        found = module.get_parameter(name).grad.to_dense()
        torch.testing.assert_close(found, kept[name].to_dense() / 3)
