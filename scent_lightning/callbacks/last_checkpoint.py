"""The state that a run is resumed from."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_info

from scent_lightning.callbacks.lookup import duals_of
from scent_lightning.errors import DivergenceError, InputError
from scent_lightning.private_api import forget_written, write_last
from scent_lightning.progress import run_progress

__all__ = ["LastCheckpoint"]

LOOK_EVERY = 100  # steps


class LastCheckpoint(ModelCheckpoint):
    """Keep ``last.ckpt``: of the start of training, then of the ends of epochs, and of the end; of finite weights only.

    Whatever ends a run, there is a state to resume from, and a folder that cannot be written is known before the first
    epoch. An epoch that ends sooner than ``at_most_every_s`` after the last writing is passed over: where an epoch is a
    few steps, writing would take longer than training. In a long epoch, one is written every ``at_least_every_s``: a
    run is resumed from within an epoch just as from its end. The command line has this callback on by default.

    Where the weights are averaged (Lightning's ``WeightAveraging``, ``EMAWeightAveraging``), the file of a finished run
    has both the average and the weights that training goes on with.

    Args:
        at_most_every_s: seconds before an epoch's end is worth a file, at least 0.
        at_least_every_s: seconds after which one is written within an epoch, above 0.

    Raises:
        DivergenceError: weights or ν are not finite at the end of an epoch; the file keeps the state before.
    """

    # ModelCheckpoint builds this text anew for each hook of a step, and has nothing to do in most of them here: the
    # Trainer passes over a hook that is None.
    state_key = "LastCheckpoint"
    on_train_batch_start = None  # type: ignore[assignment]
    on_before_zero_grad = on_before_backward = None  # type: ignore[assignment]
    on_after_backward = on_before_optimizer_step = None  # type: ignore[assignment]

    def __init__(self, at_most_every_s: float = 5.0, at_least_every_s: float = 600.0) -> None:
        if not at_most_every_s >= 0:
            raise InputError(f"at_most_every_s must be at least 0, got {at_most_every_s!r}")
        if not at_least_every_s > 0:
            raise InputError(f"at_least_every_s must be above 0, got {at_least_every_s!r}")
        super().__init__(save_top_k=0, save_last=True)
        self.at_most_every_s = at_most_every_s
        self.at_least_every_s = at_least_every_s
        self._written_at = -math.inf
        self._epoch_began: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the first one."""
        super().on_train_start(trainer, pl_module)
        self._check_finite(pl_module, "before the first step")
        forget_written(self)  # of this run nothing is written
        self._epoch_began = None
        self._watch_steps(True)
        self._write(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the time of a whole epoch: the Trainer passes over this where a run is resumed within one."""
        self._epoch_began = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one in its place, if it is time."""
        self._check_finite(pl_module, f"at the end of epoch {trainer.current_epoch}")
        if self._is_due(trainer, self.at_most_every_s) or (_averages(trainer) and _ends(trainer)):
            self._write(trainer)
        if self._epoch_began is not None:
            is_long = time.monotonic() - self._epoch_began >= self.at_least_every_s / 2
            self._watch_steps(trainer.strategy.broadcast(is_long))

    def _watch_steps(self, watch: bool) -> None:
        """Where epochs are short, a hook at every step costs 2 % of a small one: the Trainer passes over None."""
        if watch:
            self.__dict__.pop("on_train_batch_end", None)
        else:
            self.on_train_batch_end = None  # type: ignore[assignment,method-assign]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write one within a long epoch; the clock is looked at every so many steps."""
        if (batch_idx + 1) % LOOK_EVERY == 0 and self._is_due(trainer, self.at_least_every_s):
            self._check_finite(pl_module, f"at step {trainer.global_step}")
            self._write(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing: the epoch's end is what counts."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last one."""
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Say which checkpoint the run can be resumed from."""
        super().on_exception(trainer, pl_module, exception)
        if self.last_model_path and Path(self.last_model_path).is_file():
            rank_zero_info(f"Last checkpoint: {self.last_model_path}")

    def _is_due(self, trainer: L.Trainer, seconds: float) -> bool:
        """Whether so long has passed since the last writing, by the first process's clock: all write, or none."""
        return bool(trainer.strategy.broadcast(time.monotonic() - self._written_at >= seconds))

    def _write(self, trainer: L.Trainer) -> None:
        # Not ModelCheckpoint's own hooks: where it keeps no other files, these write the last one once a run is over.
        if write_last(self, trainer):
            self._written_at = time.monotonic()

    def _check_finite(self, pl_module: L.LightningModule, when: str) -> None:
        tables = [(f"duals.{name}.nu", dual.nu) for name, dual in duals_of(pl_module).items()]
        for name, values in [*pl_module.named_parameters(), *tables]:
            if not values.numel() or not values.is_floating_point():
                continue
            # The extremes show NaN and infinity, and take no memory: a table may be large.
            if not all(map(math.isfinite, torch.stack(values.detach().aminmax()).tolist())):
                raise DivergenceError(
                    f"{name} is not finite {when}, and no checkpoint is written of it. Lower the learning rate, or "
                    "start from other weights."
                )


def _averages(trainer: L.Trainer) -> bool:
    """Whether the weights are averaged: once the run is over, the module has the average and nothing to go on with."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _ends(trainer: L.Trainer) -> bool:
    """Whether the run may be over with this epoch."""
    last = 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1
    return bool(last or trainer.should_stop or run_progress(trainer) == 1)
