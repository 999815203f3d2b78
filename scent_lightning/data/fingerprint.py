"""A short hash of what training rows are, for a checkpoint to tell changed ones by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["fingerprint", "sampled"]

SAMPLED = 64


def fingerprint(parts: Iterable[npt.NDArray[Any] | bytes | str]) -> str:
    """A hash of arrays, bytes and strings, each with its length."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            content: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        else:
            content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.hexdigest()


def sampled(rows: int) -> npt.NDArray[np.int64]:
    """Some of ``rows`` positions, ascending: where to look at all rows would take long."""
    chosen: npt.NDArray[np.int64] = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, SAMPLED)).astype(np.int64))
    return chosen
