"""Pairs of an image and a caption; another source of pairs is one file, see ``source``."""

from scent_lightning.data.image_text.looks import MEAN, STD
from scent_lightning.data.image_text.module import ImageTextDataModule

__all__ = ["MEAN", "STD", "ImageTextDataModule"]
