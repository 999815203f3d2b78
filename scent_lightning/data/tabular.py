"""Tables for regression: by name, or from a CSV or Parquet file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.columns import (
    NAMED,
    check_range,
    check_resolution,
    constant_columns,
    counts_rows,
    mean_and_scale,
    names_rows,
    numbers,
)
from scent_lightning.data.encoding import Encoding, encode, learn_encoding, source_columns
from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.fractions import check_fractions, divided_rows
from scent_lightning.data.indexed import IndexedTensorDataset
from scent_lightning.data.known_tables import KNOWN_TABLES
from scent_lightning.data.loading import check_batch_size
from scent_lightning.data.table_files import read_table
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed, named_twice, rows_in_words

__all__ = ["TabularRegressionDataModule"]

EVALUATION_BATCH = 8192
Array = npt.NDArray[Any]


class TabularRegressionDataModule(IndexedDataModule):
    """Rows of a table with a numeric target, as whole batches ``(features, target, index)``.

    ``features`` is float32 of shape ``(B, d)``, ``target`` float32 of shape ``(B,)``, ``index`` int64 of shape
    ``(B,)``: the row's position in its split; for predict, in the file. Training batches are shuffled anew every epoch.
    ``predict`` goes over all rows in the order of the file.

    A checkpoint holds the columns and the scaling of the training run. Loaded from it (the Trainer's ``ckpt_path``, or
    :meth:`load_state_dict`), the module treats every file alike: the columns are taken by name, in whatever order and
    among whatever others, and scaled as in training. ``predict`` then needs no target: where the file lacks the column,
    or has nothing in it, ``target`` is None. A single row is enough.

    With ``encode`` columns may also hold texts, dates (2024-05-31) and nothing, see
    :func:`~scent_lightning.data.encoding.encode`: a text becomes a column of 0 and 1 for each of its values, of which
    those in few rows share one, a date the days since the first, and what is missing the median, with a column that
    says so. All is learned from the training rows, and is in the checkpoint.

    Numbers have a decimal point; True and False are 1 and 0. Columns without a name and the index of a Parquet file are
    left out with a warning unless ``features`` names them ("Unnamed: 0" is a first column without a name). Standardised
    features are centred in float64 before they become float32; the target, and features that are not standardised,
    become float32 as they are.

    Args:
        dataset: "diabetes" (442 rows, part of scikit-learn; the target is divided by 100), "california_housing"
            (20,640 rows, target in 100,000 dollars), "abalone" (4,177 rows, target scaled to 0…10), or the path of a
            CSV file with a header (commas, UTF-8; may be compressed as .gz, .bz2 or .xz) or of a Parquet file.
        target: the column to predict: its name, needed for a file; None for a data set by name.
        features: the columns to use; None takes all but the target and an index.
        data_dir: where the named data sets are looked for before they are downloaded, as
            ``california_housing/cal_housing.csv`` and ``abalone/abalone.csv``; None takes the environment variable
            SCENT_LIGHTNING_DATA, or ``data``.
        batch_size: rows of a training batch, in each process.
        val_fraction: fraction of the rows for validation, in [0, 1); 0 validates on the training rows.
        test_fraction: fraction of the rows for testing, in [0, 1); 0 tests on the training rows.
        standardize: shift and scale each feature to mean 0 and variance 1 on the training rows.
        split_seed: which rows go into which split.
        encode: make numbers of texts, dates and missing values; a table of numbers alone stays as it is.
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
        encode: bool = False,
    ) -> None:
        super().__init__(batch_size, EVALUATION_BATCH, num_workers)
        check_fractions(val_fraction, test_fraction)
        if dataset in KNOWN_TABLES and target is not None:
            raise InputError(f"target is part of the data set {dataset!r}; leave it out")
        self.dataset = dataset
        self.target = target
        self.features = features
        self.data_dir = Path(data_dir or os.environ.get("SCENT_LIGHTNING_DATA") or "data")
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.standardize = standardize
        self.split_seed: int = checked_integer("split_seed", split_seed, least=0)
        self.encode = encode
        self._encoding: Encoding | None = None
        self._raw: tuple[list[str], Array, Array | None] | None = None
        self._scaling: tuple[Array, Array] | None = None

    @property
    def num_features(self) -> int:
        """Number of features d."""
        columns = self.restored.get("columns")
        return len(self._table()[0] if columns is None else columns)

    @property
    def num_anchors(self) -> int:
        """Number of training rows."""
        if not self.restored:
            self.split("train")  # says what is wrong before a run leaves anything on the disk
        return len(self._rows("train"))

    def setup(self, stage: str) -> None:
        """For fit, read the table and check its splits; elsewhere a checkpoint may still say what to read."""
        if stage == "fit":
            for split in ("train", "val", "test"):
                self._rows(split)
            self.split("train")

    def load(self, split: str) -> IndexedTensorDataset:
        """Features, target and index of a split; of "predict" all rows, of which the target may be None."""
        chosen = self._rows(split)
        if split == "train":  # once: a search for a batch size ends at the rows by itself
            check_batch_size(self.batch_size, len(chosen))
        columns, features, target = self._table(labelled=split != "predict")
        values = features[chosen]
        if self._scales():
            mean, scale = self._scaler()
            values = (values - mean) / scale
            check_range(self.dataset, values, columns, chosen, "after scaling ")
        y = None if target is None else torch.from_numpy(target[chosen].astype(np.float32))
        return IndexedTensorDataset(torch.from_numpy(values.astype(np.float32)), y)

    def summary(self) -> dict[str, str]:
        """Columns, target and the rows of each split."""
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

    def learned(self) -> dict[str, Any]:
        """The columns and their scaling."""
        columns, _, _ = self._table()
        learned: dict[str, Any] = {"columns": list(columns)}
        if self._encoding is not None:
            learned["encoding"] = self._encoding
        if self._scales():
            mean, scale = self._scaler()
            learned |= {"mean": torch.from_numpy(mean), "scale": torch.from_numpy(scale)}
        return learned

    def fingerprint(self, rows: int) -> str:
        """Hash of the first ``rows`` training rows, before they are scaled."""
        columns, features, target = self._table()
        chosen = self._rows("train")[:rows]
        return fingerprint([*columns, features[chosen], b"" if target is None else target[chosen]])

    def forget(self) -> None:
        """Have the table read anew."""
        super().forget()
        self._raw = self._scaling = self._encoding = None

    def _scales(self) -> bool:
        return "mean" in self.restored if self.restored else self.standardize

    def _scaler(self) -> tuple[Array, Array]:
        """What to subtract from each feature and to divide it by: of the training run, wherever it was."""
        if self._scaling is None:
            saved = self.restored
            if "mean" in saved:
                self._scaling = saved["mean"].numpy(), saved["scale"].numpy()
            else:
                self._scaling = mean_and_scale(self._table()[1][self._rows("train")])
        return self._scaling

    def _rows(self, split: str) -> Array:
        """Rows of a split, ascending."""
        return self._rows_of(split, len(self._table(labelled=False)[1]))

    def _rows_of(self, split: str, rows: int) -> Array:
        if split == "predict":
            return np.arange(rows)
        if rows < 2 and not self.restored:
            raise InputError(f"{self.dataset} has {rows} row(s); at least 2 are needed")
        parts = divided_rows(rows, self.split_seed, self.val_fraction, self.test_fraction)
        if split != "train" and (fraction := getattr(self, f"{split}_fraction")) > 0:
            if len(parts[split]) == 0:
                raise InputError(f"{split}_fraction {fraction} of {rows} rows leaves no row")
            return parts[split]
        return parts["train"]

    # The table

    def _table(self, labelled: bool = True) -> tuple[list[str], Array, Array | None]:
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

    def _read_table(self) -> tuple[list[str], Array, Array | None]:
        trained = self.restored.get("columns")
        target: str | None
        if self.dataset in KNOWN_TABLES:
            frame, target = KNOWN_TABLES[self.dataset](self.data_dir)
        else:
            path = Path(self.dataset)
            if not path.is_file():
                known = ", ".join(KNOWN_TABLES)
                raise InputError(f"dataset {self.dataset!r} is neither a file nor one of the known data sets: {known}")
            frame, target = read_table(path), self.target
            if target is None and trained is None:
                raise InputError(f"target must name a column of {path}: {listed(list(frame.columns), NAMED)}")
        self._encoding = self.restored.get("encoding")
        if self._encoding is not None:
            columns = source_columns(self._encoding)
        else:
            columns = trained or (self._all_but(frame, target) if self.features is None else self.features)
        if trained is not None and (target not in frame.columns or frame[target].isna().all()):
            target = None
        wanted = columns if target is None else [*columns, target]
        missing = [name for name in wanted if name not in frame.columns]
        if missing:
            raise InputError(
                f"{self.dataset} has no column {listed(missing, NAMED)}; it has: {', '.join(frame.columns)}"
            )
        if target in columns or not columns:
            raise InputError(f"features must name at least one column other than the target, got {columns}")
        if (twice := named_twice(columns)) is not None:
            raise InputError(f"features must name each column once, got {twice!r} twice")
        if self._encoding is None and self.encode and trained is None:
            training = frame.iloc[self._rows_of("train", len(frame))]
            self._encoding = learn_encoding(self.dataset, training, columns, self.warn)
        if self._encoding is not None:
            encoded = encode(self.dataset, frame, self._encoding)
            columns = list(encoded.columns)
            frame = encoded if target is None else pd.concat([encoded, frame[[target]]], axis=1)
            wanted = list(frame.columns)
            if (twice := named_twice(wanted)) is not None:
                raise InputError(f"{self.dataset} has {twice!r} for a column and for a level of another: rename it")
        values = numbers(self.dataset, frame, wanted)
        if trained is None and len(values) > 0:
            if same := constant_columns(values, wanted):
                self.warn(f"{self.dataset}: column {listed(same, NAMED)} has the same value in every row")
            # Standardised features are centred in float64; all else becomes float32 as it is.
            centred = np.arange(len(wanted)) < (len(columns) if self.standardize else 0)
            check_resolution(self.dataset, values, wanted, centred)
        return columns, values[:, : len(columns)], None if target is None else values[:, -1]

    def _all_but(self, frame: pd.DataFrame, target: str | None) -> list[str]:
        """All columns but the target and an index; says so."""
        index = [name for name in frame.attrs.get("index", []) if name != target]
        if index:
            self.warn(
                f"{self.dataset}: {listed(index, NAMED)} is left out, as an index or a column without a name; to use "
                "it, name it in features"
            )
        columns = [name for name in frame.columns if name not in (target, *index)]
        counting = [name for name in columns if counts_rows(frame[name])]
        if counting:
            self.warn(
                f"{self.dataset}: column {listed(counting, NAMED)} counts the rows and is a feature like the others; "
                "if it is an index, leave it out by naming the others in features"
            )
        naming = [name for name in columns if name not in counting and names_rows(frame[name])]
        if naming:
            self.warn(
                f"{self.dataset}: column {listed(naming, NAMED)} has another number in each row and is a feature like "
                "the others; if it only names the rows, leave it out by naming the others in features"
            )
        return columns
