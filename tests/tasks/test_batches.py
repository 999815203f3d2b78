"""Batches and checkpoints that do not fit a task are refused in one sentence, or made to fit."""

import copy
import re

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from scent_lightning.duals import BSGD, SCENT, SOX, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import CLIPTask, DRORegressionTask, ExtremeClassificationTask, PartialAUCTask
from tests.helpers import quiet_trainer
from tests.settings import ARCHITECTURE

B, D, K = 6, 4, 7
FEATURES = torch.randn(B, D, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(B)
CLASSES = torch.tensor([0, 1, 2, 3, 6, 0])
BINARY = torch.tensor([1, 0, 0, 1, 0, 1])
NUMBERS = torch.arange(6.0)


def classification(negatives="in_batch", dual=None):
    task = ExtremeClassificationTask(D, K, B, dual or SCENT(1.0), negatives=negatives)
    nn.init.normal_(task.head.weight)
    return task


def ranking(loss="partial_auc"):
    return PartialAUCTask(B, SOX(0.5), num_features=D, loss=loss)


def regression(network=None):
    return DRORegressionTask(D, BSGD(), initial="zeros", network=network)


def run(task, batch):
    """A training and a validation step under the Trainer, and what the latter logs."""
    batches = DataLoader([batch], batch_size=None)
    quiet_trainer(max_steps=1, limit_val_batches=0).fit(task, batches)
    return quiet_trainer().validate(task, batches, verbose=False)[0]


def refused(task, batch, message):
    """Both steps are, under the Trainer."""
    batches = DataLoader([batch], batch_size=None)
    with pytest.raises(InputError, match=message):
        quiet_trainer(max_steps=1, limit_val_batches=0).fit(task, batches)
    with pytest.raises(InputError, match=message):
        quiet_trainer().validate(task, batches, verbose=False)


CLASSIFICATION = {
    "in_batch": {},
    "in_batch, by scores": {"dual": SoftplusASGD(0.1, 0.1)},
    "uniform": {"negatives": "uniform"},
    "all": {"negatives": "all"},
}
REFUSED = {
    "a column of labels": (
        CLASSES[:, None],
        r"labels must have shape \(6,\), one for each row of the batch, got \(6, 1\)",
    ),
    "a row of labels": (CLASSES[None], r"labels must have shape \(6,\), .* got \(1, 6\)"),
    "too few labels": (CLASSES[:5], r"labels must have shape \(6,\), .* got \(5,\)"),
    "one label": (CLASSES[0], r"labels must have shape \(6,\), .* got \(\)"),
    "one-hot labels": (nn.functional.one_hot(CLASSES, K), r"labels must have shape \(6,\), .* got \(6, 7\)"),
    "float labels": (CLASSES.float(), r"labels must be integers, .* got torch\.float32"),
    "bool labels": (CLASSES > 1, r"labels must be integers, .* got torch\.bool"),
    "a class beyond K": (CLASSES + 1, r"labels must be from 0 to 6 \(num_classes is 7\), got 7"),
    "a class far beyond K": (CLASSES * 10**12, r"labels must be from 0 to 6 \(num_classes is 7\), got 6000000000000"),
    "a negative class": (CLASSES - 1, r"labels must be from 0 to 6 \(num_classes is 7\), got -1"),
    "an ignored class": (torch.where(CLASSES == 3, -100, CLASSES), r"labels must be from 0 to 6 .*, got -100"),
}


@pytest.mark.parametrize(("labels", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("arguments", CLASSIFICATION.values(), ids=CLASSIFICATION.keys())
def test_labels_that_are_no_classes(labels, message, arguments):
    task = classification(**arguments)
    refused(task, (FEATURES, labels, INDEX), message)
    assert not task.duals["nu"].visited.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
@pytest.mark.parametrize("arguments", CLASSIFICATION.values(), ids=CLASSIFICATION.keys())
def test_classes_of_any_integer_type(dtype, arguments):
    assert run(classification(**arguments), (FEATURES, CLASSES.to(dtype), INDEX))["val/cross_entropy"] > 0


def test_another_error_stays_what_it_is():
    with pytest.raises(IndexError, match="index 6 of dual variable 'nu' is out of range"):
        classification().training_step((FEATURES, CLASSES, INDEX + 1), 0)


@pytest.mark.parametrize("labels", [CLASSES + 1, CLASSES - 1])
def test_classes_are_looked_at_before_they_go_to_another_device(labels):
    """There a label out of range would end the process; with a data module it is this one's to look."""
    task, trainer = classification(), quiet_trainer()
    trainer.strategy.connect(task)
    task.trainer = trainer
    task.setup("fit")
    before = L.LightningModule.on_before_batch_transfer
    assert task.on_before_batch_transfer.__func__ is before
    trainer.strategy._root_device = torch.device("meta")
    task.setup("fit")
    with pytest.raises(InputError, match="labels must be from 0 to 6"):
        copy.deepcopy(task).on_before_batch_transfer((FEATURES, labels, INDEX), 0)
    for other in ((FEATURES, CLASSES, INDEX), (FEATURES, None, INDEX), FEATURES, {"labels": labels}):
        assert task.on_before_batch_transfer(other, 0) is other


@pytest.mark.parametrize("loss", ["partial_auc", "cross_entropy"])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (BINARY[:, None], r"labels must have shape \(6,\), one for each row of the batch, got \(6, 1\)"),
        (BINARY[:, None].float(), r"labels must have shape \(6,\), .* got \(6, 1\)"),
        (BINARY[:4], r"labels must have shape \(6,\), .* got \(4,\)"),
        (2 * BINARY - 1, "labels must be 0 .*or 1.*, got -1"),
        (BINARY + 1, "labels must be 0 .*or 1.*, got 2"),
    ],
)
def test_labels_that_are_not_binary(labels, message, loss):
    refused(ranking(loss), (FEATURES, labels, INDEX), message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bool, torch.int32, torch.uint8])
