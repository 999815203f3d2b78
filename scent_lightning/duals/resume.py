"""What a checkpoint holds of a run beside Lightning's own, and how a run is resumed with it.

Random states of all processes, the place in the run, the gradient that gathers between two optimiser steps, the weights
before the last one where an update needs them, and hyperparameters as plain data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import lightning as L
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn

from scent_lightning import distributed
from scent_lightning.changed_data import check_change
from scent_lightning.duals.gradients import gathered_gradients, restore_gradients
from scent_lightning.duals.previous import PreviousWeights
from scent_lightning.duals.table import IfChanged
from scent_lightning.duals.variable import DualVariable
from scent_lightning.duals.weight_step import ExponentialPart
from scent_lightning.errors import InputError
from scent_lightning.private_api import load_loader_states, loader_states, loaders, trainer_of
from scent_lightning.progress import ProgressLR, epoch_share, run_progress
from scent_lightning.random_state import random_state, restore_random_state
from scent_lightning.updates import DualUpdate
from scent_lightning.validation import checked_choice

__all__ = ["FORMAT", "Resumption", "given_as_objects", "plain_hyperparameters", "rows_changed"]

# Format of what a checkpoint holds beside Lightning's own: 0 had nothing (0.1.0), 1 has the random states.
FORMAT = 1
_KEY = "scent_lightning"


class Resumption:
    """Writes the state of a module's run into checkpoints, and takes it from the one that the run is resumed from."""

    def __init__(self, exponential_part: ExponentialPart, previous_weights: PreviousWeights) -> None:
        self._exponential_part = exponential_part
        self._previous_weights = previous_weights
        # What the checkpoint has added, from when it was loaded until training starts.
        self._loaded: dict[str, Any] | None = None

    def save(self, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add to ``checkpoint`` the state of the run of ``module``; to be called in all processes."""
        trainer = trainer_of(module)
        loop: Any = None if trainer is None else trainer.fit_loop
        if self._loaded is not None:
            # Resumed, and not yet where the run was: a callback that writes as training starts comes before.
            checkpoint[_KEY] = {**self._loaded, "format": FORMAT}
            if waiting := loader_states(loop):
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = waiting
            return
        states = {name: values.unsqueeze(0) for name, values in random_state().items()}
        if distributed.is_distributed():
            states = distributed.stack_states(states)
        checkpoint[_KEY] = {"format": FORMAT, "random_states": states}
        if trainer is not None and (progress := run_progress(trainer)) is not None:
            checkpoint[_KEY]["progress"] = progress
        if (previous := self._previous_weights.state(module)) is not None:
            checkpoint[_KEY]["previous_weights"] = previous
        if "optimizer_states" in checkpoint and loop is not None and _between_steps(loop):
            accumulated = {"batches": loop.trainer.accumulate_grad_batches, "gradients": gathered_gradients(module)}
            if (exponential := self._exponential_part.state()) is not None:
                accumulated["exponential"] = exponential
            checkpoint[_KEY]["accumulated"] = accumulated

    def load(
        self,
        module: L.LightningModule,
        duals: Iterable[DualVariable],
        checkpoint: dict[str, Any],
        if_changed_data: IfChanged,
    ) -> None:
        """Take what :meth:`save` added, of any format so far, before Lightning loads the weights.

        The random states, the gradient and the place in the run belong to a run that is resumed, and to no other.

        Raises:
            InputError: a newer format than this package knows, or a wrong ``if_changed_data``.
        """
        checked_choice("if_changed_data", if_changed_data, get_args(IfChanged))
        added = checkpoint.get(_KEY, {"format": 0})
        if added["format"] > FORMAT:
            raise InputError(
                f"the checkpoint has format {added['format']} of a newer scent_lightning; this one knows 0 to {FORMAT}"
            )
        trainer = trainer_of(module)
        self._loaded = added if trainer is not None and trainer.state.fn is TrainerFn.FITTING else None
        for variable in duals:
            variable.if_changed = if_changed_data
        if trainer is not None and isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning does so after it loaded the weights, which are then rounded to float32.
            trainer.precision_plugin.convert_module(module)

    def start(self, module: L.LightningModule, duals: list[DualVariable]) -> None:
        """As training starts: continue where the run that is resumed was."""
        loop: Any = module.trainer.fit_loop
        if loader_states(loop):
            load_loader_states(loop)
        if loop.restarted_mid_epoch and loop.epoch_progress.current.processed == loop.epoch_progress.current.started:
            # Resumed from the last batch of an epoch. Lightning would not count the next one as begun, nor say that it
            # begins; and resumed from within that one, it would do all of it again.
            loop.reset_restart_stage()
        if 0 < loop.max_batches < float("inf"):
            _set_epoch(duals, epoch_share(module.trainer))
        added, self._loaded = self._loaded or {}, None
        _continue_at_place(module.trainer, duals, added.get("progress"))
        if (accumulated := added.get("accumulated")) is not None:
            # Lightning drops it where another number of batches makes a step begin here.
            scale = accumulated["batches"] / loop.trainer.accumulate_grad_batches
            place = module.global_rank, distributed.processes(), scale
            restore_gradients(module, accumulated["gradients"], *place)
            if (exponential := accumulated.get("exponential")) is not None:
                self._exponential_part.restore(exponential, *place)
        if (previous := added.get("previous_weights")) is not None:
            self._previous_weights.restore(previous, module, duals)
        states = added.get("random_states")
        if states is not None and module.global_rank < len(states["torch"]):
            restore_random_state({name: values[module.global_rank] for name, values in states.items()})

    @staticmethod
    def end_epoch(trainer: L.Trainer, duals: Iterable[DualVariable]) -> None:
        """Learn how long an epoch is in a run that ends by the clock."""
        loop: Any = trainer.fit_loop
        epochs = loop.epoch_progress.current.processed
        timed = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if epochs > 0 and timed:
            _set_epoch(duals, (run_progress(trainer) or 0.0) / epochs)


def rows_changed(trainer: L.Trainer, if_changed_data: IfChanged) -> bool:
    """Whether ν of all anchors is to be forgotten, since the checkpoint's training rows are not those there are now.

    Raises:
        InputError: they have changed in a way that ``if_changed_data`` does not allow.
    """
    changed_rows = getattr(getattr(trainer, "datamodule", None), "changed_rows", None)
    if changed_rows is None or (change := changed_rows()) == "none":
        return False
    check_change(change, if_changed_data)
    return if_changed_data == "reset"


def _set_epoch(duals: Iterable[DualVariable], fraction: float) -> None:
    for variable in duals:
        if variable.auto is not None:
            variable.auto.epoch = fraction


def _continue_at_place(trainer: L.Trainer, duals: Iterable[DualVariable], saved: float | None) -> None:
    """Put what has a position in the run where it is in the run as it is now, which may have another length."""
    loop: Any = trainer.fit_loop
    position = next((place for loader in loaders(loop) if (place := _position(loader)) is not None), None)
    if position is not None and loop.epoch_progress.current.started > loop.epoch_progress.current.processed:
        # Batches of another size were counted before.
        current = loop.epoch_loop.batch_progress.current
        more = position - current.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + more)
    now = run_progress(trainer)
    if now is None or now == saved:
        return
    for variable in duals:
        if variable.auto is not None and saved is not None:
            variable.auto.move(now - saved)
    # At the start of a run, too: the schedules were made before the length of an epoch was known.
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ProgressLR):
            config.scheduler.refresh()


def _between_steps(loop: Any) -> bool:
    """Whether some batches of an optimiser step are processed, and not all of them."""
    progress, trainer = loop.epoch_loop.batch_progress, loop.trainer
    done = progress.current.processed
    if trainer.state.fn is not TrainerFn.FITTING or done % trainer.accumulate_grad_batches == 0:
        return False
    # The last batch of an epoch is always a step.
    return not (progress.is_last_batch or done == loop.max_batches) or progress.current.ready > done


def _position(loader: Any) -> int | None:
    """How many of its batches a loader of this package leaves out; None for another one."""
    position = getattr(getattr(loader, "sampler", None), "position", None)
    return position[1] if isinstance(position, tuple) else None


def plain_hyperparameters(module: L.LightningModule) -> dict[str, Any]:
    """The hyperparameters of a module with every dual update in the form of :meth:`DualUpdate.config`."""
    hparams = dict(module.hparams)
    parameters = inspect.signature(type(module).__init__).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "_instantiator" in hparams and not takes_any:
        # The command line offers what the data module knows to every task; not every task takes all of it.
        hparams = {key: value for key, value in hparams.items() if key in parameters or key.startswith("_")}
    return {key: _plain(value) for key, value in hparams.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, DualUpdate):
        return value.config()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


def given_as_objects(task: type, weights: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Arguments of a task that are not known, though the weights of a module of that name are."""
    names = [name for name in inspect.signature(task.__init__).parameters if name not in known]  # type: ignore[misc]
    return [name for name in names if any(weight.startswith(f"{name}.") for weight in weights)]
