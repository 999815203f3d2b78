"""Extreme classification against the exact softmax."""

import math
import os
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.duals import BSGD, SCENT, SOX, DenseScores
from scent_lightning.errors import InputError
from scent_lightning.tasks import ExtremeClassificationTask
from tests.forked import finished, start_code
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers

K, D, N = 30, 8, 600


@pytest.fixture(scope="module")
def dataset():
    return rows_and_labels()


def rows_and_labels():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, K, (N,), generator=generator)
    centres = torch.randn(K, D, generator=generator)
    return IndexedTensorDataset(centres[labels] + 0.6 * torch.randn(N, D, generator=generator), labels)


def task_of(dual=None, **arguments):
    return ExtremeClassificationTask(D, K, N, dual or SCENT(2.0, max_log_weight=2.0), **{"lr": 0.5, **arguments})


def exact(task, dataset):
    features, labels = dataset.tensors
    with torch.no_grad():
        logits = task.head.logits(task(features))
    return F.cross_entropy(logits, labels, reduction="none"), logits, labels


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 8.0}])
@pytest.mark.parametrize("chunk", [7, 30, 1000])
def test_evaluation_equals_torchs_cross_entropy(dataset, options, chunk):
    task = task_of(class_chunk=chunk, **options)
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(1))
    cross_entropy, logits, labels = exact(task, dataset)
    found = quiet_trainer().test(task, batch_loader(dataset, 100, False), verbose=False)[0]
    assert found["test/cross_entropy"] == pytest.approx(cross_entropy.mean().item(), rel=1e-5)
    for k in (1, 5):
        hits = (logits.topk(k, dim=1).indices == labels.unsqueeze(1)).any(dim=1).double().mean().item()
        assert found[f"test/top{k}"] == pytest.approx(hits)


@pytest.mark.slow
def test_evaluation_memory_at_360_thousand_classes(tmp_path):
    """A batch of 512 rows against 360,232 classes: at most 1.5 GB beyond the weights."""
    code = """
import resource, torch
from scent_lightning.duals import BSGD
from scent_lightning.tasks import ExtremeClassificationTask
task = ExtremeClassificationTask(64, 360_232, 10, BSGD())
torch.nn.init.normal_(task.head.weight)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.no_grad():
    loss, rank = task.exact_cross_entropy(torch.randn(512, 64), torch.randint(360_232, (512,)))
assert torch.isfinite(loss).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9)
"""
    done = finished(start_code(tmp_path, code))
    assert float(done.stdout) < 1.5


def test_equal_logits_do_not_count_as_right(dataset):
    found = quiet_trainer().test(task_of(), batch_loader(dataset, 100, False), verbose=False)[0]
    share = (dataset.tensors[1] == 0).double().mean().item()  # all logits are 0: class 0 comes first
    assert found["test/top1"] == pytest.approx(share)
    assert found["test/cross_entropy"] == pytest.approx(math.log(K), rel=1e-6)


@pytest.mark.parametrize("chunk", [4, 11, 100])
def test_predictions(dataset, chunk):
    task = task_of(class_chunk=chunk, top_k=6)
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(1))
    _, logits, _ = exact(task, dataset)
    values, classes = torch.softmax(logits, dim=1).topk(6, dim=1)
    batches = quiet_trainer().predict(task, batch_loader(dataset, 250, False))
    assert torch.equal(torch.cat([batch["class"] for batch in batches]), classes)
    torch.testing.assert_close(torch.cat([batch["probability"] for batch in batches]), values)
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(N))


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize("dual", [SCENT(2.0, max_log_weight=2.0), SOX(0.5), BSGD()], ids=repr)
def test_learns(dataset, negatives, dual):
    L.seed_everything(0, verbose=False)
    task = task_of(dual, negatives=negatives, num_negatives=16)
    quiet_trainer(max_epochs=8).fit(task, batch_loader(dataset, 30, True))
    assert exact(task, dataset)[0].mean().item() < 0.4 * math.log(K)
    assert task.duals["nu"].visited.all()