@pytest.mark.parametrize("loss", ["partial_auc", "cross_entropy"])
def test_binary_labels_of_any_type(dtype, loss):
    found = []
    for labels in (BINARY, BINARY.to(dtype)):
        torch.manual_seed(0)
        found.append(run(ranking(loss), (FEATURES, labels, INDEX)))
    assert found[0] == found[1]


def test_fractions_are_no_labels():
    with pytest.raises(InputError, match=r"labels must be 0 or 1, got 0\.5"):
        ranking().validation_step((FEATURES, BINARY * 0.5, INDEX), 0)


@pytest.mark.parametrize("target", [NUMBERS[:, None], NUMBERS[None], NUMBERS[:5], NUMBERS[0]])
def test_a_target_of_another_shape(target):
    message = rf"target must have shape \(6,\), .* got {re.escape(str(tuple(target.shape)))}"
    refused(regression(), (FEATURES, target, INDEX), message)
    with pytest.raises(InputError, match=message):
        regression().start_at_least_squares([(FEATURES, target, INDEX)])


@pytest.mark.parametrize("target", [NUMBERS, NUMBERS[:, None]])
def test_a_network_with_two_outputs(target):
    message = r"network must give one prediction a row: expected shape \(6,\) or \(6, 1\), got \(6, 2\)"
    refused(regression(nn.Linear(D, 2)), (FEATURES, target, INDEX), message)


IMAGES, TEXTS = torch.zeros(B, 3, 16, 16), torch.ones(B, 16, dtype=torch.int64)
TASKS = {
    "classification": (classification, (FEATURES, CLASSES, INDEX)),
    "ranking": (ranking, (FEATURES, BINARY, INDEX)),
    "regression": (regression, (FEATURES, NUMBERS, INDEX)),
    "contrastive": (lambda: CLIPTask(B, SCENT(1.0), architecture=ARCHITECTURE), (IMAGES, TEXTS, INDEX)),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_without_its_index(name):
    make, batch = TASKS[name]
    task = make()
    for wrong, got in ((batch[:2], "2 part"), ([*batch, INDEX, INDEX], "5 part"), ({"a": 1}, "dict")):
        for step in (task.training_step, task.validation_step):
            with pytest.raises(InputError, match=rf"a batch must be \(.*, index\), .* got {got}"):
                step(wrong, 0)


def test_more_texts_than_images():
    make, batch = TASKS["contrastive"]
    with pytest.raises(
        InputError, match=r"images and texts must be pairs: got embeddings of shapes \(5, 8\) and \(6, 8\)"
    ):
        make().training_step((batch[0][:5], batch[1], INDEX), 0)


# Checkpoints of tasks with objects


def network():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))


class Own(DRORegressionTask):
    """A task of one's own that must have its network."""

    def __init__(self, net):
        super().__init__(D, BSGD(), initial="zeros")
        self.save_hyperparameters(ignore=["net"])
        self.net = net


WITH_OBJECTS = {
    "regression": ("network", network, lambda made: regression(made)),
    "ranking": ("network", network, lambda made: PartialAUCTask(B, SOX(0.5), network=made)),
    "ranking with a width": ("network", network, lambda made: PartialAUCTask(B, SOX(0.5), None, made, tau=0.2)),
    "classification": (
        "backbone",
        lambda: nn.Linear(D, D),
        lambda made: ExtremeClassificationTask(D, K, B, SCENT(1.0), backbone=made),
    ),
    "one's own": ("net", network, Own),
}


@pytest.mark.parametrize(("argument", "part", "make"), WITH_OBJECTS.values(), ids=WITH_OBJECTS.keys())
def test_a_checkpoint_without_its_network(tmp_path, argument, part, make):
    task = make(part())
    trainer = quiet_trainer()
    trainer.strategy.connect(task)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(InputError, match=rf"^{argument} must be given to load_from_checkpoint again"):
        type(task).load_from_checkpoint(tmp_path / "a.ckpt")
    loaded = type(task).load_from_checkpoint(tmp_path / "a.ckpt", **{argument: part()})
    for name, value in task.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        type(task).load_from_checkpoint(tmp_path / "a.ckpt", **{argument: nn.Linear(D, 3)})
