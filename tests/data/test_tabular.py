"""Tables: the named ones, files, splits, batches, and every bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes

from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.duals import SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import DRORegressionTask
from tests.helpers import quiet_trainer


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    return pd.DataFrame(generator.standard_normal((30, 4)), columns=["a", "b", "c", "y"])


def write(frame, folder, name="t.csv"):
    path = folder / name
    frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path, index=False)
    return str(path)


def rows_of(loader):
    batches = list(loader)
    return tuple(torch.cat([batch[i] for batch in batches]) for i in range(3))


def test_diabetes():
    data = TabularRegressionDataModule("diabetes", batch_size=50, standardize=False)
    features, target, index = rows_of(data.predict_dataloader())
    raw = load_diabetes(scaled=False)
    np.testing.assert_allclose(features, raw.data, rtol=1e-6)
    np.testing.assert_allclose(target, raw.target / 100, rtol=1e-6)
    assert index.tolist() == list(range(442))
    assert (data.num_features, data.num_anchors) == (10, 442)


def test_california_housing_is_scikit_learns(data_dir):
    data = TabularRegressionDataModule("california_housing", data_dir=str(data_dir), standardize=False)
    features, target, _ = rows_of(data.predict_dataloader())
    assert features.shape == (20640, 8)
    # First row of fetch_california_housing.
    expected = [8.3252, 41.0, 6.98412698, 1.02380952, 322.0, 2.55555556, 37.88, -122.23]
    np.testing.assert_allclose(features[0], expected, rtol=1e-6)
    assert target[0].item() == pytest.approx(4.526)
    assert target.max().item() == pytest.approx(5.00001)


def test_abalone(data_dir):
    data = TabularRegressionDataModule("abalone", data_dir=str(data_dir), standardize=False)
    features, target, _ = rows_of(data.predict_dataloader())
    assert features.shape == (4177, 8)
    assert sorted(features[:, 0].unique().tolist()) == [1.0, 2.0, 3.0]
    assert (target.min().item(), target.max().item()) == (0.0, 10.0)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_files_standardised_on_training_rows(table, tmp_path, name):
    data = TabularRegressionDataModule(
        write(table, tmp_path, name), target="y", batch_size=4, val_fraction=0.2, test_fraction=0.1
    )
    features, _, index = rows_of(data.train_dataloader())
    assert sorted(index.tolist()) == list(range(21))
    torch.testing.assert_close(features.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.std(0, unbiased=False), torch.ones(3))
    assert [len(rows_of(loader)[2]) for loader in (data.val_dataloader(), data.test_dataloader())] == [6, 3]
    _, target, index = rows_of(data.predict_dataloader())
    assert index.tolist() == list(range(30))
    np.testing.assert_allclose(target, table["y"], rtol=1e-6)


def test_splits_are_disjoint_and_depend_on_the_seed(table, tmp_path):
    path = write(table, tmp_path)

    def targets(seed):
        data = TabularRegressionDataModule(
            path, target="y", batch_size=4, val_fraction=0.3, test_fraction=0.3, split_seed=seed
        )
        loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
        return [set(rows_of(loader)[1].tolist()) for loader in loaders]

    first = targets(0)
    assert sum(map(len, first)) == len(set().union(*first)) == 30
    assert targets(0) == first
    assert targets(1) != first


def test_fraction_zero_evaluates_the_training_rows(table, tmp_path):
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", batch_size=4)
    assert torch.equal(rows_of(data.val_dataloader())[1], rows_of(data.predict_dataloader())[1])


def test_epochs_are_shuffled_by_their_number_alone(table, tmp_path):
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", batch_size=7)
    loader = data.train_dataloader()

    def order(epoch):
        loader.sampler.set_epoch(epoch)
        return rows_of(loader)[2].tolist()

    first, second = order(0), order(1)
    assert first != second
    torch.rand(5)
    assert order(0) == first
    assert [len(batch[2]) for batch in loader] == [7, 7, 7, 7, 2]


def test_chosen_features_and_constant_columns(table, tmp_path):
    table["c"] = 3.0
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", features=["c", "a"], batch_size=4)
    features, _, _ = rows_of(data.predict_dataloader())
    assert features.shape == (30, 2)
    assert torch.isfinite(features).all()


def bad(frame, **changes):
    for name, value in changes.items():
        frame[name] = value
    return frame


def with_holes(frame):
    frame.loc[[3, 17], "b"] = np.nan
    frame.loc[5, "a"] = np.inf
    return frame


CASES = [
    (lambda f: f, {"target": None}, "target must name a column of .*a, b, c, y"),
    (lambda f: f, {"target": "z"}, "has no column z; it has: a, b, c, y"),
    (lambda f: f, {"features": ["a", "q"]}, "has no column q"),
    (lambda f: f, {"features": ["y"]}, "at least one column other than the target"),
    (lambda f: bad(f, b="red"), {}, "column 'b' of .* is not numeric"),
    (with_holes, {}, r"missing or non-finite values in rows 3, 5, 17 \(counted from 0\), columns a, b"),
    (lambda f: f.head(1), {"batch_size": 1}, r"has 1 row\(s\); at least 2 are needed"),
    (lambda f: f, {"batch_size": 31}, "batch_size 31 is larger than the data: there are 30 training rows"),
    (lambda f: f, {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
    (lambda f: f, {"val_fraction": 0.001}, "val_fraction 0.001 of 30 rows leaves no row"),
]


@pytest.mark.parametrize(("change", "arguments", "message"), CASES)
def test_bad_tables(table, tmp_path, change, arguments, message):
    path = write(change(table), tmp_path)
    with pytest.raises(InputError, match=message):
        TabularRegressionDataModule(path, **{"target": "y", "batch_size": 4, **arguments}).setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "nothing.csv"}, "neither a file nor one of the known data sets: diabetes, california_housing, ab"),
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "must be below 1"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"dataset": "diabetes", "target": "bmi"}, "target is part of the data set 'diabetes'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        TabularRegressionDataModule(**arguments).setup("fit")


def test_unreadable_files_and_missing_data_sets(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"not a table")
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet as a table"):
        TabularRegressionDataModule(str(tmp_path / "a.parquet"), target="y").setup("fit")

    def offline(**arguments):
        raise OSError("no route to host")

    monkeypatch.setattr("scent_lightning.data.tabular.fetch_california_housing", offline)
    with pytest.raises(InputError, match=r"'california_housing' is neither in data_dir .* nor could it be downloaded"):
        TabularRegressionDataModule("california_housing", data_dir=str(tmp_path)).setup("fit")


# New data are treated as the training run's were


@pytest.fixture
def trained(table, tmp_path):
    """A fitted task, its checkpoint, and what it predicts of its training file."""
    table["a"] = 50 + 10 * table["a"]
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", batch_size=10)
    task = DRORegressionTask(3, SOX(0.5), lr=1e-3)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["TabularRegressionDataModule"]["columns"] == [*"abc"]
    return task, tmp_path / "a.ckpt", torch.cat([batch["prediction"] for batch in trainer.predict(task, data)])


NEW_FILES = {
    "a part of the rows": lambda table: table[table["a"] > 50],
    "one row": lambda table: table[7:8],
    "other columns and order": lambda table: table.assign(z="text")[["z", "y", "c", "a", "b"]],
    "no target": lambda table: table[["b", "a", "c"]],
    "nothing in the target": lambda table: table.assign(y=np.nan)[3:],
    "one row and no target": lambda table: table[["a", "b", "c"]][29:],
}


@pytest.mark.parametrize("change", NEW_FILES.values(), ids=NEW_FILES.keys())
def test_new_files_are_predicted_as_the_training_file(change, table, trained, tmp_path):
    task, checkpoint, expected = trained
    new = change(table)
    path = write(new, tmp_path, "new.csv")
    for arguments in ({}, {"standardize": False, "val_fraction": 0.5, "batch_size": 1000}):
        data = TabularRegressionDataModule(path, target="y", **arguments)
        batches = quiet_trainer().predict(task, data, ckpt_path=checkpoint, weights_only=True)
        torch.testing.assert_close(torch.cat([batch["prediction"] for batch in batches]), expected[new.index])
        assert ("loss" in batches[0]) == ("y" in new and bool(new["y"].notna().all()))
    data = TabularRegressionDataModule.load_from_checkpoint(checkpoint, dataset=path)
    batches = quiet_trainer().predict(task, data)
    torch.testing.assert_close(torch.cat([batch["prediction"] for batch in batches]), expected[new.index])


def test_validation_of_new_files_scales_as_in_training(table, trained, tmp_path):
    task, checkpoint, expected = trained
    new = table[table["a"] > 50]
    data = TabularRegressionDataModule(write(new, tmp_path, "new.csv"), target="y")
    (found,) = quiet_trainer().test(task, data, ckpt_path=checkpoint, weights_only=True, verbose=False)
    residual = expected[new.index].double().numpy() - new["y"].to_numpy()
    assert found["test/rmse"] == pytest.approx(float(np.sqrt(np.mean(residual**2))), rel=1e-5)
    missing = TabularRegressionDataModule(write(new[["a", "b", "c"]], tmp_path, "bare.csv"), target="y")
    with pytest.raises(InputError, match="nothing in its target column y: only predict does without"):
        quiet_trainer().test(task, missing, ckpt_path=checkpoint, weights_only=True, verbose=False)


def test_a_resumed_fit_keeps_the_scaling(table, trained, tmp_path):
    task, checkpoint, _ = trained
    more = pd.concat([table, table + 100])
    data = TabularRegressionDataModule(write(more, tmp_path, "more.csv"), target="y", batch_size=10)
    task.if_changed_data = "grow"
    trainer = quiet_trainer(max_epochs=2, limit_val_batches=0)
    trainer.fit(task, data, ckpt_path=checkpoint, weights_only=True)
    before = torch.load(checkpoint, weights_only=True)["TabularRegressionDataModule"]
    after = data.state_dict()
    assert torch.equal(before["mean"], after["mean"])
    assert (before["rows"], after["rows"]) == (30, 60)
