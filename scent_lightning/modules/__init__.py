"""Neural-network modules that the tasks need and torch lacks."""

from scent_lightning.modules.class_sampled_linear import ClassSampledLinear

__all__ = ["ClassSampledLinear"]
