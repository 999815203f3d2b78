"""How often each class is in a batch, from the training labels' counts or from the labels that went by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from scent_lightning.errors import InputError
from scent_lightning.functional import log_inclusion_beside, wide_dtype

__all__ = ["ClassFrequencies"]

# What a class that has not been seen is taken to have been seen: by half a row it is right for a class of one row at
# the end of the first epoch (Jeffreys' prior).
UNSEEN = 0.5
TABLES_KEPT = 4


class ClassFrequencies(nn.Module):
    r"""Frequencies of K classes among the training rows, and what they make of the classes of a batch.

    As long as nobody gives the counts, they are estimated from the labels that :meth:`see` is told: a class has the
    frequency (rows seen of it + 1/2) / (rows seen + K/2), and the rows of a batch are taken as independent draws. So a
    run begins with equal frequencies, and an estimate does not depend on the batch that it is used for.

    The state dict has ``counts``, int64, shape ``(K,)``, where they were given, or ``seen`` where some were seen. A
    state without either is loaded as well: what there is stays.

    Args:
        num_classes: number of classes K.

    Example:
        >>> frequencies = ClassFrequencies(3)
        >>> frequencies.give(torch.tensor([6, 3, 1]))
        >>> frequencies.log_inclusion(torch.tensor([0, 2]), others=9).exp()  # all other rows but the anchor's own
        tensor([1., 1.], dtype=torch.float64)
        >>> frequencies.log_inclusion(torch.tensor([0, 2]), others=3).exp()
        tensor([0.9881, 0.3333], dtype=torch.float64)
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.are_given = False
        # No buffers: DDP would send them at each step, and averages of the weights would average them.
        self._counts: Tensor | None = None
        self._rows = 0
        self._ones = torch.ones(0, dtype=torch.int64)
        self._tables: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._rarity: Tensor | None = None

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.num_classes}, {'given' if self.are_given else 'estimated'}"

    @property
    def counts(self) -> Tensor | None:
        """Rows of each class, int64, shape ``(K,)``: those given, or those seen; None where there are none."""
        return self._counts

    def give(self, counts: Any, rows: int | None = None) -> None:
        """Take the numbers of training rows of each class.

        Args:
            counts: integers of at least 0, shape ``(K,)``, as a tensor, an array or a list.
            rows: number of training rows, where a row is of several classes; None: each is of one.

        Raises:
            InputError: they do not fit.
        """
        found = torch.as_tensor(counts)
        if found.ndim != 1 or len(found) != self.num_classes:
            raise InputError(
                f"class_counts must have one number for each of the {self.num_classes} classes, got shape "
                f"{tuple(found.shape)}"
            )
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise InputError(f"class_counts must be integers, the training rows of each class, got {found.dtype}")
        found = found.to(torch.int64)
        least = int(found.argmin())
        if found[least] < 0:
            raise InputError(f"class_counts must be at least 0, got {int(found[least])} for class {least}")
        if int(found.sum()) == 0:
            raise InputError("class_counts must have a row of some class, got 0 for all of them")
        if rows is not None and int(found.max()) > rows:
            raise InputError(f"class_counts must be at most the number of rows, {rows}, got {int(found.max())}")
        self._set(found.clone(), are_given=True, rows=rows)

    def _set(self, counts: Tensor, are_given: bool, rows: int | None = None) -> None:
        self._counts, self.are_given, self._tables, self._rarity = counts, are_given, {}, None
        self._rows = int(counts.sum()) if rows is None else rows

    def see(self, labels: Tensor) -> None:
        """Count the labels of a batch, where nobody has given the counts; after they were used for it.

        Args:
            labels: of all processes, int64, shape ``(B,)``.
        """
        if self.are_given:
            return
        counts = self._on(labels.device)
        if self._ones.shape != labels.shape or self._ones.device != labels.device:
            self._ones = torch.ones_like(labels)
        counts.index_add_(0, labels, self._ones)
        # Not by way of nn.Module's __setattr__, which looks for parameters first.
        self.__dict__["_rows"] += len(labels)

    def log_inclusion(self, classes: Tensor, others: int) -> Tensor:
        """Log of the probability that a class is among the other rows of an anchor's batch.

        Args:
            classes: int64, shape ``(m,)``; not the anchor's own.
            others: rows of the batch, of all processes, but the anchor's.

        Returns:
            Shape ``(m,)``, float64 (float32 on devices without it); −inf for a class without a training row.
        """
        if self.are_given:
            return -self._table(others, wide_dtype(classes.device), classes.device).index_select(0, classes)
        return self._log_estimates(classes, others)

    def offsets(self, classes: Tensor, others: int, dtype: torch.dtype) -> Tensor:
        r"""What the score of each class of a batch gets, so that their mean estimates the mean over all other classes.

        :math:`-\log \pi_k + \log \frac{m - 1}{K - 1}`, of m classes in the batch, one of which is the anchor's own.

        Args:
            classes: the distinct ones of the batch, shape ``(m,)``.
            others: rows of the batch, of all processes, but the anchor's.
            dtype: of the result.

        Returns:
            Shape ``(m,)``; +inf for a class without a training row.
        """
        share = math.log(max(len(classes) - 1, 1) / (self.num_classes - 1))
        if self.are_given:
            return self._table(others, dtype, classes.device).index_select(0, classes).add_(share)
        return self._log_estimates(classes, others).neg_().add_(share).to(dtype)

    def rarity(self, classes: Tensor) -> Tensor:
        """How rare classes are: 1 up to the mean number of rows of a class, and the inverse of how often that above.

        Args:
            classes: int64, shape ``(B,)``.

        Returns:
            The smaller of 1 and rows / (K · rows of the class), shape ``(B,)``, float32; 1 as long as no row is known.
        """
        if self._counts is None:
            return torch.ones(classes.shape, device=classes.device)
        if not self.are_given:
            counts = self._on(classes.device).index_select(0, classes).to(torch.float32).add_(UNSEEN)
            return counts.reciprocal_().mul_(self._rows / self.num_classes + UNSEEN).clamp_(max=1)
        if self._rarity is None or self._rarity.device != classes.device:
            mean = self._rows / self.num_classes
            self._rarity = (mean / self._on(classes.device).to(torch.float32)).clamp_(max=1)
        return self._rarity.index_select(0, classes)

    def without_row(self, labels: Tensor) -> Tensor:
        """Those of the labels of which there is no training row by the counts that were given."""
        if not self.are_given:
            return labels[:0]
        labels = torch.unique(labels)
        return labels[self._on(labels.device)[labels] == 0]

    def _on(self, device: torch.device) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(self.num_classes, dtype=torch.int64, device=device)
        elif self._counts.device != device:
            self._counts = self._counts.to(device)
        return self._counts

    def _table(self, others: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """−log π of all classes, kept: the batches of an epoch have one size, but for the last."""
        key = (others, dtype, device)
        if key not in self._tables:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            self._tables[key] = -log_inclusion_beside(self._on(device), self._rows, others + 1).to(dtype)
        return self._tables[key]

    def _log_estimates(self, classes: Tensor, others: int) -> Tensor:
        """log(1 − (1 − p)^others) for the estimated frequencies p, in few calls: this is done at each step."""
        p = self._on(classes.device).index_select(0, classes).to(wide_dtype(classes.device)).add_(UNSEEN)
        p.mul_(-1 / (self._rows + UNSEEN * self.num_classes))
        return p.log1p_().mul_(others).expm1_().neg_().log_()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if self._counts is not None:
            destination[f"{prefix}{'counts' if self.are_given else 'seen'}"] = self._counts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("counts", "seen"):
            counts = state_dict.pop(f"{prefix}{name}", None)
            # Of another number of classes the weight says so.
            if counts is not None and len(counts) == self.num_classes:
                self._set(counts.to(torch.int64).clone(), are_given=name == "counts")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
