"""Extreme classification with corrected negatives: where the frequencies come from, and what is logged of the loss."""

import math
import statistics
import warnings

import lightning as L
import numpy as np
import pytest
import torch

from scent_lightning.data import FeatureDataModule, IndexedTensorDataset, SyntheticFeatureDataModule, batch_loader
from scent_lightning.duals import BSGD, MSVR, SCENT, DenseScores, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.modules.class_chunks import cross_entropy_and_rank
from scent_lightning.tasks import ExtremeClassificationTask
from tests.helpers import quiet_trainer

K, D, N = 20, 6, 400


def rows_of(rows=N):
    """Rows of Zipf's law that no linear classifier tells apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(1 / torch.arange(1.0, K + 1), rows, replacement=True, generator=generator)
    labels[:K] = torch.arange(K)
    centres = torch.randn(K, D, generator=generator)
    return centres[labels] + torch.randn(rows, D, generator=generator), labels


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train").mkdir()
    features, labels = rows_of()
    np.save(tmp_path / "train" / "features.npy", features.numpy())
    np.save(tmp_path / "train" / "labels.npy", labels.numpy())
    return tmp_path


def task_of(dual=None, **arguments):
    return ExtremeClassificationTask(D, K, N, dual or SCENT(), **arguments)


def test_counts_come_from_the_data_module_and_are_in_the_checkpoint(folder):
    expected = torch.bincount(rows_of()[1], minlength=K)
    task, trainer = task_of(), quiet_trainer(max_epochs=1)
    trainer.fit(task, datamodule=FeatureDataModule(str(folder), batch_size=32))
    assert task.head.frequencies.are_given
    assert torch.equal(task.head.frequencies.counts, expected)
    trainer.save_checkpoint(folder / "a.ckpt")
    loaded = ExtremeClassificationTask.load_from_checkpoint(folder / "a.ckpt")
    assert torch.equal(loaded.head.frequencies.counts, expected)
    # Without a correction nobody asks for them, and such a checkpoint is loaded all the same.
    plain = ExtremeClassificationTask.load_from_checkpoint(folder / "a.ckpt", correction="none")
    quiet_trainer(max_steps=2).fit(plain, datamodule=FeatureDataModule(str(folder), batch_size=32))


def test_run_that_began_without_a_correction(tmp_path):
    """It goes on, with a warning; and in silence where it stays without."""
    loader = batch_loader(IndexedTensorDataset(*rows_of()), 40, True)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task_of(correction="none"), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="whose in-batch negatives were not corrected, and this one corrects them"):
        quiet_trainer(max_epochs=2).fit(task_of(), loader, ckpt_path=tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint is of a run")
        quiet_trainer(max_epochs=2).fit(task_of(correction="none"), loader, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("zipf_exponent", [0.0, 1.0])
def test_counts_of_synthetic_rows(zipf_exponent):
    data = SyntheticFeatureDataModule(K, D, rows=301, val_rows=10, zipf_exponent=zipf_exponent)
    labels = torch.cat([labels for _, labels, _ in data.train_dataloader()])
    assert data.class_counts.tolist() == torch.bincount(labels, minlength=K).tolist()


def test_a_loader_of_ones_own_has_them_counted():
    features, labels = rows_of()
    task = task_of(MSVR(0.5, 0.5))  # scores each batch twice
    quiet_trainer(max_epochs=3).fit(task, batch_loader(IndexedTensorDataset(features, labels), 30, True))
    assert not task.head.frequencies.are_given
    assert torch.equal(task.head.frequencies.counts, 3 * torch.bincount(labels, minlength=K))
    task.eval()
    counted = task.head.frequencies.counts.clone()
    task.training_step((features[:8], labels[:8], torch.arange(8)), 0)
    assert torch.equal(task.head.frequencies.counts, counted)


class Told(FeatureDataModule):
    """Says something else of its classes."""

    def __init__(self, path, told):
        super().__init__(path, batch_size=32)
        self.told = told

    @property
    def class_counts(self):
        return self.told


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([1] * (K - 1), r"class_counts must have one number for each of the 20 classes, got shape \(19,\)"),
        ([1.5] * K, "class_counts must be integers, the training rows of each class, got torch.float32"),
        ([3] * (K - 1) + [-1], "class_counts must be at least 0, got -1 for class 19"),
        ([5] + [0] * (K - 1), "class_counts of the data say that class 1 has no training row, and a batch has one"),
    ],
)
def test_counts_that_do_not_fit(folder, told, message):
    data = Told(str(folder), told)
    data._name_dead_classes = lambda files: None
    with pytest.raises(InputError, match=f"^{message}$"):
        quiet_trainer(max_epochs=1).fit(task_of(), datamodule=data)


class SeesScores(ExtremeClassificationTask):
    def entropic_risk(self, name, scores, index, mask=None, **more):
        self.seen = (scores, mask)
        return super().entropic_risk(name, scores, index, mask, **more)


@pytest.mark.parametrize("options", [{}, {"include_target": True}, {"normalize": True, "margin": 0.3, "scale": 5.0}])
@pytest.mark.parametrize("dual", [BSGD(), SoftplusASGD(0.1, rho=1e-3), MSVR(0.5, 0.5)], ids=repr)
def test_a_subclass_and_every_update_get_the_same_scores(dual, options):
    features, labels = rows_of(40)
    batch = (features[:16], labels[:16], torch.arange(16))
    found = []
    for kind in (ExtremeClassificationTask, SeesScores):
        L.seed_everything(1, verbose=False)
        task = kind(D, K, N, dual, **options)
        torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(0))
        task.head.frequencies.give(torch.bincount(rows_of()[1], minlength=K))
        first = task.training_step(batch, 0)
        first.backward()
        found.append((first.detach(), task.duals["nu"].nu, task.head.weight.grad.to_dense()))
        # The previous scores are those of now as long as no step was taken.
        assert task.training_step(batch, 0).isfinite()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    scores, mask = task.seen
    expected = task.head.with_target(DenseScores(*task.head(*batch[:2])), batch[1])
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(mask, expected.mask)


def logged(task, epochs, rows):
    """What is logged in the last epoch, and the exact cross-entropy of the training rows at its end."""
    found = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.current_epoch + 1 == epochs and "train/cross_entropy" in trainer.callback_metrics:
                found.append(trainer.callback_metrics["train/cross_entropy"].item())

    L.seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_epochs=epochs, log_every_n_steps=1, callbacks=[Look()])
    trainer.fit(task, batch_loader(IndexedTensorDataset(*rows), 40, True))
    with torch.no_grad():
        return found, task.exact_cross_entropy(*rows)[0].mean().item()


OPTIONS = [
    {"correction": "none"},
    {"include_target": True},
    {"independent_sample": True},
    {"negatives": "uniform", "num_negatives": 4},
    {"negatives": "all"},
    {"negatives": "all", "include_target": True},
    {"negatives": "all", "normalize": True, "margin": 0.2, "scale": 4.0},
    {"normalize": True, "margin": 0.2, "margin_type": "angular", "scale": 4.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy_of_a_batch_is_exact_whatever_is_scored(options):
    """Each row is in one batch of the epoch; the weights do hardly move."""
    task = task_of(MSVR(0.5, 0.5), lr=1e-6, **options)
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(0))
    found, exact = logged(task, 1, rows_of())
    assert len(found) == 10
    assert statistics.mean(found) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("products", "rows"), [(10 * K * D, 10), (K * D, 1), (K * D - 1, 0), (10**9, 40)])
def test_rows_that_are_logged_are_as_many_as_cost_little(products, rows, monkeypatch):
    monkeypatch.setattr("scent_lightning.tasks.extreme_classification.LOGGED_PRODUCTS", products)
    seen = []
    exact = "scent_lightning.tasks.extreme_classification.cross_entropy_and_rank"

    def spy(head, features, labels, chunk):
        seen.append(len(features))
        return cross_entropy_and_rank(head, features, labels, chunk)

    monkeypatch.setattr(exact, spy)
    task = task_of()
    trainer = quiet_trainer(max_steps=1, log_every_n_steps=1)
    trainer.fit(task, batch_loader(IndexedTensorDataset(*rows_of()), 40, True))
    assert seen == [rows] * (rows > 0)
    assert ("train/cross_entropy" in trainer.callback_metrics) == (rows > 0)


def test_with_the_own_class_the_loss_is_the_cross_entropy_and_bounded():
    """Where classes are apart it falls to −log(K − 1), and without the own class far below."""
    labels = torch.arange(N) % K
    features = 20 * torch.eye(K)[labels]
    ends = {}
    for include_target in (False, True):
        task = ExtremeClassificationTask(K, K, N, SCENT(), include_target=include_target)
        logged(task, 8, (features, labels))
        ends[include_target] = task.duals["nu"].nu
    assert ends[True].min() >= -math.log(K - 1) - 1e-5
    assert ends[False].max() < -math.log(K - 1) - 10


@pytest.mark.parametrize("include_target", [False, True])
def test_batch_of_one_class_is_skipped(include_target):
    task = task_of(include_target=include_target)
    with pytest.warns(UserWarning, match="holds one class only"):
        loss = task.training_step((torch.randn(3, D), torch.tensor([4, 4, 4]), torch.arange(3)), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task.training_step((torch.randn(1, D), torch.tensor([4]), torch.arange(1)), 0)
    assert loss.item() == 0
    assert task.skipped_batches == 2
    assert not task.duals["nu"].visited.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"correction": "logq"}, "correction must be one of frequency, none, got 'logq'"),
        ({"margin": 0.2}, "margin needs normalize=True, which makes the logits cosines, got 0.2 without"),
        ({"margin": 2.0, "margin_type": "angular", "normalize": True}, "margin must be an angle below π/2 with"),
        ({"margin_type": "arc"}, "margin_type must be one of cosine, angular, got 'arc'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)
