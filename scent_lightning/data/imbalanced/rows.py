"""The rows of a split that belong to one of the two groups, as batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.augmentation import at_random
from scent_lightning.data.feature_files import FeatureFiles
from scent_lightning.data.imbalanced.images import Images
from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.data.transforms import Transform
from scent_lightning.words import rows_in_words

__all__ = ["FeatureRows", "GroupedRows", "ImageRows"]

Array = npt.NDArray[Any]


class GroupedRows(IndexedRows):
    """Rows of two groups of classes; item ``i`` is row ``rows[i]`` of the source.

    Args:
        rows: shape ``(n,)``, int64.
        labels: 0 or 1, shape ``(n,)``, int64; None where the rows to predict have none.
    """

    def __init__(self, rows: Array, labels: Array | None) -> None:
        self.rows = rows
        self._labels = labels

    @property
    def labels(self) -> Array:
        """Labels of the rows, shape (n,); there must be some."""
        assert self._labels is not None
        return self._labels

    def __len__(self) -> int:
        return len(self.rows)

    def in_words(self) -> str:
        """How many there are of each group."""
        positives = int(self.labels.sum())
        return f"{rows_in_words(len(self))}: {positives:,} positive, {len(self) - positives:,} negative"

    def inputs(self, rows: Array) -> Tensor:
        """Inputs of the source's rows ``rows``, shape (B,): float32, shape (B, …)."""
        raise NotImplementedError

    def fetch(self, index: Array) -> Batch:
        """Inputs (B, …), float32, and labels (B,), int64, or None."""
        labels = None if self._labels is None else torch.from_numpy(self._labels[index])
        return self.inputs(self.rows[index]), labels


class FeatureRows(GroupedRows):
    """Features.

    Args:
        files: all rows of the split.
        rows: see :class:`GroupedRows`.
        labels: see :class:`GroupedRows`.
    """

    def __init__(self, files: FeatureFiles, rows: Array, labels: Array | None) -> None:
        super().__init__(rows, labels)
        self.files = files

    def inputs(self, rows: Array) -> Tensor:
        """Features (B, D)."""
        features = self.files.fetch(rows)[0]
        assert features is not None
        return features


class ImageRows(GroupedRows):
    """Images, each augmented on its own as bytes, and normalised as a batch.

    Args:
        images: all rows of the split.
        rows: see :class:`GroupedRows`.
        labels: see :class:`GroupedRows`.
        normalise: takes uint8 of shape (B, 3, H, W) to float32.
        augment: gives the random transform of one image for a height and width; None for none.
        whole: augment the images as they are in the files, and not those brought to one size.
        seed: of the random transforms.
    """

    def __init__(
        self,
        images: Images,
        rows: Array,
        labels: Array | None,
        normalise: Transform,
        augment: Callable[[int, int], Transform] | None = None,
        whole: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(rows, labels)
        self.images = images
        self.normalise = normalise
        self.augment = augment
        self.whole = whole
        self.seed = seed
        self._transform: Transform | None = None

    def inputs(self, rows: Array) -> Tensor:
        """Images (B, 3, H, W)."""
        if len(rows) == 0:
            return torch.empty((0, 3, *self.images.size))
        return self.normalise(self.images.fetch(rows) if self.augment is None else self._augmented(rows))

    def _augmented(self, rows: Array) -> Tensor:
        assert self.augment is not None
        if self._transform is None:
            self._transform = self.augment(*((0, 0) if self.whole else self.images.size))
        change, read = self._transform, self.images.read
        if self.whole:
            made = at_random(rows.tolist(), lambda row: change(read(row)), self.seed, self.epoch)
        else:
            fetched = iter(self.images.fetch(rows))
            made = at_random(rows.tolist(), lambda _: change(next(fetched)), self.seed, self.epoch)
        return torch.stack(list(made))
