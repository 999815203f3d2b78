"""Pairs of a table with columns of image paths and captions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from scent_lightning.data.fingerprint import fingerprint, sampled
from scent_lightning.data.folders import elsewhere, leads_outside
from scent_lightning.data.image_text.pairs import NAMED, BadPairError, FilePairs, decode, file_size
from scent_lightning.data.image_text.source import Classes, FileSource, Options
from scent_lightning.data.strings import Strings
from scent_lightning.data.text_tables import column_names, content_suffix, text_rows
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["TablePairs", "Tables"]

Array = npt.NDArray[Any]

LOOKED_FOR = 20  # images


class TablePairs(FilePairs):
    """Pairs of a table.

    Args:
        split: its name.
        path: of the table.
        names: path of each image, shape ``(n,)``; relative ones are in the table's folder.
        captions: shape ``(n,)``; "" where there is none.
        rows: of the table, counted from 0, shape ``(n,)``.
    """

    # Six seconds, and 31 MB at 77 tokens.
    tokenised_at_once = 100_000

    def __init__(self, split: str, path: Path, names: Iterable[str], captions: Iterable[str], rows: Array) -> None:
        super().__init__(split, len(rows))
        self.path = path
        self.names = Strings(names)
        self.captions = Strings(captions)
        self.rows = rows
        bare = np.flatnonzero(self.captions.lengths() == 0)
        if len(bare) == len(rows):
            raise InputError(f"split {split!r} has no caption in any of its {len(rows)} rows of {path}")
        if bare.size:
            self.skipped[torch.from_numpy(bare)] = True
            warnings.warn(
                f"split {split!r}: {len(bare)} of {len(rows)} pairs have no caption and are skipped: rows "
                f"{listed(rows[bare].tolist(), NAMED)} (counted from 0) of {path}",
                stacklevel=2,
            )

    def image_path(self, row: int) -> str:
        """Path of a row's image."""
        return os.path.join(self.path.parent, self.names[row])

    def fingerprint(self, rows: int) -> str:
        """Hash of all paths and captions, and the sizes of some files."""
        sizes = [file_size(self.image_path(row)) for row in sampled(rows).tolist()]
        return fingerprint([*self.names.parts(rows), *self.captions.parts(rows), np.array(sizes)])

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:
        """Caption, and image (uint8, shape (3, H, W)) if asked for; raises BadPairError."""
        caption = self.captions[row]
        if not caption:
            raise BadPairError(f"row {self.rows[row]} (counted from 0) of {self.path} has no caption")
        if not self.names[row]:
            raise BadPairError(f"row {self.rows[row]} (counted from 0) of {self.path} has no image path")
        return caption, decode(self.image_path(row), self.image_path(row)) if image else None


