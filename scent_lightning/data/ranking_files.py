"""Query groups from SVMlight files: features and a relevance for each document, documents by query."""

from __future__ import annotations

import bz2
import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scent_lightning.data.images import first_line
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["QueryGroups", "ranking_file", "read_query_groups"]

Array = npt.NDArray[Any]
NAMED = 5  # rows in a message
# What the file of a split may be called before the ending; LETOR has "vali".
_NAMES = {"val": ("val", "vali", "valid", "validation")}
_ENDINGS = ("", ".txt", ".svm", ".svmlight", ".libsvm", ".dat")
_PACKED = ("", ".gz", ".bz2")


class QueryGroups(NamedTuple):
    """Documents by query, in the order in which the queries come first.

    Attributes:
        features: float64, shape ``(N, D)``.
        relevance: float32, shape ``(N,)``.
        starts: where each query's documents begin, and the end of the last: int64, shape ``(Q + 1,)``.
        ids: the queries' ids in the file, int64, shape ``(Q,)``.
        zero_based: whether the file counts features from 0.
    """

    features: Array
    relevance: Array
    starts: Array
    ids: Array
    zero_based: bool

    @property
    def lengths(self) -> Array:
        """Documents of each query, shape ``(Q,)``."""
        return np.diff(self.starts)

    @property
    def answerable(self) -> Array:
        """Whether a query has a relevant document, bool, shape ``(Q,)``."""
        found: Array = np.add.reduceat(self.relevance > 0, self.starts[:-1]) > 0
        return found

    def of_queries(self, queries: Array) -> QueryGroups:
        """Those of some queries, in the order given, which are not none."""
        lengths = self.lengths[queries]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(self.starts[queries] - starts[:-1], lengths) + np.arange(starts[-1])
        return QueryGroups(self.features[rows], self.relevance[rows], starts, self.ids[queries], self.zero_based)

    def digests(self) -> Array:
        """A hash of each query's documents, uint8, shape ``(Q, 16)``."""
        found = np.empty((len(self.ids), 16), dtype=np.uint8)
        for query, (start, end) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            digest = hashlib.blake2b(self.features[start:end].tobytes(), digest_size=16)
            digest.update(self.relevance[start:end].tobytes())
            found[query] = np.frombuffer(digest.digest(), dtype=np.uint8)
        return found


def ranking_file(folder: Path, split: str) -> Path | None:
    """The file of a split in a folder, such as ``train.txt``; None where there is none.

    Raises:
        InputError: there are several.
    """
    names = _NAMES.get(split, (split,))
    wanted = {f"{name}{ending}{packed}" for name in names for ending in _ENDINGS for packed in _PACKED}
    found = sorted(file for file in folder.iterdir() if file.is_file() and file.name.lower() in wanted)
    if len(found) > 1:
        raise InputError(f"{folder} has several files of split {split!r}: {listed([file.name for file in found])}")
    return found[0] if found else None


def read_query_groups(path: Path, width: int | None = None, zero_based: bool | None = None) -> QueryGroups:
    """The documents of an SVMlight file, by query.

    Args:
        path: of lines ``relevance qid:query 1:value 2:value …``; may be compressed as .gz or .bz2.
        width: number of features of the training file, and
        zero_based: whether it counts them from 0; None: this is the training file.

    Raises:
        InputError: in one sentence, what cannot be read, and where.
    """
    from sklearn.datasets import load_svmlight_file

    try:
        # Counted from 0 whatever the file does, for one without feature 1 in any row would be misread else.
        found, relevance = load_svmlight_file(str(path), zero_based=True)
        # Its own way to read them copies all of them for each document: hours for a million.
        queries = _query_ids(path)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} cannot be read as an SVMlight file (relevance qid:query 1:value 2:value …): {first_line(error)}"
        ) from error
    if len(relevance) == 0:
        raise InputError(f"{path} has no document")
    _check_relevance(path, relevance)
    if not np.isfinite(found.data).all():
        rows = np.unique(np.repeat(np.arange(found.shape[0]), np.diff(found.indptr))[~np.isfinite(found.data)])
        raise InputError(
            f"{path} has missing or non-finite features in rows {listed(rows.tolist(), NAMED)} (counted from 0)"
        )
    if zero_based is None:
        zero_based = bool((found.indices == 0).any())
    features = _of_width(path, found.toarray() if zero_based else found[:, 1:].toarray(), width)
    return _by_query(features, relevance.astype(np.float32), queries, zero_based)


