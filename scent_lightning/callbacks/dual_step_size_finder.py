"""A step size for SCENT from a short pilot run."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from tqdm.auto import tqdm

from scent_lightning.callbacks.lookup import duals_of, tensorboard_loggers
from scent_lightning.duals import SCENT, DualUpdate, DualVariable
from scent_lightning.errors import InputError
from scent_lightning.figures import COLOURS, new_figure, save, style
from scent_lightning.private_api import forget_loaders
from scent_lightning.random_state import random_state, restore_random_state
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["DualStepSizeFinder"]

MOST_POINTS = 500  # of a curve


class DualStepSizeFinder(L.Callback):
    r"""Run a short pilot before training, set SCENT's log α by it, and put everything else back as it was.

    ``SCENT(log_alpha="auto")`` finds the step size as it trains. This is for a fixed value, one to print in a table: in
    the manner of Lightning's ``LearningRateFinder``, the first steps of the run are taken as if they were all of it,
    schedules of the learning rate included, with "auto"; what this found of ν gives log α = −reference − c, c being
    half of what it rises to (see :class:`~scent_lightning.updates.auto.AutoStepSize`). The weights, ν, the
    optimisers, the random numbers and the order of the data are then what they were, and training begins with

    * ``SCENT(log_alpha, schedule="cosine", max_log_weight=…)`` where log α was "auto", with the guard that this had at
      the end of the pilot (one that was given stays);
    * the given update with another log α where it was a number.

    Duals with equal updates get one value, their mean. Duals with other updates are left alone.

    What it saw is logged to TensorBoard as a figure, ``dual/NAME/step_size``, and in :attr:`curves`; :meth:`plot` draws
    it. A run that is resumed continues with the value of its checkpoint, without another pilot. Validation, logging and
    other callbacks are off in the pilot.

    Args:
        fraction: length of the pilot as a part of the run, in (0, 1]. ν is to come near the value that it settles at:
            from a shorter pilot log α comes out too small.
        num_steps: length of the pilot in optimiser steps; None: by ``fraction``.

    Attributes:
        log_alpha: what was found, by the name of the dual; empty before.
        max_log_weight: the guard that "auto" had, likewise.
        curves: by the name of the dual, the same number of points of each: ``step``, ``nu`` (mean of the batch),
            ``log_mean`` (ℓ, likewise), and ``reference``, −log α − c of "auto" (NaN before there is one).

    Raises:
        InputError: an argument out of its range; in training: no dual is updated by SCENT, the run has no end and
            ``num_steps`` is not set, or the pilot was too short to see anything.

    Example:
        >>> import lightning as L
        >>> finder = DualStepSizeFinder(fraction=0.05)
        >>> trainer = L.Trainer(callbacks=[finder], logger=False, accelerator="cpu")
        >>> finder.log_alpha
        {}
    """

    def __init__(self, fraction: float = 0.3, num_steps: int | None = None) -> None:
        super().__init__()
        self.fraction = checked_number("fraction", fraction, above=0, most=1)
        self.num_steps: int | None = checked_integer("num_steps", num_steps, or_none=True)
        self.log_alpha: dict[str, float] = {}
        self.max_log_weight: dict[str, float] = {}
        self.curves: dict[str, dict[str, list[float]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """What was found, for a run that is resumed."""
        return {"log_alpha": dict(self.log_alpha), "max_log_weight": dict(self.max_log_weight)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it from a checkpoint."""
        self.log_alpha, self.max_log_weight = dict(state_dict["log_alpha"]), dict(state_dict["max_log_weight"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the pilot, unless the run is resumed."""
        duals = {name: dual for name, dual in duals_of(pl_module).items() if isinstance(dual.update, SCENT)}
        if not duals:
            raise InputError("DualStepSizeFinder needs a dual variable that SCENT updates; the module has none")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn("DualStepSizeFinder does nothing in a fast_dev_run")
            return
        if trainer.ckpt_path is None:
            self.log_alpha = self._find(trainer, pl_module, duals)
            self._log_figures(trainer)
        elif not self.log_alpha:
            rank_zero_warn("DualStepSizeFinder does nothing in a run that is resumed and had no pilot")
        for name, log_alpha in self.log_alpha.items():
            if name in duals:
                duals[name].use(with_step_size(duals[name].update, log_alpha, self.max_log_weight[name]))
                rank_zero_info(f"SCENT's step size of dual variable {name!r}: {duals[name].update!r}")
        if len({repr(dual.update) for dual in duals.values()}) == 1 and "dual" in pl_module.hparams:
            # What a checkpoint is loaded with elsewhere.
            pl_module.hparams["dual"] = next(iter(duals.values())).update.config()

    # ---------------------------------------------------------------- the pilot

    def _find(
        self, trainer: L.Trainer, module: L.LightningModule, duals: Mapping[str, DualVariable]
    ) -> dict[str, float]:
        whole = trainer.estimated_stepping_batches
        if self.num_steps is None and math.isinf(whole):
            raise InputError("DualStepSizeFinder does not know how long the run is: set num_steps")
        steps = self.num_steps or max(round(self.fraction * whole), 1)
        steps = int(min(steps, whole))
        updates = {name: dual.update for name, dual in duals.items()}
        pilot = _Pilot(steps, duals, trainer.is_global_zero and trainer.progress_bar_callback is not None)
        before = _Before(trainer, module)
        try:
            for dual in duals.values():
                dual.use(_with(dual.update, log_alpha="auto", alpha_multiplier=1.0, window=None))
            before.prepare(steps, pilot)
            trainer.fit_loop.run()
            rules = {name: dual.auto for name, dual in duals.items() if dual.auto is not None}
            suggestions = {name: rule.suggestion() for name, rule in rules.items()}
        finally:
            pilot.bar.close()
            for name, update in updates.items():
                duals[name].use(update)
            before.restore()
        self.curves = pilot.curves
        found = {name: suggestion for name, suggestion in suggestions.items() if suggestion is not None}
        missing = [name for name in suggestions if name not in found]
        if missing:
            raise InputError(
                f"a pilot of {steps} steps is too short to find a step size for dual variable {missing[0]!r}: set "
                "num_steps or fraction to take in at least two epochs"
            )
        kinds = {name: repr(update) for name, update in updates.items()}
        self.max_log_weight = {name: round(suggestion["max_log_weight"], 2) for name, suggestion in found.items()}
        alike = {name: [found[other]["log_alpha"] for other in kinds if kinds[other] == kinds[name]] for name in kinds}
        return {name: round(sum(values) / len(values), 2) for name, values in alike.items()}

    # ---------------------------------------------------------------- pictures

    @style()
    def plot(self, name: str | None = None, path: str | Path | None = None) -> Any:
        """Draw what the pilot saw of a dual: ν and ℓ of the batches, the reference, and −log α.

        Args:
            name: which dual; None is the first.
            path: file to save the figure to, as SVG beside it.

        Returns:
            The matplotlib figure.

        Raises:
            InputError: there was no pilot, or none of that dual.
        """
        name = next(iter(self.curves), None) if name is None else name
        if name is None or name not in self.curves:
            seen = ", ".join(map(repr, self.curves)) or "none"
            raise InputError(f"name must be that of a dual variable of the pilot ({seen}), got {name!r}")
        curves = self.curves[name]
        figure, panels = new_figure(size=(6.0, 3.6))
        panel = panels[0, 0]
        panel.plot(curves["step"], curves["log_mean"], label="ℓ, mean of the batch", color="#bbbbbb", linewidth=0.8)
        panel.plot(curves["step"], curves["nu"], label="ν, mean of the batch", color=COLOURS[0])
        panel.plot(curves["step"], curves["reference"], label="reference", color=COLOURS[1])
        label = f"−log α = {-self.log_alpha[name]:.2f}"
        panel.axhline(-self.log_alpha[name], label=label, color="black", linestyle="--", linewidth=1)
        panel.set(xlabel="optimiser step of the pilot", ylabel="nats", title=f"dual variable {name}")
        panel.legend()
        if path is not None:
            save(figure, path)
        return figure

    @rank_zero_only
    def _log_figures(self, trainer: L.Trainer) -> None:
        for logger in tensorboard_loggers(trainer):
            for name in self.curves:
                logger.experiment.add_figure(f"dual/{name}/step_size", self.plot(name), 0)


def with_step_size(update: DualUpdate, log_alpha: float, max_log_weight: float) -> SCENT:
    """The update with a fixed log α; one with "auto" also with what goes with it there."""
    assert isinstance(update, SCENT)
    if update.log_alpha == "auto":
        guard = max_log_weight if update.max_log_weight is None else update.max_log_weight
        return _with(update, log_alpha=log_alpha, schedule="cosine", final=None, max_log_weight=guard)
    return _with(update, log_alpha=log_alpha, window=None)


def _with(update: DualUpdate, **values: Any) -> SCENT:
    """A copy, of the same class, with other values."""
    assert isinstance(update, SCENT)
    changed = copy.copy(update)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


class _Pilot(L.Callback):
    """Notes what the duals do; some hundred points of each curve."""

    def __init__(self, steps: int, duals: Mapping[str, DualVariable], visible: bool) -> None:
        self.every = -(-steps // MOST_POINTS)
        self.duals = duals
        self.curves = {name: {key: list[float]() for key in ("step", "nu", "log_mean", "reference")} for name in duals}
        self.bar = tqdm(total=steps, desc="Finding the step size", disable=not visible)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self.bar.update(step - self.bar.n)
        for name, dual in self.duals.items():
            curves, last = self.curves[name], dual.last_step
            if step % self.every or last is None or (curves["step"] and curves["step"][-1] == step):
                continue
            seen = last.all_log_mean > -math.inf
            statistics = {} if dual.auto is None else dual.auto.statistics()
            curves["step"].append(step)
            curves["nu"].append(last.all_nu[seen].double().mean().item())
            curves["log_mean"].append(last.all_log_mean[seen].double().mean().item())
            curves["reference"].append(statistics.get("reference", math.nan))


class _Before:
    """What a Trainer and a module are before a pilot: how to run one, and how to undo it."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.state = copy.deepcopy(module.state_dict())
        self.buffers = {name: value.clone() for name, value in module.named_buffers() if name not in self.state}
        self.random_state: dict[str, Tensor] = random_state()
        self.loop: Any = trainer.fit_loop
        self.loop_state = copy.deepcopy(self.loop.state_dict())
        self.precision = copy.deepcopy(trainer.precision_plugin.state_dict())
        self.max_steps = self.loop.epoch_loop.max_steps
        self.values = {name: getattr(trainer, name) for name in ("callbacks", "loggers", "limit_val_batches")}

    def prepare(self, steps: int, pilot: L.Callback) -> None:
        """A run of ``steps``, with new optimisers, and nothing but ``pilot`` looking on."""
        trainer: Any = self.trainer
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.callbacks = [pilot]
        trainer.limit_val_batches = 0
        self.loop.epoch_loop.max_steps = steps
        trainer.strategy.setup_optimizers(trainer)

    def restore(self) -> None:
        """All as it was, with new optimisers."""
        trainer: Any = self.trainer
        for name, value in self.values.items():
            setattr(trainer, name, value)
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.enable()
        self.loop.epoch_loop.max_steps = self.max_steps
        self.loop.load_state_dict(self.loop_state)
        self.loop.restarting = self.loop.epoch_loop.restarting = False
        # The loaders are built anew: theirs would go on where the pilot stopped.
        forget_loaders(self.loop)
        trainer.should_stop = False
        self.module.zero_grad(set_to_none=True)
        self.module.load_state_dict(self.state)
        buffers = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in self.buffers.items():
                buffers[name].copy_(value)
        trainer.precision_plugin.load_state_dict(self.precision)
        trainer.strategy.setup_optimizers(trainer)
        restore_random_state(self.random_state)
