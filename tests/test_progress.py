"""How much of a run is done, as the run is now: of other batch sizes and lengths, by the clock, told by hand."""

import math
import warnings
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from scent_lightning.duals import ASGD, BSGD, SCENT, SOX, DualVariable
from scent_lightning.progress import ProgressLR, run_progress
from scent_lightning.tasks.training import scheduled_optimizer
from scent_lightning.updates.auto import AutoStepSize
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer
from tests.settings import SETTINGS


class Scheduled(SoftmaxTask):
    """With a cosine of the learning rate; keeps what the rate and the progress were in each step."""

    def __init__(self, num_anchors, dual=None, lr=0.1):
        super().__init__(num_anchors, dual, lr)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.dual_progress(), self.optimizers().param_groups[0]["lr"]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return scheduled_optimizer(self.trainer, super().configure_optimizers(), "cosine")


def cosine(progress, lr=0.1):
    return lr * 0.5 * (1 + math.cos(math.pi * progress))


def fit(folder, resume=None, epochs=4, batch_size=8, rows=24, dual=None, **arguments):
    """Train; keep a checkpoint of step 8, in the middle of an epoch of 3 batches, and of each epoch's end."""
    L.seed_everything(1, verbose=False)
    data = SoftmaxData(rows, batch_size)
    task = Scheduled(data.num_anchors, dual if dual is not None else SCENT(0.0, schedule="cosine"))
    task.if_changed_data = "grow"
    keep = [
        ModelCheckpoint(folder, filename="mid", every_n_train_steps=8, save_top_k=1),
        ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1),
    ]
    trainer = quiet_trainer(
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=keep if resume is None else [],
        enable_checkpointing=resume is None,
        **arguments,
    )
    trainer.fit(task, data, ckpt_path=resume, weights_only=True)
    return task, trainer


def test_of_an_uninterrupted_run(tmp_path):
    task, _ = fit(tmp_path)
    assert [progress for progress, _ in task.seen] == pytest.approx([step / 12 for step in range(12)])
    assert [rate for _, rate in task.seen] == pytest.approx([cosine(step / 12) for step in range(12)])


CHANGES = {
    "as before": ({}, 3),
    "larger batches": ({"batch_size": 24}, 1),
    "smaller batches": ({"batch_size": 4}, 6),
    "a longer run": ({"epochs": 20}, 3),
    "a shorter run": ({"epochs": 3}, 3),
    "more rows": ({"rows": 48}, 6),
    "fewer batches": ({"limit_train_batches": 2}, 2),
    "accumulation": ({"accumulate_grad_batches": 3}, 3),
}


@pytest.mark.parametrize(
    ("place", "change"),
    # Where an epoch is cut short to what it has done already, Lightning begins it anew.
    [
        (place, change)
        for place in ("epoch=1", "mid")
        for change in CHANGES
        if (place, change) != ("mid", "fewer batches")
    ],
)
def test_of_a_changed_run(change, place, tmp_path):
    """After two epochs, and after eight batches of three an epoch: progress and rate are those of the run as it is."""
    fit(tmp_path)
    arguments, batches = CHANGES[change]
    task, trainer = fit(tmp_path, tmp_path / f"{place}.ckpt", **arguments)
    epochs = arguments.get("epochs", 4)
    per_batch = arguments.get("batch_size", 8)
    start = 2 * batches if place == "epoch=1" else 2 * batches + min(16 // per_batch, batches)
    expected = [number / (epochs * batches) for number in range(start, epochs * batches)]
    assert [progress for progress, _ in task.seen] == pytest.approx(expected)
    if change != "accumulation":
        assert [rate for _, rate in task.seen] == pytest.approx([cosine(progress) for progress in expected])
    else:
        assert task.seen[0][1] == pytest.approx(cosine(expected[0]), rel=1e-2, abs=3e-3)
    assert trainer.current_epoch == epochs


def test_a_finished_run_made_longer(tmp_path):
    """`auto` goes on finding; with its window frozen it would stay at its first reference."""
    task, _ = fit(tmp_path, dual=SCENT("auto"))
    before = task.duals["nu"].auto.visits
    longer, _ = fit(tmp_path, tmp_path / "epoch=3.ckpt", epochs=40, dual=SCENT("auto"))
    auto = longer.duals["nu"].auto
    assert auto.visits == 39 * 24 > before
    assert auto.begun == pytest.approx(39 / 40)
    assert longer.seen[0][0] == pytest.approx(0.1)
    assert longer.seen[0][1] == pytest.approx(cosine(0.1))


def test_a_second_fit_of_one_module():
    data = SoftmaxData()
    task = Scheduled(data.num_anchors, SCENT("auto"))
    quiet_trainer(max_epochs=10, limit_val_batches=0).fit(task, data)
    first = task.duals["nu"].auto.visits
    task.seen.clear()
    quiet_trainer(max_epochs=10, limit_val_batches=0).fit(task, data)
    assert task.duals["nu"].auto.visits > first + 24
    assert task.seen[0] == (0.0, pytest.approx(0.1))
    assert task.seen[-1][0] == pytest.approx(29 / 30)


@pytest.mark.parametrize("name", SETTINGS)
def test_all_tasks_follow_a_longer_run(name, tmp_path):
    def run(epochs, resume=None):
        L.seed_everything(3, verbose=False)
        task, data = SETTINGS[name](tmp_path, 16)
        task.lr_schedule, task.warmup_epochs = "cosine", 0.0
        trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0)
        rates = []

        class Rates(L.Callback):
            def on_train_batch_start(self, trainer, *_):
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        trainer.callbacks.append(Rates())
        trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return rates

    short = run(1)
    assert short[-1] < 0.1 * short[0]
    longer = run(4, tmp_path / "a.ckpt")
    assert longer[0] == pytest.approx(short[0] * 0.5 * (1 + math.cos(math.pi / 4)))
    assert longer == sorted(longer, reverse=True)


