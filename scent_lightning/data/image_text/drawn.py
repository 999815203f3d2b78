"""Synthetic pairs: drawn shapes, and sentences that say what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.image_text.looks import Look
from scent_lightning.data.image_text.rows import PairRows
from scent_lightning.data.image_text.source import Classes, PairSource
from scent_lightning.data.shapes import CLASSES, NUM_CAPTIONS, Shapes
from scent_lightning.validation import checked_choice

__all__ = ["DrawnShapes", "ShapeRows"]

Array = npt.NDArray[Any]


class ShapeRows(PairRows):
    """Drawn pairs.

    Args:
        name: "train" or "val".
        rows: number of rows.
        seed: of everything.
        tokens: of every caption there is, shape ``(NUM_CAPTIONS, L)``.
        look: how they become batches.
    """

    def __init__(self, name: str, rows: int, seed: int, tokens: Tensor, look: Look) -> None:
        super().__init__(name, look)
        self.rows = rows
        self.seed = seed
        self.shapes = Shapes(name, seed, look.image_size)
        self.tokens = tokens

    def __len__(self) -> int:
        return self.rows

    def captions(self) -> list[str]:
        """Caption of each row."""
        return [Shapes.caption(number) for number in self.shapes.numbers(np.arange(self.rows))]

    def fingerprint(self, rows: int) -> str:
        """Hash of the seed: more rows begin with those of fewer."""
        return fingerprint(["shapes", repr(self.seed)])

    def batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        """Images, tokens and rows."""
        numbers = self.shapes.numbers(index)
        images = torch.from_numpy(self.shapes.draw(index, numbers))
        return images, self.tokens[torch.from_numpy(numbers)], torch.from_numpy(index)


class DrawnShapes(PairSource):
    """4,032 different captions, such as "a large red circle at the top left on a blue background".

    They have at most 15 of CLIP's tokens. A pair depends on ``seed``, its split and its index alone. Every 4,032 rows
    in turn have each caption once, so that no two validation rows share one, up to that number. Pictures differ within
    what the caption says: validation rows have captions that were trained on, with other pictures.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "path": "is not for source {source!r}, got {value!r}",
        "val_path": "is not for source {source!r}, got {value!r}",
        "split_column": "is only for source 'table', got {value!r} with {source!r}",
    }
    says_validation = "val_rows"

    def check(self) -> None:
        """The class must be something that captions say."""
        if (column := self.options.class_column) is not None:
            checked_choice("class_column of source 'shapes'", column, CLASSES)
        self._tokens: Tensor | None = None

    @property
    def has_validation(self) -> bool:
        """Whether there are ``val_rows``."""
        return self.options.val_rows > 0

    def _count(self, split: str) -> int:
        return self.options.rows if split == "train" else self.options.val_rows

    def rows(self, split: str, look: Look) -> ShapeRows:
        """The rows of "train" or "val" as batches."""
        if self._tokens is None:
            captions = [Shapes.caption(number) for number in range(NUM_CAPTIONS)]
            self._tokens = look.tokenizer(captions).to(torch.int32)
        return ShapeRows(split, self._count(split), self.options.seed, self._tokens, look)

    def classes(self, split: str) -> Classes:
        """What each row's caption says."""
        kind = self.options.class_column
        assert kind is not None
        numbers = Shapes(split, self.options.seed, image_size=1).numbers(np.arange(self._count(split)))
        return list(CLASSES[kind]), Shapes.classes(numbers, kind)
