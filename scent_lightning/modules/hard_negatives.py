"""Hard negatives of every training row: given, or mined, which finds the classes that a model scores highest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = ["HardNegatives", "first_but", "read_hard_negatives"]


def first_but(classes: Tensor, right: Tensor, number: int) -> Tensor:
    """The first of some classes that are not right, each once.

    Args:
        classes: best first, shape ``(B, m)``, int64, −1 where a row has no more.
        right: shape ``(B, P)``, int64, −1 where a row has no more.
        number: how many, h.

    Returns:
        Shape ``(B, h)``, −1 where a row has fewer.

    Example:
        >>> first_but(torch.tensor([[7, 3, 7, 5, 1]]), torch.tensor([[3, -1]]), 3).tolist()
        [[7, 5, 1]]
    """
    out = classes < 0
    out |= (classes.unsqueeze(2) == right.unsqueeze(1)).any(dim=2)
    again = (classes.unsqueeze(2) == classes.unsqueeze(1)).tril(-1).any(dim=2)
    found = classes.masked_fill(out | again, -1)
    order = (found < 0).to(torch.int8).argsort(dim=1, stable=True)[:, :number]
    found = found.gather(1, order)
    return nn.functional.pad(found, (0, number - found.shape[1]), value=-1)


def read_hard_negatives(path: str, rows: int, num_classes: int) -> Tensor:
    """Classes of each training row from a file of NumPy.

    Args:
        path: of integers, shape ``(n, h)``, −1 where a row has no more.
        rows: number of training rows n.
        num_classes: number of classes.

    Returns:
        Shape ``(n, h)``, int32.

    Raises:
        InputError: in one sentence, what does not fit.
    """
    if not Path(path).is_file():
        raise InputError(f"hard_negatives_file {path} is not a file")
    try:
        found: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"hard_negatives_file {path} cannot be read as one plain array: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 2 or len(found) != rows:
        got = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
        raise InputError(f"hard_negatives_file {path} must hold integers of shape ({rows}, h), got {got}")
    if found.size and (found.min() < -1 or found.max() >= num_classes):
        bad = found.min() if found.min() < -1 else found.max()
        raise InputError(
            f"hard_negatives_file {path} must hold classes from 0 to {num_classes - 1}, or -1 for none, got {bad}"
        )
    return torch.from_numpy(found.astype(np.int32))


class HardNegatives(nn.Module):
    """A table of h classes for each of n training rows, in main memory; its state is plain tensors.

    Args:
        rows: number of training rows n.
        number: h.

    Attributes:
        epoch: that the classes were found at the start of; −1: they were not.

    Example:
        >>> hard = HardNegatives(rows=3, number=2)
        >>> hard.put(torch.tensor([1]), torch.tensor([[5, 9]]))
        >>> hard.of(torch.tensor([1, 0]), right=torch.tensor([[9], [4]])).tolist()
        [[5, -1], [-1, -1]]
    """

    def __init__(self, rows: int, number: int) -> None:
        super().__init__()
        self.rows: int = checked_integer("rows", rows)
        self.number: int = checked_integer("number", number)
        self.epoch = -1
        # No buffer: DDP would send it at each step.
        self._table: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """Shape ``(n, h)``, int32, −1 where there is none."""
        if self._table is None:
            self._table = torch.full((self.rows, self.number), -1, dtype=torch.int32)
        return self._table

    def put(self, index: Tensor, classes: Tensor) -> None:
        """Set the classes of some rows.

        Args:
            index: dataset indices, shape ``(B,)``.
            classes: shape ``(B, h)``.
        """
        self.table[index.cpu()] = classes.to("cpu", torch.int32)

    def of(self, index: Tensor, right: Tensor) -> Tensor | None:
        """Classes of some rows, shape ``(B, h)``, int64, −1 for one that is right; None where there are none at all.

        Args:
            index: dataset indices, shape ``(B,)``.
            right: right classes, shape ``(B, P)``, −1 where a row has no more.
        """
        if self._table is None:
            return None
        rows = index.cpu()
        outside = (rows < 0) | (rows >= self.rows)  # of which the table of ν says more
        found = self._table[rows.masked_fill(outside, 0)].to(right.device, torch.int64)
        return found.masked_fill((found.unsqueeze(2) == right.unsqueeze(1)).any(dim=2), -1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if self._table is not None:
            destination[f"{prefix}table"] = self._table
            destination[f"{prefix}epoch"] = torch.tensor(self.epoch)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        table, epoch = (state_dict.pop(f"{prefix}{name}", None) for name in ("table", "epoch"))
        if table is not None and table.shape == (self.rows, self.number):
            self._table, self.epoch = table.clone(), int(epoch)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
