"""A task of one's own is one file, which the command line finds by its class path; and what BaseTask does for it."""

import importlib
import re
import sys

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from scent_lightning.cli import main
from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.metrics import TopKAccuracy
from scent_lightning.tasks import BaseTask, DRORegressionTask, PartialAUCTask
from tests import settings
from tests.helpers import SoftmaxData, example_of_the_guide, quiet_trainer

OWN_TASK = example_of_the_guide("own_task")
OWN_DATA = '''
import lightning as L
import torch

from scent_lightning.data import IndexedTensorDataset, batch_loader


class Ring(L.LightningDataModule):
    """Each item is followed by the next, the last by the first."""

    def __init__(self, items: int = 7, batch_size: int = 14):
        super().__init__()
        self.batch_size = batch_size
        first = torch.arange(4 * items) % items
        self.rows = IndexedTensorDataset(first, (first + 1) % items)

    @property
    def num_items(self):
        return int(self.rows.tensors[0].max()) + 1

    @property
    def num_anchors(self):
        return len(self.rows)

    def train_dataloader(self):
        return batch_loader(self.rows, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return batch_loader(self.rows, self.batch_size, shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader


class Silent(Ring):
    """Says nothing of the number of items."""

    num_items = None
'''
# Others whose sizes have other names, no type, or a parent's signature.
OTHER_TASKS = """
from __future__ import annotations

from typing import TYPE_CHECKING

from own_task import NextItem
from scent_lightning.data import SyntheticFeatureDataModule
from scent_lightning.tasks import ExtremeClassificationTask

if TYPE_CHECKING:
    from scent_lightning.duals import DualUpdate

class Renamed(NextItem):
    def __init__(self, vocabulary: int, num_anchors: int, dual: DualUpdate):
        super().__init__(vocabulary, num_anchors, dual)

class Untyped(NextItem):
    def __init__(self, num_items, num_anchors, dual):
        super().__init__(num_items, num_anchors, dual)

class Passing(NextItem):
    def __init__(self, share: float = 0.5, **kwargs):
        super().__init__(**kwargs)
        assert share == 0.5

class Classes(ExtremeClassificationTask):
    def __init__(self, num_classes: int, num_features: int | None = None, num_anchors: int | None = None, dual=None):
        super().__init__(num_features, num_classes, num_anchors, dual)
"""
OTHER_DATA = """
from own_data import Ring

class Words(Ring):
    vocabulary = Ring.num_items
    num_items = None
"""
MODULES = {"own_task": OWN_TASK, "own_data": OWN_DATA, "other_tasks": OTHER_TASKS, "other_data": OTHER_DATA}
SHORT = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
SHORT += ["--trainer.enable_model_summary", "false", "--trainer.log_every_n_steps", "1", "--dual", "SCENT"]
OWN = ["--model", "own_task.NextItem", "--data", "own_data.Ring", *SHORT]
CHECKPOINT = "lightning_logs/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working folder with the modules above; afterwards they are forgotten."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(here):
    main(["fit", *OWN, "--trainer.max_epochs", "30", "--data.items", "9"])
    return here


def test_a_task_of_ones_own_is_one_file(run, capfd):
    main(["test", *OWN, "--data.items", "9", "--ckpt_path", CHECKPOINT])
    assert float(re.search(r"test/top1\D+([\d.]+)", capfd.readouterr().out)[1]) == 1.0
    main(["predict", *OWN, "--data.items", "9", "--ckpt_path", CHECKPOINT])
    predicted = pd.read_csv(next(run.rglob("predictions.csv")))
    assert predicted["next"].tolist() == [(row + 1) % 9 for row in predicted["index"] % 9]
    saved = torch.load(CHECKPOINT, weights_only=True)["hyper_parameters"]
    own = {name: value for name, value in saved.items() if name not in ("dual", "_class_path", "_instantiator")}
    assert own == {"num_items": 9, "num_anchors": 36, "width": 8, "lr": 1.0}


def sizes_in(folder) -> dict:
    saved = torch.load(max(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime), weights_only=True)
    return saved["hyper_parameters"]


