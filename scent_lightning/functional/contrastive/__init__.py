"""The robust global contrastive loss of CLIP training."""

from scent_lightning.functional.contrastive.loss import (
    ContrastiveLogMeans,
    Everyone,
    contrastive_log_means,
    contrastive_log_moments,
    contrastive_loss,
    contrastive_scores,
)

__all__ = [
    "ContrastiveLogMeans",
    "Everyone",
    "contrastive_log_means",
    "contrastive_log_moments",
    "contrastive_loss",
    "contrastive_scores",
]
