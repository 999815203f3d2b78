"""The data module of interactions."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.fractions import check_fractions
from scent_lightning.data.indexed import IndexedRows
from scent_lightning.data.interactions.held_out import LeaveOut, left_out
from scent_lightning.data.interactions.ngrams import NGrams, hashed_ngrams
from scent_lightning.data.interactions.pairs import Interactions
from scent_lightning.data.interactions.ragged import Ragged
from scent_lightning.data.interactions.read import KNOWN, Columns, Names, Read, read_file
from scent_lightning.data.interactions.rows import QueryRows, TrainingRows
from scent_lightning.data.strings import Strings
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_choice, checked_integer
from scent_lightning.words import listed, rows_in_words

__all__ = ["InteractionsDataModule"]

_SHOWN = 5
_FILES = {"val": "val_file", "test": "test_file"}


class InteractionsDataModule(IndexedDataModule):
    r"""Interactions of queries with items, as whole batches ``(queries, items, index)``.

    In training ``queries`` is what a query's tower reads: numbers, int64 of shape ``(B,)``, or the hashed n-grams of
    texts, int64 of shape ``(B, L)``, filled up with −1. ``items`` are numbers of items, int64 of shape ``(B,)``, and
    ``index`` is the interaction's, int64 of shape ``(B,)``. Validation and test have a row for each query: ``items`` is
    then of shape ``(B, P)``, all that are to be found, filled up with −1, and ``index`` the query's number. ``predict``
    goes over all queries, without ``items``.

    Queries and items are numbered in the order in which they occur, and keep their names, by which predictions are
    written. Interactions that occur twice count once. Those of validation and test that are in training too, or have a
    query or an item that training does not have, are counted in the summary.

    Args:
        dataset: "debian_dependencies" (packages that need others: 32,542 and 29,012), "wordnet" (words by their
            definitions: 117,659 definitions, 147,306 words), "wordnet_hypernyms" (what 95,322 nouns and verbs are kinds
            of, among 20,472), or the path of a file with a row for each interaction: CSV or TSV with a header (UTF-8;
            may be compressed as .gz, .bz2 or .xz), Parquet, or an npz of arrays.
        query: the column, or array, of the query's name; None for the data sets by name.
        item: the column, or array, of the item's name; None for the data sets by name.
        query_text: the column of the query's text; None: its name is the text.
        item_text: the column of the item's text; None: its name is the text.
        split: the column that says "train", "val" or "test"; None: the interactions are split by ``leave_out``.
        time: a column of numbers, by which the last interactions are left out; None: random ones.
        val_file: a file with the interactions of validation, of the same columns; training is then all of ``dataset``.
            None: interactions that are left out.
        test_file: a file with the interactions of test, of the same columns; None: interactions that are left out.
        leave_out: "one": one interaction of each query that has three for validation and one for test; "query": all of
            ``val_fraction`` and ``test_fraction`` of the queries, which needs texts; "none". None: "one" of a file, and
            what belongs to the data set of a name.
        val_fraction: fraction of the queries for validation, in [0, 1); of ``leave_out`` "query".
        test_fraction: fraction of the queries for test, in [0, 1); of ``leave_out`` "query".
        query_ngrams: how texts of queries are read: "words" (and pairs of words), "characters" (words and their parts
            of 3 to 5 characters); None: a query is its number.
        item_ngrams: how texts of items are read: "words" or "characters"; None: an item is its number.
        data_dir: where the named data sets are, as ``debian_dependencies/interactions.npz``; None takes the environment
            variable SCENT_LIGHTNING_DATA, or ``data``.
        batch_size: interactions of a training batch, in each process.
        eval_batch_size: queries of a batch in validation, test and prediction.
        split_seed: which interactions are left out.
        num_workers: loader processes; 0 loads in the training process, which is fastest here.

    Raises:
        InputError: before training, in one sentence: a data set or file that is not there, a missing column, a row
            without a query or an item, no interaction at all, a split of another name, or an argument out of range.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "bought.csv"
        >>> rows = ["ann,tea,train", "ann,milk,train", "bob,tea,train", "bob,milk,val"]
        >>> _ = path.write_text("\n".join(["who,what,split", *rows]))
        >>> data = InteractionsDataModule(str(path), query="who", item="what", split="split", batch_size=3)
        >>> data.num_queries, data.num_items, data.num_anchors
        (2, 2, 3)
        >>> queries, items, index = next(iter(data.train_dataloader()))
        >>> queries.shape, items.shape, index.shape
        (torch.Size([3]), torch.Size([3]), torch.Size([3]))
        >>> [part.tolist() for part in next(iter(data.val_dataloader()))]
        [[1], [[1]], [1]]
    """

    def __init__(
        self,
        dataset: str = "debian_dependencies",
        query: str | None = None,
        item: str | None = None,
        query_text: str | None = None,
        item_text: str | None = None,
        split: str | None = None,
        time: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        leave_out: LeaveOut | None = None,
        val_fraction: float = 0.02,
        test_fraction: float = 0.02,
        query_ngrams: NGrams | None = None,
        item_ngrams: NGrams | None = None,
        data_dir: str | None = None,
        batch_size: int = 512,
        eval_batch_size: int = 512,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        columns = {"query": query, "item": item, "query_text": query_text, "item_text": item_text}
        columns |= {"split": split, "time": time}
        self.columns = Columns(**columns)
        known = KNOWN.get(dataset)
        if known is not None:
            for name, taken in {**columns, "val_file": val_file, "test_file": test_file}.items():
                if taken is not None:
                    raise InputError(f"{name} is part of the data set {dataset!r}; leave it out")
            leave_out = leave_out or known.leave_out  # type: ignore[assignment]
            query_ngrams, item_ngrams = query_ngrams or known.query_ngrams, item_ngrams or known.item_ngrams
        given = split is not None or val_file is not None or test_file is not None
        if given and leave_out not in (None, "none"):
            raise InputError(f"leave_out {leave_out!r} does not go with splits that are given")
        checked_choice("leave_out", leave_out or "one", get_args(LeaveOut))
        for name, ngrams in (("query_ngrams", query_ngrams), ("item_ngrams", item_ngrams)):
            if ngrams is not None:
                checked_choice(name, ngrams, get_args(NGrams))
        if leave_out == "query" and query_ngrams is None:
            raise InputError("leave_out 'query' needs query_ngrams: a query that is a number alone cannot be new")
        check_fractions(val_fraction, test_fraction)
        self.dataset = dataset
        self.files = {"val": val_file, "test": test_file}
        self.leave_out: LeaveOut = "none" if given else leave_out or "one"
        self.fractions = (float(val_fraction), float(test_fraction))
        self.query_ngrams, self.item_ngrams = query_ngrams, item_ngrams
        self.data_dir = Path(data_dir or os.environ.get("SCENT_LIGHTNING_DATA") or "data")
        self.split_seed: int = checked_integer("split_seed", split_seed, least=0)
        self._table: _Table | None = None

    @property
    def num_queries(self) -> int:
        """Number of queries, of all splits."""
        return len(self._all().query_names)

    @property
    def num_items(self) -> int:
        """Number of items K, of all splits."""
        return len(self._all().item_names)

    @property
    def interactions(self) -> Interactions:
        """The interactions of training."""
        return self._all().splits["train"]

    @property
    def item_texts(self) -> Ragged | None:
        """Hashed n-grams of the items' texts, a row for each; None where an item is its number."""
        return self._all().item_texts

    @property
    def query_texts(self) -> Ragged | None:
        """Hashed n-grams of the queries' texts, a row for each; None where a query is its number."""
        return self._all().query_texts

    def names_of(self, column: str) -> Strings | None:
        """Names of the numbers in a column of the predictions, "query" or "item"; of another column None."""
        table = self._all()
        return {"query": table.query_names, "item": table.item_names}.get(column)

    def load(self, split: str) -> IndexedRows | None:
        """The rows of a split; of "predict" all queries."""
        table = self._all()
        if split == "train":
            return TrainingRows(table.splits["train"], table.query_texts)
        if split == "predict":
            return QueryRows(torch.arange(len(table.query_names)), None, table.query_texts)
        right = table.splits[split]
        if not len(right):
            return None
        return QueryRows(torch.unique(right.queries), right, table.query_texts)

    def missing(self, split: str) -> str:
        """What to say of a split without an interaction."""
        return f"{self.dataset} has no interaction of split {split!r}"

    def summary(self) -> dict[str, str]:
        """Queries, items, and the interactions of each split."""
        table = self._all()
        counts = table.splits["train"].counts
        never = int((counts == 0).sum())
        said = {
            "data": self.dataset,
            "queries": f"{self.num_queries:,}" + (f", as {self.query_ngrams}" if self.query_ngrams else ""),
            "items": f"{self.num_items:,}"
            + (f", as {self.item_ngrams}" if self.item_ngrams else "")
            + (f", {never:,} of them without a training interaction" if never else ""),
            "training": f"{len(table.splits['train']):,} interactions",
        }
        for name, split in (("validation", "val"), ("test", "test")):
            right = table.splits[split]
            said[name] = f"{len(right):,} interactions of {len(torch.unique(right.queries)):,} queries"
        return said

    def learned(self) -> dict[str, Any]:
        """Names of queries and items in the order of their numbers."""
        table = self._all()
        return {
            name: {"ends": torch.from_numpy(ends.copy()), "bytes": torch.from_numpy(content.copy())}
            for name, names in (("query_names", table.query_names), ("item_names", table.item_names))
            for ends, content in (names.parts(len(names)),)
        }

    def fingerprint(self, rows: int) -> str:
        """Hash of the first ``rows`` training interactions, by the names of their queries and items."""
        table = self._all()
        pairs = table.splits["train"]
        parts: list[npt.NDArray[Any]] = []
        for numbers, names in ((pairs.queries, table.query_names), (pairs.items, table.item_names)):
            first = numbers[:rows].numpy()
            parts += [first, *names.parts(int(first.max()) + 1 if rows else 0)]
        return fingerprint(parts)

    def forget(self) -> None:
        """Have the files read anew."""
        super().forget()
        self._table = None

    # ---------------------------------------------------------------- reading

    def _all(self) -> _Table:
        if self._table is None:
            self._table = self._numbered(self._read())
        return self._table

    def _read(self) -> Read:
        if self.dataset in KNOWN:
            return KNOWN[self.dataset].read(self.data_dir)
        read = read_file(Path(self.dataset), self.columns)
        for split, file in self.files.items():
            if file is None:
                continue
            if not Path(file).is_file():
                raise InputError(f"{_FILES[split]} {file!r} is no file")
            more = read_file(Path(file), self.columns)
            of_file = np.full(len(more.queries), split, dtype=object)
            before = np.full(len(read.queries), "train", dtype=object) if read.split is None else read.split
            read = Read(
                np.concatenate([read.queries, more.queries]),
                np.concatenate([read.items, more.items]),
                np.concatenate([before, of_file]),
                None,
                None if read.query_texts is None else {**(more.query_texts or {}), **read.query_texts},
                None if read.item_texts is None else {**(more.item_texts or {}), **read.item_texts},
            )
        return read

    def _numbered(self, read: Read) -> _Table:
        queries, query_names = self._numbers("query", read.queries)
        items, item_names = self._numbers("item", read.items)
        known = (queries >= 0) & (items >= 0)
        if not known.all():
            self.note(f"{rows_in_words(int((~known).sum()))} of a query or an item that the training run did not have")
        split = read.split
        if split is None:
            split = left_out(queries, read.time, self.leave_out, self.fractions, self.split_seed)
        self._check_splits(split)
        pairs = {
            name: self._pairs_of(name, queries, items, known & (split == name), len(query_names), len(item_names))
            for name in ("train", "val", "test")
        }
        for name in _FILES:
            self._look_at(name, pairs, query_names, item_names)
        texts = (
            None if kind is None else hashed_ngrams(_texts(names, of), kind)
            for kind, of, names in (
                (self.query_ngrams, read.query_texts, query_names),
                (self.item_ngrams, read.item_texts, item_names),
            )
        )
        return _Table(query_names, item_names, pairs, *texts)

    def _numbers(self, what: str, names: Names) -> tuple[npt.NDArray[np.int64], Strings]:
        """Number of each name, −1 for one that the training run did not have, and the names in their order."""
        saved = self.restored.get(f"{what}_names")
        if saved is None:
            numbers, different = pd.factorize(names)
            return numbers.astype(np.int64), Strings(different.tolist())
        ends, content = saved["ends"].tolist(), bytes(saved["bytes"].numpy().tobytes())
        saved_names = [content[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(ends)]
        numbers = pd.Index(saved_names).get_indexer(names)
        return numbers.astype(np.int64), Strings(saved_names)

    def _check_splits(self, split: npt.NDArray[Any]) -> None:
        if not (split == "train").any() and not self.restored:
            raise InputError(self.missing("train"))
        for name, file in self.files.items():
            if file is not None and not (split == name).any():
                raise InputError(f"{_FILES[name]} {file!r} has no interaction")

    def _pairs_of(
        self,
        name: str,
        queries: npt.NDArray[np.int64],
        items: npt.NDArray[np.int64],
        rows: npt.NDArray[np.bool_],
        num_queries: int,
        num_items: int,
    ) -> Interactions:
        """Those of a split, each once, in the order of the file."""
        queries, items = queries[rows], items[rows]
        first = np.sort(np.unique(queries * num_items + items, return_index=True)[1])
        if len(first) < len(queries):
            self.note(f"{rows_in_words(len(queries) - len(first))} of {name} that occur twice")
        of_queries, of_items = torch.from_numpy(queries[first]), torch.from_numpy(items[first])
        return Interactions(of_queries, of_items, num_queries, num_items)

    def _look_at(self, name: str, pairs: dict[str, Interactions], query_names: Strings, item_names: Strings) -> None:
        """Leave out what is in training too; say which queries and items training does not have."""
        held, train = pairs[name], pairs["train"]
        keys = (each.queries * each.num_items + each.items for each in (held, train))
        new = ~torch.isin(*keys)
        if not new.all():
            self.note(f"{int((~new).sum()):,} of the {len(new):,} interactions of {name}, which training has too")
            held = pairs[name] = Interactions(held.queries[new], held.items[new], held.num_queries, held.num_items)
        for what, numbers, there, names, is_text in (
            ("queries", held.queries, train.of_query.lengths(), query_names, self.query_ngrams),
            ("items", held.items, train.counts, item_names, self.item_ngrams),
        ):
            cold = torch.unique(numbers[there[numbers] == 0])
            if len(cold) and is_text is None:
                shown = [names[number] for number in cold[: _SHOWN + 1].tolist()]
                sentence = f"{_cold(len(cold), what, name)}, ranked last: {_first(shown, len(cold))}"
                if sentence not in self._notes.get("to look at", {}):  # read anew for a checkpoint, they are the same
                    self.warn(sentence)


class _Table(NamedTuple):
    """What was read.

    Attributes:
        query_names: in the order of their numbers.
        item_names: likewise.
        splits: interactions of "train", "val" and "test".
        query_texts: hashed n-grams of queries; None: they are numbers.
        item_texts: hashed n-grams of items; None: they are numbers.
    """

    query_names: Strings
    item_names: Strings
    splits: dict[str, Interactions]
    query_texts: Ragged | None
    item_texts: Ragged | None


def _texts(names: Strings, of: dict[str, str] | None) -> list[str]:
    all_names = (names[number] for number in range(len(names)))
    return [name if of is None else of.get(name, "") for name in all_names]


def _cold(count: int, what: str, split: str) -> str:
    return f"{count:,} {what} of {split} are not in training"


def _first(names: list[str], count: int) -> str:
    return listed(names) if count <= _SHOWN else f"{', '.join(names[:_SHOWN])}, …"
