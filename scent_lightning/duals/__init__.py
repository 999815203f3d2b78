"""Dual variables: the tables of ν, what moves them, and the mixin that puts them into a LightningModule."""

from scent_lightning.duals.auto_rate import AutoLR
from scent_lightning.duals.contrastive import ContrastiveSamples
from scent_lightning.duals.mixin import DualVariableMixin
from scent_lightning.duals.samples import DenseScores, Exponentials, Moments, Samples
from scent_lightning.duals.variable import DualVariable
from scent_lightning.errors import DualDivergenceError
from scent_lightning.updates import (
    ASGD,
    BSGD,
    MSVR,
    SCENT,
    SOX,
    DualUpdate,
    ProximalPoint,
    ScheduledUpdate,
    SoftplusASGD,
    UMax,
)

__all__ = [
    "ASGD",
    "BSGD",
    "MSVR",
    "SCENT",
    "SOX",
    "AutoLR",
    "ContrastiveSamples",
    "DenseScores",
    "DualDivergenceError",
    "DualUpdate",
    "DualVariable",
    "DualVariableMixin",
    "Exponentials",
    "Moments",
    "ProximalPoint",
    "Samples",
    "ScheduledUpdate",
    "SoftplusASGD",
    "UMax",
]