def test_by_the_clock(tmp_path):
    """`max_time` and epochs without end."""
    task, trainer = fit(tmp_path, epochs=-1, max_time={"seconds": 1.5}, dual=SCENT("auto"))
    progress = [value for value, _ in task.seen]
    assert progress == sorted(progress)
    assert progress[0] < 0.5 < 0.9 < progress[-1] <= 1.0
    assert task.seen[-1][1] < 0.1 * task.seen[0][1]
    assert task.duals["nu"].auto.reference is not None
    assert 0 < task.duals["nu"].auto.epoch < 0.5
    assert run_progress(trainer) == pytest.approx(1.0, abs=0.05)


def test_clock_or_epochs_whichever_is_first(tmp_path):
    task, _ = fit(tmp_path, max_time={"hours": 5})
    assert [progress for progress, _ in task.seen] == pytest.approx([step / 12 for step in range(12)], abs=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_few_anchors_and_few_epochs(epochs):
    """The rule finds a step size even where an epoch is the whole run."""
    data = SoftmaxData(rows=480)
    task = SoftmaxTask(data.num_anchors, SCENT("auto"))
    quiet_trainer(max_epochs=epochs, limit_val_batches=0).fit(task, data)
    auto = task.duals["nu"].auto
    assert auto.reference is not None
    assert auto.log_alpha(0.5) < math.inf


# ---------------------------------------------------------------- without a Trainer


def batches_of(data):
    return list(data.train_dataloader())


@pytest.mark.parametrize("update", [SCENT("auto"), SOX(0.5, schedule="cosine"), ASGD(0.1, schedule="cosine")], ids=repr)
def test_nobody_says(update):
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, update)
    with pytest.warns(UserWarning, match="depends on how much of the run is done, and nobody says so"):
        task.training_step(batches_of(data)[0], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        task.training_step(batches_of(data)[1], 0)
    table = DualVariable(4, update)
    with pytest.warns(UserWarning, match="nobody says so"):
        table.entropic_risk(torch.zeros(2, 3), torch.arange(2))


@pytest.mark.parametrize("update", [SCENT(0.0), BSGD(), SOX(0.5), SCENT(0.0, schedule="cosine", final=0.0)], ids=repr)
def test_nothing_to_say(update):
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches_of(data):
            task.training_step(batch, 0)


@pytest.mark.parametrize("way", ["module", "argument"])
def test_told(way):
    """A plain loop that tells the progress ends with the ν of the Trainer."""

    class Told(SoftmaxTask):
        told = None

        def loss(self, batch):
            features, labels, index = batch
            logits = self.linear(features)
            scores = logits - logits.gather(1, labels.unsqueeze(1))
            return self.entropic_risk("nu", scores, index, progress=self.told)

    def new():
        L.seed_everything(0, verbose=False)
        data = SoftmaxData()
        return Told(data.num_anchors, SCENT("auto")), data

    expected, data = new()
    quiet_trainer(max_epochs=10, limit_val_batches=0).fit(expected, data)
    task, data = new()
    task.duals["nu"].auto.epoch = 0.1
    optimizer = task.configure_optimizers()
    loader = data.train_dataloader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(10):
            loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                progress = (3 * epoch + number) / 30
                if way == "module":
                    task.set_dual_progress(progress)
                else:
                    task.told = progress
                optimizer.zero_grad()
                task.training_step(batch, 0).backward()
                optimizer.step()
    assert torch.equal(task.duals["nu"].nu, expected.duals["nu"].nu)
    assert torch.equal(task.linear.weight, expected.linear.weight)


@pytest.mark.parametrize("progress", [-0.1, 1.5, math.nan, "half", True])
def test_told_something_else(progress):
    task = SoftmaxTask(24)
    with pytest.raises(ValueError, match=r"progress must be a number in \[0, 1\].*got"):
        task.set_dual_progress(progress)
    with pytest.raises(ValueError, match="progress must be"):
        task.entropic_risk("nu", torch.zeros(2, 3), torch.arange(2), progress=progress)
    assert not task.duals["nu"].visited.any()


# ---------------------------------------------------------------- other numbers of anchors


@pytest.mark.parametrize("rows", [(24, 30), (24, 24), (1000, 1100), (1100, 1200)])
@pytest.mark.parametrize("way", ["grow", "reset"])
def test_changed_data_with_the_default_step_size(rows, way, tmp_path):
    before, after = rows
    task, trainer = fit(tmp_path, epochs=3, rows=before, batch_size=before // 3, dual=SCENT())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    data = SoftmaxData(after, after // 3)
    resumed = SoftmaxTask(data.num_anchors, SCENT())
    resumed.if_changed_data = way
    seen = {}

    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            auto = pl_module.duals["nu"].auto
            seen.update(reference=auto.reference, visits=auto.visits, visited=int(pl_module.duals["nu"].visited.sum()))

    quiet = quiet_trainer(max_epochs=9, limit_val_batches=0, callbacks=[Before()])
    quiet.fit(resumed, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    old = task.duals["nu"].auto
    kept = way == "grow" or before == after
    assert seen["visited"] == (before if kept else 0)
    assert seen["reference"] == (old.reference if kept else None)
    assert seen["visits"] == (old.visits if kept else 0)
    auto = resumed.duals["nu"].auto
    assert resumed.duals["nu"].visited.all()
    assert auto.reference is not None
    assert auto.window.counts is None or len(auto.window.counts) == after


def test_grown_in_the_middle_of_a_window():
    table = DualVariable(4, SCENT())
    run = partial(table.entropic_risk, torch.zeros(2, 3))
    run(torch.tensor([0, 1]), progress=0.0)
    table.grow(6)
    run(torch.tensor([4, 5]), progress=0.1)
    run(torch.tensor([4, 5]), progress=0.9)
    assert table.auto.visits == 4
    assert table.auto.reference == pytest.approx(0.0)
    table.grow(2000)
    run(torch.tensor([1999, 0]), progress=0.95)
    run(torch.tensor([1999, 0]), progress=1.0)
    assert table.auto.window.counts is None
    one = DualVariable(1, SCENT())
    one.entropic_risk(torch.zeros(1, 3), torch.tensor([0]), progress=0.0)
    one.grow(3)
    for progress in (0.5, 1.0):
        one.entropic_risk(torch.zeros(2, 3), torch.tensor([1, 2]), progress=progress)
    assert one.auto.reference == pytest.approx(0.0)


def test_moved():
    auto = AutoStepSize(5)
    auto.begun = 0.9
    auto.move(-0.8)
    assert auto.begun == pytest.approx(0.1)


def test_state_of_another_schedule():
    """Checkpoints of earlier versions hold torch's own; its length is not taken."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    old = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([parameter], lr=0.5), T_max=7)
    trainer = quiet_trainer(max_epochs=2)
    new = ProgressLR(torch.optim.SGD([parameter], lr=0.1), lambda progress, step: 1 - progress, trainer)
    new.load_state_dict(old.state_dict())
    assert new.base_lrs == [0.5]
    assert not hasattr(new, "T_max")
    new.refresh()
    assert new.optimizer.param_groups[0]["lr"] == 0.5
