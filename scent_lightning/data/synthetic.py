"""Synthetic features with a class label, never stored: a row is a hash of its seed, its split and its index."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.hashing import hashed_keys, normal, uniform
from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["SyntheticFeatureDataModule", "SyntheticRows"]

Array = npt.NDArray[Any]

CENTRES = 0
COUNTED_AT_ONCE = 2**20
STREAMS = {"train": (1, 2), "val": (3, 4)}  # labels, noise


class SyntheticRows(IndexedRows):
    """Rows that are computed when they are fetched.

    Args:
        split: "train" or "val".
        rows: number of rows.
        num_classes: K.
        num_features: D.
        noise: standard deviation.
        cumulative: unnormalised cumulative probability of the classes, shape (K,), float64; None for equal ones.
        seed: of everything.
    """

    def __init__(
        self,
        split: str,
        rows: int,
        num_classes: int,
        num_features: int,
        noise: float,
        cumulative: Array | None,
        seed: int,
    ) -> None:
        self.rows = rows
        self.num_classes = num_classes
        self.num_features = num_features
        self.noise = noise
        self.cumulative = cumulative
        self.seed = seed
        self.label_stream, self.noise_stream = STREAMS[split]

    def __len__(self) -> int:
        return self.rows

    def fetch(self, index: Array) -> Batch:
        """Features (B, D), float32, and labels (B,), int64."""
        labels = self.labels(index)
        features = self.centres(labels)
        if self.noise > 0:
            noise = normal(hashed_keys(self.seed, self.noise_stream, index), self.num_features)
            noise *= np.float32(self.noise)
            features += noise
        features /= np.sqrt(np.square(features).sum(axis=1, keepdims=True))
        return torch.from_numpy(features), torch.from_numpy(labels)

    def labels(self, index: Array) -> Array:
        """Labels of rows, shape (B,), int64."""
        drawn = uniform(hashed_keys(self.seed, self.label_stream, index))
        if self.cumulative is None:
            labels: Array = (drawn * self.num_classes).astype(np.int64)
        else:
            labels = np.searchsorted(self.cumulative, drawn * self.cumulative[-1], side="right").astype(np.int64)
        return labels

    def class_counts(self) -> Array:
        """Rows of each class, shape (K,), int64."""
        counts = np.zeros(self.num_classes, dtype=np.int64)
        for start in range(0, self.rows, COUNTED_AT_ONCE):
            labels = self.labels(np.arange(start, min(start + COUNTED_AT_ONCE, self.rows)))
            counts += np.bincount(labels, minlength=self.num_classes)
        return counts

    def centres(self, classes: Array) -> Array:
        """Centres of ``classes``, shape (B,): float32, shape (B, D)."""
        return normal(hashed_keys(self.seed, CENTRES, classes), self.num_features)


class SyntheticFeatureDataModule(IndexedDataModule):
    """Random features around a centre per class, never stored, as whole batches ``(features, labels, index)``.

    ``features`` is float32 of shape ``(B, D)``, ``labels`` int64 of shape ``(B,)``, ``index`` int64 of shape ``(B,)``:
    the row's position in its split. Training batches are shuffled anew every epoch.

    A row depends on ``seed``, its split and its index alone: not on its batch, the number of processes or of rows. The
    label is drawn with probability ∝ (label + 1)^−``zipf_exponent``. The features are centre + ``noise`` · ε, scaled to
    length 1, where all entries of the class's centre and of ε are independent standard normal numbers. Both splits have
    the same centres. Neither rows nor centres are in memory, so that data of any size costs no more than its batches,
    and 8 bytes a class if ``zipf_exponent`` is above 0. ``test`` and ``predict`` go over the validation rows.

    Args:
        num_classes: number of classes K.
        num_features: number of features D, at least 2.
        rows: number of training rows.
        val_rows: number of validation rows.
        noise: standard deviation of the noise, in units of that of a centre's entries, at least 0.
        zipf_exponent: how much rarer each class is than the one before, at least 0; 0 makes all equally frequent.
        batch_size: rows of a training batch, in each process.
        eval_batch_size: rows of a batch in validation, test and prediction.
        seed: of labels, centres and noise, at least 0; the shuffle has the seed of ``seed_everything``.
        num_workers: loader processes; 0 loads in the training process.

    Raises:
        InputError: before training, in one sentence: too few rows or an argument out of range.

    Example:
        >>> data = SyntheticFeatureDataModule(num_classes=360_232, num_features=8, rows=17_091_657)
        >>> data.num_features, data.num_classes, data.num_anchors
        (8, 360232, 17091657)
        >>> features, labels, index = next(iter(data.val_dataloader()))
        >>> features.shape, labels.shape, index[:3]
        (torch.Size([512, 8]), torch.Size([512]), tensor([0, 1, 2]))
    """

    def __init__(
        self,
        num_classes: int = 1000,
        num_features: int = 64,
        rows: int = 10_000,
        val_rows: int = 2000,
        noise: float = 0.5,
        zipf_exponent: float = 0.0,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        self._num_classes: int = checked_integer("num_classes", num_classes)
        self._num_features: int = checked_integer("num_features", num_features, least=2)
        self.rows: int = checked_integer("rows", rows)
        self.val_rows: int = checked_integer("val_rows", val_rows)
        self.seed: int = checked_integer("seed", seed, least=0)
        checked_number("noise", noise, least=0)
        checked_number("zipf_exponent", zipf_exponent, least=0)
        self.noise = noise
        self.zipf_exponent = zipf_exponent
        self._cumulative: Array | None = None

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return self._num_features

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self._num_classes

    @property
    def class_counts(self) -> Array:
        """Training rows of each class, shape ``(K,)``; all labels are drawn for it."""
        counts: Array = self.existing("train").class_counts()
        return counts

    def load(self, split: str) -> SyntheticRows | None:
        """The rows of "train" and "val"; "test" is "val"."""
        if split == "test":
            found: SyntheticRows = self.split("val")
            return found
        if split not in STREAMS:
            return None
        if self.zipf_exponent > 0 and self._cumulative is None:
            self._cumulative = np.cumsum(np.arange(1, self._num_classes + 1, dtype=np.float64) ** -self.zipf_exponent)
        rows = self.rows if split == "train" else self.val_rows
        shape = rows, self._num_classes, self._num_features
        return SyntheticRows(split, *shape, self.noise, self._cumulative, self.seed)

    def summary(self) -> dict[str, str]:
        """Seed, sizes and how they are drawn."""
        return {
            "data": f"synthetic, seed {self.seed}",
            "features": f"{self.num_features:,}, noise {self.noise}",
            "classes": f"{self.num_classes:,}, Zipf exponent {self.zipf_exponent}",
            **super().summary(),
        }

    def fingerprint(self, rows: int) -> str:
        """Hash of what the rows are drawn from: those of a longer split begin with those of a shorter one."""
        numbers = (self._num_classes, self._num_features, self.noise, self.zipf_exponent, self.seed)
        return fingerprint([repr(number) for number in numbers])
