"""Partial AUC: the step against the mathematics, the two stages, several processes, resuming."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

from scent_lightning.data import IndexedTensorDataset, StratifiedBatchSampler, batch_loader
from scent_lightning.duals import ASGD, BSGD, MSVR, SCENT, SOX, SoftplusASGD, UMax
from scent_lightning.errors import InputError
from scent_lightning.functional import SURROGATES
from scent_lightning.metrics.partial_auc import partial_auc_objective
from scent_lightning.modules import SmallImageResNet
from scent_lightning.tasks import PartialAUCTask
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers

D, POSITIVE, NEGATIVE = 6, 40, 200
N = POSITIVE + NEGATIVE
DUALS = [
    SCENT(2.0, max_log_weight=2.0),
    SOX(0.5),
    MSVR(0.5, 0.5),
    BSGD(),
    ASGD(0.5),
    UMax(0.5, 1.0),
    SoftplusASGD(0.5, 1e-3),
]


def rows():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.randperm(N, generator=generator) < POSITIVE).long()
    direction = torch.linspace(0.1, 1.0, D)
    return IndexedTensorDataset(torch.randn(N, D, generator=generator) + 1.2 * labels.unsqueeze(1) * direction, labels)


def task_of(dual=None, **arguments):
    defaults = {"num_features": D, "tau": 0.2, "lr": 0.05}
    return PartialAUCTask(N, dual or SCENT(2.0, max_log_weight=2.0), **{**defaults, **arguments})


def training_loader(dataset, half=10, **process):
    sampler = StratifiedBatchSampler(dataset.tensors[1], half, half, seed=3, **process)
    return DataLoader(dataset, sampler=sampler, batch_size=None, collate_fn=lambda batch: batch)


def surrogate_by_hand(difference, name, margin):
    if name == "logistic":
        return math.log1p(math.exp(difference))
    if name == "squared":
        return (margin + difference) ** 2
    hinge = max(0.0, margin + difference)
    return hinge**2 if name == "squared_hinge" else hinge


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("score", ["sigmoid", "raw"])
def test_first_step_is_the_objective_of_the_batch_with_its_gradient(surrogate, score):
    torch.manual_seed(0)  # of other weights, a pair may be at the kink of its surrogate
    task = task_of(BSGD(), surrogate=surrogate, score=score, margin=0.7).double()
    dataset = rows()
    features, labels = (tensor[:30] for tensor in dataset.tensors)
    batch = (features.double(), labels, torch.arange(30))
    weight = task.network.weight

    def by_hand(values):
        outputs = batch[0] @ values[0] + task.network.bias.item()
        scores = outputs if score == "raw" else 1 / (1 + torch.exp(-outputs))
        total, positives = 0.0, 0
        for i in range(30):
            if labels[i] == 1:
                positives += 1
                losses = [
                    surrogate_by_hand((scores[j] - scores[i]).item(), surrogate, 0.7)
                    for j in range(30)
                    if labels[j] == 0
                ]
                total += 0.2 * math.log(sum(math.exp(loss / 0.2) for loss in losses) / len(losses))
        return total / positives

    loss = task.training_step(batch, 0)
    start = weight.detach().clone()
    assert loss.item() == pytest.approx(by_hand(start), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, weight)
    for k in range(D):
        shift = torch.zeros_like(start)
        shift[0, k] = 1e-6
        numeric = (by_hand(start + shift) - by_hand(start - shift)) / 2e-6
        assert gradient[0, k].item() == pytest.approx(numeric, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("dual", DUALS, ids=repr)
def test_duals_are_those_of_the_positive_rows_alone(dual):
    dataset, task = rows(), task_of(dual)
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, training_loader(dataset))
    variable = task.duals["nu"]
    assert torch.equal(variable.visited, dataset.tensors[1] == 1)
    assert bool(variable.nu[variable.visited].isfinite().all())
    assert variable.nu[~variable.visited].abs().max() == 0


def exact_objective(weight, dataset):
    """The objective over all pairs with raw scores, float64, differentiable."""
    features, labels = dataset.tensors
    scores = features.double() @ weight
    difference = scores[labels == 0].unsqueeze(0) - scores[labels == 1].unsqueeze(1)
    losses = (0.5 + difference).relu().square() / 0.2
    return 0.2 * (losses.logsumexp(dim=1) - math.log(NEGATIVE)).mean()


@pytest.fixture(scope="module")
def optimum():
    """Smallest objective of a linear head, by full-batch L-BFGS."""
    weight = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight], max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        solver.zero_grad()
        value = exact_objective(weight, rows())
        value.backward()
        return value

    solver.step(closure)
    assert closure().item() < 0.2
    assert weight.grad.abs().max() < 1e-6
    return closure().item()


@pytest.mark.parametrize("dual", DUALS, ids=repr)
def test_raw_scores_come_close_to_the_optimum(dual, optimum):
    torch.manual_seed(0)
    dataset, task = rows(), task_of(dual, score="raw", lr=0.02)
    torch.nn.init.zeros_(task.network.weight)
    assert exact_objective(task.network.weight[0].double(), dataset).item() == pytest.approx(0.25)
    quiet_trainer(max_epochs=40).fit(task, training_loader(dataset))
    reached = exact_objective(task.network.weight[0].double(), dataset).item()
    # SCENT, SOX and BSGD end within 3 %; what the batches' noise leaves of the others' steps in ν is more.
    assert -1e-9 < (reached - optimum) / (0.25 - optimum) < 0.1


@pytest.mark.parametrize("dual", DUALS, ids=repr)
def test_sigmoid_scores_learn(dual):
    torch.manual_seed(0)
    dataset, task = rows(), task_of(dual, lr=0.5)
    features, labels = dataset.tensors
    torch.nn.init.zeros_(task.network.weight)
    quiet_trainer(max_epochs=20).fit(task, training_loader(dataset))
    scores = task.scores(task(features)).detach()
    assert partial_auc_objective(scores[labels == 1], scores[labels == 0], 0.2, "squared_hinge", 0.5) < 0.2


def test_evaluation_and_prediction(tmp_path):
    dataset, task = rows(), task_of(max_fpr=0.2)
    features, labels = dataset.tensors
    loader = batch_loader(dataset, 37, False)
    found = quiet_trainer().test(task, loader, verbose=False)[0]
    scores = task.scores(task(features)).detach()
    assert found["test/auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    standardized = roc_auc_score(labels, scores, max_fpr=0.2)
    assert found["test/partial_auc_standardized"] == pytest.approx(standardized, abs=1e-6)
    direct = partial_auc_objective(scores[labels == 1], scores[labels == 0], 0.2, "squared_hinge", 0.5)
    assert found["test/objective"] == pytest.approx(direct.item(), rel=1e-6)
    predictions = quiet_trainer().predict(task, loader)
    torch.testing.assert_close(torch.cat([part["score"] for part in predictions]), scores)
    assert torch.equal(torch.cat([part["index"] for part in predictions]), torch.arange(N))


# ---------------------------------------------------------------- two stages


def images():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(60) % 3 == 0).long()
    pictures = torch.randn(60, 3, 8, 8, generator=generator) + labels.reshape(-1, 1, 1, 1)
    return IndexedTensorDataset(pictures, labels)


def network():
    return SmallImageResNet(width=4)


def image_task(**arguments):
    return PartialAUCTask(60, SCENT(2.0, max_log_weight=2.0), network=network(), tau=0.2, **arguments)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Checkpoint of a first stage, and its state."""
    torch.manual_seed(0)
    task = image_task(loss="cross_entropy", lr=0.1, lr_schedule="step")
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(task, training_loader(images(), 10))
    path = str(tmp_path_factory.mktemp("first") / "first.ckpt")
    trainer.save_checkpoint(path)
    assert not task.duals["nu"].visited.any()
    return path, {name: value.clone() for name, value in task.network.state_dict().items()}


