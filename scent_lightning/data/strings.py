"""Many strings in two blocks of memory, which forked loader processes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Strings"]


class Strings:
    """A list of strings; a list of Python's own would be copied page by page, as each look at one counts references.

    Args:
        strings: what it holds. What is not UTF-8 in the name of a file is kept, as Python has it.

    Example:
        >>> strings = Strings(["ant", "", "bee"])
        >>> len(strings), strings[2], list(strings)
        (3, 'bee', ['ant', '', 'bee'])
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = (string.encode("utf-8", "surrogatepass") for string in strings)
        self.array = pa.array(encoded, pa.large_binary())

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, position: int) -> str:
        content: bytes = self.array[position].as_py()
        return content.decode("utf-8", "surrogatepass")

    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each, shape (n,)."""
        return np.diff(self._parts()[0])

    def parts(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """The first ``count`` strings as two arrays: where they begin and end, shape (count + 1,), and the bytes."""
        ends, content = self._parts()
        return ends[: count + 1], content[: ends[count]]

    def _parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        buffers: list[Any] = self.array.buffers()
        ends = np.frombuffer(buffers[1], dtype=np.int64, count=len(self) + 1) if len(self) else np.zeros(1, np.int64)
        return ends, np.frombuffer(buffers[2] or b"", dtype=np.uint8)
