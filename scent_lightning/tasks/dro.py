"""KL-regularised distributionally robust regression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import MaxMetric, MeanSquaredError

from scent_lightning.callbacks.lookup import tensorboard_loggers
from scent_lightning.distributed import is_distributed, of_all_processes
from scent_lightning.duals import DualUpdate
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.functional import ResidualLoss, at_least_float32, residual_losses
from scent_lightning.metrics import EffectiveRows, EntropicRisk
from scent_lightning.private_api import trainer_of
from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.batches import check_rows, three_parts
from scent_lightning.tasks.temperature import TemperatureOfRows
from scent_lightning.tasks.training import GivenMomentum, GivenRate, LearningRate, LearningRateSchedule
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["DRORegressionTask"]

Batch = tuple[Tensor, Tensor, Tensor]
Initial = Literal["least_squares", "zeros"]
_ANCHOR = "nu"
_MOST_FEATURES = 1000  # of a network, for which least squares is worked out only to tell how large the losses are


class DRORegressionTask(BaseTask):
    r"""Regression that minimises the entropic risk of the loss, that is, its worst case under a KL penalty.

    .. math:: \min_w \tau \log \frac{1}{n} \sum_i \exp\frac{\text{loss}(f_w(x_i), y_i)}{\tau}
              = \min_w \max_p \sum_i p_i\, \text{loss}_i - \tau\, KL(p, 1/n)

    (Wei et al. 2026, appendix on KL-regularised distributionally robust optimisation). There is one anchor, the
    training set, and so one dual variable, ``nu``; at the optimum τ·ν is the objective itself.

    Logs ``train/loss`` (dual objective of the batch), and for validation and test ``…/entropic_risk`` (the objective,
    exact over the rows), ``…/rmse``, ``…/worst_loss`` and ``…/effective_rows``: how many rows carry the objective. A
    fit begins with what τ means for the training rows, in words and as ``temperature/effective_rows`` in TensorBoard.
    ``predict`` gives for each row its index, the prediction, the loss and the worst-case weight
    :math:`p_i \propto \exp(\text{loss}_i / \tau)` among all rows predicted.

    Args:
        num_features: number of features d; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``.
        tau: temperature in the units of the loss, above 0. Smaller values weigh the worst rows more.
        loss: "squared", "absolute" or "huber".
        huber_delta: where the Huber loss turns from squared to linear, above 0.
        network: maps features ``(B, d)`` to predictions ``(B,)`` or ``(B, 1)``; None is a linear model with intercept.
        initial: where the linear model starts: "least_squares" (on the training rows) or "zeros". A network starts as
            it is.
        lr: learning rate of SGD, above 0; "auto" finds it during the run; None: 0.01 with the proximal step, else 1e-5.
        momentum: momentum of SGD, in [0, 1); "auto" increases over the run from 0.9, see
            :class:`~scent_lightning.optim.IncreasingMomentumSGD`; None: "auto" with the proximal step, else 0.9.
        nesterov: Nesterov's form of a momentum that is a number; "auto" has it.
        weight_decay: L2 penalty of SGD, at least 0.
        optimizer: another optimiser by class path, with its own settings, in place of SGD; None: SGD.
        lr_schedule: "cosine" (to 0 over the run), "geometric" (to a ten-thousandth of it, the same factor each step,
            and to 0 over the last twentieth), "constant" or "step" (a tenth after each third of the run); None:
            "geometric" with the proximal step, else "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 1 with the
            proximal step, else 0.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows, in place of
            clipping; "gradient" leaves the gradients alone. See :mod:`scent_lightning.duals.weight_step`.
        independent_sample: move ν by a random half of each batch and take the gradient of the other, as the analysis
            has it (Wei et al. 2026, algorithm 1); False uses the whole batch for both. One row alone is not split.

    Raises:
        InputError: an argument out of its range; in a step a batch that is not (features, target, index), a target that
            is not of shape ``(B,)``, or a network that does not give one prediction a row.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> task = DRORegressionTask(num_features=3, dual=SCENT(log_alpha=0.0), tau=1.0, initial="zeros")
        >>> batch = (torch.randn(5, 3), torch.zeros(5), torch.arange(5))
        >>> task.training_step(batch, 0)
        tensor(0., grad_fn=<MulBackward0>)
    """

    anchor: Tensor
    network: nn.Module

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(0.01, "geometric", 1.0),
        "gradient": LearningRate(1e-5),
    }
    auto_lr = (0.2, "geometric")

    def __init__(
        self,
        num_features: int,
        dual: DualUpdate,
        tau: float = 1.0,
        loss: ResidualLoss = "squared",
        huber_delta: float = 1.0,
        network: nn.Module | None = None,
        initial: Initial = "least_squares",
        lr: GivenRate = None,
        momentum: GivenMomentum | None = None,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        weight_step: WeightStepRule = "proximal",
        independent_sample: bool = False,
        warmup_epochs: float | None = None,
    ) -> None:
        if momentum is None:
            momentum = "auto" if weight_step == "proximal" else 0.9
        super().__init__(lr, momentum, weight_decay, nesterov, optimizer, lr_schedule, weight_step, warmup_epochs)
        checked_integer("num_features", num_features)
        self.loss = checked_choice("loss", loss, get_args(ResidualLoss))
        self.initial = checked_choice("initial", initial, get_args(Initial))
        self.huber_delta = checked_number("huber_delta", huber_delta, above=0)
        self.tau = checked_number("tau", tau, above=0)
        self.independent_sample = independent_sample
        self.save_hyperparameters()
        self.is_linear = network is None
        self.network = network if network is not None else nn.Linear(num_features, 1)
        self._started = False
        self.temperature: TemperatureOfRows | None = None
        if self.is_linear:
            for parameter in self.network.parameters():
                nn.init.zeros_(parameter)
        self.add_dual(_ANCHOR, 1, dual)
        self.register_buffer("anchor", torch.zeros(1, dtype=torch.int64), persistent=False)
        metrics = {
            "entropic_risk": EntropicRisk(self.tau),
            "rmse": MeanSquaredError(squared=False),
            "worst_loss": MaxMetric(),
            "effective_rows": EffectiveRows(self.tau),
        }
        self.add_metrics(metrics, prog_bar=["entropic_risk"])
        self._log_total: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Predictions, shape ``(B,)``, for features of shape ``(B, d)``."""
        prediction: Tensor = self.network(features)
        if prediction.shape not in ((len(features),), (len(features), 1)):
            raise InputError(
                f"network must give one prediction a row: expected shape ({len(features)},) or ({len(features)}, 1), "
                f"got {tuple(prediction.shape)}"
            )
        return prediction.squeeze(-1) if prediction.ndim == 2 else prediction

    def losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Loss of each row, shape ``(B,)``, in float32 or better, in the units of the loss."""
        if prediction.shape != target.shape or prediction.ndim != 1:
            if prediction.ndim == 1:
                check_rows("target", target, len(prediction))
            raise InputError(
                f"network must give one prediction a row: expected shape ({len(target)},) or ({len(target)}, 1), got "
                f"{tuple(prediction.shape)}"
            )
        residual = at_least_float32(prediction) - at_least_float32(target)
        return residual_losses(residual, self.loss, self.huber_delta)

    # ---------------------------------------------------------------- start

    def start_at_least_squares(self, loader: Any) -> None:
        """Set the linear model to the least-squares solution over the batches of ``loader``, solved in float64.

        In a distributed run each process brings its share of the batches, and all get the solution over the whole.

        Args:
            loader: yields ``(features, target, …)`` batches.
        """
        self._set_linear(self._least_squares(loader))

    def _set_linear(self, solution: Tensor) -> None:
        linear = cast(nn.Linear, self.network)
        with torch.no_grad():
            linear.weight.copy_(solution[:-1].unsqueeze(0))
            linear.bias.copy_(solution[-1:])

    def _least_squares(self, loader: Any) -> Tensor:
        """Weights and intercept, shape ``(d + 1,)``, over the rows of all processes, in float64."""
        gram, moment = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for features, target, *_ in loader:
            check_rows("target", target, len(features))
            rows = _with_intercept(features)
            gram = gram + rows.T @ rows
            moment = moment + rows.T @ target.double().cpu()
        if trainer_of(self) is not None and self.trainer.world_size > 1:
            strategy = self.trainer.strategy
            sums = [part.to(strategy.root_device) for part in (gram, moment)]
            gram, moment = (cast(Tensor, strategy.reduce(part, reduce_op="sum")).cpu() for part in sums)
        solution: Tensor = torch.linalg.lstsq(gram, moment.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        return solution

    def _look_at_temperature(self, datamodule: Any, solution: Tensor | None) -> None:
        """Keep what tau means for the training rows: their losses at least squares."""
        if solution is None:
            features = next(iter(datamodule.train_dataloader()))[0]
            if features.ndim != 2 or features.shape[1] > _MOST_FEATURES:
                return
            solution = self._least_squares(datamodule.train_dataloader())
        losses = torch.cat(
            [
                self.losses(_with_intercept(features) @ solution, target.double().cpu())
                for features, target, *_ in datamodule.train_dataloader()
            ]
        )
        if is_distributed():
            losses = of_all_processes(losses.to(self.trainer.strategy.root_device)).cpu()
        self.temperature = TemperatureOfRows(losses, self.tau)

    def setup(self, stage: str) -> None:
        """Start the linear model at least squares, before the first training only; look at what tau means."""
        if stage != "fit" or self._started:
            return
        self._started = True
        starts = self.is_linear and self.initial == "least_squares"
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            if starts:
                raise InputError(
                    "initial='least_squares' needs a data module; without one, pass initial='zeros' and call "
                    "start_at_least_squares(loader)"
                )
            return
        solution = None
        if starts:
            solution = self._least_squares(datamodule.train_dataloader())
            self._set_linear(solution)
        with torch.random.fork_rng(devices=[]):  # a loader draws a number, and what follows is to stay as it is
            self._look_at_temperature(datamodule, solution)

    def fit_summary(self) -> dict[str, str]:
        """How many of the training rows tau looks at."""
        return {} if self.temperature is None else {"temperature": self.temperature.in_words()}

    def on_fit_start(self) -> None:
        """Show what tau means for the training rows."""
        super().on_fit_start()
        if self.temperature is None or not self.trainer.is_global_zero:
            return
        if (warning := self.temperature.warning()) is not None:
            rank_zero_warn(warning)
        for logger in tensorboard_loggers(self.trainer):
            logger.experiment.add_figure("temperature/effective_rows", self.temperature.figure(), 0)

    def on_fit_end(self) -> None:
        """Tell where the objective hangs on one row."""
        super().on_fit_end()
        effective = self.trainer.callback_metrics.get("val/effective_rows")
        if self.temperature is not None and effective is not None:
            warning = self.temperature.warning_at_end(float(effective))
            if warning is not None:
                rank_zero_warn(warning)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loaded weights are not to be overwritten by least squares."""
        super().on_load_checkpoint(checkpoint)
        self._started = True

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν and return τ times the dual objective of the batch."""
        features, target, index = three_parts(batch, "features, target")
        previous = self.at_previous_weights(lambda: self.scores(features, target, index))
        scores = moving = self.scores(features, target, index)
        if self.independent_sample and (halves := self.halves(index)) is not None:
            chosen, mine = halves
            chosen = chosen[mine].to(scores.device)
            scores, moving = scores[:, ~chosen], scores[:, chosen]
            previous = None if previous is None else previous[:, chosen]
        dual_scores = None if moving is scores else moving
        risk = self.entropic_risk(_ANCHOR, scores, self.anchor, dual_scores=dual_scores, previous_scores=previous)
        loss = self.tau * risk
        self.log_loss(loss)
        return loss

    def scores(self, features: Tensor, target: Tensor, index: Tensor) -> Tensor:
        """The losses over τ, shape ``(1, B)``: the samples of the one anchor.

        A subclass adds to them the logarithm of what each row counts, if they do not all count alike.

        Args:
            features: shape ``(B, d)``.
            target: shape ``(B,)``.
            index: dataset index of each row, shape ``(B,)``.
        """
        return (self.losses(self(features), target) / self.tau).unsqueeze(0)

    def evaluation_step(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        """Objective, RMSE and worst loss over the rows of validation or test.

        Returns:
            ``index``, ``prediction``, ``target`` and ``log_weight`` of each row, shape ``(B,)`` each, for callbacks;
            the last is the loss over τ, the logarithm of the worst-case weight up to a constant.
        """
        features, target, index = three_parts(batch, "features, target")
        prediction = self(features)
        losses = self.losses(prediction, target)
        kind = losses.dtype
        self.log_metrics(stage, losses=losses, value=losses, preds=prediction.to(kind), target=target.to(kind))
        return {"index": index, "prediction": prediction, "target": target, "log_weight": losses / self.tau}

    def on_predict_epoch_start(self) -> None:
        """Sum exp(loss/τ) over all rows that are predicted first: a worst-case weight is relative to all of them."""
        risk = EntropicRisk(self.tau).to(self.device)
        loaders: Any = self.trainer.predict_dataloaders
        limits = self.trainer.predict_loop.max_batches
        for loader, limit in zip(loaders if isinstance(loaders, list) else [loaders], limits, strict=True):
            for batch in itertools.islice(_again(loader), None if math.isinf(limit) else int(limit)):
                features, target, _ = self.trainer.strategy.batch_to_device(
                    self.trainer.precision_plugin.convert_input(batch)
                )
                if target is None:
                    return
                with self.trainer.precision_plugin.predict_step_context():  # as the Trainer's own pass
                    risk.update(self.losses(self(features), target))
        rows = self.trainer.strategy.reduce(risk.count.double(), reduce_op="sum")
        self._log_total = risk.compute() / self.tau + cast(Tensor, rows).log()

    def on_predict_epoch_end(self) -> None:
        """Forget the sum."""
        self._log_total = None

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch.

        Returns:
            ``index`` (the row), ``prediction``, ``loss`` and ``weight``, each of shape ``(B,)``. The weights sum to 1
            over all rows that the Trainer predicts; over the batch where there is no Trainer. Where the batch has None
            for the target, ``index`` and ``prediction`` alone.
        """
        features, target, index = batch
        prediction = self(features)
        if target is None:
            return {"index": index, "prediction": prediction}
        losses = self.losses(prediction, target)
        log_weights = losses.double() / self.tau
        log_total = torch.logsumexp(log_weights, dim=0) if self._log_total is None else self._log_total
        return {"index": index, "prediction": prediction, "loss": losses, "weight": torch.exp(log_weights - log_total)}


def _with_intercept(features: Tensor) -> Tensor:
    """Features in float64 with a column of ones, shape ``(B, d + 1)``."""
    return torch.cat([features.double().cpu(), torch.ones(len(features), 1, dtype=torch.float64)], dim=1)


def _again(loader: Any) -> Any:
    """The batches of a loader once more. The Trainer's batch sampler is an iterator, which its own pass needs."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return loader
    batches = BatchSampler(loader.sampler, loader.batch_sampler.batch_size, drop_last=False)  # type: ignore[attr-defined]
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )
