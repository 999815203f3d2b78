"""Tables in CSV and Parquet files, as frames."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from scent_lightning.data.text_tables import column_names, text_rows
from scent_lightning.errors import InputError
from scent_lightning.words import named_twice

__all__ = ["read_table"]

_WITHOUT_NAME = re.compile(r"Unnamed: [\d.]+|__index_level_\d+__")  # as pandas calls a column that has none


def read_table(path: Path) -> pd.DataFrame:
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
