"""What the tasks' training has in common."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from scent_lightning.errors import InputError
from scent_lightning.optim import check_sgd

LearningRateSchedule = Literal["cosine", "constant", "step"]


def check_optimization(lr: float, momentum: float, weight_decay: float, lr_schedule: str) -> None:
    """Raise InputError for a setting of SGD or of its schedule that is out of range."""
    check_sgd(lr, momentum, weight_decay)
    if lr_schedule not in get_args(LearningRateSchedule):
        raise InputError(f"lr_schedule must be one of {', '.join(get_args(LearningRateSchedule))}, got {lr_schedule!r}")


def scheduled_optimizer(trainer: L.Trainer, optimizer: Optimizer, lr_schedule: str) -> Any:
    """What ``configure_optimizers`` returns for a schedule of the learning rate.

    "constant"; "cosine", to 0 over the run; or "step", which divides it by 10 after a third and after two thirds of it.

    Raises:
        InputError: a schedule in a run without an end.
    """
    if lr_schedule == "constant":
        return optimizer
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise InputError(f"lr_schedule {lr_schedule!r} needs to know how long the run is: set trainer.max_epochs")
    steps = int(steps)
    scheduler: Any
    if lr_schedule == "cosine":
        scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    else:
        scheduler = MultiStepLR(optimizer, milestones=[-(-steps // 3), -(-2 * steps // 3)])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def logs_this_step(trainer: Any) -> bool:
    """Whether the Trainer (None: there is none) writes what is logged at this training step."""
    if trainer is None:
        return False
    every: int = trainer.log_every_n_steps
    return every > 0 and (trainer.fit_loop.epoch_loop.global_step + 1) % every == 0
