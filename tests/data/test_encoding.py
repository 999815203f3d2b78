"""Tables with texts, dates and missing values."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.linear_model import LinearRegression

from scent_lightning.cli import main
from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.data.encoding import encode, learn_encoding
from scent_lightning.errors import InputError


def houses(rows=200, seed=0):
    generator = np.random.default_rng(seed)
    towns = np.array(["Ada", "Berg", "Cove", "Dale"], dtype=object)
    town = generator.choice(towns, rows, p=[0.4, 0.35, 0.24, 0.01])
    area = generator.uniform(30, 200, rows)
    garden = generator.random(rows) < 0.5
    sold = pd.Timestamp("2020-01-01") + pd.to_timedelta(generator.integers(0, 1000, rows), unit="D")
    price = 2 * area + 50 * (town == "Berg") + 30 * garden + generator.normal(0, 5, rows)
    frame = pd.DataFrame({"town": town, "area": area, "garden": garden, "sold": sold, "note": "", "price": price})
    frame.loc[frame.index % 7 == 3, "area"] = np.nan
    frame.loc[frame.index % 11 == 5, "town"] = None
    frame["note"] = [f"text {i}" for i in range(rows)]
    return frame


def written(folder, frame, name="rows.csv"):
    path = folder / name
    frame.to_csv(path, index=False) if name.endswith(".csv") else frame.to_parquet(path, index=False)
    return str(path)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_every_kind_of_column_becomes_numbers(name, tmp_path):
    frame = houses()
    data = TabularRegressionDataModule(written(tmp_path, frame, name), "price", encode=True, standardize=False)
    with pytest.warns(UserWarning, match="'note' is left out, as every row has another text"):
        columns = data.learned()["columns"]
    assert columns == [
        *("town=(missing)", "town=Ada", "town=Berg", "town=Cove", "town=(other)"),
        *("area", "area (missing)", "garden", "sold"),
    ]
    features, target, index = data.split("train")[list(range(len(frame)))]
    found = pd.DataFrame(features.numpy(), columns=columns)
    assert index.tolist() == list(range(len(frame)))
    np.testing.assert_allclose(target, frame["price"], rtol=1e-6)
    np.testing.assert_array_equal(found["town=Berg"], frame["town"] == "Berg")
    np.testing.assert_array_equal(found["town=(other)"], frame["town"] == "Dale")
    np.testing.assert_array_equal(found["town=(missing)"], frame["town"].isna())
    assert (found.filter(like="town=").sum(axis=1) == 1).all()
    np.testing.assert_allclose(found["area"], frame["area"].fillna(frame["area"].median()), rtol=1e-6)
    np.testing.assert_array_equal(found["area (missing)"], frame["area"].isna())
    np.testing.assert_array_equal(found["garden"], frame["garden"])
    np.testing.assert_allclose(found["sold"], (frame["sold"] - frame["sold"].min()).dt.days)


def test_numbers_alone_stay_as_they_are(tmp_path):
    frame = houses()[["area", "garden", "price"]].dropna()
    path = written(tmp_path, frame)
    plain, encoded = (TabularRegressionDataModule(path, "price", encode=encode) for encode in (False, True))
    for one, other in zip(plain.split("train")[[0, 5]], encoded.split("train")[[0, 5]], strict=True):
        assert torch.equal(one, other)
    assert plain.learned()["columns"] == encoded.learned()["columns"]


def test_only_training_rows_are_learned_from(tmp_path):
    frame = houses()
    data = TabularRegressionDataModule(written(tmp_path, frame), "price", encode=True, val_fraction=0.5)
    with pytest.warns(UserWarning, match="note"):
        learned = {entry["name"]: entry for entry in data.learned()["encoding"]}
    rows = data.split("train")[list(range(len(data.split("train"))))]
    training = frame.iloc[data._rows("train")]
    assert len(rows[0]) == len(training) == 100
    assert learned["area"]["median"] == pytest.approx(training["area"].median())
    assert pd.Timestamp(learned["sold"]["origin"]) == training["sold"].min()


def test_a_checkpoint_treats_other_rows_as_those_of_training(tmp_path):
    trained = TabularRegressionDataModule(written(tmp_path, houses()), "price", encode=True)
    with pytest.warns(UserWarning, match="note"):
        state = trained.state_dict()
    torch.save(state, tmp_path / "state.pt")
    other = houses(3, seed=1)[["sold", "area", "town", "garden"]]  # in another order, without a target
    other["town"] = ["Cove", "Everywhere", None]
    other.loc[0, "area"] = np.nan
    data = TabularRegressionDataModule(written(tmp_path, other, "new.csv"), "price")
    data.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    features, target, _ = data.split("predict")[[0, 1, 2]]
    assert target is None
    values = features.numpy() * state["scale"].numpy() + state["mean"].numpy()
    found = pd.DataFrame(values, columns=state["columns"]).round(3)
    assert found.filter(like="town=").idxmax(axis=1).tolist() == ["town=Cove", "town=(other)", "town=(missing)"]
    assert found["area (missing)"].tolist() == [1, 0, 0]
    assert found["area"][0] == pytest.approx(houses()["area"].median(), abs=1e-2)


def frame_of(**columns):
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("column", "kind", "names"),
    [
        ([1, 2, 3, 4], "number", ["x"]),
        (["1", "2.5", None, "4"], "number", ["x", "x (missing)"]),
        ([True, False, True, True], "number", ["x"]),
        (["2024-01-01", "2024-03-01", "2024-02-01", None], "date", ["x", "x (missing)"]),
        (["2024-01-01T10:00:00Z", "2024-03-01T10:00:00+02:00", "2024-02-01", "2024-02-01"], "date", ["x"]),
        (["a", "a", "b", "b"], "category", ["x=a", "x=b"]),
        (["a", "a", None, None], "category", ["x=(missing)", "x=a"]),
        ([" a", "a ", "b", "b"], "category", ["x=a", "x=b"]),
        (["a", "a", "b", "c"], "category", ["x=a", "x=(other)"]),
        (["a", "a", "1", "1"], "category", ["x=1", "x=a"]),
        (pd.Categorical([3, 3, 5, 5]), "category", ["x=3", "x=5"]),
        (pd.array([1, None, 3, 4], dtype="Int64"), "number", ["x", "x (missing)"]),
        (pd.array([True, None, False, True], dtype="boolean"), "number", ["x", "x (missing)"]),
    ],
    ids=str,
)
def test_what_a_column_is_taken_for(column, kind, names):
    frame = frame_of(x=column)
    (entry,) = encoding = learn_encoding("rows", frame, ["x"], pytest.fail)
    assert entry["kind"] == kind
    found = encode("rows", frame, encoding)
    assert list(found.columns) == names
    assert np.isfinite(found.to_numpy()).all()


def test_many_levels_share_a_column():
    texts = [f"level {i}" for i in range(100) for _ in range(10 + i)]
    (entry,) = learn_encoding("rows", frame_of(x=texts), ["x"], pytest.fail)
    assert len(entry["levels"]) == 50
    assert entry["levels"][-1] == "(other)"
    assert "level 99" in entry["levels"]
    assert "level 0" not in entry["levels"]


@pytest.mark.parametrize(
    ("trained", "new", "sentence"),
    [
        ([1.0, 2.0], ["a", "b"], "column 'x' of new must hold numbers, as in training"),
        (["2024-01-01", "2024-01-02"], ["soon", "later"], r"column 'x' of new must hold dates \(such as 2024-05-31\)"),
    ],
)
def test_a_column_of_another_kind_is_refused(trained, new, sentence):
    encoding = learn_encoding("rows", frame_of(x=trained), ["x"], pytest.fail)
    with pytest.raises(InputError, match=sentence):
        encode("new", frame_of(x=new), encoding)


def test_nothing_left_and_a_name_that_is_taken(tmp_path):
    frame = frame_of(x=["a", "b", "c", "d"], y=[None] * 4, price=[1.0, 2.0, 3.0, 5.0])
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(InputError, match="no column that can be a feature"),
    ):
        TabularRegressionDataModule(written(tmp_path, frame), "price", encode=True).learned()
    frame = frame_of(**{"x": ["a", "a", "b", "b"], "x=a": [1.0, 2.0, 3.0, 4.0], "price": [1.0, 2.0, 3.0, 5.0]})
    with pytest.raises(InputError, match="has 'x=a' for a column and for a level of another: rename it"):
        TabularRegressionDataModule(written(tmp_path, frame), "price", encode=True).learned()


def test_without_it_the_error_says_that_there_is_one(tmp_path):
    for columns in (["town", "price"], ["sold", "price"], ["area", "price"]):
        path = written(tmp_path, houses()[columns])
        with pytest.raises(InputError, match="encode"):
            TabularRegressionDataModule(path, "price").learned()


@pytest.mark.slow
def test_from_a_table_to_predictions_in_two_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = houses()
    written(tmp_path, frame)
    written(tmp_path, frame.drop(columns="price").iloc[:5], "new.csv")
    given = ["--trainer.enable_progress_bar", "false"]
    own = ["--data.dataset", "rows.csv", "--data.target", "price", "--data.encode", "true", "--model.tau", "2000"]
    with pytest.warns(UserWarning, match="note"):
        main(["fit", "--config", "dro_diabetes", *own, "--trainer.max_epochs", "20", *given])
    config = tmp_path / "lightning_logs" / "version_0" / "config.yaml"
    assert yaml.safe_load(config.read_text())["data"]["init_args"]["encode"] is True
    checkpoint = str(config.parent / "checkpoints" / "last.ckpt")
    main(["predict", "--config", str(config), "--ckpt_path", checkpoint, "--data.dataset", "new.csv", *given])
    (path,) = tmp_path.rglob("predictions.csv")
    found = pd.read_csv(path)["prediction"]
    expected = LinearRegression().fit(
        pd.get_dummies(frame[["town", "garden"]]).assign(area=frame["area"].fillna(frame["area"].median())),
        frame["price"],
    )
    rows = pd.get_dummies(frame[["town", "garden"]]).assign(area=frame["area"].fillna(frame["area"].median())).iloc[:5]
    assert np.abs(found - expected.predict(rows)).max() < 40
