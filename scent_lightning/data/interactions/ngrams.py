"""Texts as hashes of their n-grams."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
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
    grams = _of_words if kind == "words" else _of_characters
    return Ragged.of_lists([[zlib.crc32(gram.encode()) for gram in grams(_WORD.findall(t.lower()))] for t in texts])


def _of_words(words: list[str]) -> list[str]:
    return words + [f"{first} {second}" for first, second in pairwise(words)]


def _of_characters(words: list[str]) -> list[str]:
    found = []
    for word in words:
        marked = f"<{word}>"
        found.append(marked)
        for length in _LENGTHS:
            if length < len(marked):
                found += [marked[start : start + length] for start in range(len(marked) - length + 1)]
    return found
