"""Data modules. Each yields batches that end with the dataset index of every row, and tells ``num_anchors``."""

from scent_lightning.data.features import FeatureDataModule, SyntheticFeatureDataModule
from scent_lightning.data.indexed import IndexedTensorDataset, batch_loader
from scent_lightning.data.tabular import TabularRegressionDataModule

__all__ = [
    "FeatureDataModule",
    "IndexedTensorDataset",
    "SyntheticFeatureDataModule",
    "TabularRegressionDataModule",
    "batch_loader",
]
