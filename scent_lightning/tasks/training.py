"""What the tasks' training has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from scent_lightning.compiling import outside_graphs
from scent_lightning.errors import InputError
from scent_lightning.private_api import trainer_of
from scent_lightning.progress import DECADES, ProgressLR, cosine, epoch_share, geometric, run_length
from scent_lightning.validation import checked_choice, checked_number

LearningRateSchedule = Literal["cosine", "geometric", "constant", "step"]
GivenRate: TypeAlias = float | Literal["auto"] | None
GivenMomentum: TypeAlias = float | Literal["auto"]
_KEY = "scent_lightning_train_loss"
# By how many powers of ten a warm-up before another schedule than the geometric one rises.
_WARMUP_DECADES = 3.0
# A fraction of the run.
_LONGEST_WARMUP = 0.2


class LearningRate(NamedTuple):
    """The learning rate of a run: at its highest, how it goes from there, and how many epochs it rises before."""

    lr: float
    schedule: LearningRateSchedule = "cosine"
    warmup_epochs: float = 0.0

    def given(
        self, lr: float | None, schedule: LearningRateSchedule | None, warmup_epochs: float | None
    ) -> LearningRate:
        """This one where nothing is given.

        Raises:
            InputError: what is given is out of its range.
        """
        found = LearningRate(
            self.lr if lr is None else lr,
            self.schedule if schedule is None else schedule,
            self.warmup_epochs if warmup_epochs is None else warmup_epochs,
        )
        checked_choice("lr_schedule", found.schedule, get_args(LearningRateSchedule))
        checked_number("warmup_epochs", found.warmup_epochs, least=0)
        return found


def check_auto(lr: str, optimizer: Any, lr_schedule: Any, weight_step: str, warmup_epochs: Any) -> None:
    """Raise InputError unless a learning rate that is given as a word can be found with the other arguments."""
    checked_choice("lr", lr, ("auto",))
    if optimizer is not None or weight_step != "proximal":
        got = f"weight_step {weight_step!r}" if optimizer is None else "another optimizer"
        raise InputError(f"lr 'auto' needs the proximal steps of SGD, which say how large a rate may be; got {got}")
    for name, given in (("lr_schedule", lr_schedule), ("warmup_epochs", warmup_epochs)):
        if given is not None:
            raise InputError(f"lr 'auto' rises and falls by a rule of its own: leave {name} out, got {given!r}")


def nothing_is_given(lr: Any, optimizer: Any, lr_schedule: Any, weight_step: str, warmup_epochs: Any) -> bool:
    """Whether the learning rate can be found, and nothing is said of it."""
    return weight_step == "proximal" and all(x is None for x in (lr, optimizer, lr_schedule, warmup_epochs))


def check_trains(parameters: Iterable[Any], way_out: str) -> None:
    """Raise InputError where there is nothing to train; ``way_out`` says what would change that."""
    if not list(parameters):
        raise InputError(f"nothing is left to train: no parameter requires a gradient; {way_out}")


def scheduled_optimizer(trainer: L.Trainer, optimizer: Optimizer, lr_schedule: str, warmup_epochs: float = 0.0) -> Any:
    """What ``configure_optimizers`` returns for a schedule of the learning rate.

    "constant"; "cosine", to 0 over the run; "geometric", to a ten-thousandth of it, by the same factor each step, and
    to 0 over the last twentieth of the run; or "step", which divides it by 10 after a third and after two thirds. In a
    warm-up the rate rises by the same factor each step, from a ten-thousandth of what a geometric schedule says and a
    thousandth of the others. It lasts a fifth of the run at most.

    Raises:
        InputError: a schedule in a run without an end.
    """
    if lr_schedule == "constant" and warmup_epochs == 0:
        return optimizer
    run_length(trainer, f"lr_schedule {lr_schedule!r}" if lr_schedule != "constant" else "warmup_epochs")

    def factor(progress: float, step: int) -> float:
        warmup = warmup_epochs * epoch_share(trainer) if warmup_epochs else 0.0
        return rate_factor(lr_schedule, progress, warmup)

    return ProgressLR(optimizer, factor, trainer).each_step()


def rate_factor(lr_schedule: str, progress: float, warmup: float = 0.0) -> float:
    """What a schedule multiplies the learning rate by; see :func:`scheduled_optimizer`.

    Args:
        lr_schedule: one of :data:`LearningRateSchedule`.
        progress: fraction of the run that is done, in [0, 1].
        warmup: fraction of the run in which the rate rises; more than a fifth counts as a fifth.
    """
    warmup = min(warmup, _LONGEST_WARMUP)
    fall = _SCHEDULES[lr_schedule](progress)
    if progress >= warmup:
        return fall
    decades = DECADES if lr_schedule == "geometric" else _WARMUP_DECADES
    return 10 ** (-decades * (1 - progress / warmup)) * fall


def _thirds(progress: float) -> float:
    return 0.1 ** int(3 * progress + 1e-9) if progress < 1 else 0.01


def _constant(progress: float) -> float:
    return 1.0


_SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "geometric": geometric,
    "step": _thirds,
    "constant": _constant,
}


def logs_this_step(trainer: L.Trainer) -> bool:
    """Whether the Trainer writes what is logged at this training step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (trainer.fit_loop.epoch_loop.global_step + 1) % every == 0


