"""What every task is made of."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from scent_lightning import distributed
from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import AutoLR, DualVariableMixin
from scent_lightning.duals.auto_rate import Fall
from scent_lightning.duals.weight_step import WeightStepRule, checked_weight_step
from scent_lightning.optim import IncreasingMomentumSGD, check_sgd
from scent_lightning.private_api import trainer_of
from scent_lightning.random_state import seed_of
from scent_lightning.tasks.batches import random_half, three_parts
from scent_lightning.tasks.training import (
    GivenMomentum,
    GivenRate,
    LearningRate,
    LearningRateSchedule,
    TrainLossMixin,
    check_auto,
    check_trains,
    scheduled_optimizer,
)
from scent_lightning.validation import checked_choice

__all__ = ["BaseTask"]


class BaseTask(TrainLossMixin, DualVariableMixin):
    """A task of one's own: say how a batch becomes scores, and the rest is here.

    A subclass builds its network in ``__init__``, calls :meth:`add_dual` and :meth:`add_metrics` there, and has

    * ``training_step(batch, batch_idx)``, which gives :meth:`entropic_risk` the scores and :meth:`log_loss` the loss;
    * :meth:`evaluation_step`, which gives :meth:`log_metrics` what they take, for validation and test;
    * :meth:`predict_step`, where the network's output is not the prediction.

    It may replace :meth:`configure_optimizer` and :meth:`configure_schedule`. An argument of its ``__init__`` that is a
    size, such as ``num_anchors``, the command line takes from the data module. Logs ``train/loss``, and the metrics as
    ``val/…`` and ``test/…``.

    Args:
        lr: learning rate of SGD, above 0; "auto" finds it during the run, see :mod:`scent_lightning.duals.auto_rate`;
            None: the task's own for its ``weight_step``, see :attr:`learning_rates`.
        momentum: momentum of SGD, in [0, 1); "auto" increases over the run, see
            :class:`~scent_lightning.optim.IncreasingMomentumSGD`.
        weight_decay: L2 penalty of SGD, at least 0.
        nesterov: Nesterov's form of a momentum that is a number above 0; "auto" has it.
        optimizer: another optimiser by class path, with its own settings, in place of SGD; None: SGD.
        lr_schedule: "cosine" (to 0 over the run), "geometric" (to a ten-thousandth of it, the same factor each step,
            and to 0 over the last twentieth), "constant" or "step" (a tenth after each third of the run); None: the
            task's own.
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: the task's own.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows, in place of
            clipping; "gradient" leaves the gradients alone. See :mod:`scent_lightning.duals.weight_step`.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> from torchmetrics.classification import MulticlassAccuracy
        >>> from scent_lightning.duals import SCENT
        >>> class Softmax(BaseTask):
        ...     def __init__(self, num_features, num_classes, num_anchors, dual, lr=0.1):
        ...         super().__init__(lr=lr)
        ...         self.save_hyperparameters()
        ...         self.linear = torch.nn.Linear(num_features, num_classes)
        ...         self.add_dual("nu", num_anchors, dual)
        ...         self.add_metrics({"top1": MulticlassAccuracy(num_classes)}, prog_bar=["top1"])
        ...     def forward(self, inputs):
        ...         return self.linear(inputs)
        ...     def training_step(self, batch, batch_idx):
        ...         inputs, labels, index = batch
        ...         logits = self(inputs)
        ...         loss = self.entropic_risk("nu", logits - logits.gather(1, labels[:, None]), index)
        ...         self.log_loss(loss)
        ...         return loss
        ...     def evaluation_step(self, stage, batch):
        ...         inputs, labels, _ = batch
        ...         self.log_metrics(stage, preds=self(inputs), target=labels)
        >>> task = Softmax(num_features=4, num_classes=3, num_anchors=8, dual=SCENT(log_alpha=0.0))
        >>> loss = task.training_step((torch.randn(2, 4), torch.tensor([0, 2]), torch.tensor([5, 1])), 0)
        >>> task.duals["nu"].visited.nonzero().flatten().tolist()
        [1, 5]
    """

    #: The metric of validation by which runs are compared, and whether "min" or "max" of it is best; None: none.
    main_metric: tuple[str, Literal["min", "max"]] | None = None
    #: What would change it, where no parameter is left to train: the end of the error's sentence.
    way_to_train = "give a network that is not frozen"
    #: The learning rate where none is given, by ``weight_step``; another optimiser than SGD has that of "gradient".
    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(0.1),
        "gradient": LearningRate(0.1),
    }
    #: For ``lr`` "auto", the mean of W(a) at which the rate stops rising, in nats, and how it falls from there.
    auto_lr: ClassVar[tuple[float, Fall]] = (0.005, "cosine")

    def __init__(
        self,
        lr: GivenRate = None,
        momentum: GivenMomentum = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        weight_step: WeightStepRule = "proximal",
        warmup_epochs: float | None = None,
    ) -> None:
        super().__init__()
        self.weight_step = checked_weight_step(weight_step)
        self.finds_lr = isinstance(lr, str)
        if isinstance(lr, str):
            check_auto(lr, optimizer, lr_schedule, weight_step, warmup_epochs)
            lr, lr_schedule, warmup_epochs = 1.0, "constant", 0.0  # times what is found
        default = self.learning_rates["gradient" if optimizer is not None else weight_step]
        self.lr, self.lr_schedule, self.warmup_epochs = default.given(lr, lr_schedule, warmup_epochs)
        if isinstance(momentum, str):
            checked_choice("momentum", momentum, ("auto",))
        check_sgd(self.lr, 0.0 if momentum == "auto" else momentum, weight_decay)
        self.momentum: GivenMomentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov and momentum != "auto" and momentum > 0
        self.optimizer = optimizer

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """As the mixin's, but without networks and functions: ``load_from_checkpoint`` is to be given those again."""
        if frame is None:
            current = inspect.currentframe()
            frame = current.f_back if current else None
        objects = [name for name, value in _arguments(frame).items() if isinstance(value, nn.Module) or callable(value)]
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        super().save_hyperparameters(*args, ignore=[*ignored, *objects], frame=frame, logger=logger)

    # ---------------------------------------------------------------- random draws

    def draws_of_step(self) -> torch.Generator | None:
        """Random numbers that depend on the seed and the step alone; None, torch's own, without a Trainer.

        So they are the same in every process, whatever else each has drawn, and in a run that was interrupted.
        """
        if trainer_of(self) is None:
            return None
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx
        return torch.Generator().manual_seed(seed_of(torch.initial_seed(), step))

    @outside_graphs
    def halves(self, index: Tensor) -> tuple[Tensor, slice] | None:
        """Split the rows of a batch at random in two: those that move ν, and those of the loss.

        Args:
            index: dataset indices of this process's rows, shape ``(N,)``. Which half a row is in does not depend on the
                process that it is in.

        Returns:
            For the rows of all processes in rank order whether they move ν, bool, on the device of ``index``; and which
            of them are this process's. None where there is but one, which has to do for both.
        """
        everyone, mine = index, slice(None)
        if distributed.is_distributed():
            (everyone,), mine = distributed.gather(index)
        rows = len(everyone)
        if rows < 2:
            return None
        chosen = random_half(rows, self.draws_of_step()).to(index.device)
        return torch.zeros_like(chosen).scatter_(0, torch.argsort(everyone.to(index.device)), chosen), mine

    # ---------------------------------------------------------------- metrics

    def add_metrics(self, metrics: Mapping[str, Metric] | MetricCollection, prog_bar: Sequence[str] = ()) -> None:
        """Set the metrics of validation and test, each of which has copies of its own; in ``__init__``.

        Args:
            metrics: by name; each gives one number. In a mapping each has a state of its own; a
                :class:`torchmetrics.MetricCollection` whose ``compute_groups`` say so keeps one for several. Its
                automatic groups, which are those that are equal after the first batch, suit only metrics of one kind.
            prog_bar: names of those that the progress bar shows; the first is the main one, by which runs are compared.
        """
        if not isinstance(metrics, MetricCollection):
            metrics = MetricCollection(dict(metrics), compute_groups=False)
        self.stage_metrics = nn.ModuleDict({stage: metrics.clone(prefix=f"{stage}/") for stage in ("val", "test")})
        self._in_prog_bar = {f"{stage}/{name}" for stage in self.stage_metrics for name in prog_bar}
        if prog_bar:
            main = prog_bar[0]
            # Means of a loss do not say which way is better.
            self.main_metric = (f"val/{main}", "max" if getattr(metrics[main], "higher_is_better", None) else "min")

    def log_metrics(self, stage: str, **values: Any) -> None:
        """Give the metrics of a stage a batch, and have them logged at its end.

        Args:
            stage: "val" or "test".
            **values: by the names that the metrics' ``update`` has for them; each takes those that it knows.
        """
        metrics = cast(MetricCollection, self.stage_metrics[stage])
        metrics.update(**values)
        for name, metric in metrics.items(copy_state=False):
            self.log(name, metric, on_epoch=True, prog_bar=name in self._in_prog_bar)

    # ---------------------------------------------------------------- steps

    def evaluation_step(self, stage: str, batch: Any) -> Any:
        """Evaluate a batch of validation or test.

        Args:
            stage: "val" or "test".
            batch: what the data module yields.

        Returns:
            What callbacks are to see of the batch; None for nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no evaluation_step, which validation and test need")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """The evaluation step of a batch of validation."""
        return self.evaluation_step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """The evaluation step of a batch of test."""
        return self.evaluation_step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch of (inputs, target, index).

        Returns:
            ``index`` (the row), shape ``(B,)``, and ``prediction``, the network's output for each.
        """
        inputs, _, index = three_parts(batch, "inputs, target")
        return {"index": index, "prediction": self(inputs)}

    # ---------------------------------------------------------------- optimiser

    def trained_parameters(self) -> list[Any]:
        """Parameters, or groups of them, for the optimiser: all that require a gradient."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizer(self, parameters: list[Any]) -> Optimizer:
        """SGD; called where the argument ``optimizer`` is None.

        Args:
            parameters: those of :meth:`trained_parameters`.
        """
        if self.momentum == "auto":
            return IncreasingMomentumSGD(parameters, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay
        )

    def configure_schedule(self, optimizer: Optimizer) -> Any:
        """What ``configure_optimizers`` returns: the optimiser with its learning-rate schedule.

        Args:
            optimizer: the one of this run.
        """
        if self.finds_lr:
            return AutoLR(optimizer, self, *self.auto_lr).each_step()
        return scheduled_optimizer(self.trainer, optimizer, self.lr_schedule, self.warmup_epochs)

    def configure_optimizers(self) -> Any:
        """SGD, or the optimiser given, on what is not frozen, with the learning-rate schedule.

        Raises:
            InputError: nothing is left to train, or the schedule needs the length of an endless run.
        """
        parameters = self.trained_parameters()
        check_trains(parameters, self.way_to_train)
        make: Callable[[list[Any]], Optimizer] = self.optimizer or self.configure_optimizer
        return self.configure_schedule(make(parameters))


def _arguments(frame: types.FrameType | None) -> dict[str, Any]:
    """What the function of a frame was called with, by name."""
    if frame is None:
        return {}
    names, _, keywords, values = inspect.getargvalues(frame)
    more: dict[str, Any] = values[keywords] if keywords else {}
    return {**{name: values[name] for name in names}, **more}
