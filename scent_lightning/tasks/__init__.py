"""Tasks: LightningModules that are ready to train, with any dual update."""

from scent_lightning.tasks.dro import DRORegressionTask

__all__ = ["DRORegressionTask"]