def test_outside_training_nu_is_read_only(dataset):
    """By samples of the head as by scores."""
    task = task_of()
    features, labels = (tensor[:16] for tensor in dataset.tensors)
    index = torch.arange(16)
    task.training_step((features, labels, index), 0)
    trained = task.duals["nu"].nu.clone()
    task.eval()
    found = task.entropic_risk("nu", task.head.samples(features, labels), index)
    dense = task.head.with_target(DenseScores(*task.head(features, labels)), labels)
    assert found.item() == pytest.approx(task.entropic_risk("nu", dense, index).item(), rel=1e-5)
    assert task.training_step((features, labels, index), 0).isfinite()
    assert torch.equal(task.duals["nu"].nu, trained)


def test_a_step_changes_only_rows_of_the_batch(dataset):
    task = task_of()
    torch.nn.init.normal_(task.head.weight)
    before = task.head.weight.detach().clone()
    quiet_trainer(max_steps=1).fit(task, batch_loader(dataset, 10, False))
    changed = (task.head.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == dataset.tensors[1][:10].unique().tolist()


@pytest.mark.parametrize("dual", [BSGD(), SOX(0.1), SCENT(-5.0)], ids=repr)
def test_cross_entropy_of_training_is_exact(dataset, dual):
    """With all classes as negatives it is the softmax cross-entropy of the batch, however far ν is behind."""
    task = task_of(dual, negatives="all", lr=0.0001)
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(max_epochs=2, limit_train_batches=1, log_every_n_steps=1)
    trainer.fit(task, batch_loader(dataset, 50, False))
    with torch.no_grad():
        task.head.weight.mul_(1.5)
    expected = exact(task, dataset)[0][:50].mean().item()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(task, batch_loader(dataset, 50, False))
    assert trainer.callback_metrics["train/cross_entropy"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_uniform_negatives_reach_the_optimum_of_the_exact_softmax(dataset):
    """F of the trained weights against the optimum of log(1/(K−1) Σ exp) by full-batch L-BFGS with a ridge."""
    features, labels = (tensor[:200] for tensor in dataset.tensors)
    features = features.double()
    ridge = 0.02

    def risk(weight, inputs):
        logits = inputs @ weight.T
        scores = logits - logits.gather(1, labels.unsqueeze(1))
        others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, labels.unsqueeze(1), False)
        return (scores.masked_fill(~others, -math.inf).logsumexp(1) - math.log(K - 1)).mean()

    weight = torch.zeros(K, D, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        value = risk(weight, features) + ridge / 2 * weight.square().sum()
        value.backward()
        return value

    solver.step(closure)
    best = closure().item()
    L.seed_everything(0, verbose=False)
    small = IndexedTensorDataset(features.float(), labels)
    gaps = {}
    for dual in (SCENT(4.0, schedule="cosine"), BSGD()):
        # Dense gradients here, so that the ridge acts on every row at every step.
        task = ExtremeClassificationTask(
            D,
            K,
            200,
            dual,
            negatives="uniform",
            num_negatives=4,
            optimizer=lambda p: Ridge(p, 0.3, ridge),
            weight_step="gradient",
            include_target=False,
        )
        quiet_trainer(max_epochs=300).fit(task, batch_loader(small, 50, True))
        trained = task.head.weight.detach().double()
        gaps[type(dual)] = (risk(trained, features) + ridge / 2 * trained.square().sum()).item() - best
    # Four negatives at a time: the batch's own log-mean-exp is far off, ν averages the bias away.
    assert 0 <= gaps[SCENT] < 0.15
    assert gaps[SCENT] < 0.1 * gaps[BSGD]


class Ridge(torch.optim.SGD):
    """SGD with a ridge on all rows, whether touched or not."""

    def __init__(self, params, lr, ridge):
        super().__init__(params, lr=lr)
        self.ridge = ridge

    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    parameter.sub_(group["lr"] * (gradient + self.ridge * parameter))
        return loss


def test_batch_of_one_class_is_skipped_counted_and_warned_about_once():
    task = task_of()
    with pytest.warns(UserWarning, match="holds one class only"):
        loss = task.training_step((torch.randn(3, D), torch.tensor([4, 4, 4]), torch.arange(3)), 0)
    task.training_step((torch.randn(2, D), torch.tensor([1, 1]), torch.arange(2)), 0)
    assert loss.item() == 0
    assert task.skipped_batches == 2
    assert not task.duals["nu"].visited.any()


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.01), ("value", 1e-4)])
def test_gradient_clipping_accumulation_and_sparse_adam(dataset, algorithm, limit):
    task = task_of(lr=1.0, lr_schedule="constant")
    quiet_trainer(max_steps=1, gradient_clip_val=limit, gradient_clip_algorithm=algorithm).fit(
        task, batch_loader(dataset, 20, False)
    )
    moved = task.head.weight.detach()
    size = moved.norm() if algorithm == "norm" else moved.abs().max()
    assert size.item() == pytest.approx(limit, rel=1e-3)
    quiet_trainer(max_epochs=1, accumulate_grad_batches=4).fit(task_of(), batch_loader(dataset, 20, True))
    adam = task_of(optimizer=lambda p: torch.optim.SparseAdam(p, lr=0.1))
    quiet_trainer(max_epochs=2).fit(adam, batch_loader(dataset, 30, True))
    assert exact(adam, dataset)[0].mean() < math.log(K)