@pytest.mark.parametrize(
    ("task", "data", "expected"),
    [
        ("other_tasks.Renamed", "other_data.Words", {"vocabulary": 7, "num_anchors": 28}),
        ("other_tasks.Untyped", "own_data.Ring", {"num_items": 7, "num_anchors": 28}),
        ("other_tasks.Passing", "own_data.Ring", {"num_items": 7, "num_anchors": 28}),
        ("other_tasks.Classes", "SyntheticFeatureDataModule", {"num_classes": 1000, "num_features": 64}),
        ("own_task.NextItem --model.num_items 7", "own_data.Ring", {"num_items": 7}),
        ("own_task.NextItem --model.num_items 11", "own_data.Silent", {"num_items": 11, "num_anchors": 28}),
        ("other_tasks.Renamed --model.vocabulary 8", "own_data.Ring", {"vocabulary": 8}),
    ],
)
def test_sizes_come_from_the_data_or_the_user(here, task, data, expected):
    name, *given = task.split()
    main(["fit", "--model", name, *given, "--data", data, *SHORT, "--trainer.max_steps", "1"])
    assert expected.items() <= sizes_in(here).items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "own_task.NextItem --data own_data.Ring --model.num_items 8",
            "--model.num_items 8 contradicts the data: Rin",
        ),
        ("own_task.NextItem --data own_data.Ring --model.num_anchors 3", "Ring has num_anchors 28"),
        ("other_tasks.Renamed --data other_data.Words --model.vocabulary 6", "Words has vocabulary 7"),
        (
            "own_task.NextItem --data own_data.Silent",
            "--model needs its argument(s) num_items, as --model.num_items V",
        ),
        ("other_tasks.Passing --data own_data.Silent", "Silent has no integer num_items to take it from"),
        ("own_task.NextItem --data own_data.Ring --model.num_items many", "--model.num_items must be int, got many"),
    ],
)
def test_sizes_that_contradict_or_are_missing(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--model", *arguments.split(), *SHORT, "--trainer.max_steps", "1"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- metrics


class Task(BaseTask):
    """A linear softmax, and what it takes of BaseTask."""

    def __init__(self, metrics=None, backbone=None, activation=torch.tanh, **training):
        super().__init__(**training)
        self.save_hyperparameters()
        self.linear = nn.Linear(4, 5)
        self.backbone, self.activation = backbone, activation
        self.add_dual("nu", 24, SCENT(0.0))
        if metrics is not None:
            self.add_metrics(metrics, prog_bar=["first"])

    def forward(self, inputs):
        return self.linear(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels, index = batch
        logits = self(inputs)
        loss = self.entropic_risk("nu", logits - logits.gather(1, labels.unsqueeze(1)), index)
        self.log_loss(loss)
        return loss

    def evaluation_step(self, stage, batch):
        inputs, labels, index = batch
        logits = self(inputs)
        self.log_metrics(stage, preds=logits, target=labels, value=logits.sum(dim=1), ranks=index)


def test_metrics_take_what_they_know_and_are_logged_for_both_stages():
    task = Task({"first": MulticlassAccuracy(5, average="micro"), "largest": MaxMetric(), "mean": MeanMetric()})
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, SoftmaxData())
    inputs, labels, _ = (torch.cat(part) for part in zip(*SoftmaxData().val_dataloader(), strict=True))
    with torch.no_grad():
        logits = task(inputs)
    expected = {
        "first": (logits.argmax(dim=1) == labels).float().mean().item(),
        "largest": logits.sum(dim=1).max().item(),
        "mean": logits.sum(dim=1).mean().item(),
    }
    for stage, found in (
        ("val", trainer.callback_metrics),
        ("test", quiet_trainer().test(task, SoftmaxData(), verbose=False)[0]),
    ):
        assert {name: float(found[f"{stage}/{name}"]) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert set(trainer.progress_bar_metrics) == {"val/first"}


def test_metrics_that_agree_on_the_first_batch_stay_apart():
    """In a mapping: torchmetrics' automatic groups would take them for one."""
    task = Task({"first": TopKAccuracy(2), "more": TopKAccuracy(15)})
    data = DataLoader([(torch.zeros(4), 0, row) for row in (0, 5, 20)], batch_size=1)
    found = quiet_trainer().validate(task, data, verbose=False)[0]
    assert found == pytest.approx({"val/first": 1 / 3, "val/more": 2 / 3})


@pytest.mark.parametrize("stage", ["val", "test"])
def test_partial_auc_keeps_one_copy_of_the_scores(stage):
    task = PartialAUCTask(6, SCENT(0.0), num_features=4)
    metrics = task.stage_metrics[stage]
    assert isinstance(metrics, MetricCollection)
    for _ in range(3):
        metrics.update(scores=torch.rand(6), labels=torch.tensor([1, 1, 0, 0, 0, 1]))
    assert len({id(metric.scores) for metric in metrics.values(copy_state=False)}) == 1
    assert len(metrics["auroc"].scores) == 3
    metrics.reset()
    assert all(metric.scores == [] for metric in metrics.values(copy_state=False))


# ---------------------------------------------------------------- hyperparameters, optimiser


def test_objects_are_no_hyperparameters():
    task = Task(backbone=nn.Linear(4, 4), optimizer=torch.optim.Adam, lr=0.5, lr_schedule="constant")
    assert dict(task.hparams) == {"metrics": None, "lr": 0.5, "lr_schedule": "constant"}
    assert "network" in DRORegressionTask(3, SCENT(0.0)).hparams
    assert "network" not in DRORegressionTask(3, SCENT(0.0), network=nn.Linear(3, 1)).hparams


def test_optimisers_and_schedules():
    for arguments, kind, rates in (
        ({"lr": 0.9, "momentum": 0.5, "nesterov": True, "lr_schedule": "step"}, torch.optim.SGD, [0.9, 0.09, 0.009]),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.2), "lr_schedule": "constant"}, torch.optim.Adam, [0.2] * 3),
    ):
        task, seen = Task(**arguments), []
        trainer = quiet_trainer(max_epochs=3, limit_val_batches=0)
        task.on_train_epoch_start = lambda trainer=trainer, seen=seen: seen.append(
            trainer.optimizers[0].param_groups[0]["lr"]
        )
        trainer.fit(task, SoftmaxData())
        assert type(trainer.optimizers[0]) is kind
        assert seen == pytest.approx(rates)
    assert trainer.optimizers[0].param_groups[0]["params"] == list(task.parameters())


