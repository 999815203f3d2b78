"""Data modules. Each yields batches that end with the dataset index of every row, and tells ``num_anchors``.

One of one's own is an :class:`IndexedDataModule` with one method, ``load``.
"""

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.class_images import ImageFolderDataModule
from scent_lightning.data.features import FeatureDataModule, SyntheticFeatureDataModule
from scent_lightning.data.image_text import ImageTextDataModule
from scent_lightning.data.imbalanced import ImbalancedImageDataModule
from scent_lightning.data.indexed import IndexedRows, IndexedTensorDataset, batch_loader
from scent_lightning.data.interactions import Interactions, InteractionsDataModule
from scent_lightning.data.ranking import RankingDataModule
from scent_lightning.data.stratified import StratifiedBatchSampler
from scent_lightning.data.tabular import TabularRegressionDataModule
from scent_lightning.data.with_index import WithIndex

__all__ = [
    "FeatureDataModule",
    "ImageFolderDataModule",
    "ImageTextDataModule",
    "ImbalancedImageDataModule",
    "IndexedDataModule",
    "IndexedRows",
    "IndexedTensorDataset",
    "Interactions",
    "InteractionsDataModule",
    "RankingDataModule",
    "StratifiedBatchSampler",
    "SyntheticFeatureDataModule",
    "TabularRegressionDataModule",
    "WithIndex",
    "batch_loader",
]
