"""What the tasks' training has in common."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from scent_lightning.errors import InputError


def scheduled_optimizer(trainer: L.Trainer, optimizer: Optimizer, lr_schedule: str) -> Any:
    """What ``configure_optimizers`` returns for a "constant" learning rate, or a "cosine" one that goes to 0.

    Raises:
        InputError: "cosine" in a run without an end.
    """
    if lr_schedule == "constant":
        return optimizer
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise InputError("lr_schedule 'cosine' needs to know how long the run is: set trainer.max_epochs")
    scheduler = CosineAnnealingLR(optimizer, T_max=int(steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def logs_this_step(trainer: Any) -> bool:
    """Whether the Trainer (None: there is none) writes what is logged at this training step."""
    if trainer is None:
        return False
    every: int = trainer.log_every_n_steps
    return every > 0 and (trainer.fit_loop.epoch_loop.global_step + 1) % every == 0
