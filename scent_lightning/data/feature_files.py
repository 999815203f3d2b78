"""Features and labels in files of NumPy and torch, memory-mapped: a batch reads its own rows."""

from __future__ import annotations

import mmap
import os
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.fingerprint import fingerprint, sampled
from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.errors import InputError

__all__ = ["FeatureFiles", "has_array", "open_array"]

RELEASE_EVERY = 32
COUNTED_AT_ONCE = 2**20  # labels: of many rows not all are in memory
SUFFIXES = (".npy", ".pt")
Array = npt.NDArray[Any]


def has_array(folder: Path, name: str) -> bool:
    """Whether a folder has ``name``.npy or ``name``.pt."""
    return any((folder / f"{name}{suffix}").is_file() for suffix in SUFFIXES)


def open_array(folder: Path, name: str) -> tuple[Array, Path]:
    """The array in ``name``.npy or else ``name``.pt, mapped and not read, and the file's path."""
    path = next((path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)
    if path is None:
        raise InputError(f"{folder} has neither {name}.npy nor {name}.pt")
    array: Any
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            array = array.detach().numpy() if isinstance(array, Tensor) else array
    except Exception as error:
        reason = re.split(r"\.\s|\n", str(error))[0].rstrip(".")
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds objects other than tensors"
        raise InputError(f"cannot read {path} as one plain array, whole and not pickled: {reason}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} must hold one array, got {type(array).__name__}")
    return array, path


def _release(array: Array) -> None:
    """Let go of the pages that a memory map has read: they stay in the system's cache, not in this process.

    Each row that is read maps its neighbourhood as well, so that a long run would come to hold the whole file.
    """
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class _Length:
    """Watches the length of a file that is mapped, at a microsecond a look.

    A file that is cut after the look and before the rows are read, some 40 microseconds later, still ends the process
    that reads it. To read the rows by calls of the system instead, which would fail with an error, takes 2.4 times as
    long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The file that is mapped stays the one it is if another takes its place.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._bytes = os.fstat(self._descriptor).st_size

    def check(self) -> None:
        """Raise InputError if the file has become shorter."""
        size = os.fstat(self._descriptor).st_size
        if size < self._bytes:
            raise InputError(f"{self.path} was cut from {self._bytes} to {size} bytes while it was in use")


class FeatureFiles(IndexedRows):
    """The rows of a split's folder, gathered from the memory map batch by batch.

    Args:
        folder: has features.npy or features.pt, shape ``(n, D)``, and labels.npy or labels.pt, shape ``(n,)``.
        labelled: it must have the labels; else they are not looked at, and None.
        labels: the array and its path, where they are open already.
    """

    def __init__(self, folder: Path, labelled: bool = True, labels: tuple[Array, Path] | None = None) -> None:
        self.folder = folder
        self.features, self.path = open_array(folder, "features")
        if self.features.dtype not in (np.float16, np.float32):
            raise InputError(f"{self.path} must be float16 or float32, got {self.features.dtype}")
        if self.features.ndim != 2 or self.features.shape[1] == 0:
            raise InputError(f"{self.path} must have shape (n, D) with D at least 1, got {self.features.shape}")
        if len(self.features) == 0:
            raise InputError(f"split {folder.name!r} is empty: {self.path} has no rows")
        # Reading a page of a map that its file has no more ends the process.
        self._files = [_Length(self.path)]
        self._labels = self._open_labels(labels) if labelled else None
        self._fetches = 0

    def _open_labels(self, given: tuple[Array, Path] | None) -> Array:
        labels, path = given or open_array(self.folder, "labels")
        if labels.dtype.kind not in "iu":
            raise InputError(f"{path} must hold integers, got {labels.dtype}")
        if labels.ndim != 1:
            raise InputError(f"{path} must have shape (n,), got {labels.shape}")
        if len(self.features) != len(labels):
            raise InputError(
                f"features and labels of split {self.folder.name!r} differ in length: {self.path} has "
                f"{len(self.features)} rows, {path} has {len(labels)}"
            )
        self._files.append(_Length(path))
        return labels

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path, bool]]:
        # A loader process maps the files itself: pickled, a memory map would be copied whole.
        return type(self), (self.folder, self._labels is not None)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def labels(self) -> Array:
        """Labels of all rows, shape (n,); there must be some."""
        assert self._labels is not None
        return self._labels

    def fingerprint(self, rows: Array, labels: Array) -> str:
        """Hash of rows of the split, shape (m,), by their labels, shape (m,), and some of their features."""
        some = np.asarray(self.features[rows[sampled(len(rows))]], dtype=np.float32)
        return fingerprint([np.asarray(labels, dtype=np.int64), np.array(some.shape), some])

    def check_files(self) -> None:
        """Raise InputError if a file has become shorter."""
        for file in self._files:
            file.check()

    def fingerprint_of_first(self, rows: int) -> str:
        """Hash of the first rows by all of their labels, and some of their features."""
        return self.fingerprint(np.arange(rows), self.labels[:rows])

    def fetch(self, index: Array) -> Batch:
        """Features (B, D), float32, and labels (B,), int64, or None."""
        features = self._features_of(index)
        labels = None if self._labels is None else np.asarray(self._labels[index], dtype=np.int64)
        return features, None if labels is None else torch.from_numpy(labels)

    def _features_of(self, index: Array) -> Tensor:
        self.check_files()
        order = np.argsort(index)
        ascending = index[order]
        found = self.features[ascending]
        features = np.empty(found.shape, dtype=np.float32)
        features[order] = found
        with np.errstate(over="ignore", invalid="ignore"):
            total = features.sum()
        if not np.isfinite(total):  # or the sum has overflowed
            bad = ascending[~np.isfinite(found).all(axis=1)]
            if bad.size:
                raise InputError(
                    f"features of split {self.folder.name!r} are NaN or infinite in row {bad[0]} (counted from 0) "
                    f"of {self.path}"
                )
        self._fetches += 1
        if self._fetches % RELEASE_EVERY == 0:
            _release(self.features)
        return torch.from_numpy(features)

    def check_width(self, width: int) -> None:
        """Raise InputError unless there are as many features as the training rows had."""
        if self.features.shape[1] != width:
            raise InputError(f"{self.path} has {self.features.shape[1]} features, the training rows had {width}")

    def class_counts(self, num_classes: int) -> Array:
        """Rows of each class, shape (num_classes,); the labels are checked before."""
        counts = np.zeros(num_classes, dtype=np.int64)
        for start in range(0, len(self), COUNTED_AT_ONCE):
            labels = np.asarray(self.labels[start : start + COUNTED_AT_ONCE], dtype=np.int64)
            counts += np.bincount(labels, minlength=num_classes)
        return counts

    def check_labels(self, num_classes: int | None) -> int:
        """Return the largest label; raise InputError unless all are at least 0 and below ``num_classes``."""
        largest = int(self.labels.max())
        if self.labels.min() < 0 or (num_classes is not None and largest >= num_classes):
            bad = self.labels < 0
            if num_classes is not None:
                bad |= self.labels >= num_classes
            row = int(bad.argmax())
            limit = "" if num_classes is None else f" and below num_classes {num_classes}"
            raise InputError(
                f"labels of split {self.folder.name!r} must be at least 0{limit}, got {self.labels[row]} in row {row} "
                "(counted from 0)"
            )
        return largest
