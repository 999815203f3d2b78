"""The pairs of a split as batches of images and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.augmentation import at_random
from scent_lightning.data.image_text.looks import Look
from scent_lightning.data.image_text.pairs import BadPairError, FilePairs
from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.errors import InputError

__all__ = ["FileRows", "PairRows"]

Array = npt.NDArray[Any]


class PairRows(IndexedRows):
    """Pairs of one split; a batch leaves out those that are skipped.

    Args:
        name: of the split.
        look: how they become batches.

    Attributes:
        groups: number of the group of each row, int64, shape ``(n,)``: batches have it before the index. None: they
            have none.
    """

    groups: Tensor | None = None

    def __init__(self, name: str, look: Look) -> None:
        self.name = name
        self.look = look

    def skipped(self) -> int:
        """How many rows were skipped so far."""
        return 0

    def captions(self) -> list[str]:
        """Caption of each row, "" where there is none."""
        raise NotImplementedError

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` pairs are, found without reading them all."""
        raise NotImplementedError

    def batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        """Images (B', 3, S, S), uint8, tokens (B', L) and the rows (B',), int64, without those that are skipped."""
        raise NotImplementedError

    def __getitem__(self, index: int | Sequence[int]) -> Batch:
        if isinstance(index, Sequence):
            return self.__getitems__(index)
        parts = self.__getitems__([index])
        if len(parts[-1]) == 0:
            raise InputError(f"pair {index} of split {self.name!r} has no caption or no readable image")
        return tuple(part[0] for part in parts)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        images, texts, rows = self.batch(self.checked(indices))
        groups = () if self.groups is None else (self.groups[rows],)
        return self.look.normalise(images), texts.to(torch.int64), *groups, rows


class FileRows(PairRows):
    """Pairs read from files when they are fetched.

    Args:
        pairs: the pairs.
        look: how they become batches.
    """

    def __init__(self, pairs: FilePairs, look: Look) -> None:
        super().__init__(pairs.split, look)
        self.pairs = pairs
        self._kept: dict[int, tuple[str, Tensor]] = {}
        self.width = look.tokenizer([""]).shape[1]
        self.tokens: Tensor | None = None
        if len(pairs) <= pairs.tokenised_at_once:
            self.tokens = look.tokenizer(self.captions()).to(torch.int32)

    def __len__(self) -> int:
        return len(self.pairs)

    def skipped(self) -> int:
        """How many rows were skipped so far."""
        return int(self.pairs.skipped.sum())

    def captions(self) -> list[str]:
        """Caption of each row, "" where there is none."""
        return [self.pairs.caption(row) for row in range(len(self))]

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` pairs are."""
        return self.pairs.fingerprint(rows)

    def _read(self, row: int) -> tuple[str, Tensor] | None:
        """Caption and image (uint8, shape (3, S, S)), or None for a pair to skip."""
        transform, is_random = self.look.transform, self.look.seed is not None
        kept = self._kept.get(row)
        if kept is not None:
            return (kept[0], transform(kept[1])) if is_random else kept
        try:
            caption, image = self.pairs.read(row)
        except BadPairError as error:
            self.pairs.skip(row, str(error))
            return None
        assert image is not None
        transformed = transform(image)
        if self.look.keep:
            self._kept[row] = caption, image.contiguous() if is_random else transformed
        return caption, transformed

    def batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        """Images, tokens and rows of the pairs that can be read."""
        rows, captions, images = [], [], []
        numbers, seed = index.tolist(), self.look.seed
        pairs = map(self._read, numbers) if seed is None else at_random(numbers, self._read, seed, self.epoch)
        for row, pair in zip(numbers, pairs, strict=True):
            if pair is not None:
                rows.append(row)
                captions.append(pair[0])
                images.append(pair[1])
        kept = torch.tensor(rows, dtype=torch.int64)
        if not rows:
            size = self.look.image_size
            empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
            return empty, torch.empty(0, self.width, dtype=torch.int64), kept
        texts = self.look.tokenizer(captions) if self.tokens is None else self.tokens[kept]
        return torch.stack(images), texts, kept
