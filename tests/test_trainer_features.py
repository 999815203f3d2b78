"""The Trainer's own features on the four tasks: what monitors the loss, compiles, exports, and predicts in part."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.tasks import DRORegressionTask
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers
from tests.settings import SETTINGS


class Rows(L.LightningDataModule):
    """Regression of 40 rows, in batches of 8."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(40, 3, generator=generator)
        self.dataset = IndexedTensorDataset(features, features.sum(dim=1) + torch.rand(40, generator=generator))

    def loader(self, shuffle) -> DataLoader:
        replicas = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        return batch_loader(self.dataset, 8, shuffle, *replicas)

    def train_dataloader(self):
        return self.loader(False)

    def val_dataloader(self):
        return self.loader(False)

    predict_dataloader = val_dataloader


class Losses(DRORegressionTask):
    """Keeps the loss of each step."""

    def __init__(self, lr=0.01):
        super().__init__(3, SCENT(0.0), initial="zeros", lr=lr, lr_schedule="constant")
        self.steps = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.steps.append(loss.item())
        return loss


class Seen(L.Callback):
    """Keeps ``train/loss`` as a callback that monitors sees it, at the ends of validations and epochs."""

    monitor = "train/loss"

    def __init__(self):
        self.validation, self.epoch = [], []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validation.append(trainer.callback_metrics["train/loss"].item())


class SeenAtTheEnd(Seen, ModelCheckpoint):
    """Monitoring callbacks are checkpoints and early stopping for the Trainer: only those look after the module."""

    def __init__(self):
        ModelCheckpoint.__init__(self, monitor="train/loss", save_top_k=0)
        self.validation, self.epoch = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epoch.append(trainer.callback_metrics["train/loss"].item())


def mean(values):
    return pytest.approx(sum(values) / len(values), rel=1e-6)


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_monitors_see_the_mean_of_the_epoch(tmp_path, every, accumulate):
    seen, task = SeenAtTheEnd(), Losses()
    trainer = quiet_trainer(
        default_root_dir=tmp_path,
        max_epochs=3,
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        val_check_interval=0.6,
        callbacks=[seen],
        enable_checkpointing=True,
    )
    trainer.fit(task, Rows())
    epochs = [task.steps[start : start + 5] for start in (0, 5, 10)]
    assert seen.epoch == [mean(steps) for steps in epochs]
    assert seen.validation == [mean(steps[:3]) for steps in epochs]
    assert trainer.callback_metrics["train/loss_epoch"].item() == mean(epochs[-1])


@pytest.mark.parametrize("name", SETTINGS)
def test_callbacks_of_every_task_monitor_the_loss(name, tmp_path):
    task, data = SETTINGS[name](tmp_path, 16)
    best = ModelCheckpoint(tmp_path / "best", monitor="train/loss", filename="{epoch}")
    stop = EarlyStopping("train/loss", stopping_threshold=1e9)
    trainer = quiet_trainer(
        max_epochs=3, limit_val_batches=0, callbacks=[best, stop], enable_checkpointing=True, log_every_n_steps=1000
    )
    trainer.fit(task, data)
    assert trainer.current_epoch == 1  # the loss is below the threshold
    assert (tmp_path / "best" / "epoch=0.ckpt").exists()
    assert best.best_model_score == trainer.callback_metrics["train/loss_epoch"]


@pytest.mark.parametrize("check_val_every_n_epoch", [1, 2])
def test_early_stopping_beside_validation(check_val_every_n_epoch):
    stop = EarlyStopping("train/loss", patience=0, min_delta=1e9)
    trainer = quiet_trainer(max_epochs=9, check_val_every_n_epoch=check_val_every_n_epoch, callbacks=[stop])
    trainer.fit(Losses(), Rows())
    assert trainer.current_epoch == 2 * check_val_every_n_epoch


def test_the_learning_rate_falls_where_the_loss_rests():
    class Plateau(Losses):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, eps=0.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train/loss"}}

    trainer = quiet_trainer(max_epochs=4, limit_val_batches=0)
    trainer.fit(Plateau(), Rows())
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.5e-6


