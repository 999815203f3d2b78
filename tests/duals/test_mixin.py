"""Dual variables in a LightningModule under the Trainer."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from scent_lightning.duals import ASGD, SCENT, SOX, DualUpdate, DualVariableMixin
from scent_lightning.errors import InputError
from scent_lightning.functional import log_mean_exp
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer


class Recording(DualUpdate):
    """Remembers the progress it was told."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def step_from_log_mean(self, nu, log_mean, progress=0.0):
        self.seen.append(progress)
        return log_mean


def states_equal(first, second) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(states_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(states_equal, first, second))
    return first == second


def exact_loss(task, data) -> float:
    """Mean log-mean-exp over all rows, without any dual variable."""
    features, labels = data.dataset.tensors
    with torch.no_grad():
        logits = task.linear(features)
    return log_mean_exp(logits - logits.gather(1, labels.unsqueeze(1))).mean().item()


def test_training_visits_every_anchor_and_learns():
    L.seed_everything(0, verbose=False)
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, lr=0.03)
    before = exact_loss(task, data)
    quiet_trainer(max_epochs=60).fit(task, data)
    nu = task.duals["nu"]
    assert nu.visited.all()
    after = exact_loss(task, data)
    assert after < before - 1
    # At a standstill the dual variables are the log-mean-exps.
    assert nu.nu.mean().item() == pytest.approx(after, abs=0.1)


def test_outside_training_nu_is_read_only():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, data)
    before = copy.deepcopy(task.duals["nu"].state_dict())
    for method in (trainer.validate, trainer.test, trainer.predict):
        method(task, data)
        assert states_equal(before, task.duals["nu"].state_dict())
    task.train()  # even a module left in training mode is not written by an evaluation loop
    trainer.predict(task, data)
    assert states_equal(before, task.duals["nu"].state_dict())


def test_sanity_check_does_not_write():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors)

    class Look(L.Callback):
        seen = None

        def on_train_start(self, trainer, pl_module):
            self.seen = int(pl_module.duals["nu"].visited.sum())

    look = Look()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=2, callbacks=[look]).fit(task, data)
    assert look.seen == 0


def test_plain_loop_without_a_trainer():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors)
    optimizer = task.configure_optimizers()
    for batch in data.train_dataloader():
        optimizer.zero_grad()
        task.training_step(batch, 0).backward()
        optimizer.step()
    assert task.duals["nu"].visited.all()
    task.eval()
    before = copy.deepcopy(task.duals["nu"].state_dict())
    task.training_step(next(iter(data.train_dataloader())), 0)
    assert states_equal(before, task.duals["nu"].state_dict())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epochs": 2}, [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]),
        ({"max_steps": 4}, [0, 1 / 4, 2 / 4, 3 / 4]),
        ({"max_steps": 4, "max_epochs": 1}, [0, 1 / 3, 2 / 3]),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]),
        ({"max_epochs": 2, "limit_train_batches": 1}, [0, 1 / 2]),
    ],
)
def test_progress(arguments, expected):
    data, update = SoftmaxData(), Recording()
    quiet_trainer(**arguments, limit_val_batches=0).fit(SoftmaxTask(data.num_anchors, update), data)
    assert update.seen == pytest.approx(expected)


def test_endless_run_refuses_a_schedule_and_accepts_a_constant():
    data = SoftmaxData()

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    def fit(update):
        quiet_trainer(max_epochs=-1, callbacks=[Stop()], limit_val_batches=0).fit(
            SoftmaxTask(data.num_anchors, update), data
        )

    fit(SCENT(0.0))
    with pytest.raises(InputError, match=r"schedule of dual variable 'nu'.*max_steps"):
        fit(SCENT(0.0, schedule="cosine"))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true", "32-true"])
def test_precision(precision, tmp_path):
    L.seed_everything(0, verbose=False)
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, lr=0.02)
    trainer = quiet_trainer(precision=precision, max_epochs=5)
    trainer.fit(task, data)
    nu = task.duals["nu"]
    assert nu.nu.dtype == torch.float32
    assert nu.visited.all()
    assert not torch.equal(nu.nu, nu.nu.bfloat16().float()), "the table holds bfloat16 numbers only"
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved["duals.nu.nu"].dtype == torch.float32
    assert torch.equal(saved["duals.nu.nu"], nu.nu)
    assert trainer.callback_metrics["val_loss"] < 0  # where it starts


