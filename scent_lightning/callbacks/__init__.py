"""Lightning callbacks."""

from scent_lightning.callbacks.dual_variable_monitor import DualVariableMonitor
from scent_lightning.callbacks.prediction_writer import PredictionWriter

__all__ = ["DualVariableMonitor", "PredictionWriter"]
