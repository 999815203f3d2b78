"""Columns of a table as numbers that neither float64 nor float32 blurs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = [
    "check_range",
    "check_resolution",
    "constant_columns",
    "counts_rows",
    "mean_and_scale",
    "names_rows",
    "numbers",
]

Array = npt.NDArray[Any]

NAMED = 5  # columns or rows in a message
_DATES = ("datetime64", "datetime", "date", "timedelta64", "timedelta", "time", "period")
_ENCODE = "; encode (--data.encode true) makes numbers of texts"
_NAMES_OF_NAMES = {"id", "ids", "identifier", "idx", "index", "key", "uuid", "guid"}
_TOLERANCE = 0.01  # rounding may take this fraction of a column's standard deviation


def mean_and_scale(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column of ``(n, d)``; 1 where all values are the same."""
    mean = values.mean(axis=0)
    mean += (values - mean).mean(axis=0)  # what rounding has left in a mean far from 0
    centred = values - mean
    size = np.abs(centred).max(axis=0)
    constant = values.min(axis=0) == values.max(axis=0)
    size[constant] = 1.0
    scale: Array = size * np.sqrt(np.mean((centred / size) ** 2, axis=0))  # squares neither overflow nor vanish
    scale[constant] = 1.0
    return mean, scale


def counts_rows(column: pd.Series) -> bool:
    """Whether a column counts the rows, from 0 or 1."""
    if not pd.api.types.is_integer_dtype(column) or column.isna().any() or len(column) < 3:
        return False
    values = column.to_numpy()
    return values[0] in (0, 1) and bool((values == np.arange(len(values)) + values[0]).all())


def names_rows(column: pd.Series) -> bool:
    """Whether a column looks like the numbers by which someone calls the rows: whole, all different, named so."""
    if not pd.api.types.is_integer_dtype(column) or len(column) < 3 or not column.is_unique:
        return False
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", str(column.name))
    return any(word.lower() in _NAMES_OF_NAMES for word in words)


def _hint(column: pd.Series) -> str:
    """What may be meant by the first value that is no number."""
    texts = column.dropna().astype(str)
    bad = texts[pd.to_numeric(texts, errors="coerce").isna()]
    value = bad.iloc[0] if len(bad) else ""
    if re.fullmatch(r"[-+]?[\d.,' \u00a0]*\d", value):
        return "; write numbers with a decimal point and nothing between thousands"
    if re.fullmatch(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*", value):
        return "; encode (--data.encode true) makes a date the days since the first one"
    return ""


def numbers(table: str, frame: pd.DataFrame, columns: list[str]) -> Array:
    """Values of columns of a table.

    Args:
        table: what messages call it.
        frame: has the columns.
        columns: names.

    Returns:
        float64, shape ``(n, len(columns))``, all of them finite and in the range of float32.

    Raises:
        InputError: a value is missing, no number, or beyond float32; the message names the column and the row.
    """
    values = np.empty((len(frame), len(columns)))
    for position, name in enumerate(columns):
        values[:, position] = _column(table, frame[name], name)
    finite = np.isfinite(values)
    bad = np.flatnonzero(~finite.all(axis=1))
    if bad.size:
        names = [columns[position] for position in np.flatnonzero(~finite.all(axis=0))]
        raise InputError(
            f"{table} has missing or non-finite values in rows {listed(bad.tolist(), NAMED)} (counted from 0), "
            f"columns {listed(names, NAMED)}; encode (--data.encode true) fills in what is missing"
        )
    check_range(table, values, columns, np.arange(len(values)))
    return values


def _column(table: str, column: pd.Series, name: str) -> Array:
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind in _DATES:
        raise InputError(
            f"column {name!r} of {table} holds dates or times, which are no numbers: make it a number, such as days "
            "since a date, set encode to true, or leave it out by naming the others in features"
        )
    try:
        if kind == "complex":
            raise TypeError("it holds complex numbers")
        found: Array = pd.to_numeric(column).to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise InputError(f"column {name!r} of {table} is not numeric: {error}{_hint(column) or _ENCODE}") from error
    large = len(found) > 0 and abs(found[0]) > 2**53
    if large and (found == found[0]).all() and column.nunique() > 1:
        raise InputError(
            f"column {name!r} of {table} has different integers near {found[0]:.6g} that float64 makes equal: subtract "
            "a constant from it"
        )
    return found


def check_range(table: str, values: Array, columns: list[str], rows: Array, when: str = "") -> None:
    """Raise InputError for a number that float32 cannot hold.

    Args:
        table: what the message calls it.
        values: shape ``(n, d)``.
        columns: d names.
        rows: which rows of the table they are, shape ``(n,)``.
        when: what was done to the values, with a space at its end.
    """
    beyond = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
    if beyond.size:
        row, position = beyond[0].tolist()
        raise InputError(
            f"column {columns[position]!r} of {table} has {values[row, position]:.6g} {when}in row {rows[row]} "
            "(counted from 0), which float32 cannot hold (at most 3.4e38): divide it by a constant"
        )


def constant_columns(values: Array, columns: list[str]) -> list[str]:
    """Names of the columns with the same value in every one of several rows."""
    if len(values) < 2:
        return []
    return [columns[position] for position in np.flatnonzero(values.min(axis=0) == values.max(axis=0))]


def check_resolution(table: str, values: Array, columns: list[str], centred: Array) -> None:
    """Raise InputError for a column whose differences are lost in rounding: in float64, or as it reaches the model.

    Args:
        table: what the message calls it.
        values: shape ``(n, d)``, n at least 1.
        columns: d names.
        centred: whether a column is centred in float64 before it becomes float32, shape ``(d,)``; else it becomes
            float32 as it is.
    """
    _, spread = mean_and_scale(values)
    varies = values.min(axis=0) != values.max(axis=0)
    largest = np.abs(values).max(axis=0)
    lost = np.finfo(np.float64).eps / 2 * largest
    rounded = np.abs(values - values.astype(np.float32)).max(axis=0)
    lost = np.where(centred, lost, np.maximum(lost, rounded))
    for position in np.flatnonzero(varies & (lost > _TOLERANCE * spread)).tolist():
        raise InputError(
            f"column {columns[position]!r} of {table} has values up to {largest[position]:.6g} that differ by about "
            f"{spread[position]:.2g}, which rounding to float{'64' if centred[position] else '32'} blurs: subtract a "
            "constant from it"
        )
