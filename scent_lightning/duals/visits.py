"""Whether the indices of the batches can be those of the data set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import lightning as L

from scent_lightning.duals.table import DualTable

__all__ = ["warn_of_places_in_batches"]

# Visited anchors in those of an average batch: up to so many are no sign of dataset indices.
_LARGER = 1.5


def warn_of_places_in_batches(tables: Iterable[DualTable], trainer: L.Trainer) -> None:
    """Warn, once a table, where after an epoch only the anchors 0, 1, … up to the size of a batch were ever visited.

    That is what becomes of a row's place in its batch, ``torch.arange(B)``, given for its place in the data set: each ν
    is then shared by many rows.

    Args:
        tables: of the module that was trained.
        trainer: at the end of an epoch. Where it was told to take part of the batches, nothing can be said.
    """
    batches = trainer.num_training_batches
    if batches < 3 or trainer.limit_train_batches != 1.0:
        return
    dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
    rows = len(dataset) if hasattr(dataset, "__len__") else math.inf
    for table in tables:
        visited = int(table.visited.sum())
        share = visited * batches / table.num_anchors
        if 1 < visited < min(rows, table.num_anchors) and share <= _LARGER and bool(table.visited[:visited].all()):
            table.warn_once(
                "visits",
                f"after an epoch of {batches} batches only the anchors 0 to {visited - 1} of {table.num_anchors} of "
                f"dual variable {table.name!r} were visited: if index is a row's place in its batch, give its place in "
                "the data set instead (scent_lightning.data.WithIndex adds it to any data set)",
            )
