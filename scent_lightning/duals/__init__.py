"""Dual variables: the updates, the table, and the mixin that puts them into a LightningModule."""

from scent_lightning.duals.mixin import DualVariableMixin
from scent_lightning.duals.updates import ASGD, BSGD, SCENT, SOX, DualUpdate, SoftplusASGD, UMax
from scent_lightning.duals.variable import DualVariable
from scent_lightning.errors import DualDivergenceError

__all__ = [
    "ASGD",
    "BSGD",
    "SCENT",
    "SOX",
    "DualDivergenceError",
    "DualUpdate",
    "DualVariable",
    "DualVariableMixin",
    "SoftplusASGD",
    "UMax",
]
