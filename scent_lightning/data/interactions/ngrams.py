"""Texts as hashes of their n-grams."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from scent_lightning.data.interactions.ragged import Ragged
from scent_lightning.validation import checked_choice

__all__ = ["NGrams", "hashed_ngrams"]

NGrams = Literal["words", "characters"]
_WORD = re.compile(r"\w+")
_LENGTHS = (3, 4, 5)


def hashed_ngrams(texts: Iterable[str], kind: NGrams) -> Ragged:
    """Hashes of the n-grams of texts, which are the same in every run and on every machine.

    Letters are made small. "words" are the words and the pairs of neighbours; "characters" are, of each word with a
    mark at both ends, itself and all that is of 3 to 5 characters in it, so that words of one stem have some in common.

    Args:
        texts: n of them.
        kind: "words" or "characters".

    Returns:
        n rows of integers from 0 to 2³² − 1.

    Raises:
        InputError: another kind.

    Example:
        >>> texts = hashed_ngrams(["Red wine.", "wine"], "words")
        >>> texts.lengths().tolist(), bool(texts.values[1] == texts.values[3])
        ([3, 1], True)
    """
    checked_choice("kind", kind, get_args(NGrams))
    hashes = _of_words if kind == "words" else _of_characters
    return Ragged.of_lists([hashes(_WORD.findall(text.lower())) for text in texts])


def _hash(gram: str) -> int:
    return zlib.crc32(gram.encode())


def _of_words(words: list[str]) -> list[int]:
    return [_hash(gram) for gram in (*words, *(f"{first} {second}" for first, second in pairwise(words)))]


def _of_characters(words: list[str]) -> list[int]:
    return [hashed for word in words for hashed in _parts(word)]


@lru_cache(maxsize=2**16)
def _parts(word: str) -> tuple[int, ...]:
    marked = f"<{word}>"
    lengths = (length for length in _LENGTHS if length < len(marked))
    starts = ((start, length) for length in lengths for start in range(len(marked) - length + 1))
    return _hash(marked), *(_hash(marked[start : start + length]) for start, length in starts)
