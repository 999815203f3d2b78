"""Where rows of two groups of classes come from: what a source says of its splits, classes and rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy.typing as npt

from scent_lightning.data.fingerprint import fingerprint, sampled
from scent_lightning.data.folders import elsewhere, missing_split
from scent_lightning.data.imbalanced.images import Images
from scent_lightning.data.imbalanced.rows import GroupedRows, ImageRows
from scent_lightning.data.loading import shuffle_seed
from scent_lightning.data.transforms import PaddedCrop, ResizedPart, check_channels, normalise
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed

__all__ = ["NORMALISATION", "FolderSource", "ImageSource", "Options", "Source"]

Array = npt.NDArray[Any]
Evaluated = Literal["val", "test"]

NORMALISATION = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Options:
    """What the data module's arguments say of where the rows are and how they are shown; see there."""

    dataset: str
    path: Path
    val_split: str = "val"
    test_split: str = "test"
    image_size: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    in_memory: bool = True
    download: bool = False


class Source:
    """One kind of data, with all its splits. A subclass has the methods that raise NotImplementedError here.

    It is one file, and one line each in ``SOURCES`` and ``Name`` of the data module, under what ``dataset`` calls it.

    Args:
        options: of the data module.
        note: takes a sentence for the summary, on what was passed over.
        restored: what a checkpoint holds of the training run; empty without one.

    Attributes:
        refused: arguments that have to stay as they are by default, and what the message says of one that does not.
        says_groups: whether the kind of data says which classes are positive, see :meth:`positives`.
        named_by_position: whether a class may also be called by its position in the order of the names.
    """

    refused: ClassVar[Mapping[str, str]] = {}
    says_groups: ClassVar[bool] = False
    named_by_position: ClassVar[bool] = True

    def __init__(self, options: Options, note: Callable[[str], None], restored: Mapping[str, Any]) -> None:
        self.options = options
        self.note = note
        self.restored = restored
        self.opened: dict[str, Any] = {}  # all rows of each split that was looked at

    @classmethod
    def check(cls, options: Options) -> None:
        """Raise InputError for an argument that is out of range or not for this kind of data."""
        checked_integer("image_size", options.image_size, or_none=True)
        usual = Options(options.dataset, options.path)
        for name, reason in cls.refused.items():
            if (value := getattr(options, name)) != getattr(usual, name):
                raise InputError(f"{name} {reason.format(value=value, dataset=options.dataset)}")
        check_channels(options.mean, options.std)

    @property
    def folder(self) -> Path:
        """The path, or where it is in the folder that the environment variable SCENT_LIGHTNING_DATA names."""
        path = self.options.path
        if not path.exists() and not path.is_absolute() and os.environ.get("SCENT_LIGHTNING_DATA"):
            other = Path(elsewhere(str(path)))
            if other.is_dir():
                return other
        return path

    def prepare(self) -> None:
        """Download what is not there, if asked to."""

    # Splits

    def has_training_rows(self) -> bool:
        """Whether there is a split to train on."""
        raise NotImplementedError

    def evaluated(self, kind: Evaluated) -> str | None:
        """Name of the split to evaluate on; None if there is none."""
        raise NotImplementedError

    def missing(self, split: str) -> str:
        """What to say of a split that is not there."""
        return missing_split(self.folder, split)

    def of_split(self, name: str) -> str:
        """What the summary says of the split that is validated on."""
        raise NotImplementedError

    # Classes

    def classes(self) -> list[Any]:
        """All classes in the order of their numbers."""
        raise NotImplementedError

    def positives(self, classes: list[Any]) -> list[int] | None:
        """Positions in ``classes`` of the positive ones, where the kind of data says which they are."""
        return None

    def known(self, classes: list[Any], by_position: bool) -> str:
        """What to say of an unknown class: which ones there are, and whether positions count."""
        if by_position:
            return f"known are numbers 0 to {len(classes) - 1}, or names: {listed(classes)}"
        return (
            "as classes are called by numbers here, they must be named, in quotes where a name begins with 0: "
            f"{listed(classes)}"
        )

    # Rows

    @property
    def num_features(self) -> int | None:
        """Number of features; None for images."""
        return None

    def all_rows(self, split: str, classes: list[Any]) -> Any:
        """All rows of a split, whatever their class, opened once; they have ``labels``, shape (n,)."""
        if split not in self.opened:
            self.opened[split] = self.open(split, classes)
        return self.opened[split]

    def open(self, split: str, classes: list[Any]) -> Any:
        """All rows of a split; see :meth:`all_rows`."""
        raise NotImplementedError

    def positions(self, split: str, classes: list[Any]) -> Array:
        """Position in ``classes`` of each row's class, shape (n,), −1 where it is none of them."""
        labels: Array = self.all_rows(split, classes).labels
        return labels

    def chosen(self, rows: Any, chosen: Array, labels: Array | None, augment: bool = False) -> GroupedRows:
        """The data set of some of the rows that :meth:`open` gave.

        Args:
            rows: all rows of a split.
            chosen: which of them, shape (m,), int64.
            labels: 0 or 1, shape (m,), int64; None for none.
            augment: for training.
        """
        raise NotImplementedError

    def to_predict(self) -> GroupedRows | None:
        """Rows without labels, where there are any besides those of the splits."""
        return None

    def fingerprint(self, rows: Any, chosen: Array, labels: Array) -> str:
        """Hash of what the rows of :meth:`chosen` are."""
        raise NotImplementedError