def test_backbone_and_checkpoint(dataset, tmp_path):
    task = task_of(backbone=torch.nn.Linear(D, D), lr=0.1, momentum=0.9, dual_placement="cpu")
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, batch_loader(dataset, 30, True))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    loaded = ExtremeClassificationTask.load_from_checkpoint(tmp_path / "a.ckpt", backbone=torch.nn.Linear(D, D))
    assert torch.equal(loaded.head.weight, task.head.weight)
    assert torch.equal(loaded.duals["nu"].nu, task.duals["nu"].nu)


def test_resumed_run_is_bit_identical(dataset, tmp_path):
    def fit(folder, stop_after=None, resume=None):
        L.seed_everything(1, verbose=False)
        task = task_of(SCENT(2.0, schedule="cosine", max_log_weight=2.0), momentum=0.9, lr=0.1, negatives="in_batch")

        class Stop(L.Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                trainer.should_stop = trainer.current_epoch + 1 == stop_after

        keep = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
        trainer = quiet_trainer(max_epochs=4, enable_checkpointing=True, callbacks=[keep, Stop()])
        trainer.fit(task, batch_loader(dataset, 30, True), ckpt_path=resume)
        return task, trainer

    whole, first = fit(tmp_path / "whole")
    fit(tmp_path / "part", stop_after=2)
    resumed, second = fit(tmp_path / "part", resume=tmp_path / "part" / "last.ckpt")
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    for key, value in first.optimizers[0].state_dict()["state"][0].items():
        other = second.optimizers[0].state_dict()["state"][0][key]
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), key


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precision(dataset, precision):
    task = task_of()
    quiet_trainer(max_epochs=2, precision=precision).fit(task, batch_loader(dataset, 30, True))
    assert task.duals["nu"].nu.dtype == torch.float32
    assert task.duals["nu"].visited.all()


class Halves(L.LightningDataModule):
    def train_dataloader(self):
        return batch_loader(rows_and_labels(), 15, True, self.trainer.world_size, self.trainer.global_rank)


def _fit(rank, backbone):
    L.seed_everything(rank, verbose=False)  # different starts: the first process's counts
    options = {"backbone": torch.nn.Linear(D, D)} if backbone else {}
    task = task_of(negatives="uniform", num_negatives=16, normalize=True, scale=8.0, momentum=0.5, lr=0.2, **options)
    trainer = ddp_trainer(max_epochs=6)
    trainer.fit(task, Halves())
    folder = Path(tempfile.gettempdir()) / f"scent_xc_{os.getppid()}.ckpt"
    trainer.save_checkpoint(folder)
    trainer.strategy.barrier()
    names = set(torch.load(folder, weights_only=True)["state_dict"])
    trainer.strategy.barrier()
    folder.unlink(missing_ok=True)
    state = {key: value.tolist() for key, value in task.state_dict().items() if key != "ddp_placeholder.0"}
    return state, names, exact(task, rows_and_labels())[0].mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [False, True])
def test_two_processes_hold_the_same_weights_and_table(backbone):
    (first, names, loss), (second, _, _) = under_two_trainers(partial(_fit, backbone=backbone))
    assert first == second
    assert all(first["duals.nu.visited"])
    assert loss < 0.5 * math.log(K)
    assert names == set(task_of(**({"backbone": torch.nn.Linear(D, D)} if backbone else {})).state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"class_chunk": 0}, "class_chunk must be an integer of at least 1"),
        ({"lr_schedule": "linear"}, "lr_schedule must be one of"),
        ({"negatives": "few"}, "negatives must be one of"),
        ({"dual_placement": "disk"}, "placement of dual variable 'nu'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)
