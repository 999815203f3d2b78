"""How much of a run is done, as the run is now, and learning rates that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import lightning as L
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scent_lightning.errors import InputError
from scent_lightning.private_api import schedule_state, set_last_rates

Factor: TypeAlias = Callable[[float, int], float]

__all__ = [
    "DECADES",
    "ProgressLR",
    "check_progress",
    "cosine",
    "ending",
    "epoch_share",
    "geometric",
    "run_length",
    "run_progress",
]

DECADES = 4.0  # powers of ten by which the geometric schedule falls
_END = 0.05  # the last part of the run, in which it also falls to 0


def run_progress(trainer: L.Trainer) -> float | None:
    """Fraction of a run of ``trainer.fit`` that is done, in [0, 1]; None where the run has no end that is known.

    Counted in epochs against ``max_epochs``, in optimiser steps against ``max_steps`` and in seconds against
    ``max_time``, whichever comes first. An epoch that has begun counts by its batches. So a run that is resumed with
    another batch size, another number of processes, more data or another length is where it is in the new run.

    Args:
        trainer: runs the fit.
    """
    loop: Any = trainer.fit_loop
    progress = -1.0
    steps, epochs, batches = loop.epoch_loop.max_steps, loop.max_epochs or -1, loop.max_batches
    if steps > 0:
        progress = loop.epoch_loop.global_step / steps
    if epochs > 0 and 0 < batches < math.inf:
        current = loop.epoch_progress.current
        # Between epochs the batches are still those of the epoch before.
        begun = current.started > current.processed
        done = loop.epoch_loop.batch_progress.current.processed if begun else 0
        progress = max(progress, (current.processed * batches + done) / (epochs * batches))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            progress = max(progress, _of_time(trainer, callback))
    return None if progress < 0 else min(progress, 1.0)


def epoch_share(trainer: L.Trainer) -> float:
    """An epoch as a fraction of the run, by ``max_epochs`` and ``max_steps``; 0 where neither ends the run.

    Args:
        trainer: runs the fit.
    """
    loop: Any = trainer.fit_loop
    steps, epochs, batches = loop.epoch_loop.max_steps, loop.max_epochs or -1, loop.max_batches
    share = 1 / epochs if epochs > 0 else 0.0
    if steps > 0 and 0 < batches < math.inf:
        share = max(share, math.ceil(batches / trainer.accumulate_grad_batches) / steps)
    return share


def run_length(trainer: L.Trainer, what: str) -> float:
    """Optimiser steps of the run, infinity where only the clock ends it.

    Raises:
        InputError: a run without an end, which ``what`` needs.
    """
    steps = trainer.estimated_stepping_batches
    if steps == math.inf and run_progress(trainer) is None:
        raise InputError(f"{what} needs to know how long the run is: set trainer.max_epochs")
    return steps


def _of_time(trainer: L.Trainer, timer: Timer) -> float:
    rest = timer.time_remaining()
    if rest is None:
        return -1.0
    elapsed = timer.time_elapsed()
    progress = elapsed / max(elapsed + rest, 1e-9)
    # One clock for all: ν and the learning rate have to be the same in all processes.
    return float(trainer.strategy.broadcast(progress)) if trainer.world_size > 1 else progress


def check_progress(progress: float) -> float:
    """Return ``progress``, or raise ValueError unless it is a number in [0, 1]."""
    if isinstance(progress, bool) or not isinstance(progress, (int, float)) or not 0 <= progress <= 1:
        raise ValueError(f"progress must be a number in [0, 1], the fraction of the run that is done, got {progress!r}")
    return float(progress)


def cosine(progress: float) -> float:
    """From 1 to 0 over the run."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def geometric(progress: float) -> float:
    """From 1 to a ten-thousandth over the run, by the same factor each step, and to 0 over its last twentieth."""
    return 10 ** (-DECADES * progress) * ending(progress)


def ending(progress: float) -> float:
    """1, and from there to 0 over the last twentieth of the run.

    Where a row lies so far out that a ten-thousandth of a rate is still a large step for it, no such step is the last.
    """
    return min((1 - progress) / _END, 1.0)


class ProgressLR(LRScheduler):
    """Learning rates as a function of the progress of a run under a Trainer, for ``"interval": "step"``.

    Unlike a schedule over a number of steps it survives a change of the run: resumed with another length, batch size
    or number of processes, it is where the run is.

    Args:
        optimizer: whose groups' learning rates are multiplied.
        factor: maps the progress, in [0, 1], and the number of optimiser steps done to what multiplies the rates; or a
            list of one for each parameter group.
        trainer: runs the fit.
    """

    def __init__(self, optimizer: Optimizer, factor: Factor | Sequence[Factor], trainer: L.Trainer) -> None:
        self.factor = factor
        self.trainer = trainer
        super().__init__(optimizer)

    def each_step(self) -> dict[str, Any]:
        """What ``configure_optimizers`` returns: the optimiser, and this schedule after each of its steps."""
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self, "interval": "step"}}

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group now, after a batch, or at the start."""
        return self._rates()

    def _rates(self) -> list[float | Tensor]:
        progress = run_progress(self.trainer) or 0.0
        factors = [self.factor] * len(self.base_lrs) if callable(self.factor) else self.factor
        return [rate * factor(progress, self.last_epoch) for rate, factor in zip(self.base_lrs, factors, strict=True)]

    def refresh(self) -> None:
        """Set the rates to what they are at this place of the run, between batches."""
        rates = self._rates()
        set_last_rates(self, rates)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The rates and how many steps were taken, as plain data."""
        return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch, **schedule_state(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this schedule, or of another one of torch: its length is not taken."""
        own = self.state_dict()
        self.__dict__.update({name: value for name, value in state_dict.items() if name in own})
