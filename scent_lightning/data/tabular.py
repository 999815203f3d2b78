"""Tables for regression: bundled, downloaded, or from a CSV or Parquet file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import fetch_california_housing, fetch_openml, load_diabetes
from torch.utils.data import DataLoader

from scent_lightning.data.indexed import (
    IndexedTensorDataset,
    batch_loader,
    check_batch_size,
    evaluation_loader,
    place_in_run,
)
from scent_lightning.data.state import TrainedDataModule, fingerprint
from scent_lightning.data.text_tables import column_names, named_twice, text_rows
from scent_lightning.errors import InputError
from scent_lightning.summary import listed, rows_in_words

__all__ = ["TabularRegressionDataModule"]

EVALUATION_BATCH = 8192
_WITHOUT_NAME = re.compile(r"Unnamed: [\d.]+|__index_level_\d+__")  # as pandas calls a column that has none
_DATES = ("datetime64", "datetime", "date", "timedelta64", "timedelta", "time", "period")
_TOLERANCE = 0.01  # rounding may take this fraction of a column's standard deviation


def _diabetes(data_dir: Path) -> tuple[pd.DataFrame, str]:
    frame: pd.DataFrame = load_diabetes(as_frame=True, scaled=False).frame
    frame["target"] /= 100
    return frame, "target"


def _find(data_dir: Path, folder: str, file: str) -> Path | None:
    return next((path for path in (data_dir / folder / file, data_dir / file) if path.is_file()), None)


def _fetch(name: str, data_dir: Path, file: str, fetch: Callable[[], Any]) -> pd.DataFrame:
    try:
        frame: pd.DataFrame = fetch().frame
    except Exception as error:
        raise InputError(
            f"data set {name!r} is neither in data_dir ({data_dir / name / file}) nor could it be downloaded: {error}"
        ) from error
    return frame


def _california_housing(data_dir: Path) -> tuple[pd.DataFrame, str]:
    path = _find(data_dir, "california_housing", "cal_housing.csv")
    if path is None:
        frame = _fetch(
            "california_housing", data_dir, "cal_housing.csv", lambda: fetch_california_housing(as_frame=True)
        )
        return frame, "MedHouseVal"
    raw = _read(path)
    # The derived columns of scikit-learn's fetch_california_housing, in its order.
    frame = pd.DataFrame(
        {
            "MedInc": raw["median_income"],
            "HouseAge": raw["housing_median_age"],
            "AveRooms": raw["total_rooms"] / raw["households"],
            "AveBedrms": raw["total_bedrooms"] / raw["households"],
            "Population": raw["population"],
            "AveOccup": raw["population"] / raw["households"],
            "Latitude": raw["latitude"],
            "Longitude": raw["longitude"],
            "MedHouseVal": raw["median_house_value"] / 100_000,
        }
    )
    return frame, "MedHouseVal"


def _abalone(data_dir: Path) -> tuple[pd.DataFrame, str]:
    path = _find(data_dir, "abalone", "abalone.csv")
    if path is None:
        frame = _fetch(
            "abalone", data_dir, "abalone.csv", lambda: fetch_openml("abalone", version=1, as_frame=True, parser="auto")
        )
    else:
        frame = _read(path)
    sex, target = frame.columns[0], frame.columns[-1]
    rings = frame[target].astype(float)
    frame = frame.rename(columns={target: "Rings"})
    frame["Rings"] = 10 * (rings - rings.min()) / (rings.max() - rings.min())
    frame[sex] = frame[sex].map({"M": 1, "F": 2, "I": 3}).astype(float)
    return frame, "Rings"


BUILT_IN: dict[str, Callable[[Path], tuple[pd.DataFrame, str]]] = {
    "diabetes": _diabetes,
    "california_housing": _california_housing,
    "abalone": _abalone,
}


def _read(path: Path) -> pd.DataFrame:
    """The table in a file. Its column names are without surrounding spaces, and none occurs twice.

    ``attrs["index"]`` has the names of the columns that number or name the rows and are no features by themselves.
    """
    if path.suffix.lower() in (".parquet", ".pq"):
        frame = _read_parquet(path)
    else:
        names = _checked_names(path)
        try:
            frame = pd.read_csv(path, names=names, header=0, index_col=False, low_memory=False)
        except Exception as error:
            raise _unreadable(path, error) from error
        frame.attrs["index"] = [name for name in names if _WITHOUT_NAME.fullmatch(name)]
    return frame


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        frame: pd.DataFrame = pd.read_parquet(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    index = [str(name).strip() for name in frame.index.names if name is not None]
    _check_unique(path, [*index, *(str(name).strip() for name in frame.columns)])
    if index:
        frame = frame.reset_index()
    frame.columns = [str(name).strip() for name in frame.columns]
    frame.attrs["index"] = [name for name in frame.columns if name in index or _WITHOUT_NAME.fullmatch(name)]
    return frame


def _checked_names(path: Path) -> list[str]:
    """The header of a CSV file, every row of which has as many fields; columns without a name as pandas calls them."""
    names = column_names(path, ",")
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise InputError(
            f"{path} separates its columns by {other!r}: save it with commas between the columns and points in numbers"
        )
    _check_unique(path, names)
    for line, fields in text_rows(path, ","):
        if len(fields) < len(names):
            raise InputError(
                f"cannot read {path} as a table: line {line} has {len(fields)} fields where the header has {len(names)}"
            )
    for position, name in enumerate(names):
        if not name:
            named = f"Unnamed: {position}"
            names[position] = named if named not in names else f"{named}.1"
    return names


def _check_unique(path: Path, names: list[str]) -> None:
    if (name := named_twice(names)) is not None:
        raise InputError(f"{path} has more than one column of the name {name!r} (spaces around it do not count)")


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"cannot read {path} as a table: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _mean_and_scale(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column of ``(n, d)``; 1 where all values are the same."""
    mean = values.mean(axis=0)
    mean += (values - mean).mean(axis=0)  # what rounding has left in a mean far from 0
    centred = values - mean
    size = np.abs(centred).max(axis=0)
    constant = values.min(axis=0) == values.max(axis=0)
    size[constant] = 1.0
    scale: np.ndarray = size * np.sqrt(np.mean((centred / size) ** 2, axis=0))  # squares neither overflow nor vanish
    scale[constant] = 1.0
    return mean, scale


