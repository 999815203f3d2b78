"""CIFAR-10 and CIFAR-100: the archive as torchvision unpacks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from scent_lightning.data.imbalanced.images import ArrayImages
from scent_lightning.data.imbalanced.source import Evaluated, ImageSource
from scent_lightning.errors import InputError

__all__ = ["Cifar"]

_ONE_TEST_SET = "is not for dataset {dataset!r}, which has one test set, got {value!r}"


class Cifar(ImageSource):
    """The official training and test sets; the second half of the classes by number is positive, as published."""

    says_groups = True
    refused: ClassVar[Mapping[str, str]] = {
        "image_size": "is only for dataset 'folder', got {value!r} with {dataset!r}",
        "val_split": _ONE_TEST_SET,
        "test_split": _ONE_TEST_SET,
    }

    def prepare(self) -> None:
        """Download the archive, if asked to and it is not there."""
        if self.options.download:
            self._archive(True, download=True)

    def has_training_rows(self) -> bool:
        """There always are."""
        return True

    def evaluated(self, kind: Evaluated) -> str:
        """The official test set."""
        return "test"

    def of_split(self, name: str) -> str:
        """Which one it is."""
        return "the official test set"

    def classes(self) -> list[Any]:
        """Names."""
        return list(self._archive(False).classes)

    def positives(self, classes: list[Any]) -> list[int]:
        """The second half."""
        return list(range(len(classes) // 2, len(classes)))

    def open(self, split: str, classes: list[Any]) -> ArrayImages:
        """The images of a set."""
        archive = self._archive(split == "train")
        images = torch.from_numpy(archive.data).permute(0, 3, 1, 2).contiguous()
        return ArrayImages(images, np.array(archive.targets, dtype=np.int64))

    def _archive(self, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        name = self.options.dataset
        kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        try:
            return kind(str(self.folder), train=train, download=download)
        except (RuntimeError, OSError) as error:
            hint = "" if self.options.download else "set download to true, or "
            raise InputError(
                f"path {self.folder} has no whole {name}: {str(error).splitlines()[0].split('. ')[0]}; "
                f"{hint}unpack the archive so that {self.folder / kind.base_folder} is there"
            ) from error
