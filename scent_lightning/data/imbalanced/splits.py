"""The splits of a source as rows of two groups, of which some of the positive training rows are removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.data.imbalanced.groups import Classes, Grouping, grouping
from scent_lightning.data.imbalanced.rows import GroupedRows
from scent_lightning.data.imbalanced.source import Source
from scent_lightning.errors import InputError
from scent_lightning.words import listed, rows_in_words

__all__ = ["GroupedSplits"]

Array = npt.NDArray[Any]


class GroupedSplits:
    """What is read of a source, once.

    Args:
        source: has the rows.
        positive_classes: names or positions; None for all that are not negative.
        negative_classes: names or positions; None for all that are not positive.
        removed_positives: fraction of the positive training rows that is removed, in [0, 1).
        seed: of the removal.

    Raises:
        InputError: an empty list of classes.
    """

    def __init__(
        self,
        source: Source,
        positive_classes: Classes | None,
        negative_classes: Classes | None,
        removed_positives: float,
        seed: int,
    ) -> None:
        for name, classes in (("positive_classes", positive_classes), ("negative_classes", negative_classes)):
            if classes is not None and len(classes) == 0:
                raise InputError(f"{name} must name at least one class, got an empty list")
        self.source = source
        self.given = positive_classes, negative_classes
        self.removed_positives = removed_positives
        self.seed = seed
        self.removed_rows = 0
        self._grouping: Grouping | None = None
        self._splits: dict[tuple[str, bool], GroupedRows] = {}

    @property
    def grouping(self) -> Grouping:
        """The classes and their groups, those of the training run where a checkpoint was loaded."""
        if self._grouping is None:
            saved = self.source.restored
            if "classes" in saved:
                self._grouping = Grouping(list(saved["classes"]), saved["groups"].numpy())
            else:
                self._grouping = grouping(self.source, *self.given)
        return self._grouping

    @property
    def says_groups(self) -> bool:
        """Whether the classes need not be looked at to know which are positive."""
        return self.source.says_groups or any(classes is not None for classes in self.given)

    def all_rows(self, split: str) -> Any:
        """The source's rows of a split, whatever their class."""
        return self.source.all_rows(split, self.grouping.classes)

    def of(self, split: str, augment: bool = False) -> GroupedRows:
        """The rows of a split that are in a group.

        Raises:
            InputError: a group has none.
        """
        key = split, augment
        if key not in self._splits:
            other = self._splits.get((split, not augment))
            rows, labels = self._chosen(split) if other is None else (other.rows, other.labels)
            self._splits[key] = self.source.chosen(self.all_rows(split), rows, labels, augment)
        return self._splits[key]

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` training rows are."""
        split = self.of("train")
        return self.source.fingerprint(self.all_rows("train"), split.rows[:rows], split.labels[:rows])

    def summary(self) -> dict[str, str]:
        """The classes of each group, the training rows, and how many were removed."""
        kinds = (("positive", 1), ("negative", 0), ("left out", -1))
        named = {f"{kind} classes": listed(self.grouping.named(group)) for kind, group in kinds}
        said = {kind: names for kind, names in named.items() if names}
        train = self.of("train")
        said["training"] = train.in_words()
        if count := self.removed_rows:
            positives = count + int(train.labels.sum())
            said["removed"] = f"{rows_in_words(count)} of {positives:,} positive training rows at random"
        return said

    def _chosen(self, split: str) -> tuple[Array, Array]:
        """Rows of the source, shape (n,), ascending, and their labels 0 or 1, shape (n,)."""
        rows, labels = self._in_groups(split)
        if split == "train":
            positive = np.flatnonzero(labels == 1)
            count = round(self.removed_positives * len(positive))
            if count == len(positive):
                raise InputError(
                    f"removed_positives {self.removed_positives} leaves split 'train' none of its {count} positive rows"
                )
            kept = np.ones(len(rows), dtype=bool)
            kept[np.random.default_rng(self.seed).permutation(positive)[:count]] = False
            rows, labels = rows[kept], labels[kept]
            self.removed_rows = count
        return rows, labels

    def _in_groups(self, split: str) -> tuple[Array, Array]:
        classes, groups = self.grouping
        positions = self.source.positions(split, classes)
        unknown = positions < 0
        if unknown.any() and None in self.given:
            row = int(unknown.argmax())
            raise InputError(
                f"labels of split {split!r} must be among those of 'train', which say what is positive: got "
                f"{self.all_rows(split).labels[row]} in row {row} (counted from 0), known are: {listed(classes)}"
            )
        labels = np.where(unknown, -1, groups[positions])
        rows = np.flatnonzero(labels >= 0)
        labels = labels[rows]
        for label, kind in ((1, "positive"), (0, "negative")):
            if not (labels == label).any():
                named = listed(self.grouping.named(label)) or "none"
                raise InputError(f"split {split!r} has no {kind} row; {kind} classes: {named}")
        return rows, labels
