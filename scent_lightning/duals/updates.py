"""The class paths that checkpoints and configurations of version 0.1 have; the updates are in their own package."""

from scent_lightning.updates import ASGD, BSGD, SCENT, SOX, DualUpdate, SoftplusASGD, UMax

__all__ = ["ASGD", "BSGD", "SCENT", "SOX", "DualUpdate", "SoftplusASGD", "UMax"]