class _Mean:
    """The mean of numbers that stay on their device: to add one is one addition there, and waits for nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, value: Tensor) -> None:
        value = value.detach()
        if self.total is None or self.total.device != value.device:
            # A sum of many in float32 would lose digits; MPS has nothing wider.
            kind = torch.float32 if value.device.type == "mps" else torch.float64
            start = 0.0 if self.total is None else self.total
            self.total = torch.zeros((), dtype=kind, device=value.device).add_(start)
        self.total.add_(value)
        self.count += 1

    def compute(self) -> Tensor | None:
        return None if self.total is None else (self.total / self.count).float()


class TrainLossMixin(L.LightningModule):
    """``train/loss`` of a task, for the log and for callbacks that monitor it.

    The loss of a step is logged at logging steps, as ``train/loss``. At the end of an epoch, and where validation
    starts within one, ``train/loss`` of ``trainer.callback_metrics`` is the mean over the epoch so far: early stopping,
    the best checkpoint and ``ReduceLROnPlateau`` may monitor it. The log has the mean as ``train/loss_epoch``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch_loss = _Mean()

    @outside_graphs
    def log_loss(self, loss: Tensor) -> bool:
        """Log the loss of a training step, where there is a Trainer: a ``self.log`` at each step would cost a third.

        Args:
            loss: a scalar; in a distributed run this process's share, of which the mean is the whole.

        Returns:
            Whether this is a logging step.
        """
        trainer = trainer_of(self)
        if trainer is None:
            return False
        self._epoch_loss.add(loss)
        if not logs_this_step(trainer):
            return False
        self.log("train/loss", loss, prog_bar=True)
        return True

    def on_train_epoch_start(self) -> None:
        """Start the mean anew. The Trainer passes over this where a run is resumed within an epoch."""
        super().on_train_epoch_start()
        self._epoch_loss.reset()

    def on_validation_epoch_start(self) -> None:
        """Callbacks that look at the end of validation see the mean so far."""
        super().on_validation_epoch_start()
        of_training = self.trainer.state.fn is TrainerFn.FITTING and not self.trainer.sanity_checking
        if of_training and (mean := self._epoch_loss.compute()) is not None:
            self.log("train/loss", mean, logger=False, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's mean, before the callbacks that monitor something look."""
        super().on_train_epoch_end()
        if (mean := self._epoch_loss.compute()) is not None:
            # Of one name in the log, its steps and its means could not be told apart.
            self.log("train/loss", mean, logger=False, sync_dist=True)
            self.log("train/loss_epoch", mean, sync_dist=True)
        self._epoch_loss.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint from within an epoch holds its mean so far, over all processes."""
        super().on_save_checkpoint(checkpoint)
        if (mean := self._epoch_loss.compute()) is not None:
            mean = self.trainer.strategy.reduce(mean, reduce_op="mean")  # type: ignore[assignment]
            checkpoint[_KEY] = {"mean": mean.cpu(), "count": self._epoch_loss.count}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        super().on_load_checkpoint(checkpoint)
        self._epoch_loss.reset()
        if (saved := checkpoint.get(_KEY)) is not None:
            self._epoch_loss.total, self._epoch_loss.count = saved["mean"].double() * saved["count"], saved["count"]
