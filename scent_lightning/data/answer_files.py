"""Features with several labels a row: a matrix padded with −1, or a sparse matrix with a weight for each label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scent_lightning.data.feature_files import COUNTED_AT_ONCE, FeatureFiles, has_array, open_array
from scent_lightning.data.fingerprint import fingerprint, sampled
from scent_lightning.data.images import first_line
from scent_lightning.data.indexed import Batch
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["AnswerFiles", "feature_files", "has_labels"]

Array = npt.NDArray[Any]
SPARSE = "labels.npz"
NAMED = 5  # rows in a message


def has_labels(folder: Path) -> bool:
    """Whether a folder has labels of any kind."""
    return has_array(folder, "labels") or (folder / SPARSE).is_file()


def feature_files(folder: Path, labelled: bool = True) -> FeatureFiles:
    """The rows of a split's folder, with one label each, or several where the file of labels has them."""
    if not labelled:
        return FeatureFiles(folder, labelled=False)
    if (folder / SPARSE).is_file():
        return AnswerFiles(folder)
    if not (has_array(folder, "features") and has_array(folder, "labels")):
        return FeatureFiles(folder)  # which says what is missing
    labels = open_array(folder, "labels")
    several = labels[0].ndim == 2 and labels[0].shape[1] > 1
    return (AnswerFiles if several else FeatureFiles)(folder, labels=labels)


