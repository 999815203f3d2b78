"""What the tasks' training has in common."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import lightning as L
from torch.optim import Optimizer

from scent_lightning.errors import InputError
from scent_lightning.optim import check_sgd
from scent_lightning.progress import ProgressLR, run_progress

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
    run_length(trainer, f"lr_schedule {lr_schedule!r}")
    scheduler = ProgressLR(optimizer, _cosine if lr_schedule == "cosine" else _thirds, trainer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run_length(trainer: L.Trainer, what: str) -> float:
    """Optimiser steps of the run, infinity where only the clock ends it.

    Raises:
        InputError: a run without an end, which ``what`` needs.
    """
    steps = trainer.estimated_stepping_batches
    if steps == math.inf and run_progress(trainer) is None:
        raise InputError(f"{what} needs to know how long the run is: set trainer.max_epochs")
    return steps


def cosine(progress: float) -> float:
    """From 1 to 0 over the run."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _cosine(progress: float, step: int) -> float:
    return cosine(progress)


def _thirds(progress: float, step: int) -> float:
    return 0.1 ** int(3 * progress + 1e-9) if progress < 1 else 0.01


def logs_this_step(trainer: Any) -> bool:
    """Whether the Trainer (None: there is none) writes what is logged at this training step."""
    if trainer is None:
        return False
    every: int = trainer.log_every_n_steps
    return every > 0 and (trainer.fit_loop.epoch_loop.global_step + 1) % every == 0
