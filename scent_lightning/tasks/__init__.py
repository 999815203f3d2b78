"""Tasks: LightningModules that are ready to train, with any dual update."""

from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.clip import CLIPTask
from scent_lightning.tasks.dro import DRORegressionTask
from scent_lightning.tasks.extreme_classification import ExtremeClassificationTask
from scent_lightning.tasks.multi_label import MultiLabelTask
from scent_lightning.tasks.partial_auc import PartialAUCTask
from scent_lightning.tasks.ranking import RankingTask
from scent_lightning.tasks.retrieval import RetrievalTask

__all__ = [
    "BaseTask",
    "CLIPTask",
    "DRORegressionTask",
    "ExtremeClassificationTask",
    "MultiLabelTask",
    "PartialAUCTask",
    "RankingTask",
    "RetrievalTask",
]
