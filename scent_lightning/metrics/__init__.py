"""Metrics, as torchmetrics modules."""

from scent_lightning.metrics.entropic_risk import EntropicRisk

__all__ = ["EntropicRisk"]
