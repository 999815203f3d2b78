"""Multi-label extreme classification against the exact loss, in one process and two, and by the command line."""

import math
import sys
from functools import partial

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from scipy import sparse

from scent_lightning.cli import main
from scent_lightning.data import FeatureDataModule
from scent_lightning.duals import BSGD, MSVR, SCENT, SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import MultiLabelTask
from tests.helpers import assert_resumed_is_the_same, quiet_trainer
from tests.settings import several_labels
from tests.test_process_counts import assert_equal_states

K, D, N = 40, 8, 400


def write(folder, seed=0, rows=N, weighted=False):
    """Rows of one to four classes, frequent ones first, around the mean of their centres."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(9).standard_normal((K, D))
    matrix = sparse.lil_matrix((rows, K), dtype=np.float32)
    for row in range(rows):
        classes = np.unique((K * generator.random(generator.integers(1, 5)) ** 2).astype(int))
        matrix[row, classes] = generator.integers(1, 4, len(classes)) if weighted else 1
    matrix = matrix.tocsr()
    features = matrix.sign() @ centres + 0.3 * generator.standard_normal((rows, D))
    folder.mkdir(parents=True)
    np.save(folder / "features.npy", features.astype(np.float32))
    sparse.save_npz(folder / "labels.npz", matrix)
    return features, matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("labels")
    write(place / "train")
    write(place / "val", 1, 100)
    return place


def fitted(folder, dual, epochs=10, **arguments):
    L.seed_everything(0, verbose=False)
    data = FeatureDataModule(str(folder), batch_size=32)
    data.setup("fit")
    task = MultiLabelTask(D, K, data.num_anchors, dual, **arguments)
    trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0)
    trainer.fit(task, datamodule=data)
    return task, data


def of_training(task, folder):
    """Exact cross-entropy of the training rows."""
    data = FeatureDataModule(str(folder), batch_size=32)
    loader = data.evaluation_loader(data.existing("train"))
    return quiet_trainer().validate(task, loader, verbose=False)[0]["val/cross_entropy"]


@pytest.fixture(scope="module")
def optimum(folder):
    """Of the convex problem, by L-BFGS in float64: the exact loss of the training rows."""
    features = torch.from_numpy(np.load(folder / "train" / "features.npy")).double()
    shares = torch.from_numpy(sparse.load_npz(folder / "train" / "labels.npz").toarray()).double()
    shares /= shares.sum(dim=1, keepdim=True)
    weight = torch.zeros(K, D, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss():
        optimizer.zero_grad()
        logits = features @ weight.T
        value = (logits.logsumexp(1) - (shares * logits).sum(1)).mean()
        value.backward()
        return value

    return optimizer.step(loss).item() and loss().item()


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize("dual", [SCENT(), SOX(0.5), MSVR(gamma=0.5, beta=0.5)], ids=lambda dual: type(dual).__name__)
def test_comes_to_the_optimum_of_the_full_softmax(folder, optimum, negatives, dual):
    task, _ = fitted(folder, dual, 15, negatives=negatives, num_negatives=16, lr=5.0)
    assert optimum < of_training(task, folder) < optimum + 0.05


def test_the_cross_entropy_that_is_logged_is_near_that_of_all_rows(folder, tmp_path):
    L.seed_everything(0, verbose=False)
    data = FeatureDataModule(str(folder), batch_size=32)
    data.setup("fit")
    task = MultiLabelTask(D, K, data.num_anchors, SCENT(), lr=1.0)
    logger = CSVLogger(tmp_path)
    quiet_trainer(max_epochs=12, limit_val_batches=0, logger=logger, log_every_n_steps=1).fit(task, datamodule=data)
    logged = pd.read_csv(f"{logger.log_dir}/metrics.csv")["train/cross_entropy"].dropna()
    assert logged.tail(13).mean() == pytest.approx(of_training(task, folder), rel=0.05)


def test_metrics_of_validation(folder):
    """By NumPy, of the logits of all classes; without a fit nobody has said how frequent classes are."""
    task, data = fitted(folder, BSGD(), 2, ks=[1, 4], lr=1.0)
    found = quiet_trainer().validate(task, data, verbose=False)[0]
    assert set(found) == {
        "val/cross_entropy",
        *(f"val/{name}@{k}" for name in ("precision", "psp", "recall") for k in (1, 4)),
    }
    features, right = (
        np.load(folder / "val" / "features.npy"),
        sparse.load_npz(folder / "val" / "labels.npz").toarray() > 0,
    )
    logits = features @ task.head.weight.detach().numpy().T
    counts = (sparse.load_npz(folder / "train" / "labels.npz").toarray() > 0).sum(axis=0)
    inverse = 1 + (np.log(N) - 1) * 2.5**0.55 * (counts + 1.5) ** -0.55
    for k in (1, 4):
        hits = np.take_along_axis(right, np.argsort(-logits)[:, :k], axis=1)
        assert found[f"val/precision@{k}"] == pytest.approx(hits.mean(), rel=1e-5)
        assert found[f"val/recall@{k}"] == pytest.approx((hits.sum(axis=1) / right.sum(axis=1)).mean(), rel=1e-5)
        worth = (hits * inverse[np.argsort(-logits)[:, :k]]).sum()
        best = np.sort(right * inverse)[:, ::-1][:, :k].sum()
        assert found[f"val/psp@{k}"] == pytest.approx(worth / best, rel=1e-5)
    fresh = MultiLabelTask(D, K, N, BSGD(), ks=[1])
    assert math.isnan(quiet_trainer().validate(fresh, data, verbose=False)[0]["val/psp@1"])


def test_weights_are_those_of_the_loss(tmp_path):
    """And a checkpoint has what the metrics need."""
    features, matrix = write(tmp_path / "train", weighted=True)
    data = FeatureDataModule(str(tmp_path), batch_size=50)
    data.setup("fit")
    task = MultiLabelTask(D, K, data.num_anchors, BSGD(), negatives="all", lr=1.0)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, datamodule=data)
    logits = torch.from_numpy(features).float() @ task.head.weight.detach().T
    shares = torch.from_numpy(matrix.toarray())
    shares = shares / shares.sum(dim=1, keepdim=True)
    expected = (logits.logsumexp(1) - (shares * logits).sum(1)).mean().item()
    assert of_training(task, tmp_path) == pytest.approx(expected, rel=1e-4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = MultiLabelTask.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(again.propensities(), task.propensities())
    assert again.propensities().shape == (K,)


@pytest.mark.slow
@pytest.mark.parametrize(("negatives", "hard"), [("in_batch", 0), ("uniform", 0), ("in_batch", 2)])
def test_two_processes_are_as_one(negatives, hard, tmp_path, thorough):
    setting = partial(several_labels, negatives=negatives, hard_negatives=hard)
    assert_equal_states(tmp_path, setting, thorough, worlds=(2,), steps={2: 25})


def test_the_command_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scent-lightning"])
    short = ["--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    settings = [
        "--model",
        "MultiLabelTask",
        "--data",
        "FeatureDataModule",
        "--data.path",
        str(folder),
        "--dual",
        "SCENT",
    ]
    settings += [*short, "--trainer.default_root_dir", str(tmp_path), "--data.batch_size", "32"]
    main(["fit", *settings])
    (last,) = tmp_path.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    main(["predict", *settings, "--ckpt_path", str(last)])
    (file,) = tmp_path.glob("lightning_logs/*/predictions.csv")
    table = pd.read_csv(file)
    assert len(table) == 100
    assert table.filter(like="probability").sum(axis=1).between(0, 1.001).all()


def mined_by_hand(task, data, number):
    """The classes of the largest logits that are not right, of each training row."""
    rows = data.existing("train")
    features, answers, _ = rows[list(range(len(rows)))]
    with torch.no_grad():
        logits = task.head.logits(features)
    right = (answers.unsqueeze(2) == torch.arange(K)).any(dim=1)
    return logits.masked_fill(right, -math.inf).topk(number, dim=1).indices


def test_mining_is_exact(folder):
    """The last one of the run was at the start of its last epoch, with the weights of then."""
    task, data = fitted(folder, SCENT(), 1, lr=5.0, hard_negatives=3, class_chunk=7)
    assert task.hard_negatives.epoch == -1
    assert task.hard_negatives.of(torch.arange(3), torch.zeros(3, 1, dtype=torch.int64)) is None
    weights = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0 and pl_module.hard_negatives.epoch == trainer.current_epoch:
                weights.append((trainer.current_epoch, mined_by_hand(pl_module, data, 3)))

    L.seed_everything(0, verbose=False)
    task = MultiLabelTask(D, K, N, SCENT(), lr=5.0, hard_negatives=3, class_chunk=7, mine_every_n_epochs=2)
    quiet_trainer(max_epochs=4, limit_val_batches=0, callbacks=[Keep()]).fit(task, datamodule=data)
    assert [epoch for epoch, _ in weights] == [2]
    assert torch.equal(task.hard_negatives.table.long(), weights[-1][1])
    assert task.training


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
def test_hard_negatives_come_to_the_same_optimum(folder, optimum, negatives):
    task, _ = fitted(folder, SCENT(), 15, negatives=negatives, num_negatives=16, lr=5.0, hard_negatives=4)
    assert optimum < of_training(task, folder) < optimum + 0.05


def test_given_hard_negatives(folder, tmp_path):
    given = np.random.default_rng(0).integers(-1, K, (N, 2))
    np.save(tmp_path / "hard.npy", given)
    task, _ = fitted(folder, BSGD(), 2, lr=5.0, hard_negatives_file=str(tmp_path / "hard.npy"))
    assert np.array_equal(task.hard_negatives.table.numpy(), given)
    assert task.hard_negatives.epoch == -1


def test_resumed_within_an_epoch_it_is_the_same(folder, tmp_path):
    """With the hard negatives of its start, which the weights of now would not find."""

    def make():
        data = FeatureDataModule(str(folder), batch_size=32)
        data.setup("fit")
        return MultiLabelTask(D, K, data.num_anchors, SCENT(), lr=5.0, hard_negatives=3), data

    state = assert_resumed_is_the_same(make, tmp_path, step=18, max_epochs=3)  # of 13 steps an epoch
    assert {"hard_negatives.table", "hard_negatives.epoch"} <= set(state)


def test_one_label_a_row_will_do(tmp_path):
    (tmp_path / "train").mkdir()
    generator = np.random.default_rng(0)
    np.save(tmp_path / "train" / "features.npy", generator.standard_normal((60, D)).astype(np.float32))
    np.save(tmp_path / "train" / "labels.npy", generator.integers(0, K, 60))
    task, data = fitted(tmp_path, SCENT(), 2, lr=1.0, hard_negatives=2)
    assert task.hard_negatives.epoch == 1
    found = quiet_trainer().validate(task, data.evaluation_loader(data.existing("train")), verbose=False)[0]
    assert found["val/precision@1"] == pytest.approx(found["val/recall@1"])


def test_mining_needs_a_data_module(folder):
    data = FeatureDataModule(str(folder), batch_size=32)
    task = MultiLabelTask(D, K, N, SCENT(), hard_negatives=2)
    with pytest.raises(
        InputError, match=r"hard negatives are mined from the training rows of a data module .*, got none"
    ):
        quiet_trainer(max_epochs=2, limit_val_batches=0).fit(task, data.train_dataloader())


@pytest.mark.parametrize(("array", "message"), [
    (None, r"hard_negatives_file .*hard\.npy is not a file"),
    (np.zeros((3, 2), dtype=int), r"must hold integers of shape \(400, h\), got int64 \(3, 2\)"),
    (np.zeros((N, 2)), r"must hold integers of shape \(400, h\), got float64"),
    (np.full((N, 2), K), r"must hold classes from 0 to 39, or -1 for none, got 40"),
    (np.full((N, 2), -2), r"must hold classes from 0 to 39, or -1 for none, got -2"),
    (np.array([None]), r"hard\.npy cannot be read as one plain array"),
])  # fmt: skip
def test_files_of_hard_negatives_that_do_not_fit(array, message, tmp_path):
    if array is not None:
        np.save(tmp_path / "hard.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        MultiLabelTask(D, K, N, BSGD(), hard_negatives_file=str(tmp_path / "hard.npy"))


def batch_of(rows=4, widest=2):
    generator = torch.Generator().manual_seed(0)
    answers = torch.stack([torch.randperm(K, generator=generator)[:widest] for _ in range(rows)])
    return torch.randn(rows, D, generator=generator), answers, torch.arange(rows)


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, a, i: (x, a), r"a batch must be \(inputs, answers, index\) or .*, got 2 part\(s\)"),
    (lambda x, a, i: x, "a batch must be .*, got Tensor"),
    (lambda x, a, i: (x, a[:, :, None], i), r"answers must have shape \(4, P\), one row for each .*, got \(4, 2, 1\)"),
    (lambda x, a, i: (x, a[:3], i), r"answers must have shape \(4, P\), .*, got \(3, 2\)"),
    (lambda x, a, i: (x, a.float(), i), "answers must be integers, .*, got torch.float32"),
    (lambda x, a, i: (x, a, a[:, :1].float(), i), r"weights must have the answers' shape \(4, 2\), got \(4, 1\)"),
    (lambda x, a, i: (x, a + K, i), r"labels must be from 0 to 39 \(num_classes is 40\), got "),
])  # fmt: skip
@pytest.mark.parametrize("way", ["training", "validation"])
def test_batches(change, message, way):
    task = MultiLabelTask(D, K, N, BSGD())
    step = task.training_step if way == "training" else task.validation_step
    with pytest.raises(InputError, match=message):
        step(change(*batch_of()), 0)


def test_a_batch_without_a_right_class_adds_nothing():
    task = MultiLabelTask(D, K, N, BSGD())
    inputs, answers, index = batch_of()
    loss = task.training_step((inputs, torch.full_like(answers, -1), index), 0)
    assert loss.item() == 0
    assert not task.duals["nu"].visited.any()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ks": []}, r"ks must hold at least one k, got \[\]"),
    ({"ks": [0]}, "each of ks must be an integer of at least 1, got 0"),
    ({"propensity_a": 0}, "propensity_a must be a finite number above 0, got 0"),
    ({"hard_negatives": -1}, "hard_negatives must be an integer of at least 0, got -1"),
    ({"hard_negatives": 2, "hard_negatives_file": "a.npy"}, "hard_negatives must be 0 with hard_negatives_file, got 2"),
    ({"mine_every_n_epochs": 0}, "mine_every_n_epochs must be an integer of at least 1, got 0"),
    ({"propensity_b": -1.0}, "propensity_b must be a finite number above 0, got -1"),
])  # fmt: skip
def test_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        MultiLabelTask(D, K, N, BSGD(), **arguments)