class AnswerFiles(FeatureFiles):
    """Rows of several labels each, as ``(features, answers)`` or ``(features, answers, weights)``.

    Answers are int64, shape ``(B, P)`` with P the most that a row of the batch has, −1 where a row has no more.

    Args:
        folder: has features as :class:`FeatureFiles` wants them, and ``labels.npy`` (or ``.pt``): integers, shape
            ``(n, P)``, −1 where a row has no more; or ``labels.npz``: a matrix of shape ``(n, K)`` as
            ``scipy.sparse.save_npz`` writes it, whose entries are the labels' weights (or all of them 1).
    """

    def _open_labels(self, given: tuple[Array, Path] | None) -> Array:
        self._weights: Array | None = None
        self._starts: Array | None = None
        self._columns: int | None = None
        path = self.folder / SPARSE
        labels = self._open_sparse(path) if path.is_file() else self._open_padded(given)
        rows = len(labels) if self._starts is None else len(self._starts) - 1
        if len(self.features) != rows:
            raise InputError(
                f"features and labels of split {self.folder.name!r} differ in length: {self.path} has "
                f"{len(self.features)} rows, the labels have {rows}"
            )
        return labels

    def _open_padded(self, given: tuple[Array, Path] | None) -> Array:
        labels, path = given or open_array(self.folder, "labels")
        if labels.dtype.kind not in "iu" or labels.ndim != 2:
            raise InputError(f"{path} must hold integers of shape (n,) or (n, P), got {labels.dtype} {labels.shape}")
        return labels

    def _open_sparse(self, path: Path) -> Array:
        """Labels of all rows, one row's after the other's, shape (N,)."""
        from scipy import sparse

        try:
            matrix = sparse.csr_matrix(sparse.load_npz(path))
        except Exception as error:  # what a damaged archive raises depends on where
            raise InputError(f"cannot read {path} as a sparse matrix of scipy's: {first_line(error)}") from error
        matrix.sum_duplicates()
        if (bad := np.flatnonzero(~(matrix.data >= 0) | ~np.isfinite(matrix.data))).size:
            row = int(np.searchsorted(matrix.indptr, bad[0], side="right")) - 1
            raise InputError(
                f"{path} has weight {matrix.data[bad[0]]:g} in row {row} (counted from 0); weights must be finite "
                "numbers of at least 0"
            )
        matrix.eliminate_zeros()
        self._starts, self._columns = matrix.indptr.astype(np.int64), matrix.shape[1]
        if not (matrix.data == 1).all():
            self._weights = matrix.data.astype(np.float32)
        labels: Array = matrix.indices.astype(np.int64)
        return labels

    @property
    def counts_of_rows(self) -> Array:
        """Number of labels of each row, shape (n,)."""
        if self._starts is not None:
            return np.diff(self._starts)
        parts = range(0, len(self), COUNTED_AT_ONCE)
        return np.concatenate([(self.labels[start : start + COUNTED_AT_ONCE] >= 0).sum(axis=1) for start in parts])

    def fetch(self, index: Array) -> Batch:
        """Features (B, D), float32, answers (B, P), int64, and weights (B, P), float32, where there are any."""
        features = self._features_of(index)
        answers, weights = self._answers_of(index)
        if weights is None:
            return features, torch.from_numpy(answers)
        return features, torch.from_numpy(answers), torch.from_numpy(weights)

    def _answers_of(self, index: Array) -> tuple[Array, Array | None]:
        if self._starts is None:
            found = np.asarray(self.labels[index], dtype=np.int64)
            return found[:, (found >= 0).any(axis=0)], None
        starts, counts = self._starts[index], self._starts[index + 1] - self._starts[index]
        steps = np.arange(int(counts.max()) if len(counts) else 0)
        there = steps < counts[:, None]
        places = np.where(there, starts[:, None] + steps, 0)
        if not len(self.labels):
            return np.full(there.shape, -1), None
        weights = None if self._weights is None else np.where(there, self._weights[places], np.float32(0))
        return np.where(there, self.labels[places], -1), weights

    def class_counts(self, num_classes: int) -> Array:
        """Rows that have each class, shape (num_classes,); the labels are checked before."""
        counts = np.zeros(num_classes, dtype=np.int64)
        for start in range(0, len(self.labels), COUNTED_AT_ONCE):
            labels = np.asarray(self.labels[start : start + COUNTED_AT_ONCE], dtype=np.int64)
            counts += np.bincount(labels[labels >= 0], minlength=num_classes)
        return counts

    def check_labels(self, num_classes: int | None) -> int:
        """Return the largest label there may be; raise InputError for one out of range, or twice in a row."""
        largest = -1 if self._columns is None else self._columns - 1
        if self._starts is not None:
            if num_classes is not None and largest >= num_classes:
                raise InputError(
                    f"labels of split {self.folder.name!r} have {self._columns} columns, and num_classes is "
                    f"{num_classes}"
                )
            return largest
        limit = np.inf if num_classes is None else num_classes
        for start in range(0, len(self), COUNTED_AT_ONCE):
            labels = np.asarray(self.labels[start : start + COUNTED_AT_ONCE], dtype=np.int64)
            ordered = np.sort(labels, axis=1)
            bad = (labels < -1) | (labels >= limit)
            if bad.any():
                row, place = np.argwhere(bad)[0].tolist()
                below = "" if num_classes is None else f" and below num_classes {num_classes}"
                raise InputError(
                    f"labels of split {self.folder.name!r} must be at least 0{below}, or -1 for none, got "
                    f"{labels[row, place]} in row {start + row} (counted from 0)"
                )
            again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
            if again.any():
                row, place = np.argwhere(again)[0].tolist()
                raise InputError(
                    f"labels of split {self.folder.name!r} must name a class once, got {ordered[row, place]} twice in "
                    f"row {start + row} (counted from 0)"
                )
            largest = max(largest, int(labels.max(initial=-1)))
        if largest < 0:
            raise InputError(f"labels of split {self.folder.name!r} have no class in any row")
        return largest

    def without_label(self) -> str | None:
        """What to say of rows without a label; None where each has one."""
        rows = np.flatnonzero(self.counts_of_rows == 0).tolist()
        if not rows:
            return None
        return f"{len(rows):,} rows of split {self.folder.name!r} have no label and add nothing: {listed(rows, NAMED)}"

    def fingerprint_of_first(self, rows: int) -> str:
        """Hash of the labels of the first rows, and some of their features."""
        labels: list[Array] = [np.asarray(self.labels[:rows], dtype=np.int64)]
        if self._starts is not None:
            end = self._starts[rows]
            labels = [self._starts[: rows + 1], self.labels[:end]]
            labels += [] if self._weights is None else [self._weights[:end]]
        some = np.asarray(self.features[sampled(rows)], dtype=np.float32)
        return fingerprint([*labels, np.array(some.shape), some])
