"""Tables: the named ones, files, splits, batches, and every bad input."""

import datetime
import decimal
import gzip

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
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
    with pytest.warns(UserWarning, match="column c has the same value in every row"):
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
    (lambda f: f.head(0), {"batch_size": 1}, r"has 0 row\(s\); at least 2 are needed"),
    (lambda f: f.head(1), {"batch_size": 1}, r"has 1 row\(s\); at least 2 are needed"),
    (lambda f: f, {"batch_size": 31}, "batch_size 31 is larger than the data: there are 30 training rows"),
    (lambda f: f, {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
    (lambda f: f, {"val_fraction": 0.001}, "val_fraction 0.001 of 30 rows leaves no row"),
]


@pytest.mark.parametrize(("change", "arguments", "message"), CASES)
def test_bad_tables(table, tmp_path, change, arguments, message):
    path = write(change(table), tmp_path)
    with pytest.raises(InputError, match=message):
        TabularRegressionDataModule(path, **{"target": "y", "batch_size": 4, **arguments}).setup("fit")


# Files that could be read wrongly


def text(content, name="t.csv"):
    def write_text(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(folder / name)

    return write_text


def columns(name="t.csv", **values):
    """Three rows of a and y unless told otherwise."""

    def write_columns(folder):
        return write(pd.DataFrame({"a": [1.0, 2.0, 4.0], "y": [1.0, 2.0, 3.0], **values}), folder, name)

    return write_columns


def parquet_of_names(*names):
    def write_names(folder):
        arrays = [pa.array([1.0, 2.0, 3.0 + number]) for number in range(len(names))]
        pq.write_table(pa.table(arrays, names=list(names)), folder / "t.parquet")
        return str(folder / "t.parquet")

    return write_names


def of_index_and_column(folder):
    frame = pd.DataFrame({"a": [1.0, 2.0], "y": [1.0, 2.0]}, index=pd.Index([7, 8], name="a "))
    frame.to_parquet(folder / "t.parquet")
    return str(folder / "t.parquet")


REFUSED = {
    "a name twice": (text("a,y,a\n1,2,3\n4,5,6\n"), "more than one column of the name 'a'"),
    "a name twice with spaces": (text("a,y, a \n1,2,3\n4,5,6\n"), "more than one column of the name 'a'"),
    "the target twice": (text("a,y,y\n1,2,3\n4,5,6\n"), "more than one column of the name 'y'"),
    "a name twice in Parquet": (parquet_of_names("a", "y", " a"), "more than one column of the name 'a'|Duplicate"),
    "an index of a column's name": (of_index_and_column, "more than one column of the name 'a'"),
    "datetimes": (columns("t.parquet", a=pd.to_datetime(["2020-01-01", None, "2021"], format="mixed")), "holds dates"),
    "datetimes of a time zone": (columns("t.parquet", a=pd.date_range("2020", periods=3, tz="UTC")), "holds dates"),
    "only NaT": (columns("t.parquet", a=pd.to_datetime([None] * 3)), "column 'a' .* holds dates or times"),
    "dates": (columns("t.parquet", a=[datetime.date(2020, 1, day) for day in (1, 2, 3)]), "holds dates or times"),
    "durations": (columns("t.parquet", a=pd.to_timedelta([1, 2, 3], unit="s")), "holds dates or times"),
    "a date as target": (columns("t.parquet", y=pd.date_range("2020", periods=3)), "column 'y' .* holds dates"),
    "written dates": (
        columns(a=["2020-01-01", "2020-01-02", "2020-01-05"]),
        "not numeric: .*encode .* makes a date",
    ),
    "decimal commas": (columns(a=["1,5", "2,5", "3,0"]), "not numeric: .*'1,5'.*decimal point"),
    "thousands": (columns(a=["1,234,567.5", "2", "3"]), "not numeric: .*nothing between thousands"),
    "spaced thousands": (columns(a=["1 234", "2", "3"]), "not numeric: .*nothing between thousands"),
    "semicolons": (text("a;b;y\n1,5;2;3\n1;2;3\n"), "separates its columns by ';'"),
    "tabs": (text("a\ty\n1\t2\n"), r"separates its columns by '\\t'"),
    "more fields": (text("a,y\n1,2\n1,5,2,5\n"), "line 3 has 4 fields where the header has 2"),
    "more fields in all rows": (text("a,y\n1,2,\n3,4,\n"), "line 2 has 3 fields where the header has 2"),
    "fewer fields": (text("a,b,y\n1,2,3\n1 2,3\n"), "line 3 has 2 fields where the header has 3"),
    "a quotation mark": (text('a,b,y\n1,"2,3\n4,5,6\n'), "row from line 2 on has a quotation mark that is not closed"),
    "a NUL byte": (text("a,y\n1,2\n3\0,4\n"), "line 3 has a NUL byte"),
    "UTF-16": (text("a,y\n1,2\n".encode("utf-16")), "it is UTF-16: save it as UTF-8"),
    "Latin-1": (text("a,größe,y\n1,2,3\n".encode("latin-1")), "line 1 is not UTF-8"),
    "empty": (text(""), "it is empty"),
    "cut short": (text(gzip.compress(b"a,y\n1,2\n" * 99)[:-9], "t.csv.gz"), "cannot read .* as a table: "),
    "damaged": (text(gzip.compress(b"a,y\n1,2\n" * 99)[:15] + b"x" * 30, "t.csv.gz"), "cannot read .* as a table: "),
    "another kind of compression": (text(gzip.compress(b"a,y\n1,2\n"), "t.csv.xz"), "cannot read .* as a table: "),
    "a spreadsheet": (text(b"PK\x03\x04\x14\x00\x06\x00", "t.xlsx"), "line 1 has a NUL byte, so it is no text"),
    "beyond float32": (columns(a=[1.0, -1e39, 2.0]), r"column 'a' of .* has -1e\+39 in row 1 .* float32 cannot hold"),
    "a target beyond float32": (columns(y=[1.0, 2.0, 4e38]), r"column 'y' of .* has 4e\+38 in row 2"),
    "integers beyond float64": (
        columns(a=[10**18, 10**18 + 1, 10**18 + 2]),
        "different integers .* that float64 makes equal",
    ),
    "a column that float64 rounds": (columns(a=[1.7e18, 1.7e18 + 1000, 1.7e18 + 2000]), r"up to 1\.7e\+18 .* blurs"),
    "floats beyond float64": (columns(a=[1e17, 1e17 + 16, 1e17 + 32]), "rounding to float64 blurs"),
    "a target beyond float32's digits": (columns(y=[1.7e9, 1.7e9 + 60, 1.7e9 + 120]), "'y' .* rounding to float32"),
    "complex numbers in words": (columns(a=["1+2j", "2", "3"]), "column 'a' of .* is not numeric"),
    "text among numbers": (columns(a=["1", "two", "3"]), "column 'a' of .* is not numeric: .*two"),
    "truth among numbers": (columns(a=["True", "2", "3"]), "column 'a' of .* is not numeric: .*True"),
    "an empty column": (columns(a=[None, None, None]), "missing or non-finite values in rows 0, 1, 2 .* columns a"),
    "empty but for spaces": (columns(a=["  ", "  ", "  "]), "column 'a' of .* is not numeric"),
    "a category": (columns("t.parquet", a=pd.Categorical(["red", "blue", "red"])), "column 'a' of .* is not numeric"),
}


@pytest.mark.parametrize(("prepare", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_read_wrongly_is_refused(tmp_path, prepare, message):
    with pytest.raises(InputError, match=message) as caught:
        TabularRegressionDataModule(prepare(tmp_path), target="y", batch_size=1).setup("fit")
    assert "\n" not in str(caught.value)


READ = {
    "a byte-order mark": text("\ufeffa,y\n1,10\n2,20\n4,30\n"),
    "both line ends": text("a,y\r\n1,10\r\n2,20\r\n4,30\r\n"),
    "carriage returns": text("a,y\r1,10\r2,20\r4,30"),
    "spaces": text(" a , y\n 1, 10\n2 ,20 \n4,30\n\n"),
    "quoted": text('"a","y"\n"1","10"\n"2","20"\n"4","30"\n'),
    "compressed": text(gzip.compress(b"a,y\n1,10\n2,20\n4,30\n"), "t.csv.gz"),
    "other order": text("y,a\n10,1\n20,2\n30,4\n"),
    "numbers as text": columns("t.parquet", a=["1", "2", "4"], y=[10, 20, 30]),
    "numbers as text of several kinds": columns("t.parquet", a=[" 1", "2.0", "4e0"], y=["10", "2e1", "30.0"]),
    "categories of numbers": columns("t.parquet", a=pd.Categorical([1, 2, 4]), y=[10, 20, 30]),
    "decimals": columns("t.parquet", a=[decimal.Decimal(value) for value in (1, 2, 4)], y=[10, 20, 30]),
    "small integers": columns("t.parquet", a=np.array([1, 2, 4], dtype=np.int8), y=np.array([10, 20, 30], np.uint16)),
}


@pytest.mark.parametrize("prepare", READ.values(), ids=READ.keys())
def test_other_ways_to_write_the_same_numbers(tmp_path, prepare, recwarn):
    data = TabularRegressionDataModule(prepare(tmp_path), target="y", batch_size=1, standardize=False)
    features, target, _ = rows_of(data.predict_dataloader())
    assert (features.tolist(), target.tolist()) == ([[1.0], [2.0], [4.0]], [10.0, 20.0, 30.0])
    assert not recwarn.list


def test_the_same_number_in_several_writings(tmp_path):
    path = columns("t.parquet", a=["1", "1.0", "1e0"])(tmp_path)
    data = TabularRegressionDataModule(path, target="y", batch_size=1, standardize=False)
    with pytest.warns(UserWarning, match="column a has the same value in every row"):
        assert rows_of(data.predict_dataloader())[0].tolist() == [[1.0]] * 3


def test_truth_is_one(tmp_path):
    path = columns(a=[True, False, True], b=[3, 3, 4])(tmp_path)
    data = TabularRegressionDataModule(path, target="y", batch_size=1, standardize=False)
    assert rows_of(data.predict_dataloader())[0].tolist() == [[1.0, 3.0], [0.0, 3.0], [1.0, 4.0]]


INDICES = {
    "written by pandas": lambda frame, folder: frame.to_csv(folder / "t.csv"),
    "written and read twice": lambda frame, folder: (
        frame.to_csv(folder / "s.csv"),
        pd.read_csv(folder / "s.csv").to_csv(folder / "t.csv"),
    ),
    "separators at the ends": lambda frame, folder: (folder / "t.csv").write_text(
        "\n".join(f"{line}," for line in frame.to_csv(index=False).splitlines())
    ),
    "names of the rows": lambda frame, folder: frame.set_index(pd.Index(list("pqrs"))).to_csv(folder / "t.csv"),
    "named in Parquet": lambda frame, folder: frame.set_index(pd.Index([3, 1, 4, 2], name="id")).to_parquet(
        folder / "t.parquet"
    ),
    "unnamed in Parquet": lambda frame, folder: pq.write_table(
        pa.table({"__index_level_0__": [0, 1, 2, 3], **frame.to_dict("list")}), folder / "t.parquet"
    ),
}


@pytest.mark.parametrize("save", INDICES.values(), ids=INDICES.keys())
def test_an_index_is_left_out_aloud(tmp_path, save):
    frame = pd.DataFrame({"a": [1.0, 2.0, 4.0, 8.0], "y": [1.0, 2.0, 3.0, 4.0]})
    save(frame, tmp_path)
    (path,) = tmp_path.glob("t.*")
    data = TabularRegressionDataModule(str(path), target="y", batch_size=1, standardize=False)
    with pytest.warns(UserWarning, match="is left out, as an index or a column without a name"):
        features, _, _ = rows_of(data.predict_dataloader())
    assert features.tolist() == [[1.0], [2.0], [4.0], [8.0]]


def test_an_index_is_a_feature_if_it_is_named(tmp_path):
    pd.DataFrame({"a": [1.0, 2.0], "y": [1.0, 2.0]}, index=pd.Index([7, 8], name="id")).to_parquet(
        tmp_path / "t.parquet"
    )
    arguments = {"target": "y", "batch_size": 1, "standardize": False}
    data = TabularRegressionDataModule(str(tmp_path / "t.parquet"), features=["id"], **arguments)
    assert rows_of(data.predict_dataloader())[0].tolist() == [[7.0], [8.0]]
    pd.read_parquet(tmp_path / "t.parquet").reset_index(drop=True).to_csv(tmp_path / "t.csv")
    data = TabularRegressionDataModule(str(tmp_path / "t.csv"), features=["Unnamed: 0", "a"], **arguments)
    assert rows_of(data.predict_dataloader())[0].tolist() == [[0.0, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize("start", [0, 1])
def test_a_column_that_counts_the_rows_is_used_aloud(table, tmp_path, start):
    path = write(table.assign(number=range(start, 30 + start)), tmp_path)
    with pytest.warns(UserWarning, match="column number counts the rows and is a feature like the others"):
        assert TabularRegressionDataModule(path, target="y", batch_size=4).num_features == 4


@pytest.mark.parametrize("name", ["id", "customer_id", "CustomerID", "Row key", "orderId"])
def test_a_column_of_names_is_used_aloud(table, tmp_path, name):
    numbers = np.random.default_rng(0).permutation(90)[:30] * 17
    path = write(table.assign(**{name: numbers}), tmp_path)
    with pytest.warns(UserWarning, match=f"column '?{name}'? has another number in each row and is a feature like"):
        assert TabularRegressionDataModule(path, target="y", batch_size=4).num_features == 4


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("width", range(100, 130)),
        ("id", [1, 1, *range(28)]),
        ("id", np.arange(30) / 7),
        ("humidity", range(5, 35)),
    ],
)
def test_other_columns_are_features_without_a_word(table, tmp_path, recwarn, name, numbers):
    path = write(table.assign(**{name: numbers}), tmp_path)
    assert TabularRegressionDataModule(path, target="y", batch_size=4).num_features == 4
    assert not [each for each in recwarn if "in each row" in str(each.message)]


def test_features_far_from_zero_are_centred_in_float64(tmp_path):
    frame = pd.DataFrame({"stamp": 1_700_000_000_000_000_000 + np.arange(1000) ** 2 * 10**6, "y": np.arange(1000.0)})
    features, _, _ = rows_of(
        TabularRegressionDataModule(write(frame, tmp_path), target="y", batch_size=10).predict_dataloader()
    )
    squares = np.arange(1000.0) ** 2
    np.testing.assert_allclose(features[:, 0], (squares - squares.mean()) / squares.std(), atol=1e-5)
    with pytest.raises(InputError, match=r"'stamp' .* up to 1.7e\+18 .* which rounding to float32 blurs"):
        TabularRegressionDataModule(str(tmp_path / "t.csv"), target="y", batch_size=10, standardize=False).setup("fit")


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30])
def test_scaling_of_any_size(table, tmp_path, size):
    table["b"] *= size
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", batch_size=4)
    features, _, _ = rows_of(data.predict_dataloader())
    torch.testing.assert_close(features.std(0, unbiased=False), torch.ones(3))


def test_new_rows_that_float32_cannot_hold_after_scaling(table, tmp_path):
    table["b"] *= 1e-30
    data = TabularRegressionDataModule(write(table, tmp_path), target="y", batch_size=4)
    state = data.state_dict()
    new = TabularRegressionDataModule(write(table.assign(b=[0.0] * 29 + [1e20]), tmp_path, "new.csv"), target="y")
    new.load_state_dict(state)
    with pytest.raises(InputError, match=r"column 'b' of .* has .* after scaling in row 29"):
        new.predict_dataloader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "nothing.csv"}, "neither a file nor one of the known data sets: diabetes, california_housing, ab"),
        ({"val_fraction": 1.0}, r"val_fraction must be a number in \[0, 1\), got 1.0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "must be below 1"),
        ({"split_seed": -1}, "split_seed must be an integer of at least 0, got -1"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
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

    monkeypatch.setattr("scent_lightning.data.known_tables.fetch_california_housing", offline)
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