def _query_ids(path: Path) -> Array:
    """The query of each document, int64."""
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    found: list[int] = []
    missing: list[int] = []
    with opened(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.partition(b"#")[0].split(None, 2)
            if not fields:
                continue
            if len(fields) < 2 or not fields[1].startswith(b"qid:"):
                missing.append(number)
                continue
            try:
                found.append(int(fields[1][4:]))
            except ValueError as error:
                raise InputError(
                    f"the query id in line {number} of {path} must be an integer, got "
                    f"{fields[1][4:].decode('latin-1')!r}"
                ) from error
    if missing:
        raise InputError(
            f"{path} has {len(missing):,} of {len(missing) + len(found):,} documents without a query id (lines "
            f"{listed(missing, NAMED)}): each needs one, as in 2 qid:17 1:0.5"
        )
    return np.array(found, dtype=np.int64)


def _check_relevance(path: Path, relevance: Array) -> None:
    if (bad := np.flatnonzero(~(relevance >= 0) | ~np.isfinite(relevance))).size:
        raise InputError(
            f"{path} has relevance {relevance[bad[0]]:g} in row {bad[0]} (counted from 0); it must be a finite number "
            "of at least 0"
        )


def _of_width(path: Path, features: Array, width: int | None) -> Array:
    """Features that no row of a file has are 0 there."""
    if width is None:
        if features.shape[1] == 0:
            raise InputError(f"{path} has no feature in any row")
        return features
    if features.shape[1] > width:
        raise InputError(f"{path} has {features.shape[1]} features, and the training rows have {width}")
    return np.pad(features, ((0, 0), (0, width - features.shape[1])))


def _by_query(features: Array, relevance: Array, queries: Array, zero_based: bool) -> QueryGroups:
    ids, first, place = np.unique(queries, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    place = rank[place]
    starts = np.concatenate([[0], np.cumsum(np.bincount(place))])
    if not (np.diff(place) >= 0).all():  # documents of a query need not follow each other
        rows = np.argsort(place, kind="stable")
        features, relevance = features[rows], relevance[rows]
    return QueryGroups(features, relevance, starts, ids[order], zero_based)


def drawn(relevance: Array, list_size: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """All relevant documents of a list, and as many of the others as there is room for, drawn evenly; one at least.

    Args:
        relevance: shape ``(n,)``.
        list_size: documents that there is room for.
        generator: of the draw.

    Returns:
        Which documents, ascending, shape ``(m,)``; and how many of the list each stands for, float32, shape ``(m,)``.
    """
    relevant, others = np.flatnonzero(relevance > 0), np.flatnonzero(~(relevance > 0))
    room = min(max(list_size - len(relevant), 1), len(others))
    documents = np.sort(np.concatenate([relevant, generator.choice(others, room, replace=False)]))
    counts = np.where(relevance[documents] > 0, 1.0, len(others) / max(room, 1))
    return documents, counts.astype(np.float32)


def places(starts: Array, lengths: Array) -> tuple[Array, Array]:
    """Rows of several lists as one matrix.

    Args:
        starts: first row of each list, shape ``(B,)``.
        lengths: shape ``(B,)``.

    Returns:
        Rows, shape ``(B, L)``, 0 where a list has no more; and where it has, bool.
    """
    steps = np.arange(int(lengths.max()) if len(lengths) else 0)
    there = steps < lengths[:, None]
    return np.where(there, starts[:, None] + steps, 0), there


def sizes_in_words(lengths: Sequence[int]) -> str:
    """Numbers of documents of queries in words.

    Example:
        >>> sizes_in_words([3, 20, 4])
        '3 queries of 3 to 20 documents'
    """
    count = f"{len(lengths):,} {'query' if len(lengths) == 1 else 'queries'}"
    return f"{count} of {min(lengths):,} to {max(lengths):,} documents"
