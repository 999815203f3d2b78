"""Precomputed features with a label, in a folder for each split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from scent_lightning.data.feature_files import FeatureFiles, has_array
from scent_lightning.data.imbalanced.rows import FeatureRows
from scent_lightning.data.imbalanced.source import FolderSource
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["FeatureFolder"]

Array = npt.NDArray[Any]


class FeatureFolder(FolderSource):
    """Classes are called by their labels, which are numbers: of them none is a position."""

    named_by_position = False
    refused: ClassVar[Mapping[str, str]] = {
        "image_size": "is only for dataset 'folder', got {value!r} with {dataset!r}",
        "mean": "is only for images, got {value!r} with dataset {dataset!r}",
        "std": "is only for images, got {value!r} with dataset {dataset!r}",
    }

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return int(self.restored.get("num_features") or self.all_rows("train", []).features.shape[1])

    def classes(self) -> list[Any]:
        """The labels that occur in "train", ascending."""
        classes: list[Any] = np.unique(self.all_rows("train", []).labels).tolist()
        return classes

    def known(self, classes: list[Any], by_position: bool) -> str:
        """The labels."""
        return f"known are numbers: {listed(classes)}"

    def open(self, split: str, classes: list[Any]) -> FeatureFiles:
        """The files of a split, as wide as those of "train"."""
        files = FeatureFiles(self.folder / split)
        if split != "train" and self.num_features != files.features.shape[1]:
            raise InputError(
                f"splits differ in the number of features: 'train' has {self.num_features}, {split!r} has "
                f"{files.features.shape[1]}"
            )
        return files

    def positions(self, split: str, classes: list[Any]) -> Array:
        """Position in ``classes`` of each row's label, shape (n,), −1 where it is none of them."""
        labels, values = self.all_rows(split, classes).labels, np.array(classes)
        found = np.minimum(np.searchsorted(values, labels), len(values) - 1)
        return np.where(values[found] == labels, found, -1)

    def chosen(self, rows: FeatureFiles, chosen: Array, labels: Array | None, augment: bool = False) -> FeatureRows:
        """Features as they are."""
        return FeatureRows(rows, chosen, labels)

    def to_predict(self) -> FeatureRows | None:
        """All rows of the files in the folder "predict", or else in ``path`` itself; labels are not looked at."""
        folder = self.folder / "predict"
        if not folder.is_dir():
            folder = self.folder
            if not has_array(folder, "features"):
                return None
        files = FeatureFiles(folder, labelled=False)
        if self.restored:
            files.check_width(self.num_features)
        return self.chosen(files, np.arange(len(files)), None)

    def fingerprint(self, rows: FeatureFiles, chosen: Array, labels: Array) -> str:
        """Hash of all labels, and the features of some rows."""
        return rows.fingerprint(chosen, labels)
