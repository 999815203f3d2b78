"""What callbacks look up in a module and its Trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from scent_lightning.duals import DualVariable

__all__ = ["duals_of", "tensorboard_loggers"]


def duals_of(module: L.LightningModule) -> dict[str, DualVariable]:
    """The dual variables of a module by name; none if it has no such thing."""
    duals: Any = getattr(module, "duals", {})
    return {name: variable for name, variable in duals.items() if isinstance(variable, DualVariable)}


def tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
