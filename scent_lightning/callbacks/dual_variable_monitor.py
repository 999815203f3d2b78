"""Watch the dual variables of a run."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from scent_lightning.callbacks.custom_scalars import custom_scalars
from scent_lightning.callbacks.lookup import duals_of, tensorboard_loggers
from scent_lightning.duals import DualVariable
from scent_lightning.duals.step import DualStep

__all__ = ["DualVariableMonitor"]

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
# What only ``detail`` shows, and what repeats the rest where there is one anchor.
DETAILS = frozenset({"min", "max", "std", "change", "kappa", "reference", "table_q25", "table_q75"})
DETAILS |= {"effective_gamma_min", "effective_gamma_max"}
OF_SEVERAL = frozenset({"weight_max"})
# TensorBoard's bins end at 1e20, and it stops where no value falls into any.
LARGEST_IN_HISTOGRAM = 9e19
# Quantiles and histogram copy and sort what they are of, some ten times the memory of so many anchors of the table.
MOST_ANCHORS = 1_000_000


class DualVariableMonitor(L.Callback):
    r"""Log statistics of every dual variable of the module to its loggers.

    For a dual called NAME, every ``log_every_n_steps`` of the Trainer and from the current batch, in O(B):

    ==============================  ===================================================================================
    tag                             meaning
    ==============================  ===================================================================================
    ``dual/NAME/mean``              the new ν of the batch's anchors, their mean
    ``dual/NAME/weight``            mean :math:`\exp(\ell - \nu)`, 1 at stationarity; above 1, ν lags below the scores
    ``dual/NAME/weight_max``        the largest of them: what a single anchor can do to the gradient
    ``dual/NAME/guarded``           fraction of the anchors that the guard raised
    ``…/effective_samples``         mean m/κ: how many of an anchor's m samples count; near 1, a larger batch would help
    ``dual/NAME/log_alpha``, …      the update's scheduled step size under its own name (``gamma``, ``alpha``); not
                                    while log α is infinite, as in the first epoch of "auto"
    ``dual/NAME/effective_gamma``   SCENT: mean of sigmoid(log α + ν)
    ==============================  ===================================================================================

    At the end of every epoch, over the visited anchors of the table: ``dual/NAME/table_mean``, the quantiles
    ``table_q01``, ``table_q50`` and ``table_q99``, the fraction of anchors ``visited``, and with TensorBoard a
    histogram, ``dual/NAME/histogram``. Of a table with more than two million anchors, mean, quantiles and histogram are
    those of at least a million, evenly spaced in the table. A dual of one anchor has none of these and no
    ``weight_max``, which would repeat what the others say.

    With ``detail`` also, of the batch, ``min``, ``max`` and ``std`` of ν, ``change`` (mean \|new ν − ν before\|, where
    an anchor on its first visit starts at ℓ), ``kappa`` (mean κ, :math:`m \sum_j e^{2 s_j} / (\sum_j e^{s_j})^2`, from
    1 to m), ``effective_gamma_min`` and ``…_max``, and of SCENT with log α "auto" the ``reference``, the least windowed
    mean of ν so far, once there is one; of the table ``table_q25`` and ``table_q75``.

    Where the weights take a proximal step (``weight_step``), also ``weights/decrease``, the nats W(a) that the step
    takes off its own batch in its model, and ``weights/scale``, what the gradient was multiplied by.

    TensorBoard's page *custom scalars* shows a run in the order in which one reads it: a chart for the loss and one for
    each metric, training and validation together; then for each dual variable ν with its quantiles as a band, the
    weights and the step size.

    Nothing is computed, and no device waited for, between logging steps. κ (:mod:`scent_lightning.duals.kappa`) is that
    of the whole step: over the anchors of all processes, each once and by all its samples.

    Args:
        histogram: write the histogram of the table once an epoch (TensorBoard only).
        detail: log all there is; also for one anchor.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[DualVariableMonitor()], logger=False, accelerator="cpu")
    """

    def __init__(self, histogram: bool = True, detail: bool = False) -> None:
        super().__init__()
        self.histogram = histogram
        self.detail = detail
        self._logged_step = -1
        self._measures = False
        self._in_layout: tuple[str, ...] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A new run logs its first step again."""
        self._logged_step = -1
        self._measure(pl_module, False)
        self._in_layout = None
        self._lay_out(trainer, pl_module)

    def _lay_out(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell TensorBoard what belongs together, where there is something new: it goes by the last layout."""
        known = tuple(trainer.callback_metrics)
        if not trainer.is_global_zero or known == self._in_layout:
            return
        self._in_layout = known
        for logger in tensorboard_loggers(trainer):
            if layout := custom_scalars(duals_of(pl_module), known):
                logger.experiment.add_custom_scalars(layout)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The metrics of validation have names now."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._lay_out(trainer, pl_module)

    def _kept(self, variable: DualVariable, statistics: dict[str, float]) -> dict[str, float]:
        """Those that are logged."""
        if self.detail:
            return statistics
        left_out = DETAILS if variable.num_anchors > 1 else DETAILS | OF_SEVERAL
        return {key: value for key, value in statistics.items() if key not in left_out}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have κ worked out where this batch may end in a logging step."""
        every, step = trainer.log_every_n_steps, trainer.global_step  # type: ignore[attr-defined]
        steps = max(len(trainer.optimizers), 1)  # of this batch, where each of several takes one
        logs = every > 0 and step // every != (step + steps) // every and bool(trainer.loggers)
        if logs != self._measures:
            self._measure(pl_module, logs)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the tables as they were."""
        self._measure(pl_module, False)

    def _measure(self, pl_module: L.LightningModule, measures: bool) -> None:
        self._measures = measures
        for variable in duals_of(pl_module).values():
            variable.measures_kappa = measures

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the batch's statistics at logging steps."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step
        if not trainer.loggers or every == 0 or step == 0 or step % every or step == self._logged_step:
            return
        self._logged_step = step
        metrics: dict[str, float] = {}
        for name, variable in duals_of(pl_module).items():
            if variable.last_step is not None:
                found = batch_statistics(variable, variable.last_step)
                metrics |= {f"dual/{name}/{key}": value for key, value in self._kept(variable, found).items()}
        weight_step = getattr(pl_module, "last_weight_step", None)
        if weight_step is not None:
            metrics |= {"weights/decrease": weight_step.decrease, "weights/scale": weight_step.scale}
        self._log(trainer, metrics, step - 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table's statistics."""
        if not trainer.loggers:
            return
        self._lay_out(trainer, pl_module)
        for name, variable in duals_of(pl_module).items():
            if trainer.is_global_zero and (self.detail or variable.num_anchors > 1):
                every = max(variable.num_anchors // MOST_ANCHORS, 1)
                values = variable.nu[::every][variable.visited[::every]].cpu().numpy()
                found = self._kept(variable, table_statistics(variable, values))
                metrics = {f"dual/{name}/{key}": value for key, value in found.items()}
                self._log(trainer, metrics, trainer.global_step - 1)
                values = np.clip(values[np.isfinite(values)], -LARGEST_IN_HISTOGRAM, LARGEST_IN_HISTOGRAM)
                if self.histogram and values.size:
                    for logger in tensorboard_loggers(trainer):
                        logger.experiment.add_histogram(f"dual/{name}/histogram", values, trainer.global_step - 1)

    @rank_zero_only
    def _log(self, trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
        if metrics:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)


def batch_statistics(variable: DualVariable, step: DualStep) -> dict[str, float]:
    """Statistics of a step by name, over the anchors with a valid sample; empty if there are none."""
    valid = step.log_mean > -torch.inf
    if not bool(valid.any()):
        return {}
    nu, before, log_mean = step.nu.double()[valid], step.nu_before.double()[valid], step.log_mean.double()[valid]
    weights = torch.exp(log_mean - nu)
    raised = (nu - step.unguarded.double()[valid]) > 1e-6 * (1 + nu.abs())
    values = {
        "mean": nu.mean(),
        "min": nu.amin(),
        "max": nu.amax(),
        "std": nu.std(unbiased=False),
        "change": (nu - before).abs().mean(),
        "weight": weights.mean(),
        "weight_max": weights.amax(),
        "guarded": raised.double().mean(),
    }
    if step.kappa is not None:
        values |= {"kappa": step.kappa.kappa, "effective_samples": step.kappa.effective_samples}
    update = variable.update_at(step.progress, step.rows[valid.to(step.rows.device)])
    values |= update.statistics(before, log_mean, step.progress)
    numbers = torch.stack([value.to(nu) for value in values.values()]).tolist()
    sizes = update.step_sizes(step.progress)
    found = dict(zip(values, numbers, strict=True)) | {key: size for key, size in sizes.items() if size != math.inf}
    return found if variable.auto is None else found | variable.auto.statistics()


def table_statistics(variable: DualVariable, values: np.ndarray) -> dict[str, float]:
    """Mean and quantiles of ``values``, the visited ν or a part of them, and the fraction visited, by name."""
    statistics = {"visited": int(torch.count_nonzero(variable.visited)) / variable.num_anchors}
    if values.size:
        statistics["table_mean"] = float(values.mean(dtype=np.float64))
        for quantile, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True):
            statistics[f"table_q{round(100 * quantile):02d}"] = float(value)
    return statistics
