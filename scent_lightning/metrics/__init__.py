"""Metrics, as torchmetrics modules, and the functions behind them.

The function ``partial_auc`` is not repeated here, because its name is that of its file:
``from scent_lightning.metrics.partial_auc import partial_auc``.
"""

from scent_lightning.metrics.entropic_risk import EntropicRisk
from scent_lightning.metrics.partial_auc import (
    OneWayPartialAUC,
    PartialAUCObjective,
    TwoWayPartialAUC,
    partial_auc_objective,
    roc_curve,
    two_way_partial_auc,
)

__all__ = [
    "EntropicRisk",
    "OneWayPartialAUC",
    "PartialAUCObjective",
    "TwoWayPartialAUC",
    "partial_auc_objective",
    "roc_curve",
    "two_way_partial_auc",
]