class Tables(FileSource):
    """A CSV or TSV file with a header, and a column each of image paths and captions, in UTF-8.

    It may be compressed as .gz, .bz2 or .xz. A text with the separator in it is in quotation marks; between tabs, a
    quotation mark that does not enclose the whole text belongs to it. Relative image paths are in the table's folder;
    to lead out of it, a path has to be absolute. Validation has a table of its own, ``val_path``, or rows of this one:
    with ``split_column``, index i is the i-th row of the split.
    """

    says_validation = "val_path or split_column"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._frame: tuple[Path, pd.DataFrame] | None = None  # of which both splits are rows
        self._classes: dict[str, Classes] = {}
        self._groups: dict[str, Array] = {}

    def check(self) -> None:
        """There must be a path, and one word on the splits."""
        super().check()
        options = self.options
        if options.split_column is not None:
            if options.val_path is not None:
                raise InputError(
                    f"split_column and val_path must not both be given, got {options.split_column!r}, "
                    f"{options.val_path!r}"
                )
            if options.train_split == options.val_split:
                raise InputError(f"train_split and val_split must differ, got {options.train_split!r} for both")
        if options.separator is not None and len(options.separator) != 1:
            raise InputError(f"separator must be one character, got {options.separator!r}")

    @property
    def has_validation(self) -> bool:
        """Whether there is ``val_path``, or ``val_split`` in a column."""
        options = self.options
        return options.val_path is not None or (options.split_column is not None and options.val_split is not None)

    def classes(self, split: str) -> Classes:
        """What ``class_column`` has."""
        self.pairs(split)
        return self._classes[split]

    def groups(self, split: str) -> Array | None:
        """By what ``group_column`` has; a row without text there is a group of its own."""
        self.pairs(split)
        return self._groups.get(split)

    def open(self, split: str) -> TablePairs:
        """The pairs of a split."""
        argument, path = self.path_of(split)
        file = next((Path(place) for place in (path, elsewhere(path)) if os.path.isfile(place)), None)
        if file is None:
            raise InputError(f"{argument} {path} is not a file; it must be a table of image paths and captions")
        options = self.options
        if options.split_column is None:
            return self._table(split, file, self._read(file), None)
        if self._frame is None:
            self._frame = file, self._read(file)
        return self._table(split, *self._frame, options.val_split if split == "val" else options.train_split)

    def _read(self, path: Path) -> pd.DataFrame:
        """The columns needed, as text, "" where there is none."""
        options = self.options
        separator = options.separator or ("," if content_suffix(path) == ".csv" else "\t")
        columns = {"image_column": options.image_column, "caption_column": options.caption_column}
        for argument in ("class_column", "split_column", "group_column"):
            if (column := getattr(options, argument)) is not None:
                columns[argument] = column
        there = column_names(path, separator)
        for argument, column in columns.items():
            if there.count(column) != 1:
                how = "more than once" if column in there else "not"
                raise InputError(f"{argument} {column!r} is {how} in {path}; it has: {', '.join(there)}")
        # As text: else "12", "None" and "nan" would be no captions.
        frame: pd.DataFrame = pd.DataFrame(
            _texts(path, separator, {name: there.index(name) for name in columns.values()}), dtype=str
        )
        if len(frame) == 0:
            raise InputError(f"{path} has no rows")
        captions = frame[options.caption_column]
        written = captions[captions != ""]
        if len(written) and pd.to_numeric(written, errors="coerce").notna().all():
            raise InputError(
                f"caption_column {options.caption_column!r} of {path} must hold text, got nothing but numbers such as "
                f"{written.iloc[0]}"
            )
        return frame

    def _table(self, split: str, path: Path, frame: pd.DataFrame, value: str | None) -> TablePairs:
        options = self.options
        if value is not None:
            splits = frame[options.split_column].str.strip()
            frame = frame[splits == value]
            if len(frame) == 0:
                raise InputError(
                    f"split_column {options.split_column!r} of {path} has no {value!r}; it has: "
                    f"{listed(splits.unique().tolist(), NAMED)}"
                )
        if options.class_column is not None:
            which, names = pd.factorize(frame[options.class_column].str.strip())
            self._classes[split] = names.tolist(), which
        if options.group_column is not None:
            texts = frame[options.group_column].str.strip()
            which, names = pd.factorize(texts)
            alone = len(names) + np.arange(len(texts))
            self._groups[split] = np.where(texts == "", alone, which)
        images = frame[options.image_column]
        for row, image in images[images.str.contains("..", regex=False)].items():
            if leads_outside(image):
                raise InputError(
                    f"image path {image!r} in row {row} (counted from 0) of {path} leads outside the table's folder; "
                    f"only an absolute path may"
                )
        table = TablePairs(split, path, images, frame[options.caption_column].str.strip(), frame.index.to_numpy())
        looked_for = np.unique(np.linspace(0, len(table) - 1, LOOKED_FOR).astype(np.int64)).tolist()
        if not any(os.path.isfile(table.image_path(row)) for row in looked_for):
            raise InputError(
                f"image_column {options.image_column!r} of {path} names no file: of {len(looked_for)} looked for, none "
                f"is there, such as {table.image_path(looked_for[0])}"
            )
        return table


def _texts(path: Path, separator: str, places: dict[str, int]) -> dict[str, list[str]]:
    """Columns of a table by name; a row that is short of one has "" there, which is said."""
    texts: dict[str, list[str]] = {name: [] for name in places}
    short: list[int] = []
    rows = text_rows(path, separator)
    width = len(next(rows)[1])
    for line, fields in rows:
        if len(fields) < width:
            short.append(line)
            fields += [""] * (width - len(fields))
        for name, place in places.items():
            texts[name].append(fields[place])
    if short:
        warnings.warn(
            f"{len(short)} rows of {path} have fewer fields than the header, which count as empty: lines "
            f"{listed(short, NAMED)}",
            stacklevel=2,
        )
    return texts
