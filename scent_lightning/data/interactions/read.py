"""Interactions from files, and those that have a name of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scent_lightning.data.table_files import read_table
from scent_lightning.data.text_tables import content_suffix, text_rows
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["KNOWN", "Columns", "Read", "read_file"]

Names = npt.NDArray[Any]  # of str, shape (n,)
_TABS = (".tsv", ".tab")
_SHOWN = 5


class Columns(NamedTuple):
    """Names of the columns of a file; None where there is no such column."""

    query: str | None
    item: str | None
    query_text: str | None = None
    item_text: str | None = None
    split: str | None = None
    time: str | None = None


class Read(NamedTuple):
    """Interactions as they were read, one a row.

    Attributes:
        queries: names, shape ``(n,)``.
        items: names, shape ``(n,)``.
        split: "train", "val" or "test" of each, shape ``(n,)``; None: it is still to be split.
        time: numbers, shape ``(n,)``; None: there are none.
        query_texts: text by name of the query; None: the name is the text.
        item_texts: likewise.
    """

    queries: Names
    items: Names
    split: Names | None = None
    time: npt.NDArray[np.float64] | None = None
    query_texts: dict[str, str] | None = None
    item_texts: dict[str, str] | None = None


def read_file(path: Path, columns: Columns) -> Read:
    """Interactions of a CSV, TSV, Parquet or npz file.

    Args:
        path: of the file.
        columns: which columns, or arrays, it is to have.

    Raises:
        InputError: the file cannot be read, lacks a column, has no row, or a row without a query or an item.
    """
    if not path.is_file():
        raise InputError(f"dataset {str(path)!r} is neither a file nor one of the known data sets: {', '.join(KNOWN)}")
    for name in ("query", "item"):
        if getattr(columns, name) is None:
            raise InputError(f"{name} must name a column of {path}: {listed(list(_table(path, [])))}")
    found = _table(path, [name for name in columns if name is not None])
    missing = [name for name in columns if name is not None and name not in found]
    if missing:
        raise InputError(f"{path} has no column {listed(missing, _SHOWN)}; it has: {listed(list(found))}")
    queries, items = (_names(path, found, name) for name in (columns.query, columns.item))
    if not len(queries):
        raise InputError(f"{path} has no interaction")
    return Read(
        queries,
        items,
        None if columns.split is None else _splits(path, _names(path, found, columns.split)),
        None if columns.time is None else _numbers(path, found, columns.time),
        None if columns.query_text is None else _texts(queries, _names(path, found, columns.query_text, empty=True)),
        None if columns.item_text is None else _texts(items, _names(path, found, columns.item_text, empty=True)),
    )


def _table(path: Path, names: list[str]) -> dict[str, Any]:
    """Columns by name; of those that are not in ``names`` nothing but the name is certain."""
    suffix = content_suffix(path)
    if suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] if name in names else None for name in file.files}
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path} as a table: {error}") from error
        lengths = {name: array.shape for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
            raise InputError(f"arrays of {path} must be of one shape (n,), got {listed([*lengths.items()], _SHOWN)}")
        return arrays
    if suffix in (".parquet", ".pq"):
        frame = read_table(path)
        return {str(name): frame[name].to_numpy() for name in frame.columns}
    rows = text_rows(path, "\t" if suffix in _TABS else ",")
    _, header = next(rows, (0, []))
    header = [name.strip() for name in header]
    kept = {name: header.index(name) for name in names if name in header}
    columns: list[list[Any]] = [[] for _ in kept]
    for _, fields in rows:
        for values, place in zip(columns, kept.values(), strict=True):
            values.append(fields[place] if place < len(fields) else None)
    of_name = {name: np.array(values, dtype=object) for name, values in zip(kept, columns, strict=True)}
    return {name: of_name.get(name) for name in header}


def _names(path: Path, found: dict[str, Any], column: str | None, empty: bool = False) -> Names:
    """A column as strings."""
    values = found[str(column)]
    none = np.array([value is None or value != value or value == "" for value in values.tolist()], dtype=bool)
    if none.any() and not empty:
        raise InputError(
            f"column {column!r} of {path} is empty in row {int(none.argmax())} (counted from 0): each row needs a "
            "query and an item"
        )
    strings = np.array([value.strip() if isinstance(value, str) else str(value) for value in values.tolist()], object)
    strings[none] = ""
    return strings


def _numbers(path: Path, found: dict[str, Any], column: str) -> npt.NDArray[np.float64]:
    try:
        return np.asarray(found[column], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"column {column!r} of {path} must hold numbers: {error}") from error


def _splits(path: Path, splits: Names) -> Names:
    others = sorted(set(splits.tolist()) - {"train", "val", "test"})
    if others:
        raise InputError(f"the split in {path} must be train, val or test, got {listed(others, _SHOWN)}")
    return splits


def _texts(names: Names, texts: Names) -> dict[str, str]:
    """Text of each name: the first that is not empty."""
    found: dict[str, str] = {}
    for name, text in zip(names.tolist(), texts.tolist(), strict=True):
        if text or name not in found:
            found[name] = found.get(name) or text
    return found


def _needed(data_dir: Path, name: str, file: str) -> Path:
    for path in (data_dir / name / file, data_dir / file):
        if path.is_file():
            return path
    raise InputError(
        f"data set {name!r} is not in data_dir: there is no {data_dir / name / file}; set data_dir, or the environment "
        "variable SCENT_LIGHTNING_DATA"
    )


def _lines(path: Path) -> list[list[str]]:
    return [fields for _, fields in text_rows(path, "\t")]


def _debian_dependencies(data_dir: Path) -> Read:
    """Which package needs which."""
    paths = [_needed(data_dir, "debian_dependencies", f) for f in ("interactions.npz", "users.tsv.gz", "items.tsv.gz")]
    users, items = (np.array([fields[0] for fields in _lines(path)], dtype=object) for path in paths[1:])
    with np.load(paths[0]) as file:
        parts = {split: file[split] for split in ("train", "val", "test")}
    pairs = np.concatenate(list(parts.values()))
    split = np.repeat(np.array(list(parts), dtype=object), [len(part) for part in parts.values()])
    return Read(users[pairs[:, 0]], items[pairs[:, 1]], split)


def _wordnet(data_dir: Path) -> Read:
    """Words by their definitions; letters are made small, as a word of both cases is one of the 147,306."""
    lines = _lines(_needed(data_dir, "wordnet", "synsets.tsv.gz"))
    words = [(fields[0], word.replace("_", " ").lower()) for fields in lines for word in fields[2].split("|")]
    queries, items = (np.array(names, dtype=object) for names in zip(*words, strict=True))
    return Read(queries, items, query_texts={fields[0]: fields[4] for fields in lines})


def _wordnet_hypernyms(data_dir: Path) -> Read:
    """What things are kinds of: hypernyms of nouns and verbs; a synset's text is its words and its definition."""
    lines = _lines(_needed(data_dir, "wordnet", "synsets.tsv.gz"))
    links = [(fields[0], hypernym) for fields in lines if fields[3] for hypernym in fields[3].split("|")]
    queries, items = (np.array(names, dtype=object) for names in zip(*links, strict=True))
    texts = {fields[0]: f"{fields[2].replace('_', ' ').replace('|', ', ')}: {fields[4]}" for fields in lines}
    return Read(queries, items, query_texts=texts, item_texts=texts)


class Known(NamedTuple):
    """A data set with a name: how it is read, what is left out for evaluation, and what its texts are read as."""

    read: Callable[[Path], Read]
    leave_out: str
    query_ngrams: Any
    item_ngrams: Any


KNOWN = {
    "debian_dependencies": Known(_debian_dependencies, "none", None, None),
    "wordnet": Known(_wordnet, "query", "words", "characters"),
    "wordnet_hypernyms": Known(_wordnet_hypernyms, "query", "words", "words"),
}