class ImageSource(Source):
    """Base of sources of images, see :class:`~scent_lightning.data.imbalanced.images.Images`."""

    def chosen(self, rows: Images, chosen: Array, labels: Array | None, augment: bool = False) -> ImageRows:
        """Images, augmented if they are for training, and normalised."""
        options, size = self.options, self.options.image_size
        mean, std = NORMALISATION[options.dataset]
        change = (PaddedCrop() if size is None else ResizedPart(size)) if augment else None
        to_float = normalise(options.mean or mean, options.std or std)
        return ImageRows(rows, chosen, labels, to_float, change, size is not None, shuffle_seed())

    def fingerprint(self, rows: Images, chosen: Array, labels: Array) -> str:
        """Hash of labels, positions and some pixels."""
        some = rows.fetch(chosen[sampled(len(chosen))])
        return fingerprint([labels, chosen, some.numpy()])


class FolderSource(Source):
    """Base of sources with a folder for each split."""

    def has_training_rows(self) -> bool:
        """Whether there is a folder "train"."""
        return (self.folder / "train").is_dir()

    def evaluated(self, kind: Evaluated) -> str | None:
        """The folder ``val_split``, or else ``test_split``; for test only this one."""
        for argument, usual in (("val_split", "val"), ("test_split", "test")):
            name: str = getattr(self.options, argument)
            if kind == "test" and argument == "val_split":
                continue
            if (self.folder / name).is_dir():
                return name
            if name != usual:  # asked for, perhaps misspelt: another split would be evaluated in its place
                raise InputError(f"{argument} {self.missing(name)}")
        return None

    def of_split(self, name: str) -> str:
        """Which folder it is."""
        wanted = self.options.val_split
        if name != wanted:
            return f"of {name!r}, as there is no folder {wanted!r}"
        return f"of {name!r}" + (", the training rows" if name == "train" else "")

    def all_rows(self, split: str, classes: list[Any]) -> Any:
        """All rows of a split, whatever their class, opened once."""
        self.check_there(split)
        return super().all_rows(split, classes)

    def check_there(self, split: str) -> None:
        """Raise InputError unless the split has a folder."""
        if split in self.opened:
            return
        if not self.folder.is_dir():
            raise InputError(f"path {self.folder} is not a folder; it must hold a folder for each split")
        if not (self.folder / split).is_dir():
            raise InputError(f"path needs a split {self.missing(split)}")
