"""Where pairs of an image and a caption come from: what a source says of its splits, pairs and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from scent_lightning.data.image_text.looks import Look
from scent_lightning.data.image_text.pairs import FilePairs
from scent_lightning.data.image_text.rows import FileRows, PairRows
from scent_lightning.errors import InputError

__all__ = ["Classes", "FileSource", "Options", "PairSource"]

Array = npt.NDArray[Any]
Classes = tuple[list[str], Array]  # what occurs, "" for none, and which of it each row has, shape (n,)


@dataclass(frozen=True)
class Options:
    """What the data module's arguments say of where the pairs are; see there."""

    source: str
    path: str | None = None
    val_path: str | None = None
    image_column: str = "filepath"
    caption_column: str = "title"
    class_column: str | None = None
    separator: str | None = None
    split_column: str | None = None
    train_split: str = "train"
    val_split: str | None = "val"
    seed: int = 0
    rows: int = 20_000
    val_rows: int = 500
    group_column: str | None = None


class PairSource:
    """One kind of source, with its splits. A subclass has the methods that raise NotImplementedError here.

    It is one file, and one line each in ``SOURCES`` and ``Source`` of the data module, under what ``source`` calls it.

    Args:
        options: of the data module.

    Attributes:
        refused: arguments that must not be given, and what the message says of one that is.
        says_validation: the arguments that say what the validation rows are.
    """

    refused: ClassVar[Mapping[str, str]] = {}
    says_validation: ClassVar[str]

    def __init__(self, options: Options) -> None:
        self.options = options
        for name, reason in self.refused.items():
            if (value := getattr(options, name)) is not None:
                raise InputError(f"{name} {reason.format(value=value, source=options.source)}")
        self.check()

    def check(self) -> None:
        """Raise InputError for an argument that is not as this source needs it."""

    @property
    def has_validation(self) -> bool:
        """Whether there are validation rows."""
        raise NotImplementedError

    def rows(self, split: str, look: Look) -> PairRows:
        """The rows of "train" or "val" as batches."""
        raise NotImplementedError

    def classes(self, split: str) -> Classes:
        """Classes of the rows of "train" or "val", by ``class_column``, which is given."""
        raise NotImplementedError

    def groups(self, split: str) -> Array | None:
        """Number of the group of each row of "train" or "val", shape ``(n,)``, int64; None without ``group_column``.

        Raises:
            InputError: ``group_column`` is given, and this source has no columns.
        """
        if self.options.group_column is not None:
            raise InputError(
                f"group_column is for source 'table', got {self.options.group_column!r} with source "
                f"{self.options.source!r}"
            )
        return None

    def classes_or_none(self, split: str) -> Classes:
        """Classes of the rows of "train" or "val"; nothing of what there is not."""
        if self.options.class_column is None or not (split == "train" or self.has_validation):
            return [], np.empty(0, dtype=np.int64)
        return self.classes(split)


class FileSource(PairSource):
    """Base of sources of pairs in files."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.opened: dict[str, FilePairs] = {}

    def check(self) -> None:
        """There must be a path."""
        if not self.options.path:
            raise InputError(f"path must be given for source {self.options.source!r}, got {self.options.path!r}")

    def path_of(self, split: str) -> tuple[str, str]:
        """The argument that says where a split is, and the path."""
        assert self.options.path is not None
        if split == "val" and self.options.val_path:
            return "val_path", self.options.val_path
        return "path", self.options.path

    def open(self, split: str) -> FilePairs:
        """The pairs of "train" or "val"."""
        raise NotImplementedError

    def pairs(self, split: str) -> FilePairs:
        """The pairs of "train" or "val", opened once."""
        if split not in self.opened:
            self.opened[split] = self.open(split)
        return self.opened[split]

    def rows(self, split: str, look: Look) -> FileRows:
        """The rows of "train" or "val" as batches."""
        return FileRows(self.pairs(split), look)