class Groups(Task):
    def trained_parameters(self):
        return [{"params": [self.linear.weight], "lr": 0.3}, {"params": [self.linear.bias]}]

    def configure_optimizer(self, parameters):
        return torch.optim.RMSprop(parameters, lr=self.lr)

    def configure_schedule(self, optimizer):
        return optimizer


def test_each_part_of_the_optimiser_can_be_replaced():
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(Groups(lr=0.1), SoftmaxData())
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.3, 0.1]
    assert isinstance(trainer.optimizers[0], torch.optim.RMSprop)
    assert trainer.lr_scheduler_configs == []


def test_what_a_task_of_ones_own_lacks_is_named():
    frozen = Task()
    frozen.linear.requires_grad_(False)
    with pytest.raises(InputError, match=r"nothing is left to train: .*; give a network that is not frozen"):
        quiet_trainer(max_epochs=1).fit(frozen, SoftmaxData())
    with pytest.raises(NotImplementedError, match="BaseTask has no evaluation_step, which validation and test need"):
        BaseTask().validation_step(None, 0)
    with pytest.raises(InputError, match="lr_schedule must be one of cosine, geometric, constant, step, got 'linear'"):
        BaseTask(lr_schedule="linear")
    index = torch.arange(3)
    assert Task().predict_step((torch.zeros(3, 4), None, index), 0)["prediction"].shape == (3, 5)


@pytest.mark.parametrize(
    ("setting", "metric"),
    [
        ("regression", ("val/entropic_risk", "min")),
        ("classification", ("val/cross_entropy", "min")),
        ("ranking", ("val/partial_auc", "max")),
        ("contrastive", ("val/image_to_text_R@1", "max")),
        ("recommendation", ("val/recall@20", "max")),
    ],
)
def test_every_task_has_a_metric_that_its_runs_are_compared_by(setting, metric, tmp_path):
    task, _ = settings.SETTINGS[setting](tmp_path, 16)
    assert task.main_metric == metric
    assert setting == "contrastive" or metric[0] in task.stage_metrics["val"].keys()  # noqa: SIM118, keys have the stage


def test_a_task_of_ones_own_is_compared_by_the_first_metric_that_it_shows():
    task = BaseTask()
    assert task.main_metric is None
    task.add_metrics({"loss": MeanMetric(), "top1": TopKAccuracy(1)})
    assert task.main_metric is None
    task.add_metrics({"loss": MeanMetric(), "top1": TopKAccuracy(1)}, prog_bar=["top1", "loss"])
    assert task.main_metric == ("val/top1", "max")
    task.add_metrics({"loss": MeanMetric(), "top1": TopKAccuracy(1)}, prog_bar=["loss"])
    assert task.main_metric == ("val/loss", "min")
