"""Pairs of an image and a caption in files. Row i is always the same pair, whatever becomes of the others."""

from __future__ import annotations

import io
import os
import warnings

import torch
from torch import Tensor

from scent_lightning.data.images import UnreadableImageError, decode_image
from scent_lightning.errors import InputError

__all__ = ["BadPairError", "FilePairs", "decode", "file_size"]

NAMED = 5  # pairs that are skipped


def file_size(path: str) -> int:
    """Size of a file in bytes; −1 where there is none."""
    return os.path.getsize(path) if os.path.isfile(path) else -1


class BadPairError(Exception):
    """A pair that has to be skipped; the message says which file, and why."""


def decode(file: str | io.BytesIO, name: str) -> Tensor:
    """The image in ``file`` as RGB: uint8, shape (3, H, W); raises BadPairError if there is none."""
    try:
        return decode_image(file)
    except FileNotFoundError as error:
        raise BadPairError(f"{name} does not exist") from error
    except UnreadableImageError as error:
        raise BadPairError(f"cannot read {name} as an image: {error}") from error


class FilePairs:
    """Pairs in files.

    Args:
        split: its name.
        rows: number of rows.

    Attributes:
        tokenised_at_once: the captions of up to so many rows are read and tokenised before any batch; 0: of none.
    """

    tokenised_at_once = 0

    def __init__(self, split: str, rows: int) -> None:
        self.split = split
        if rows == 0:
            raise InputError(f"split {split!r} has no rows")
        # In shared memory: loader processes write it too.
        self.skipped: Tensor = torch.zeros(rows, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.skipped)

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:
        """Caption, and image (uint8, shape (3, H, W)) if asked for; raises BadPairError."""
        raise NotImplementedError

    def caption(self, row: int) -> str:
        """Caption, "" where there is none."""
        try:
            return self.read(row, image=False)[0]
        except BadPairError:
            return ""

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` pairs are, found without reading them all."""
        raise NotImplementedError

    def skip(self, row: int, reason: str) -> None:
        """Count the row, once, and say so of the first ones."""
        if self.skipped[row]:
            return
        self.skipped[row] = True
        count = int(self.skipped.sum())
        if count == len(self):
            raise InputError(f"split {self.split!r} has no pair that can be used, of {count}; the last one: {reason}")
        if count <= NAMED:
            more = "; no more are named" if count == NAMED else ""
            warnings.warn(f"pair {row} of split {self.split!r} is skipped: {reason}{more}", stacklevel=2)