def test_second_stage_trains_the_classifier_alone(pretrained):
    path, first = pretrained
    task = image_task(backbone_checkpoint=path, freeze_backbone=True, lr=0.5)
    fresh = {name: value.clone() for name, value in task.network.state_dict().items()}
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, training_loader(images(), 10))
    assert not torch.equal(fresh["blocks.0.conv1.weight"], first["blocks.0.conv1.weight"])
    for name, value in task.network.state_dict().items():
        if name.startswith("classifier"):
            assert not torch.equal(value, first[name])
            assert not torch.equal(value, fresh[name]) or name.endswith("bias")
        else:
            assert torch.equal(value, first[name]), name
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2]


def test_second_stage_can_train_everything(pretrained):
    path, first = pretrained
    task = image_task(backbone_checkpoint=path, lr=0.5)
    quiet_trainer(max_epochs=1).fit(task, training_loader(images(), 10))
    state = task.network.state_dict()
    assert not torch.equal(state["blocks.0.conv1.weight"], first["blocks.0.conv1.weight"])
    assert not torch.equal(state["stem.1.running_mean"], first["stem.1.running_mean"])


def test_resuming_does_not_need_the_backbone_checkpoint_again(pretrained, tmp_path):
    path, _ = pretrained
    task = image_task(backbone_checkpoint=path, freeze_backbone=True)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, training_loader(images(), 10))
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    again = image_task(backbone_checkpoint=str(tmp_path / "gone.ckpt"), freeze_backbone=True)
    quiet_trainer(max_epochs=1).fit(again, training_loader(images(), 10), ckpt_path=tmp_path / "second.ckpt")
    for name, value in task.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], value)
    loaded = PartialAUCTask.load_from_checkpoint(tmp_path / "second.ckpt", network=network(), weights_only=True)
    assert torch.equal(loaded.network.classifier.weight, task.network.classifier.weight)