@pytest.mark.parametrize("name", ["regression", "classification", "ranking"])
def test_the_mean_goes_on_within_an_epoch(name, tmp_path):
    epochs = []
    for part in ("whole", "rest"):
        seen = SeenAtTheEnd()
        save = ModelCheckpoint(tmp_path / part, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        task, data = SETTINGS[name](tmp_path, 16)
        per_epoch = len(data.train_dataloader())
        trainer = quiet_trainer(
            max_epochs=2, limit_val_batches=0, enable_checkpointing=True, callbacks=[seen, save], num_sanity_val_steps=0
        )
        path = tmp_path / "whole" / f"step={-(-(per_epoch + 1) // 3) * 3}.ckpt"
        trainer.fit(task, data, ckpt_path=path if part == "rest" else None)
        epochs.append(seen.epoch)
    assert epochs[1] == [pytest.approx(epochs[0][1], rel=1e-6)]


def test_a_second_fit_starts_anew():
    task, seen = Losses(), SeenAtTheEnd()
    with pytest.raises(RuntimeError, match="stopped"):
        quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=[Stop()]).fit(task, Rows())
    task.steps.clear()
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=[seen], enable_checkpointing=True)
    trainer.fit(task, Rows())
    assert seen.epoch == [mean(task.steps)]


class Stop(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("stopped")


def losses_of_rank(rank):
    task, seen = Losses(), SeenAtTheEnd()
    ddp_trainer(max_epochs=2, limit_val_batches=0, callbacks=[seen], enable_checkpointing=True).fit(task, Rows())
    return seen.epoch, task.steps


def test_in_two_processes_it_is_the_mean_of_both():
    (first, one), (second, other) = under_two_trainers(losses_of_rank)
    assert first == second
    half = len(one) // 2
    assert first == [mean(one[:half] + other[:half]), mean(one[half:] + other[half:])]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_clipping_at_zero_or_less_is_none(name, algorithm, tmp_path):
    weights = []
    for limit in (None, 0, -1.0):
        torch.manual_seed(0)
        task, data = SETTINGS[name](tmp_path, 16)
        trainer = quiet_trainer(max_steps=2, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
        trainer.fit(task, data)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in task.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("limit", [1, 2, 4, 0.5, 1.0, 99])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_worst_case_weights_sum_to_one_over_what_is_predicted(limit, precision):
    data, task = Rows(), Losses()
    task.tau = 0.05  # a weight is e^20 times another's
    task.network.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    trainer = quiet_trainer(limit_predict_batches=limit, precision=precision)
    batches = trainer.predict(task, data)
    assert len(batches) == min(5, limit if isinstance(limit, int) else int(5 * limit))
    weights = torch.cat([batch["weight"] for batch in batches])
    losses = torch.cat([batch["loss"] for batch in batches])
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(weights, torch.softmax(losses.double() / 0.05, dim=0), atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_it_is_the_same_run(name, tmp_path):
    """The Python that keeps the table is outside the graphs; nothing is compiled over and over."""
    runs = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        task, data = SETTINGS[name](tmp_path, 16)
        for variable in task.duals.values():
            variable.use(SCENT("auto"))
        module = torch.compile(task, backend="eager") if compile_it else task
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            quiet_trainer(max_epochs=2, limit_val_batches=0, log_every_n_steps=3).fit(module, data)
        tables = {f"{key}.nu": variable.nu for key, variable in task.duals.items()}
        runs.append({**dict(task.named_parameters()), **tables})
    for key, value in runs[0].items():
        assert torch.allclose(value, runs[1][key], atol=1e-5), key


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("init_val", "mode"), [(2, "power"), (4, "binsearch")])
def test_the_search_for_a_batch_size_ends_at_the_data(name, init_val, mode, tmp_path):
    task, data = SETTINGS[name](tmp_path, 16)
    finder = BatchSizeFinder(mode, steps_per_trial=1, init_val=init_val)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=[finder], default_root_dir=tmp_path)
    trainer.fit(task, data)
    assert 64 < data.batch_size <= 128  # there are 101 rows
    assert trainer.global_step >= 1
    assert list(tmp_path.glob(".scale_batch_size*")) == []


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:.*to_torchscript")
def test_torchscript_is_traced(name, tmp_path):
    task, data = SETTINGS[name](tmp_path, 16)
    with pytest.raises(InputError, match="pass method='trace' with example_inputs"):
        task.to_torchscript()
    inputs = next(iter(data.train_dataloader()))[: 2 if name == "contrastive" else 1]  # images and texts
    traced = task.to_torchscript(method="trace", example_inputs=inputs)
    torch.testing.assert_close(traced(*inputs), task.eval()(*inputs))
