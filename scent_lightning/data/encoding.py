"""Columns of text, dates and missing values as numbers, by scikit-learn; what was learned is plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_union
from sklearn.preprocessing import OneHotEncoder

from scent_lightning.errors import InputError

__all__ = ["Encoding", "encode", "learn_encoding", "source_columns"]

# One entry a column: its name, its kind ("number", "date" or "category"), and what its values become.
Encoding = list[dict[str, Any]]

MOST_LEVELS = 50
RARE, MISSING = "(other)", "(missing)"
_MAYBE_DATES = ("string", "mixed", "date", "datetime", "datetime64")  # as pandas calls what is in a column
_DAY = pd.Timedelta(days=1)


def learn_encoding(table: str, frame: pd.DataFrame, columns: Sequence[str], warn: Callable[[str], None]) -> Encoding:
    """What the columns of the training rows are.

    Args:
        table: what messages call it.
        frame: the training rows.
        columns: the features among its columns.
        warn: told of a column that is left out.

    Raises:
        InputError: nothing is left.
    """
    encoding: Encoding = []
    for name in columns:
        column = frame[name]
        if column.isna().all():
            warn(f"{table}: column {name!r} is left out, as it has no value in the training rows")
        elif (numbers := _as_numbers(column)) is not None:
            encoding.append(_learned_number(name, "number", numbers))
        elif (dates := _as_dates(column)) is not None:
            origin = dates.min()
            days = (dates - origin) / _DAY
            encoding.append({**_learned_number(name, "date", days), "origin": origin.isoformat()})
        elif column.nunique() == len(column) > 2:
            warn(f"{table}: column {name!r} is left out, as every row has another text: it names the rows")
        else:
            encoding.append(_learned_category(name, column))
    if not encoding:
        raise InputError(f"{table} has no column that can be a feature")
    return encoding


def source_columns(encoding: Encoding) -> list[str]:
    """The columns that an encoding needs."""
    return [entry["name"] for entry in encoding]


def encode(table: str, frame: pd.DataFrame, encoding: Encoding) -> pd.DataFrame:
    """The columns of an encoding as numbers, without a missing one.

    A number or date that is missing is the training rows' median, and ``NAME (missing)`` is 1 there if any was missing
    among those. A text has a column ``NAME=LEVEL`` for each level of training; ``NAME=(other)`` stands for those that
    were rare, and for levels that are new. If there were no rare ones, all columns of a new level are 0.

    Args:
        table: what messages call it.
        frame: any rows with those columns.
        encoding: of :func:`learn_encoding`.

    Raises:
        InputError: a column of numbers or dates has something else.
    """
    values = pd.DataFrame({entry["name"]: _values(table, frame[entry["name"]], entry) for entry in encoding})
    parts = [(str(i), _transformer(entry), [entry["name"]]) for i, entry in enumerate(encoding)]
    encoded: Any = ColumnTransformer(parts).fit_transform(values)
    names = [name for entry in encoding for name in _names(entry)]
    found: pd.DataFrame = pd.DataFrame(np.asarray(encoded, dtype=np.float64), columns=names, index=frame.index)
    return found


def _transformer(entry: dict[str, Any]) -> Any:
    """A transformer with nothing left to learn."""
    if entry["kind"] == "category":
        return OneHotEncoder(categories=[entry["levels"]], handle_unknown="ignore", sparse_output=False)
    filled = SimpleImputer(strategy="constant", fill_value=entry["median"], keep_empty_features=True)
    return make_union(filled, MissingIndicator(features="all")) if entry["missing"] else filled


def _names(entry: dict[str, Any]) -> list[str]:
    name = entry["name"]
    if entry["kind"] == "category":
        return [f"{name}={level}" for level in entry["levels"]]
    return [name, f"{name} {MISSING}"] if entry["missing"] else [name]


def _values(table: str, column: pd.Series, entry: dict[str, Any]) -> npt.NDArray[Any]:
    """A column as its transformer takes it."""
    if entry["kind"] == "category":
        levels = set(entry["levels"])
        texts = column.map(_text).where(column.notna(), MISSING)
        return np.asarray(texts.where(texts.isin(levels), RARE), dtype=object)
    found = _as_numbers(column) if entry["kind"] == "number" else _as_dates(column)
    if found is None:
        kind = {"number": "numbers", "date": "dates (such as 2024-05-31)"}[entry["kind"]]
        raise InputError(
            f"column {entry['name']!r} of {table} must hold {kind}, as in training, and has something else"
        )
    if entry["kind"] == "date":
        found = (found - pd.Timestamp(entry["origin"])) / _DAY
    values: npt.NDArray[Any] = found.to_numpy(dtype=np.float64, na_value=np.nan)
    return values


def _learned_number(name: str, kind: str, values: pd.Series) -> dict[str, Any]:
    missing = bool(values.isna().any())
    return {"name": name, "kind": kind, "median": float(values.median()), "missing": missing}


def _learned_category(name: str, column: pd.Series) -> dict[str, Any]:
    """The levels that are frequent enough, in their order, and a last one for the others if there are any."""
    texts = column.map(_text).where(column.notna(), MISSING).to_numpy(dtype=object).reshape(-1, 1)
    least = max(2, min(10, len(texts) // 50))
    encoder = OneHotEncoder(min_frequency=least, max_categories=MOST_LEVELS, handle_unknown="infrequent_if_exist")
    encoder.fit(texts)
    rare = encoder.infrequent_categories_[0]
    found = [str(level) for level in encoder.categories_[0]]
    if rare is not None:
        infrequent = {str(level) for level in rare}
        found = [*(level for level in found if level not in infrequent), RARE]
    return {"name": name, "kind": "category", "levels": found}


def _text(value: Any) -> str:
    return str(value).strip()


def _as_numbers(column: pd.Series) -> pd.Series | None:
    """As numbers with NaN where nothing is; None if anything else is in it."""
    if pd.api.types.is_datetime64_any_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype):
        return None
    try:
        numbers = pd.to_numeric(column)
    except (TypeError, ValueError):
        return None
    if pd.api.types.is_complex_dtype(numbers) or pd.api.types.is_timedelta64_dtype(numbers):
        return None
    found: pd.Series = pd.Series(numbers.to_numpy(dtype=np.float64, na_value=np.nan), index=column.index)
    return found


def _as_dates(column: pd.Series) -> pd.Series | None:
    """As dates without a time zone, NaT where nothing is; None if anything else is in it."""
    if not pd.api.types.is_datetime64_any_dtype(column) and pd.api.types.infer_dtype(column) not in _MAYBE_DATES:
        return None
    try:
        dates = pd.to_datetime(column, format="ISO8601", utc=True)
    except (TypeError, ValueError):
        return None
    without_zone: pd.Series = dates.dt.tz_localize(None)
    return without_zone