def test_plain_state_dict_as_backbone(pretrained, tmp_path):
    _, first = pretrained
    other = {name: value for name, value in first.items() if not name.startswith("classifier")}
    torch.save({**other, "classifier.weight": torch.zeros(1000, 32)}, tmp_path / "plain.pt")
    task = image_task()
    task.load_backbone(str(tmp_path / "plain.pt"))
    assert torch.equal(task.network.state_dict()["blocks.7.conv2.weight"], first["blocks.7.conv2.weight"])


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def test_backbone_checkpoint_that_does_not_match(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, first = pretrained
    task = image_task()
    before = {name: value.clone() for name, value in task.network.state_dict().items()}

    def refused(state, message):
        torch.save(state, tmp_path / "bad.pt")
        with pytest.raises(InputError, match=message):
            task.load_backbone(str(tmp_path / "bad.pt"))

    refused({name: value for name, value in first.items() if "stem.0" not in name}, r"it lacks stem\.0\.weight$")
    refused({**first, "extra.weight": torch.zeros(2)}, r"it has unknown extra\.weight$")
    refused({**first, "stem.0.weight": torch.zeros(2)}, r"it has another shape of stem\.0\.weight$")
    refused({"fc.weight": torch.zeros(2)}, r"lacks stem\.0\.weight, .* and \d+ more; it has unknown fc\.weight$")
    refused([1, 2], "must hold a state dict")
    refused(Malicious(), r"bad\.pt holds a posix\.system, and not only tensors")
    assert not (tmp_path / "executed").exists()
    (tmp_path / "half.ckpt").write_bytes(Path(path).read_bytes()[:5000])
    with pytest.raises(InputError, match=r"half\.ckpt is truncated, damaged"):
        task.load_backbone(str(tmp_path / "half.ckpt"))
    with pytest.raises(InputError, match="does not exist"):
        quiet_trainer(max_epochs=1).fit(image_task(backbone_checkpoint="no.ckpt"), training_loader(images(), 10))
    assert all(torch.equal(value, before[name]) for name, value in task.network.state_dict().items())


def test_torchvision_model_by_name():
    task = PartialAUCTask(5, BSGD(), torchvision_model="resnet18", freeze_backbone=True)
    assert task(torch.zeros(2, 3, 64, 64)).shape == (2,)
    assert [name for name, p in task.network.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]
    assert not task.network.bn1.training
    assert task.network.fc.training


# ---------------------------------------------------------------- runs


def test_resumed_run_is_bit_identical(tmp_path):
    def fit(epochs, folder, **arguments):
        torch.manual_seed(7)
        task = task_of(momentum=0.9)
        checkpoint = ModelCheckpoint(dirpath=tmp_path / folder, save_last=True)
        trainer = quiet_trainer(max_epochs=4, enable_checkpointing=True, callbacks=[checkpoint])
        if epochs < 4:
            trainer.callbacks.append(_StopAfter(epochs))
        trainer.fit(task, training_loader(rows()), **arguments)
        return task.state_dict()

    whole = fit(4, "whole")
    fit(2, "part")
    resumed = fit(4, "rest", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class _StopAfter(ModelCheckpoint):
    def __init__(self, epochs):
        super().__init__(save_top_k=0)
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.epochs:
            trainer.should_stop = True


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precision(precision):
    found = []
    for kind in ("32-true", precision):
        torch.manual_seed(0)
        task = task_of(score="raw")
        quiet_trainer(max_epochs=5, precision=kind).fit(task, training_loader(rows()))
        assert task.duals["nu"].nu.dtype == torch.float32
        found.append(task.network.weight.detach().double())
    assert (found[0] - found[1]).norm() < (1e-4 if precision == "64-true" else 0.05) * found[0].norm()


def _fit(rank, half, trainer_of):
    torch.manual_seed(0)
    task = task_of(score="raw", lr=0.02, momentum=0.9)
    trainer = trainer_of(max_epochs=10, use_distributed_sampler=False)
    world = trainer.world_size
    trainer.fit(task, training_loader(rows(), half, num_replicas=world, rank=rank))
    return {name: value.tolist() for name, value in task.state_dict().items()}, trainer.global_step


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one():
    torch.set_num_threads(1)
    one, steps = _fit(0, 12, quiet_trainer)
    (first, _), (second, theirs) = under_two_trainers(partial(_fit, half=6, trainer_of=ddp_trainer))
    assert steps == theirs == 100
    assert first == second
    assert one.keys() == first.keys()
    for name in one:
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(one[name]), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 1, 1], r"batch of 3 rows has no negative row \(label 0\): use StratifiedBatchSampler"),
        ([0, 0, 0], r"batch of 3 rows has no positive row \(label 1\): use StratifiedBatchSampler"),
        ([0, 2, 1], r"labels must be 0 \(negative\) or 1 \(positive\), got 2"),
    ],
)
def test_bad_batches(labels, message):
    task = task_of()
    with pytest.raises(InputError, match=message):
        task.training_step((torch.randn(3, D), torch.tensor(labels), torch.arange(3)), 0)
    assert not task.duals["nu"].visited.any()


