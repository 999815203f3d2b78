"""Lightning callbacks."""

from scent_lightning.callbacks.accuracy_by_frequency import AccuracyByFrequency
from scent_lightning.callbacks.dual_step_size_finder import DualStepSizeFinder
from scent_lightning.callbacks.dual_variable_monitor import DualVariableMonitor
from scent_lightning.callbacks.last_checkpoint import LastCheckpoint
from scent_lightning.callbacks.predicted_against_true import PredictedAgainstTrue
from scent_lightning.callbacks.prediction_writer import PredictionWriter
from scent_lightning.callbacks.retrieval_panel import RetrievalPanel
from scent_lightning.callbacks.roc_curve import ROCCurve
from scent_lightning.callbacks.similarity_histogram import SimilarityHistogram
from scent_lightning.callbacks.vector_export import VectorExport
from scent_lightning.callbacks.zero_shot_benchmark import ZeroShotBenchmark
from scent_lightning.callbacks.zero_shot_classification import ZeroShotClassification

__all__ = [
    "AccuracyByFrequency",
    "DualStepSizeFinder",
    "DualVariableMonitor",
    "LastCheckpoint",
    "PredictedAgainstTrue",
    "PredictionWriter",
    "ROCCurve",
    "RetrievalPanel",
    "SimilarityHistogram",
    "VectorExport",
    "ZeroShotBenchmark",
    "ZeroShotClassification",
]
