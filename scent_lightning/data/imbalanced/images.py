"""Images of all rows of a split: in memory, or in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.images import UnreadableImageError, decode_image, first_line
from scent_lightning.data.strings import Strings
from scent_lightning.data.transforms import Transform
from scent_lightning.errors import InputError

__all__ = ["ArrayImages", "FileImages", "Images"]

Array = npt.NDArray[Any]


class Images:
    """Images of one size, with the numbers of their classes.

    Attributes:
        labels: class numbers, shape ``(N,)``, int64.
    """

    labels: Array

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        raise NotImplementedError

    def fetch(self, rows: Array) -> Tensor:
        """Images of ``rows``, shape (B,): uint8 of shape (B, 3, H, W)."""
        raise NotImplementedError

    def read(self, row: int) -> Tensor:
        """An image before it was brought to that size: uint8 of shape (3, H, W)."""
        return self.fetch(np.array([row]))[0]


class ArrayImages(Images):
    """Images in memory.

    Args:
        images: shape ``(N, 3, H, W)``, uint8.
        labels: class numbers, shape ``(N,)``, int64.
    """

    def __init__(self, images: Tensor, labels: Array) -> None:
        self.images = images
        self.labels = labels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.images.shape[2], self.images.shape[3]

    def fetch(self, rows: Array) -> Tensor:
        """Images of ``rows``, shape (B,): uint8 of shape (B, 3, H, W)."""
        return self.images[torch.from_numpy(rows)]


class FileImages(Images):
    """Images in files, decoded when they are fetched.

    Args:
        paths: of the images.
        labels: class numbers, shape ``(N,)``, int64.
        keep: keep what was decoded (and resized).
        resize: applied to each image, to bring all to one size; None demands that they have one.
    """

    def __init__(self, paths: Sequence[str], labels: Array, keep: bool, resize: Transform | None) -> None:
        self.paths = Strings(paths)
        self.labels = labels
        self.keep = keep
        self.resize = resize
        self._size: tuple[int, int] | None = None
        self._kept: Tensor | None = None
        self._is_kept = np.zeros(len(paths), dtype=bool)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, of the first image."""
        if self._size is None:
            _, height, width = self._one(0).shape
            self._size = height, width
        return self._size

    def read(self, row: int) -> Tensor:
        """The image as it is in the file: uint8 of shape (3, H, W)."""
        path = self.paths[row]
        try:
            return decode_image(path)
        except (FileNotFoundError, UnreadableImageError) as error:
            raise InputError(f"cannot read {path} as an image: {first_line(error)}") from error

    def _one(self, row: int) -> Tensor:
        image = self.read(row)
        return image if self.resize is None else self.resize(image)

    def fetch(self, rows: Array) -> Tensor:
        """Images of ``rows``, shape (B,): uint8 of shape (B, 3, H, W)."""
        size = self.size
        if self.keep and self._kept is None:
            self._kept = torch.empty(len(self.paths), 3, *size, dtype=torch.uint8)
        images = torch.empty(len(rows), 3, *size, dtype=torch.uint8)
        for position, row in enumerate(rows.tolist()):
            if self._is_kept[row]:
                continue
            image = self._one(row)
            if image.shape[1:] != size:
                raise InputError(
                    f"image_size must be given where images differ in size: {self.paths[row]} is {image.shape[2]} × "
                    f"{image.shape[1]} pixels, {self.paths[0]} is {size[1]} × {size[0]}"
                )
            images[position] = image
            if self._kept is not None:
                self._kept[row] = image
                self._is_kept[row] = True
        return images if self._kept is None else self._kept[torch.from_numpy(rows)]