def test_network_of_another_shape():
    task = task_of(network=nn.Linear(D, 2))
    with pytest.raises(InputError, match=r"one score a row: expected shape \(3,\) or \(3, 1\), got \(3, 2\)"):
        task(torch.randn(3, D))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "tau must be a finite number above 0, got 0.0"),
        ({"margin": -0.1}, "margin must be a finite number of at least 0, got -0.1"),
        ({"surrogate": "exponential"}, "surrogate must be one of squared_hinge, squared, hinge, logistic"),
        ({"score": "softmax"}, "score must be one of sigmoid, raw, got 'softmax'"),
        ({"loss": "auc"}, "loss must be one of partial_auc, cross_entropy, got 'auc'"),
        (
            {"num_features": None},
            "num_features must be an integer of at least 1, got None; for images give",
        ),
        ({"freeze_backbone": True}, "freeze_backbone needs a network whose last linear layer"),
        ({"network": nn.Conv2d(3, 1, 8), "backbone_checkpoint": "x"}, "backbone_checkpoint needs .* has no linear"),
        ({"torchvision_model": "resnet19"}, "torchvision_model 'resnet19' is not known; known are resnet18"),
        ({"torchvision_model": "resnet18", "network": nn.Linear(D, 1)}, "exclude each other"),
        ({"torchvision_model": "resnet18", "torchvision_weights": "NO"}, "torchvision_weights 'NO' are not known"),
        ({"torchvision_model": "squeezenet1_0"}, "does not end in a linear layer"),
        ({"torchvision_weights": "DEFAULT"}, "needs a torchvision_model"),
        ({"max_fpr": 1.5}, "max_fpr must be"),
        ({"min_tpr": 1.0}, "min_tpr must be"),
        ({"lr_schedule": "linear"}, "lr_schedule must be one of cosine, geometric, constant, step"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)
