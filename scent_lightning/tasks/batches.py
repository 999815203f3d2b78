"""What a batch must be: checked by its shapes and types, which are known without waiting for a device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from scent_lightning.duals import DenseScores
from scent_lightning.errors import InputError
from scent_lightning.functional import wide_dtype

__all__ = ["binary_labels", "check_range", "check_rows", "class_numbers", "random_half", "some_columns", "three_parts"]


def three_parts(batch: Any, names: str) -> tuple[Any, Any, Any]:
    """The parts of a batch.

    Args:
        batch: three of them.
        names: what the first two are.

    Raises:
        InputError: it has another number of parts.
    """
    try:
        first, second, index = batch
    except (TypeError, ValueError) as error:
        count = f"{len(batch)} part(s)" if isinstance(batch, list | tuple) else type(batch).__name__
        raise InputError(
            f"a batch must be ({names}, index), where index is the position of each row in the data set, got {count}"
        ) from error
    return first, second, index


def some_columns(scores: Tensor, chosen: Tensor, mask: Tensor, corrected: bool) -> DenseScores:
    """Some columns, whose mean estimates that over all classes where the mean over all columns does.

    Args:
        scores: shape ``(B, m)``.
        chosen: which columns, bool, shape ``(m,)``.
        mask: which scores count, bool, shape ``(B, m)``.
        corrected: whether the scores are less the log-probability of their class to be in a batch.
    """
    half = mask & chosen
    if corrected:
        kind = wide_dtype(scores.device)
        # The mean is over fewer, and a class of the batch is there with the share of its half.
        counts, whole = (of.sum(dim=1, keepdim=True).clamp(min=1).to(kind).log() for of in (half, mask))
        share = chosen.sum().clamp(min=1).to(kind).log() - math.log(len(chosen))
        scores = scores + (counts - whole - share).to(scores.dtype)
    return DenseScores(scores, half)


def random_half(size: int, generator: torch.Generator | None) -> Tensor:
    """A random half of ``size`` places, the smaller one where it is odd: bool, shape ``(size,)``, on the CPU.

    Args:
        size: number of places.
        generator: on the CPU; None: torch's global one.
    """
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[torch.randperm(size, generator=generator)[: size // 2]] = True
    return chosen


def check_rows(name: str, values: Tensor, rows: int) -> None:
    """Raise InputError unless ``values`` has shape ``(rows,)``."""
    if values.shape != (rows,):
        raise InputError(f"{name} must have shape ({rows},), one for each row of the batch, got {tuple(values.shape)}")


def class_numbers(labels: Tensor, rows: int) -> Tensor:
    """Labels as int64, shape ``(rows,)``; raises InputError for another shape or for what are no integers."""
    if isinstance(labels, Tensor) and labels.ndim == 2:
        raise InputError(
            f"labels must have shape ({rows},), one for each row of the batch, got {tuple(labels.shape)}; several "
            "right classes a row are for MultiLabelTask"
        )
    check_rows("labels", labels, rows)
    if labels.dtype == torch.int64:
        return labels
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels must be integers, the number of each row's class, got {labels.dtype}")
    return labels.long()


def binary_labels(labels: Tensor, rows: int) -> Tensor:
    """Labels as integers or bool, shape ``(rows,)``; raises InputError for another shape or for fractions."""
    check_rows("labels", labels, rows)
    if not labels.is_floating_point():
        return labels
    whole = labels.long()
    if not torch.equal(whole.to(labels.dtype), labels):
        raise InputError(f"labels must be 0 or 1, got {labels[whole != labels][0].item():g}")
    return whole


def check_range(labels: Tensor, largest: int, what: str) -> None:
    """Raise InputError unless all labels are from 0 to ``largest``; on a GPU this would wait for the device.

    Args:
        labels: any shape.
        largest: largest label that is allowed.
        what: the rest of "labels must be …".
    """
    if labels.numel() == 0:
        return
    least, most = (value.item() for value in labels.aminmax())
    if least < 0 or most > largest:
        raise InputError(f"labels must be {what}, got {least if least < 0 else most}")
