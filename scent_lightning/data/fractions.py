"""Rows of one file divided at random into validation, test and training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_number

__all__ = ["check_fractions", "divided_rows"]


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Raise InputError unless both are in [0, 1) and leave rows for training."""
    for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        checked_number(name, value, least=0, below=1)
    if val_fraction + test_fraction >= 1:
        raise InputError(f"val_fraction + test_fraction must be below 1, got {val_fraction} + {test_fraction}")


def divided_rows(rows: int, seed: int, val_fraction: float, test_fraction: float = 0.0) -> dict[str, npt.NDArray[Any]]:
    """Rows of each split, ascending: "val", "test" and "train", which has the rest.

    Args:
        rows: number of rows.
        seed: which row goes where.
        val_fraction: of the rows, for validation.
        test_fraction: of the rows, for testing.
    """
    val, test = (round(fraction * rows) for fraction in (val_fraction, test_fraction))
    order = np.random.default_rng(seed).permutation(rows)
    parts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {split: np.sort(part) for split, part in parts.items()}
