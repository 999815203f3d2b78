"""Lists of documents by query, with graded relevance, from SVMlight files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.columns import check_range, mean_and_scale
from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.fractions import check_fractions, divided_rows
from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.data.loading import shuffle_seed
from scent_lightning.data.ranking_files import (
    QueryGroups,
    drawn,
    places,
    ranking_file,
    read_query_groups,
    sizes_in_words,
)
from scent_lightning.errors import InputError
from scent_lightning.random_state import seed_of
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed

__all__ = ["RankedLists", "RankingDataModule"]

Array = npt.NDArray[Any]


class RankedLists(IndexedRows):
    """Lists of documents; item ``i`` is that of query ``i``.

    Args:
        groups: the documents; their features are kept as float32.
        list_size: see :class:`RankingDataModule`.
        seed: of the draws.
    """

    def __init__(self, groups: QueryGroups, list_size: int | None = None, seed: int = 0) -> None:
        self.features = torch.from_numpy(groups.features.astype(np.float32))
        self.relevance = groups.relevance
        self.starts = groups.starts
        self.ids = groups.ids
        self.list_size = list_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Array:
        """Documents of each query, shape ``(n,)``."""
        return np.diff(self.starts)

    def fetch(self, index: Array) -> Batch:
        """Features (B, L, D), relevance (B, L) and mask (B, L)."""
        starts, lengths = self.starts[index], self.starts[index + 1] - self.starts[index]
        mask: Array
        if self.list_size is None:
            rows, mask = places(starts, lengths)
        else:
            rows, mask = self._drawn(index, starts, lengths)
        features = self.features[torch.from_numpy(rows)]
        relevance = torch.from_numpy(np.where(mask > 0, self.relevance[rows], np.float32(0)))
        there = torch.from_numpy(mask)
        return features.masked_fill_((there == 0).unsqueeze(2), 0.0), relevance, there

    def _drawn(self, index: Array, starts: Array, lengths: Array) -> tuple[Array, Array]:
        """Rows (B, L), and how many documents each stands for."""
        assert self.list_size is not None
        chosen, counts = [], []
        for query, start, length in zip(index.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            documents, stands_for = np.arange(length), np.ones(length, dtype=np.float32)
            if length > self.list_size:
                generator = np.random.default_rng(seed_of(self.seed, self.epoch, query))
                documents, stands_for = drawn(self.relevance[start : start + length], self.list_size, generator)
            chosen.append(start + documents)
            counts.append(stands_for)
        sizes = np.array([len(rows) for rows in chosen])
        _, there = places(starts, sizes)
        rows, mask = np.zeros(there.shape, dtype=np.int64), np.zeros(there.shape, dtype=np.float32)
        rows[there], mask[there] = np.concatenate(chosen), np.concatenate(counts)
        return rows, mask


class RankingDataModule(IndexedDataModule):
    r"""Documents of queries, with graded relevance, as whole batches ``(features, relevance, mask, index)``.

    ``features`` is float32 of shape ``(B, L, D)``, ``relevance`` float32 of shape ``(B, L)``, ``mask`` bool of shape
    ``(B, L)``, False where a list has no more documents (features and relevance are 0 there), and ``index`` int64 of
    shape ``(B,)``: the query's position in its split. L is the length of the batch's longest list. There is one anchor
    for each training query.

    ``path`` is a folder with the files ``train.txt``, ``val.txt`` (or ``vali.txt``) and ``test.txt``, as LETOR, MSLR
    and Yahoo's sets have them, or one file, which is split by query. A line is a document, ``2 qid:17 1:0.5 3:1.2``:
    its relevance, its query, and its features by number, from 1 or from 0 as the training file has it; those left out
    are 0. ``.gz`` and ``.bz2`` are read as well. ``predict`` goes over ``predict.txt``, over all of a single file, or
    over the test, validation or training queries.

    **Long lists.** With ``list_size`` a training list that is longer is sampled anew every epoch: all of its relevant
    documents are in, and of the others as many as there is room for, at least one, drawn evenly. The batches then have
    in the place of ``mask`` how many documents of the list each stands for, float32 (0 where there is none): so
    weighed, sums over a list are estimated without bias. Validation and test see whole lists.

    Training queries without a relevant document are passed over and counted: they have no loss.

    A checkpoint holds the number of features and the scaling of the training run, by which other files are treated.

    Args:
        path: the folder or the file.
        batch_size: queries of a training batch, in each process.
        eval_batch_size: queries of a batch in validation, test and prediction.
        list_size: documents of a training list, at least 2; None takes whole lists.
        val_fraction: fraction of a single file's queries for validation, in [0, 1); 0 does without.
        test_fraction: fraction of a single file's queries for testing, in [0, 1).
        standardize: shift and scale each feature to mean 0 and variance 1 on the training documents.
        split_seed: which queries go into which split.
        num_workers: loader processes; 0 loads in the training process.

    Raises:
        InputError: before training, in one sentence: a missing file, one that cannot be read, documents without a query
            id, a negative relevance, features that are not finite, no training query with a relevant document, files
            that do not fit, too few queries, or an argument out of range.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "letor.txt"
        >>> _ = file.write_text("2 qid:1 1:0.5\n0 qid:1 2:1.5\n1 qid:7 1:2\n0 qid:7 2:1\n0 qid:7 1:3\n")
        >>> data = RankingDataModule(str(file), batch_size=2, val_fraction=0)
        >>> data.num_features, data.num_anchors
        (2, 2)
        >>> features, relevance, mask, index = next(iter(data.train_dataloader()))
        >>> features.shape, mask.sum(dim=1).sort().values.tolist()
        (torch.Size([2, 3, 2]), [2, 3])
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        list_size: int | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        standardize: bool = True,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        self.path = Path(path)
        self.list_size: int | None = checked_integer("list_size", list_size, least=2, or_none=True)
        check_fractions(val_fraction, test_fraction)
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.standardize = standardize
        self.split_seed: int = checked_integer("split_seed", split_seed, least=0)
        self._single: QueryGroups | None = None
        self._learned: dict[str, Any] = {}
        self._digests: Array | None = None
        self._unanswerable: dict[str, int] = {}

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return int(self._of_training("num_features"))

    # Splits

    def load(self, split: str) -> RankedLists | None:
        """The lists of a split, scaled."""
        if split != "train" and not (self.restored or self._learned):
            self.existing("train")  # which says how
        if (groups := self._groups(split)) is None:
            return None
        if split == "train":
            groups = self._to_train_on(groups)
        elif not groups.answerable.all():
            self._unanswerable[split] = int((~groups.answerable).sum())
        list_size = self.list_size if split == "train" else None
        return RankedLists(self._scaled(groups), list_size, shuffle_seed())

    def _to_train_on(self, groups: QueryGroups) -> QueryGroups:
        """The queries with a relevant document; learns what there is to learn of them."""
        answerable = groups.answerable
        if not answerable.any():
            raise InputError(f"no training query of {self.path} has a document of a relevance above 0")
        if without := int((~answerable).sum()):
            groups = groups.of_queries(np.flatnonzero(answerable))
            self.note(f"{without:,} training {'query' if without == 1 else 'queries'} without a relevant document")
        self._digests = groups.digests()
        if not self.restored:
            self._learned = {"num_features": groups.features.shape[1], "zero_based": groups.zero_based}
            if self.standardize:
                mean, scale = mean_and_scale(groups.features)
                self._learned |= {"mean": torch.from_numpy(mean), "scale": torch.from_numpy(scale)}
        return groups

    def _scaled(self, groups: QueryGroups) -> QueryGroups:
        learned = self._learned or self.restored
        values = groups.features
        if "mean" in learned:
            values = (values - learned["mean"].numpy()) / learned["scale"].numpy()
        columns = [str(column + (not groups.zero_based)) for column in range(values.shape[1])]
        check_range(str(self.path), values, columns, np.arange(len(values)), "after scaling " * ("mean" in learned))
        return groups._replace(features=values)

    def _groups(self, split: str) -> QueryGroups | None:
        """The documents of a split as they are in the files."""
        if self.path.is_file():
            return self._of_single_file(split)
        if not self.path.is_dir():
            raise InputError(f"path {self.path} is neither a folder with train.txt nor a file of documents by query")
        file = ranking_file(self.path, split)
        return None if file is None else self._read(file)

    def _read(self, file: Path) -> QueryGroups:
        learned = self._learned or self.restored
        return read_query_groups(file, learned.get("num_features"), learned.get("zero_based"))

    def _of_single_file(self, split: str) -> QueryGroups | None:
        if self._single is None:
            self._single = self._read(self.path)
        if split == "predict":
            return self._single
        count = len(self._single.ids)
        parts = divided_rows(count, self.split_seed, self.val_fraction, self.test_fraction)
        if split != "train" and getattr(self, f"{split}_fraction") == 0:
            return None
        if len(parts[split]) == 0:
            raise InputError(f"{split}_fraction of the {count} queries of {self.path} leaves none to {split}")
        return self._single.of_queries(parts[split])

    def missing(self, split: str) -> str:
        """What to say of a split that there is not."""
        if self.path.is_file():
            return f"{split}_fraction is 0, and {self.path} is a single file: there are no rows of split {split!r}"
        there = listed(sorted(file.name for file in self.path.iterdir())) or "nothing"
        return f"path needs a split {split!r}: there is no {self.path / split}.txt; {self.path} has: {there}"

    # Summary

    def summary(self) -> dict[str, str]:
        """Path, features, and how many queries of how many documents each split has."""
        width = self.num_features
        scaled = ", standardized" if "mean" in (self._learned or self.restored) else ""
        said = {"data": str(self.path), "features": f"{width:,}{scaled}"}
        for name, split in (("training", "train"), ("validation", "val")):
            rows = self.split(split)
            said[name] = "none" if rows is None else sizes_in_words(rows.lengths.tolist())
            if split in self._unanswerable:
                said[name] += f", {self._unanswerable[split]:,} without a relevant one, which no metric counts"
        if self.list_size is not None:
            longer = int((self.existing("train").lengths > self.list_size).sum())
            said["training"] += f"; {longer:,} are sampled, to {self.list_size} documents"
        return said

    # What a checkpoint holds

    def _of_training(self, name: str) -> Any:
        if not (self._learned or self.restored):
            self.existing("train")
        return (self._learned or self.restored)[name]

    def learned(self) -> dict[str, Any]:
        """The number of features, from where they are counted, and their scaling."""
        self.existing("train")
        names = ("num_features", "zero_based", "mean", "scale")
        learned = self._learned or self.restored
        return {name: learned[name] for name in names if name in learned}

    def fingerprint(self, rows: int) -> str:
        """Hash of the documents of the first ``rows`` training queries, before they are scaled."""
        self.existing("train")
        assert self._digests is not None
        return fingerprint([self._digests[:rows]])

    def forget(self) -> None:
        """Have the files read anew."""
        super().forget()
        self._single = self._digests = None
        self._learned = {}