def _some(values: list[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:5])
    return shown if len(values) <= 5 else f"{shown}, … ({len(values)} in all)"


def _counts_rows(column: pd.Series) -> bool:
    """Whether a column counts the rows, from 0 or 1."""
    if not pd.api.types.is_integer_dtype(column) or column.isna().any() or len(column) < 3:
        return False
    values = column.to_numpy()
    return values[0] in (0, 1) and bool((values == np.arange(len(values)) + values[0]).all())


def _hint(column: pd.Series) -> str:
    """What may be meant by the first value that is no number."""
    texts = column.dropna().astype(str)
    bad = texts[pd.to_numeric(texts, errors="coerce").isna()]
    value = bad.iloc[0] if len(bad) else ""
    if re.fullmatch(r"[-+]?[\d.,' \u00a0]*\d", value):
        return "; write numbers with a decimal point and nothing between thousands"
    if re.fullmatch(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*", value):
        return "; make a date a number first, such as days since a date"
    return ""


class TabularRegressionDataModule(TrainedDataModule):
    """Rows of numbers with a numeric target, as whole batches ``(features, target, index)``.

    ``features`` is float32 of shape ``(B, d)``, ``target`` float32 of shape ``(B,)``, ``index`` int64 of shape
    ``(B,)``: the row's position in its split; for predict, in the file. Training batches are shuffled anew every epoch.
    ``predict`` goes over all rows in the order of the file.

    A checkpoint holds the columns and the scaling of the training run. Loaded from it (the Trainer's ``ckpt_path``, or
    :meth:`load_state_dict`), the module treats every file alike: the columns are taken by name, in whatever order and
    among whatever others, and scaled as in training. ``predict`` then needs no target: where the file lacks the column,
    or has nothing in it, ``target`` is None. A single row is enough.

    Numbers have a decimal point; True and False are 1 and 0. Columns without a name and the index of a Parquet file are
    left out with a warning unless ``features`` names them ("Unnamed: 0" is a first column without a name). Standardised
    features are centred in float64 before they become float32; the target, and features that are not standardised,
    become float32 as they are.

    Args:
        dataset: "diabetes" (442 rows, part of scikit-learn; the target is divided by 100), "california_housing"
            (20,640 rows, target in 100,000 dollars), "abalone" (4,177 rows, target scaled to 0…10), or the path of a
            CSV file with a header (commas, UTF-8; may be compressed as .gz, .bz2 or .xz) or of a Parquet file.
        target: the column to predict; needed for a file, and not allowed otherwise.
        features: the columns to use; None takes all but the target and an index.
        data_dir: where the named data sets are looked for before they are downloaded, as
            ``california_housing/cal_housing.csv`` and ``abalone/abalone.csv``; None takes the environment variable
            SCENT_LIGHTNING_DATA, or ``data``.
        batch_size: rows of a training batch, in each process.
        val_fraction: fraction of the rows for validation, in [0, 1); 0 validates on the training rows.
        test_fraction: fraction of the rows for testing, in [0, 1); 0 tests on the training rows.
        standardize: shift and scale each feature to mean 0 and variance 1 on the training rows.
        split_seed: which rows go into which split.
        num_workers: loader processes; 0 loads in the training process, which is fastest here.

    Raises:
        InputError: before training, in one sentence: an unknown data set, a missing file or column, two columns of one
            name, a row with more or fewer fields than the header (which line), a column that is not numeric or holds
            dates, rows with missing values (which), a number beyond float32 (in which row), a column whose differences
            are lost in rounding, too few rows, or an argument out of range.

    Example:
        >>> data = TabularRegressionDataModule("diabetes", batch_size=50)
        >>> data.num_features, data.num_anchors
        (10, 442)
        >>> features, target, index = next(iter(data.train_dataloader()))
        >>> features.shape, target.shape, index.dtype
        (torch.Size([50, 10]), torch.Size([50]), torch.int64)
    """

    def __init__(
        self,
        dataset: str = "diabetes",
        target: str | None = None,
        features: list[str] | None = None,
        data_dir: str | None = None,
        batch_size: int = 100,
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        standardize: bool = True,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= value < 1:
                raise InputError(f"{name} must be in [0, 1), got {value!r}")
        if val_fraction + test_fraction >= 1:
            raise InputError(f"val_fraction + test_fraction must be below 1, got {val_fraction} + {test_fraction}")
        if num_workers < 0:
            raise InputError(f"num_workers must be at least 0, got {num_workers!r}")
        if dataset in BUILT_IN and target is not None:
            raise InputError(f"target is part of the data set {dataset!r}; leave it out")
        self.dataset = dataset
        self.target = target
        self.features = features
        self.data_dir = Path(data_dir or os.environ.get("SCENT_LIGHTNING_DATA") or "data")
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.standardize = standardize
        self.split_seed = split_seed
        self.num_workers = num_workers
        self._raw: tuple[list[str], np.ndarray, np.ndarray | None] | None = None
        self._scaling: tuple[np.ndarray, np.ndarray] | None = None
        self._splits: dict[str, IndexedTensorDataset] = {}

    @property
    def num_features(self) -> int:
        """Number of features d."""
        columns = self._of_checkpoint.get("columns")
        return len(self._table()[0] if columns is None else columns)

    @property
    def num_anchors(self) -> int:
        """Number of training rows."""
        if not self._of_checkpoint:
            self._train_split()  # says what is wrong before a run leaves anything on the disk
        return len(self._rows("train"))

    def setup(self, stage: str) -> None:
        """For fit, read the table and check its splits; elsewhere a checkpoint may still say what to read."""
        if stage == "fit":
            for split in ("train", "val", "test"):
                self._rows(split)
            self._train_split()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the three tensors, without Lightning's walk through an unknown collection."""
        return tuple(part if part is None else part.to(device, non_blocking=True) for part in batch)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        replicas, rank, epoch = place_in_run(self.trainer)
        return batch_loader(self._train_split(), self.batch_size, True, replicas, rank, self.num_workers, epoch=epoch)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation rows, or the training rows if ``val_fraction`` is 0."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Test rows, or the training rows if ``test_fraction`` is 0."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """All rows in the order of the file."""
        return self._evaluation_loader("predict")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        return evaluation_loader(self._split(split), EVALUATION_BATCH, self.trainer, self.num_workers)

    def _summary(self) -> dict[str, str]:
        columns, _, _ = self._table()
        said = {
            "data": self.dataset,
            "features": f"{len(columns):,}{', standardized' if self._scales() else ''}: {listed(columns)}",
        }
        if self.target is not None:
            said["target"] = self.target
        said["training"] = rows_in_words(len(self._rows("train")))
        for name, split in (("validation", "val"), ("test", "test")):
            fraction = getattr(self, f"{split}_fraction")
            said[name] = (
                rows_in_words(len(self._rows(split))) if fraction else f"the training rows, as {split}_fraction is 0"
            )
        return said

    # What a checkpoint holds

    def _learn(self) -> dict[str, Any]:
        columns, _, _ = self._table()
        learned: dict[str, Any] = {"columns": list(columns)}
        if self._scales():
            mean, scale = self._scaler()
            learned |= {"mean": torch.from_numpy(mean), "scale": torch.from_numpy(scale)}
        return learned

    def _fingerprint(self, rows: int) -> str:
        columns, features, target = self._table()
        chosen = self._rows("train")[:rows]
        return fingerprint([*columns, features[chosen], b"" if target is None else target[chosen]])

    def _forget(self) -> None:
        self._raw = self._scaling = None
        self._splits = {}

    # Splits

    def _train_split(self) -> IndexedTensorDataset:
        if "train" not in self._splits:  # once: a search for a batch size ends at the rows by itself
            check_batch_size(self.batch_size, len(self._rows("train")))
        return self._split("train")

    def _split(self, name: str) -> IndexedTensorDataset:
        """Features, target and index of a split; only of "predict" the target may be None."""
        if name not in self._splits:
            columns, features, target = self._table(labelled=name != "predict")
            chosen = self._rows(name)
            values = features[chosen]
            if self._scales():
                mean, scale = self._scaler()
                values = (values - mean) / scale
                self._check_range(values, columns, chosen, "after scaling ")
            y = None if target is None else torch.from_numpy(target[chosen].astype(np.float32))
            self._splits[name] = IndexedTensorDataset(torch.from_numpy(values.astype(np.float32)), y)
        return self._splits[name]

    def _scales(self) -> bool:
        return "mean" in self._of_checkpoint if self._of_checkpoint else self.standardize

    def _scaler(self) -> tuple[np.ndarray, np.ndarray]:
        """What to subtract from each feature and to divide it by: of the training run, wherever it was."""
        if self._scaling is None:
            saved = self._of_checkpoint
            if "mean" in saved:
                self._scaling = saved["mean"].numpy(), saved["scale"].numpy()
            else:
                self._scaling = _mean_and_scale(self._table()[1][self._rows("train")])
        return self._scaling

    def _rows(self, split: str) -> np.ndarray:
        """Rows of a split, ascending."""
        rows = len(self._table(labelled=False)[1])
        if split == "predict":
            return np.arange(rows)
        if rows < 2 and not self._of_checkpoint:
            raise InputError(f"{self.dataset} has {rows} row(s); at least 2 are needed")
        sizes = {"val": round(self.val_fraction * rows), "test": round(self.test_fraction * rows)}
        order = np.random.default_rng(self.split_seed).permutation(rows)
        if split != "train" and getattr(self, f"{split}_fraction") > 0:
            if sizes[split] == 0:
                raise InputError(f"{split}_fraction {getattr(self, f'{split}_fraction')} of {rows} rows leaves no row")
            start = 0 if split == "val" else sizes["val"]
            return np.sort(order[start : start + sizes[split]])
        return np.sort(order[sizes["val"] + sizes["test"] :])

    # The table

    def _table(self, labelled: bool = True) -> tuple[list[str], np.ndarray, np.ndarray | None]:
        """Names and values (n, d) of the features and the target (n,), in float64, checked.

        With a checkpoint's columns the target may be missing, unless ``labelled``; it is None then.
        """
        if self._raw is None:
            self._raw = self._read_table()
        if labelled and self._raw[2] is None:
            raise InputError(
                f"{self.dataset} has nothing in its target column {self.target}: only predict does without"
            )
        return self._raw

    def _read_table(self) -> tuple[list[str], np.ndarray, np.ndarray | None]:
        trained = self._of_checkpoint.get("columns")
        target: str | None
        if self.dataset in BUILT_IN:
            frame, target = BUILT_IN[self.dataset](self.data_dir)
        else:
            path = Path(self.dataset)
            if not path.is_file():
                known = ", ".join(BUILT_IN)
                raise InputError(f"dataset {self.dataset!r} is neither a file nor one of the known data sets: {known}")
            frame, target = _read(path), self.target
            if target is None and trained is None:
                raise InputError(f"target must name a column of {path}: {_some(list(frame.columns))}")
        columns = trained or (self._all_but(frame, target) if self.features is None else self.features)
        if trained is not None and (target not in frame.columns or frame[target].isna().all()):
            target = None
        wanted = columns if target is None else [*columns, target]
        missing = [name for name in wanted if name not in frame.columns]
        if missing:
            raise InputError(f"{self.dataset} has no column {_some(missing)}; it has: {', '.join(frame.columns)}")
        if target in columns or not columns:
            raise InputError(f"features must name at least one column other than the target, got {columns}")
        if (twice := named_twice(columns)) is not None:
            raise InputError(f"features must name each column once, got {twice!r} twice")
        values = self._numbers(frame, wanted)
        if trained is None and len(values) > 0:
            self._check_resolution(values, wanted)
        return columns, values[:, : len(columns)], None if target is None else values[:, -1]

    def _all_but(self, frame: pd.DataFrame, target: str | None) -> list[str]:
        """All columns but the target and an index; says so."""
        index = [name for name in frame.attrs.get("index", []) if name != target]
        if index:
            self._warn(
                f"{self.dataset}: {_some(index)} is left out, as an index or a column without a name; to use it, name "
                "it in features"
            )
        columns = [name for name in frame.columns if name not in (target, *index)]
        counting = [name for name in columns if _counts_rows(frame[name])]
        if counting:
            self._warn(
                f"{self.dataset}: column {_some(counting)} counts the rows and is a feature like the others; if it is "
                "an index, leave it out by naming the others in features"
            )
        return columns

    def _numbers(self, frame: pd.DataFrame, columns: list[str]) -> np.ndarray:
        """Values of columns, float64, shape ``(n, len(columns))``, all of them finite and in the range of float32."""
        values = np.empty((len(frame), len(columns)))
        for position, name in enumerate(columns):
            values[:, position] = self._column(frame[name], name)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if bad.size:
            names = [columns[i] for i in np.flatnonzero(~np.isfinite(values).all(axis=0))]
            raise InputError(
                f"{self.dataset} has missing or non-finite values in rows {_some(bad.tolist())} (counted from 0), "
                f"columns {_some(names)}"
            )
        self._check_range(values, columns, np.arange(len(values)))
        return values

    def _column(self, column: pd.Series, name: str) -> np.ndarray:
        kind = pd.api.types.infer_dtype(column, skipna=True)
        if kind in _DATES:
            raise InputError(
                f"column {name!r} of {self.dataset} holds dates or times, which are no numbers: make it a number, such "
                "as days since a date, or leave it out by naming the others in features"
            )
        try:
            if kind == "complex":
                raise TypeError("it holds complex numbers")
            numbers: np.ndarray = pd.to_numeric(column).to_numpy(dtype=float, na_value=np.nan)
        except (TypeError, ValueError) as error:
            raise InputError(f"column {name!r} of {self.dataset} is not numeric: {error}{_hint(column)}") from error
        large = len(numbers) > 0 and abs(numbers[0]) > 2**53
        if large and (numbers == numbers[0]).all() and column.nunique() > 1:
            raise InputError(
                f"column {name!r} of {self.dataset} has different integers near {numbers[0]:.6g} that float64 makes "
                "equal: subtract a constant from it"
            )
        return numbers

    def _check_range(self, values: np.ndarray, columns: list[str], rows: np.ndarray, when: str = "") -> None:
        """Raise InputError for a number that float32 cannot hold; ``rows`` says which rows of the file they are."""
        beyond = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
        if beyond.size:
            row, position = beyond[0].tolist()
            raise InputError(
                f"column {columns[position]!r} of {self.dataset} has {values[row, position]:.6g} {when}in row "
                f"{rows[row]} (counted from 0), which float32 cannot hold (at most 3.4e38): divide it by a constant"
            )

    def _check_resolution(self, values: np.ndarray, columns: list[str]) -> None:
        """Raise InputError for a column whose differences are lost in rounding: in float64, or as it reaches the model.

        Standardised features are centred in float64 before they become float32; all else becomes float32 as it is.
        """
        _, spread = _mean_and_scale(values)
        varies = values.min(axis=0) != values.max(axis=0)
        if not varies.all() and len(values) > 1:
            same = [columns[position] for position in np.flatnonzero(~varies)]
            self._warn(f"{self.dataset}: column {_some(same)} has the same value in every row")
        largest = np.abs(values).max(axis=0)
        lost = np.finfo(np.float64).eps / 2 * largest
        centred = np.array([self.standardize and position < values.shape[1] - 1 for position in range(len(columns))])
        rounded = np.abs(values - values.astype(np.float32)).max(axis=0)
        lost = np.where(centred, lost, np.maximum(lost, rounded))
        for position in np.flatnonzero(varies & (lost > _TOLERANCE * spread)).tolist():
            raise InputError(
                f"column {columns[position]!r} of {self.dataset} has values up to {largest[position]:.6g} that differ "
                f"by about {spread[position]:.2g}, which rounding to float{'64' if centred[position] else '32'} blurs: "
                "subtract a constant from it"
            )
