"""Classification into very many classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from scent_lightning import distributed
from scent_lightning.duals import DenseScores, DualUpdate, DualVariable, DualVariableMixin, Samples
from scent_lightning.duals.table import Placement
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32
from scent_lightning.metrics import TopKAccuracy
from scent_lightning.modules.class_sampled_linear import ClassSampledLinear, Negatives
from scent_lightning.optim import RowSparseSGD, average_sparse_gradient, clip_gradients
from scent_lightning.private_api import keep_from_ddp
from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.batches import check_range, class_numbers, random_half, three_parts
from scent_lightning.tasks.training import LearningRate, LearningRateSchedule
from scent_lightning.validation import checked_integer

__all__ = ["ExtremeClassificationTask"]

Batch = tuple[Tensor, Tensor, Tensor]
_ANCHOR = "nu"
_PLACEHOLDER = "ddp_placeholder.0"


class ExtremeClassificationTask(BaseTask):
    r"""Softmax classification over up to millions of classes, at a cost a step that does not grow with them.

    .. math:: \min_W \frac{1}{n} \sum_i \log \frac{1}{K - 1} \sum_{k \neq y_i} \exp h_i^\top (w_k - w_{y_i})

    (Wei et al. 2026, extreme classification), which is the softmax cross-entropy but for the 1 inside its logarithm.
    Every training row is an anchor with a dual variable, ``nu``; a batch scores only some classes (see
    :class:`~scent_lightning.modules.ClassSampledLinear` on choosing them), and only their rows are updated.

    **Choosing learning rate and log α together.** ν settles at the log-mean-exp of an anchor's scores, from 0 at the
    start to −10 to −20 when classes are well apart; SCENT's effective γ is sigmoid(log α + ν), so log α near −ν keeps
    it about a half. A larger learning rate lowers ν further and wants a larger log α; with features of unit norm
    learning rates of tens to hundreds are usual, and the guard (``max_log_weight`` 1 or 2) lets them train.

    Logs ``train/loss`` (dual objective) at logging steps, and where ``negatives`` is "all" the batch's softmax
    cross-entropy as ``train/cross_entropy``: from fewer classes it cannot be told. For validation and test it logs
    the exact ``…/cross_entropy``, ``…/top1`` and ``…/top5`` over all K classes, worked out in chunks of classes.
    ``predict`` gives the most probable classes.

    In a distributed run the class weights' sparse gradient is kept from DDP and exchanged row by row; in-batch
    negatives are the distinct labels of the whole batch, of all processes.

    Args:
        num_features: number of features D; the command line takes it from the data module.
        num_classes: number of classes K; the command line takes it from the data module.
        num_anchors: number of training rows n; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``.
        negatives: "in_batch", "uniform" or "all" other classes.
        num_negatives: classes drawn for a batch; "uniform" only.
        normalize: scale features and class weights to unit norm.
        scale: multiplies the scores, above 0.
        backbone: maps the batch's inputs to features ``(B, D)``; None takes the inputs as they are.
        lr: learning rate of SGD, above 0; None: 5 for each class with the proximal step, as a class is in few batches,
            else 1.
        momentum: momentum of SGD, in [0, 1); on the class weights it decays lazily, see
            :class:`~scent_lightning.optim.RowSparseSGD`.
        weight_decay: L2 penalty of SGD, at least 0; on the class weights that are touched.
        optimizer: another optimiser by class path, with its own settings; replaces the three above. It must take sparse
            gradients (``torch.optim.SparseAdam``) unless ``negatives`` is "all".
        lr_schedule: "cosine" (to 0 over the run), "geometric" (to a ten-thousandth of it, the same factor each step),
            "constant" or "step" (a tenth after each third of the run); None: "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        top_k: number of classes that ``predict`` gives.
        class_chunk: classes scored at a time in evaluation; memory is batch × ``class_chunk`` numbers.
        dual_placement: "module" keeps the table of ν on the module's device, "cpu" in main memory.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows, in place of
            clipping; "gradient" leaves the gradients alone. See :mod:`scent_lightning.duals.weight_step`.
        independent_sample: move ν by other negatives than those of the gradient, as the analysis has it (Wei et al.
            2026, algorithm 1): "uniform" draws twice, "in_batch" splits the batch's classes at random in two halves.

    Raises:
        InputError: an argument out of its range; in a step a batch that is not (inputs, labels, index), or labels that
            are no integers of shape ``(B,)`` from 0 to K − 1.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> task = ExtremeClassificationTask(8, num_classes=1000, num_anchors=50, dual=SCENT(log_alpha=0.0))
        >>> batch = (torch.randn(4, 8), torch.tensor([3, 17, 999, 3]), torch.tensor([0, 1, 2, 3]))
        >>> task.training_step(batch, 0).item()
        0.0
    """

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(5.0),  # for each class
        "gradient": LearningRate(1.0),
    }

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        num_anchors: int,
        dual: DualUpdate,
        negatives: Negatives = "in_batch",
        num_negatives: int = 128,
        normalize: bool = False,
        scale: float = 1.0,
        backbone: nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        top_k: int = 5,
        class_chunk: int = 16384,
        dual_placement: Placement = "module",
        weight_step: WeightStepRule = "proximal",
        independent_sample: bool = False,
        warmup_epochs: float | None = None,
    ) -> None:
        checked_integer("num_classes", num_classes, least=2)
        if lr is None and optimizer is None and weight_step == "proximal":
            # A class's row is moved in one of so many steps.
            lr = self.learning_rates["proximal"].lr * num_classes
        super().__init__(lr, momentum, weight_decay, False, optimizer, lr_schedule, weight_step, warmup_epochs)
        checked_integer("top_k", top_k)
        self.class_chunk: int = checked_integer("class_chunk", class_chunk)
        if independent_sample and negatives == "all":
            raise InputError("independent_sample needs negatives that are sampled, got True with negatives='all'")
        self.independent_sample = independent_sample
        self.save_hyperparameters()
        self.backbone = backbone
        self.head = ClassSampledLinear(num_features, num_classes, negatives, num_negatives, normalize, scale)
        self.top_k = min(top_k, num_classes)
        self.add_dual(_ANCHOR, num_anchors, dual, placement=dual_placement)
        self.skipped_batches = 0
        metrics = {"cross_entropy": MeanMetric(), "top1": TopKAccuracy(1), "top5": TopKAccuracy(5)}
        self.add_metrics(metrics, prog_bar=["cross_entropy", "top1"])
        # The last of the parameters: averages of the weights pair those of two copies by their order.
        self.ddp_placeholder = nn.ParameterList()

    def forward(self, inputs: Tensor) -> Tensor:
        """Features, shape ``(B, D)``, of a batch of inputs."""
        features = inputs if self.backbone is None else cast(Tensor, self.backbone(inputs))
        width = self.head.weight.shape[1]
        if features.ndim != 2 or features.shape[1] != width:
            raise InputError(
                f"{'the data' if self.backbone is None else 'backbone'} must give num_features = {width} features a "
                f"row: expected shape ({len(inputs)}, {width}), got {tuple(features.shape)}"
            )
        return features

    # ---------------------------------------------------------------- training

    def setup(self, stage: str) -> None:
        """Keep the class weights from DDP, which has no way to send a sparse gradient; look at labels of one's own."""
        if self.trainer.datamodule is None and self.trainer.strategy.root_device.type != "cpu":  # type: ignore[attr-defined]
            # Only here: were it a method, Lightning would warn of it wherever there is a data module.
            self.on_before_batch_transfer = self._check_on_the_way  # type: ignore[method-assign]
        if stage != "fit" or self.trainer.world_size == 1 or self.head.negatives == "all":
            return
        keep_from_ddp(self, "head.weight")
        others = [name for name, p in self.named_parameters() if p.requires_grad and name != "head.weight"]
        if not others:
            # DDP refuses a module without a parameter of its own to send.
            self.ddp_placeholder.append(nn.Parameter(torch.zeros((), device=self.device)))

    def on_fit_start(self) -> None:
        """All processes start from the first one's class weights."""
        super().on_fit_start()
        if self._exchanges_rows():
            torch.distributed.broadcast(self.head.weight.data, src=0)

    def _exchanges_rows(self) -> bool:
        return self.trainer.world_size > 1 and self.head.negatives != "all"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Average the class weights' sparse gradient over the processes."""
        if self._exchanges_rows() and self.head.weight.grad is not None:
            average_sparse_gradient(self.head.weight)
        super().on_before_optimizer_step(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint does not depend on the number of processes."""
        super().on_save_checkpoint(checkpoint)
        for state in ("state_dict", "current_model_state"):  # the latter where Lightning averages the weights
            checkpoint.get(state, {}).pop(_PLACEHOLDER, None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nor does a model need it to."""
        super().on_load_checkpoint(checkpoint)
        if len(self.ddp_placeholder):
            for state in {"state_dict", "current_model_state"} & checkpoint.keys():
                checkpoint[state][_PLACEHOLDER] = torch.zeros(())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν at the batch's rows and return the dual objective."""
        inputs, labels, index = three_parts(batch, "inputs, labels")
        previous = self.at_previous_weights(lambda: self._samples(inputs, labels)[-1])
        samples, moving = self._samples(inputs, labels)
        if isinstance(samples, DenseScores) and self.head.negatives == "in_batch" and samples.values.shape[1] < 2:
            self._count_skipped(labels)
        loss = self._risk(samples, moving, previous, index)
        for placeholder in self.ddp_placeholder:
            loss = loss + 0 * placeholder
        if self.log_loss(loss) and self.head.negatives == "all":
            # Not from some classes, and not from ν, which trails: what is near 0 may then be off by any factor.
            step = cast(DualVariable, self.duals[_ANCHOR]).last_step
            if step is not None:
                self.log("train/cross_entropy", softplus(step.log_mean + math.log(self.head.num_classes - 1)).mean())
        return loss

    def _samples(self, inputs: Tensor, labels: Tensor) -> tuple[Samples, Samples]:
        """The loss's, and those that move ν."""
        features = self(inputs)
        labels = class_numbers(labels, len(features))
        shares = self.head.negatives == "in_batch" and distributed.is_distributed()
        all_labels = distributed.of_all_processes(labels) if shares else None
        draws = self.draws_of_step() if self.head.negatives == "uniform" else None
        try:
            samples = self._scored(features, labels, all_labels, draws)
            if not self.independent_sample:
                return samples, samples
            if isinstance(samples, DenseScores) and self.head.negatives == "in_batch":
                return self._halves_of_classes(samples)
            with torch.no_grad():
                return samples, self._scored(features, labels, all_labels, draws)
        except (IndexError, RuntimeError):
            self._check_classes(labels if all_labels is None else all_labels)  # only now: it costs nothing otherwise
            raise

    def _scored(
        self, features: Tensor, labels: Tensor, all_labels: Tensor | None, draws: torch.Generator | None
    ) -> Samples:
        # A subclass that overrides entropic_risk looks at the scores; the classes can be split in them alone.
        splits = self.independent_sample and self.head.negatives == "in_batch"
        if type(self).entropic_risk is not DualVariableMixin.entropic_risk or splits:
            return DenseScores(*self.head(features, labels, all_labels, draws))
        return self.head.samples(features, labels, all_labels, draws)

    def _halves_of_classes(self, samples: DenseScores) -> tuple[DenseScores, DenseScores]:
        scores, mask = samples.values, cast(Tensor, samples.mask)
        chosen = random_half(scores.shape[1], self.draws_of_step()).to(scores.device)
        return DenseScores(scores, mask & ~chosen), DenseScores(scores.detach(), mask & chosen)

    def _risk(self, samples: Samples, moving: Samples, previous: Samples | None, index: Tensor) -> Tensor:
        """The dual objective, after ν was updated."""
        given = {"dual_scores": None if moving is samples else moving, "previous_scores": previous}
        more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if isinstance(samples, DenseScores):
            return self.entropic_risk(_ANCHOR, samples.values, index, samples.mask, **more)
        return self.entropic_risk(_ANCHOR, samples, index, **more)

    def _check_classes(self, labels: Tensor) -> None:
        """Raise InputError for a label that is no class, where looking does not wait for a device."""
        if labels.device.type == "cpu":
            classes = self.head.num_classes
            check_range(labels, classes - 1, f"from 0 to {classes - 1} (num_classes is {classes})")

    def _check_on_the_way(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's ``on_before_batch_transfer`` where a label out of range would end the process on its device."""
        if isinstance(batch, list | tuple) and len(batch) == 3 and isinstance(batch[1], Tensor):
            self._check_classes(batch[1])
        return batch

    def _count_skipped(self, labels: Tensor) -> None:
        self.skipped_batches += 1
        if self.skipped_batches == 1:
            if distributed.is_distributed():
                labels = distributed.of_all_processes(labels)
            rank_zero_warn(
                f"a batch holds one class only (class {int(labels[0])}), so it has no in-batch negatives and is "
                "skipped; further ones are counted in skipped_batches (larger batches, a shuffled data set or "
                "negatives='uniform' avoid them)"
            )

    # ---------------------------------------------------------------- evaluation

    def _chunks(self, features: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First class and logits in float32 or better of each chunk of classes."""
        for start in range(0, self.head.num_classes, self.class_chunk):
            yield start, at_least_float32(self.head.logits(features, start, start + self.class_chunk))

    def exact_cross_entropy(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax cross-entropy over all K classes, and the rank of the right class.

        Args:
            features: shape ``(B, D)``.
            labels: shape ``(B,)``.

        Returns:
            Cross-entropy, shape ``(B,)``, and how many classes come before the right one (equal logits in the order of
            the classes), shape ``(B,)``, int64.

        Raises:
            InputError: labels of another shape, that are no integers, or that are no class.
        """
        labels = class_numbers(labels, len(features))
        try:
            own_rows = torch.nn.functional.embedding(labels, self.head.weight)
        except IndexError:
            self._check_classes(labels)
            raise
        one = torch.nn.functional.normalize if self.head.normalize else (lambda rows, dim: rows)
        own = at_least_float32((one(features, dim=1) * one(own_rows, dim=1)).sum(dim=1, keepdim=True)) * self.head.scale
        total = torch.full((len(labels),), -math.inf, device=own.device, dtype=own.dtype)
        rank = torch.zeros_like(labels)
        for start, logits in self._chunks(features):
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
            classes = torch.arange(start, start + logits.shape[1], device=labels.device)
            earlier = classes < labels.unsqueeze(1)
            others = classes != labels.unsqueeze(1)
            rank += (others & ((logits > own) | (earlier & (logits == own)))).sum(dim=1)
        return total - own.squeeze(1), rank

    def evaluation_step(self, stage: str, batch: Batch) -> None:
        """Exact cross-entropy, top-1 and top-5 accuracy over the rows of validation or test."""
        inputs, labels, _ = three_parts(batch, "inputs, labels")
        cross_entropy, rank = self.exact_cross_entropy(self(inputs), labels)
        self.log_metrics(stage, value=cross_entropy, ranks=rank)

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The most probable classes.

        Returns:
            ``index`` (the row), shape ``(B,)``; ``class`` and ``probability``, shape ``(B, top_k)``, most probable
            first.
        """
        inputs, _, index = batch
        features = self(inputs)
        best: Tensor | None = None
        classes = torch.empty(0)
        total = torch.full((len(features),), -math.inf, device=features.device)
        for start, logits in self._chunks(features):
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
            values, places = logits.topk(min(self.top_k, logits.shape[1]), dim=1)
            places = places + start
            if best is not None:
                values, places = torch.cat([best, values], dim=1), torch.cat([classes, places], dim=1)
                values, kept = values.topk(min(self.top_k, values.shape[1]), dim=1)
                places = places.gather(1, kept)
            best, classes = values, places
        probability = torch.exp(cast(Tensor, best) - total.unsqueeze(1))
        return {"index": index, "class": classes, "probability": probability}

    # ---------------------------------------------------------------- optimiser

    def trained_parameters(self) -> list[Any]:
        """All that require a gradient, but for what only DDP needs."""
        return [p for name, p in self.named_parameters() if p.requires_grad and name != _PLACEHOLDER]

    def configure_optimizer(self, parameters: list[Any]) -> Optimizer:
        """Row-sparse SGD; called where the argument ``optimizer`` is None."""
        return RowSparseSGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def configure_schedule(self, optimizer: Optimizer) -> Any:
        """The learning-rate schedule, of an optimiser that can train the class weights."""
        if self.head.negatives != "all":
            _check_takes_sparse_gradients(optimizer)
        return super().configure_schedule(optimizer)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by norm or by value, sparse gradients included."""
        if gradient_clip_val is not None:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
            clip_gradients(parameters, gradient_clip_val, by=algorithm.value)


def _check_takes_sparse_gradients(optimizer: Optimizer) -> None:
    """Raise InputError for torch's own optimisers of dense gradients; of another class only its author knows."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    takes = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam | torch.optim.LBFGS)
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if not takes or decays:
        raise InputError(
            f"optimizer {type(optimizer).__name__}{' with weight_decay' * takes} takes no sparse gradients, which the "
            "sampled classes' weights have: leave it out for RowSparseSGD, set it to SGD, Adagrad or SparseAdam "
            "without weight_decay, or take negatives='all'"
        )
