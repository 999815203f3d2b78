"""Neural-network modules that the tasks need and torch lacks."""

from scent_lightning.modules.class_sampled_linear import ClassSampledLinear
from scent_lightning.modules.small_image_resnet import SmallImageResNet
from scent_lightning.modules.towers import EmbeddingTower, HashedTextTower

__all__ = ["ClassSampledLinear", "EmbeddingTower", "HashedTextTower", "SmallImageResNet"]