def test_mixed_precision_tracks_float32():
    results = []
    for precision in ("32-true", "bf16-mixed"):
        L.seed_everything(0, verbose=False)
        data = SoftmaxData()
        task = SoftmaxTask(data.num_anchors)
        quiet_trainer(precision=precision, max_epochs=10).fit(task, data)
        results.append(task.duals["nu"].nu)
    torch.testing.assert_close(*results, atol=0.1, rtol=0.1)


def fit_until(folder, stop_after=None, resume=None, epochs=6):
    """Train with a cosine schedule, optionally stopping after an epoch, optionally resuming."""
    L.seed_everything(7, verbose=False)
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, SCENT(1.0, schedule="cosine", max_log_weight=3.0))

    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if stop_after is not None and trainer.current_epoch + 1 == stop_after:
                trainer.should_stop = True

    checkpoint = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
    trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[checkpoint, Stop()])
    trainer.fit(task, data, ckpt_path=resume)
    return task, trainer, folder / "last.ckpt"


def test_resumed_run_is_bit_identical(tmp_path):
    whole, whole_trainer, _ = fit_until(tmp_path / "whole")
    _, _, path = fit_until(tmp_path / "part", stop_after=3)
    torch.randn(17)
    resumed, resumed_trainer, _ = fit_until(tmp_path / "part", resume=path)
    assert resumed_trainer.current_epoch == 6
    assert states_equal(dict(whole.state_dict()), dict(resumed.state_dict()))
    assert states_equal(whole_trainer.optimizers[0].state_dict(), resumed_trainer.optimizers[0].state_dict())


def test_checkpoint_holds_no_objects_of_ours_and_loads(tmp_path):
    task, _, path = fit_until(tmp_path, stop_after=1)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["dual"] == {
        "class_path": "scent_lightning.updates.SCENT",
        "init_args": {
            "log_alpha": 1.0,
            "schedule": "cosine",
            "final": None,
            "max_log_weight": 3.0,
            "alpha_multiplier": 1.0,
            "window": None,
        },
    }
    loaded = SoftmaxTask.load_from_checkpoint(path)
    assert states_equal(dict(task.state_dict()), dict(loaded.state_dict()))
    assert repr(loaded.duals["nu"].update) == repr(task.duals["nu"].update)


def test_checkpoint_of_another_size(tmp_path):
    _, _, path = fit_until(tmp_path, stop_after=1)
    data = SoftmaxData(rows=10, batch_size=5)
    for method in ("validate", "test", "predict"):
        getattr(quiet_trainer(), method)(SoftmaxTask(10), data, ckpt_path=path)
    with pytest.raises(InputError, match="holds 24 anchors and this model has 10"):
        quiet_trainer(max_epochs=6).fit(SoftmaxTask(10), data, ckpt_path=path)


def test_two_duals_and_names():
    class Two(DualVariableMixin, L.LightningModule):
        def __init__(self):
            super().__init__()
            self.add_dual("image", 3, SOX(0.5))
            self.add_dual("text", 4, ASGD(0.1), placement="cpu")

    task = Two()
    assert list(task.duals) == ["image", "text"]
    assert set(task.state_dict()) == {f"duals.{n}.{k}" for n in ("image", "text") for k in ("nu", "visited")}
    task.entropic_risk("text", torch.zeros(1, 2), torch.tensor([3]))
    with pytest.raises(KeyError, match="no dual variable 'audio'; this module has: image, text"):
        task.entropic_risk("audio", torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(InputError, match="'image' of a dual variable is taken"):
        task.add_dual("image", 3, SOX(0.5))
    with pytest.raises(InputError, match="'keys' of a dual variable is taken"):
        task.add_dual("keys", 3, SOX(0.5))
    with pytest.raises(InputError, match=r"must be an identifier, got 'a\.b'"):
        task.add_dual("a.b", 3, SOX(0.5))


def test_gradient_accumulation_updates_at_every_batch():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors)
    quiet_trainer(max_epochs=1, accumulate_grad_batches=3).fit(task, data)
    assert task.duals["nu"].visited.all()


def test_deep_copy():
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors)
    quiet_trainer(max_epochs=1).fit(task, data)
    assert states_equal(dict(copy.deepcopy(task).state_dict()), dict(task.state_dict()))
