"""Tables for regression: bundled, downloaded, or from a CSV or Parquet file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from sklearn.datasets import fetch_california_housing, fetch_openml, load_diabetes
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader

from scent_lightning.data.indexed import IndexedTensorDataset, batch_loader, check_batch_size, place_in_run
from scent_lightning.errors import InputError

__all__ = ["TabularRegressionDataModule"]

EVALUATION_BATCH = 8192


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
    try:
        frame: pd.DataFrame = pd.read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else pd.read_csv(path)
    except Exception as error:
        raise InputError(f"cannot read {path} as a table: {str(error).splitlines()[0]}") from error
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _some(values: list[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:5])
    return shown if len(values) <= 5 else f"{shown}, … ({len(values)} in all)"


class TabularRegressionDataModule(L.LightningDataModule):
    """Rows of numbers with a numeric target, as whole batches ``(features, target, index)``.

    ``features`` is float32 of shape ``(B, d)``, ``target`` float32 of shape ``(B,)``, ``index`` int64 of shape
    ``(B,)``: the row's position in its split; for predict, in the file. Training batches are shuffled anew every epoch.
    ``predict`` goes over all rows in the order of the file.

    Args:
        dataset: "diabetes" (442 rows, part of scikit-learn; the target is divided by 100), "california_housing"
            (20,640 rows, target in 100,000 dollars), "abalone" (4,177 rows, target scaled to 0…10), or the path of a
            CSV file with a header or of a Parquet file.
        target: the column to predict; needed for a file, and not allowed otherwise.
        features: the columns to use; None takes all but the target.
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
        InputError: before training, in one sentence: an unknown data set, a missing file or column, a column that is
            not numeric, rows with missing values (which), too few rows, or an argument out of range.

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
        self._splits: dict[str, IndexedTensorDataset] | None = None

    @property
    def num_features(self) -> int:
        """Number of features d."""
        return self._loaded()["train"].tensors[0].shape[1]

    @property
    def num_anchors(self) -> int:
        """Number of training rows."""
        return len(self._loaded()["train"])

    def setup(self, stage: str) -> None:
        """Read the table and split it, once."""
        self._loaded()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the three tensors, without Lightning's walk through an unknown collection."""
        return tuple(tensor.to(device, non_blocking=True) for tensor in batch)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        replicas, rank, epoch = place_in_run(self.trainer)
        return batch_loader(
            self._loaded()["train"], self.batch_size, True, replicas, rank, self.num_workers, epoch=epoch
        )

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
        return batch_loader(self._loaded()[split], EVALUATION_BATCH, False, num_workers=self.num_workers)

    def _loaded(self) -> dict[str, IndexedTensorDataset]:
        if self._splits is None:
            self._splits = self._split(*self._table())
        return self._splits

    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Features (n, d) and target (n,) in float64, checked."""
        if self.dataset in BUILT_IN:
            frame, target = BUILT_IN[self.dataset](self.data_dir)
        else:
            path = Path(self.dataset)
            if not path.is_file():
                known = ", ".join(BUILT_IN)
                raise InputError(f"dataset {self.dataset!r} is neither a file nor one of the known data sets: {known}")
            frame = _read(path)
            if self.target is None:
                raise InputError(f"target must name a column of {path}: {_some(list(frame.columns))}")
            target = self.target
        columns = [name for name in frame.columns if name != target] if self.features is None else self.features
        missing = [name for name in [*columns, target] if name not in frame.columns]
        if missing:
            raise InputError(f"{self.dataset} has no column {_some(missing)}; it has: {', '.join(frame.columns)}")
        if target in columns or not columns:
            raise InputError(f"features must name at least one column other than the target, got {columns}")
        values = np.empty((len(frame), len(columns) + 1))
        for position, name in enumerate([*columns, target]):
            try:
                values[:, position] = pd.to_numeric(frame[name]).to_numpy(dtype=float, na_value=np.nan)
            except (TypeError, ValueError) as error:
                raise InputError(f"column {name!r} of {self.dataset} is not numeric: {error}") from error
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if bad.size:
            names = [[*columns, target][i] for i in np.flatnonzero(~np.isfinite(values).all(axis=0))]
            raise InputError(
                f"{self.dataset} has missing or non-finite values in rows {_some(bad.tolist())} (counted from 0), "
                f"columns {_some(names)}"
            )
        return values[:, :-1], values[:, -1]

    def _split(self, features: np.ndarray, target: np.ndarray) -> dict[str, IndexedTensorDataset]:
        rows = len(target)
        if rows < 2:
            raise InputError(f"{self.dataset} has {rows} row(s); at least 2 are needed")
        sizes = {"val": round(self.val_fraction * rows), "test": round(self.test_fraction * rows)}
        order = np.random.default_rng(self.split_seed).permutation(rows)
        parts = {
            "val": np.sort(order[: sizes["val"]]),
            "test": np.sort(order[sizes["val"] : sizes["val"] + sizes["test"]]),
            "train": np.sort(order[sizes["val"] + sizes["test"] :]),
            "predict": np.arange(rows),
        }
        for split in ("val", "test"):
            if getattr(self, f"{split}_fraction") == 0:
                parts[split] = parts["train"]
            elif sizes[split] == 0:
                raise InputError(f"{split}_fraction {getattr(self, f'{split}_fraction')} of {rows} rows leaves no row")
        check_batch_size(self.batch_size, len(parts["train"]))
        if self.standardize:
            features = StandardScaler().fit(features[parts["train"]]).transform(features)
        x = torch.from_numpy(features.astype(np.float32))
        y = torch.from_numpy(target.astype(np.float32))
        return {split: IndexedTensorDataset(x[chosen], y[chosen]) for split, chosen in parts.items()}
