"""Images or features of two groups of classes; a kind of data is one file with a source, see ``source``."""

from scent_lightning.data.imbalanced.module import ImbalancedImageDataModule
from scent_lightning.data.imbalanced.source import NORMALISATION

__all__ = ["NORMALISATION", "ImbalancedImageDataModule"]
