"""What looks at every validation and test run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = ["EvaluationCallback"]

Stage = Literal["val", "test"]
_STEPS: dict[Stage, str] = {"val": "validation_step", "test": "test_step"}


class EvaluationCallback(L.Callback):
    """Collect from the batches of every validation and test run, and do something with it at the run's end.

    A subclass says what in :meth:`start`, :meth:`collect` and :meth:`finish`; none of them is called in the sanity
    check, nor in an epoch that is passed over.

    Args:
        every_n_epochs: during a fit, look at every n-th epoch only.

    Raises:
        InputError: it is no whole number of at least 1.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        self.every_n_epochs: int = checked_integer("every_n_epochs", every_n_epochs)
        self._stage: Stage | None = None  # of the run that is looked at

    def start(self, pl_module: L.LightningModule) -> None:
        """Begin a run with nothing."""
        raise NotImplementedError

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Keep what is needed of a batch.

        Args:
            trainer: the Trainer.
            step: name of the module's method that returned the outputs, for messages.
            outputs: what it returned.
            batch: what it was given.
            dataloader_idx: of which dataloader.
        """
        raise NotImplementedError

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Do it, and let go of what was kept. Every process comes here."""
        raise NotImplementedError

    def tensors(self, step: str, outputs: Any, *names: str, shape: str = "") -> list[Tensor]:
        """Tensors by name from what a step returned.

        Args:
            step: name of the module's method that returned it.
            outputs: what it returned.
            names: of the tensors.
            shape: what else to say of them in the message, such as ", each of shape (B,)".

        Raises:
            InputError: it is no dictionary with all of them.
        """
        found = outputs if isinstance(outputs, dict) else {}
        tensors = [value for value in map(found.get, names) if isinstance(value, Tensor)]
        if len(tensors) < len(names):
            quoted = [f"'{name}'" for name in names]
            came = type(outputs).__name__
            if isinstance(outputs, dict):
                came += f" of {', '.join(f'{key!r} ({type(value).__name__})' for key, value in outputs.items())}"
            raise InputError(
                f"{type(self).__name__} needs {step} to return a dict with the tensors {', '.join(quoted[:-1])} and "
                f"{quoted[-1]}{shape}, got {came}"
            )
        return tensors

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start, unless this validation is passed over."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        passed_over = fitting and (trainer.current_epoch + 1) % self.every_n_epochs != 0
        self._start(pl_module, None if trainer.sanity_checking or passed_over else "val")

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start."""
        self._start(pl_module, "test")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect."""
        if self._stage is not None:
            self.collect(trainer, _STEPS[self._stage], outputs, batch, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish."""
        stage, self._stage = self._stage, None
        if stage is not None:
            with self._as_validated(trainer, pl_module, stage):
                self.finish(trainer, pl_module, stage)

    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    @contextmanager
    def _as_validated(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> Iterator[None]:
        """The weights that were validated: a callback before this one that averages them has put the others back."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)] if stage == "val" and self in callbacks else []
        averaging = [callback for callback in before if isinstance(callback, WeightAveraging)]
        for callback in averaging:
            callback.on_validation_epoch_start(trainer, pl_module)
        try:
            yield
        finally:
            for callback in reversed(averaging):
                callback.on_validation_epoch_end(trainer, pl_module)

    def _start(self, pl_module: L.LightningModule, stage: Stage | None) -> None:
        self._stage = stage
        if stage is not None:
            self.start(pl_module)
