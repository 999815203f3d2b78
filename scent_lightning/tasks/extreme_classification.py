"""Classification into very many classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from scent_lightning import distributed
from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import DenseScores, DualUpdate, DualVariable, DualVariableMixin, Samples
from scent_lightning.duals.table import Placement
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import DualDivergenceError, InputError
from scent_lightning.metrics import TopKAccuracy
from scent_lightning.modules.class_chunks import cross_entropy_and_rank, most_probable
from scent_lightning.modules.class_sampled_linear import ClassSampledLinear, Correction, Negatives, OwnClass
from scent_lightning.modules.margins import MarginType
from scent_lightning.optim import RowSparseSGD
from scent_lightning.private_api import trainer_of
from scent_lightning.tasks.batches import check_range, class_numbers, random_half, some_columns, three_parts
from scent_lightning.tasks.row_sparse import RowSparseTask
from scent_lightning.tasks.training import GivenRate, LearningRate, LearningRateSchedule
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["ExtremeClassificationTask"]

Batch = tuple[Tensor, Tensor, Tensor]
_ANCHOR = "nu"
# Products of numbers in a logging step: about a millisecond on one core, and as much on a GPU.
LOGGED_PRODUCTS = 2**23
LOGGED_PRODUCTS_OF_A_GPU = 2**34


class ExtremeClassificationTask(RowSparseTask):
    r"""Softmax classification over up to millions of classes, at a cost a step that does not grow with them.

    .. math:: \min_W \frac{1}{n} \sum_i \log \frac{1}{K - 1} \sum_{k \neq y_i} \exp h_i^\top (w_k - w_{y_i})

    (Wei et al. 2026, extreme classification), which is the softmax cross-entropy but for the 1 inside its logarithm.
    Every training row is an anchor with a dual variable, ``nu``; a batch scores only some classes (see
    :class:`~scent_lightning.modules.ClassSampledLinear` on choosing them), and only their rows are updated.

    **The mean over all classes from those of a batch.** The labels of a batch are of frequent classes more often than
    of rare ones. With ``correction`` "frequency" each weighs the inverse of its probability to be in the batch, so that
    the mean is unbiased and ν the log of the true one; "none" is the paper's, which minimises another loss wherever
    classes are not equally frequent. The frequencies are those of the data module's ``class_counts`` (training rows of
    each class, shape ``(K,)``), taken at the start of a fit and kept in checkpoints. Where there are none, with a
    loader of one's own, they are estimated from the labels that go by. Both count the rows of all processes.

    **The own class in the sum.** As it stands, the loss goes to −∞ where classes are apart, long after all rows are
    right (the "decoupled" contrastive loss, Yeh et al. 2022), and gives rows up that are not: those of rare classes.
    With ``include_target`` 1/(K − 1) is inside the logarithm: the loss is the softmax cross-entropy less log(K − 1),
    and bounded below. Its gradient fades where a row is right, so that it takes longer; "gradual" begins nearly without
    the own class and ends with it, see :class:`~scent_lightning.modules.ClassSampledLinear`.

    **Choosing learning rate and log α together.** ν settles at the log-mean-exp of an anchor's scores, from 0 at the
    start to −10 to −20 when classes are well apart (not below −log(K − 1) with the own class); SCENT's effective γ is
    sigmoid(log α + ν), so log α near −ν keeps it about a half. A larger learning rate lowers ν further and wants a
    larger log α; with features of unit norm learning rates of tens to hundreds are usual, and the guard
    (``max_log_weight`` 1 or 2) lets them train.

    Logs ``train/loss`` (dual objective; it rises as the own class comes in) at logging steps, and
    ``train/cross_entropy``, the exact softmax cross-entropy over all classes, of the batch's first rows: as many as are
    a millisecond's work (6 of 20,902 classes and 64 features, and none of 360,232 and 512, on a CPU; all where
    ``negatives`` is "all", and as a rule on a GPU). So it is right in the mean over many steps. For validation and test
    it logs the exact ``…/cross_entropy``, ``…/top1`` and ``…/top5`` over all K classes, in chunks of classes. None of
    these has the margin. ``predict`` gives the most probable classes.

    Hard negatives, given or mined, are those of :class:`~scent_lightning.tasks.MultiLabelTask`, which takes rows of one
    class as well.

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
        lr: learning rate of SGD, above 0; "auto" finds it during the run; None: 1 for each class with the proximal
            step, else 1.
        momentum: momentum of SGD, in [0, 1); lazy on class weights, see :class:`~scent_lightning.optim.RowSparseSGD`.
        weight_decay: L2 penalty of SGD, at least 0; on the class weights that are touched.
        optimizer: another optimiser by class path, with its own settings; it must take sparse gradients
            (``torch.optim.SparseAdam``) unless ``negatives`` is "all". None: SGD.
        lr_schedule: "cosine", "geometric", "constant" or "step", see :class:`BaseTask`; None: "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        top_k: number of classes that ``predict`` gives.
        class_chunk: classes scored at a time in evaluation; on a GPU memory is batch × ``class_chunk`` numbers.
        dual_placement: "module" keeps the table of ν on the module's device, "cpu" in main memory.
        weight_step: "proximal" or "gradient", see :class:`BaseTask` and :mod:`scent_lightning.duals.weight_step`.
        independent_sample: move ν by other negatives than those of the gradient, as the analysis has it (Wei et al.
            2026, algorithm 1): "uniform" draws twice, "in_batch" splits the batch's classes at random in two halves.
        correction: "frequency" weighs in-batch negatives by how probable they are; "none" is the paper's. Negatives
            that are drawn evenly, or all, need none.
        include_target: have the own class in the sum: "gradual" lets it in as the run goes on (in a run without an end
            it is there from the start), True has it always, and False, the paper's, never.
        margin: of the own class; recognition trains with it, on ``normalize`` and ``scale`` 64. At least 0.
        margin_type: "cosine" subtracts it from the similarity (Wang et al. 2018, 0.35 is usual); "angular" adds it to
            the angle, in radians below π/2 (Deng et al. 2019, 0.5).

    Raises:
        InputError: an argument out of its range; ``class_counts`` that do not fit; in a step a batch that is not
            (inputs, labels, index), or labels that are no integers of shape ``(B,)`` from 0 to K − 1.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> task = ExtremeClassificationTask(8, num_classes=1000, num_anchors=50, dual=SCENT(log_alpha=0.0))
        >>> batch = (torch.randn(4, 8), torch.tensor([3, 17, 999, 4]), torch.tensor([0, 1, 2, 3]))
        >>> round(task.training_step(batch, 0).item(), 2)
        0.0
    """

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(1.0),  # for each class
        "gradient": LearningRate(1.0),
    }
    auto_lr = (3.0, "cosine")

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
        lr: GivenRate = None,
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
        correction: Correction = "frequency",
        include_target: OwnClass = "gradual",
        margin: float = 0.0,
        margin_type: MarginType = "cosine",
    ) -> None:
        checked_integer("num_classes", num_classes, least=2)
        checked_number("momentum", momentum, least=0, below=1)
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
        more: dict[str, Any] = {"correction": correction, "include_target": include_target}
        more |= {"margin": margin, "margin_type": margin_type}
        self.head = ClassSampledLinear(num_features, num_classes, negatives, num_negatives, normalize, scale, **more)
        self.top_k = min(top_k, num_classes)
        self.add_dual(_ANCHOR, num_anchors, dual, placement=dual_placement)
        self.skipped_batches = 0
        # Of the latest batch: features and labels here, and labels in all processes.
        self._features_of_batch = torch.empty(0, num_features)
        self._labels_here = self._labels_of_batch = torch.empty(0, dtype=torch.int64)
        metrics = {"cross_entropy": MeanMetric(), "top1": TopKAccuracy(1), "top5": TopKAccuracy(5)}
        self.add_metrics(metrics, prog_bar=["cross_entropy", "top1"])
        self.add_placeholder()

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

    sparse_optimizers = (
        "which the sampled classes' weights have: leave it out for RowSparseSGD, set it to SGD, Adagrad or SparseAdam "
        "without weight_decay, or take negatives='all'"
    )

    def row_sparse(self) -> list[str]:
        """The class weights, unless all classes are scored."""
        return [] if self.head.negatives == "all" else ["head.weight"]

    def setup(self, stage: str) -> None:
        """Look at labels of one's own."""
        super().setup(stage)
        if self.trainer.datamodule is None and self.trainer.strategy.root_device.type != "cpu":  # type: ignore[attr-defined]
            # Only here: were it a method, Lightning would warn of it wherever there is a data module.
            self.on_before_batch_transfer = self._check_on_the_way  # type: ignore[method-assign]

    def fit_summary(self) -> dict[str, str]:
        """That the loss changes as the run goes on, where it does."""
        if self.head.include_target != "gradual":
            return super().fit_summary()
        return {"own class": "comes into the loss by and by, so train/loss rises; train/cross_entropy does not"}

    def on_fit_start(self) -> None:
        """The data module says how frequent the classes are."""
        super().on_fit_start()
        counts = getattr(self.trainer.datamodule, "class_counts", None)  # type: ignore[attr-defined]
        if counts is not None and (self.head.uses_frequencies or self.head.include_target == "gradual"):
            self.head.frequencies.give(counts)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say it where a run goes on with another loss than it began with."""
        super().on_load_checkpoint(checkpoint)
        trainer, saved = trainer_of(self), checkpoint.get("hyper_parameters")
        if trainer is None or trainer.state.fn is not TrainerFn.FITTING or not saved:
            return
        if self.head.uses_frequencies and saved.get("correction", "none") == "none":
            rank_zero_warn(
                "the checkpoint is of a run whose in-batch negatives were not corrected, and this one corrects them: "
                "its ν has to move to another loss; correction='none' goes on as before"
            )
        before = saved.get("include_target", False)
        if before != self.head.include_target:
            rank_zero_warn(
                f"the checkpoint is of a run with include_target={before!r}, and this one has "
                f"{self.head.include_target!r}: its ν has to move to another loss; include_target={before!r} goes on "
                "as before"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν at the batch's rows and return the dual objective."""
        inputs, labels, index = self._parts(batch)
        previous = self.at_previous_weights(lambda: self._samples(inputs, labels)[-1])
        samples, moving = self._samples(inputs, labels)
        if isinstance(samples, DenseScores) and self.head.negatives == "in_batch":
            self._count_skipped(samples)
        try:
            loss = self._risk(samples, moving, previous, index)
        except DualDivergenceError:
            self._check_frequencies()
            raise
        if self.head.uses_frequencies and self.updates_duals():
            self.head.frequencies.see(self._labels_of_batch)
        loss = self.with_placeholder(loss)
        if self.log_loss(loss):
            self._log_cross_entropy()
        return loss

    def _parts(self, batch: Any) -> tuple[Tensor, Any, Tensor]:
        return three_parts(batch, "inputs, labels")

    def _log_cross_entropy(self) -> None:
        """Log the exact softmax cross-entropy of the batch, or of as many of its rows as are scored in no time.

        From the classes of a batch it cannot be told: where few negatives make the sum, most batches have none of them.
        """
        head, step = self.head, cast(DualVariable, self.duals[_ANCHOR]).last_step
        plain = head.scoring.margin == 0 and head.include_target != "gradual"
        if head.negatives == "all" and plain and step is not None:
            log_sum = step.log_mean + math.log(head.num_classes - 1)
            self.log("train/cross_entropy", (log_sum if head.include_target else softplus(log_sum)).mean())
            return
        features = self._features_of_batch
        products = LOGGED_PRODUCTS if features.device.type == "cpu" else LOGGED_PRODUCTS_OF_A_GPU
        rows = min(products // head.weight.numel(), len(features))
        if rows > 0:
            with torch.no_grad():
                self.log("train/cross_entropy", self._exact_losses(features, self._labels_here, rows).nanmean())

    def _exact_losses(self, features: Tensor, labels: Any, rows: int) -> Tensor:
        """Softmax cross-entropy of the first rows of a batch, shape ``(rows,)``; NaN where nothing is right."""
        return cross_entropy_and_rank(self.head, features[:rows], labels[:rows], self.class_chunk)[0]

    def _samples(self, inputs: Tensor, labels: Any) -> tuple[Samples, Samples]:
        """The loss's, and those that move ν."""
        self._tell_progress()
        features = self(inputs)
        labels = class_numbers(labels, len(features))
        shares = self.head.negatives == "in_batch" and distributed.is_distributed()
        all_labels = distributed.of_all_processes(labels) if shares else None
        # Not by nn.Module's __setattr__, which looks for parameters first.
        self.__dict__.update(
            _features_of_batch=features.detach(),
            _labels_here=labels,
            _labels_of_batch=labels if all_labels is None else all_labels,
        )
        draws = self.draws_of_step() if self.head.negatives == "uniform" else None
        try:
            samples = self._scored(features, labels, all_labels, draws)
            if not self.independent_sample:
                return samples, samples
            if isinstance(samples, DenseScores) and self.head.negatives == "in_batch":
                return self._halves_of_classes(samples, labels)
            with torch.no_grad():
                return samples, self._scored(features, labels, all_labels, draws)
        except (IndexError, RuntimeError):
            self._check_classes(self._labels_of_batch)  # only now: it costs nothing otherwise
            raise

    def _scored(
        self, features: Tensor, labels: Tensor, all_labels: Tensor | None, draws: torch.Generator | None
    ) -> Samples:
        if self.independent_sample and self.head.negatives == "in_batch":  # the classes are to be split
            return DenseScores(*self.head(features, labels, all_labels, draws))
        if type(self).entropic_risk is not DualVariableMixin.entropic_risk:  # a subclass looks at the scores
            return self.head.with_target(DenseScores(*self.head(features, labels, all_labels, draws)), labels)
        return self.head.samples(features, labels, all_labels, draws)

    @outside_graphs
    def _tell_progress(self) -> None:
        """Tell the head how much of the run is done; all of it where that is not known."""
        if self.head.include_target == "gradual":
            progress = self.known_progress()
            self.head.progress = 1.0 if progress is None else progress

    def _halves_of_classes(self, samples: DenseScores, labels: Tensor) -> tuple[Samples, Samples]:
        scores, mask = samples.values, cast(Tensor, samples.mask)
        chosen = random_half(scores.shape[1], self.draws_of_step()).to(scores.device)
        corrected = self.head.uses_frequencies
        halves = (scores, ~chosen), (scores.detach(), chosen)
        in_loss, moving = (self.head.with_target(some_columns(*half, mask, corrected), labels) for half in halves)
        return in_loss, moving

    def _risk(self, samples: Samples, moving: Samples, previous: Samples | None, index: Tensor) -> Tensor:
        """The dual objective, after ν was updated."""
        given = {"dual_scores": None if moving is samples else moving, "previous_scores": previous}
        more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if isinstance(samples, DenseScores):
            if samples.fixed is not None:
                more["fixed"] = samples.fixed
            return self.entropic_risk(_ANCHOR, samples.values, index, samples.mask, **more)
        return self.entropic_risk(_ANCHOR, samples, index, **more)

    def _check_classes(self, labels: Tensor) -> None:
        """Raise InputError for a label that is no class, where looking does not wait for a device."""
        if labels.device.type == "cpu":
            classes = self.head.num_classes
            check_range(labels, classes - 1, f"from 0 to {classes - 1} (num_classes is {classes})")

    def _check_frequencies(self) -> None:
        """Raise InputError for a class of the batch that has no training row by the counts of the data module."""
        if not self.head.uses_frequencies:
            return
        if len(missing := self.head.frequencies.without_row(self._labels_of_batch)):
            raise InputError(
                f"class_counts of the data say that class {int(missing[0])} has no training row, and a batch has one"
            )

    def _check_on_the_way(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's ``on_before_batch_transfer`` where a label out of range would end the process on its device."""
        if isinstance(batch, list | tuple) and len(batch) == 3 and isinstance(batch[1], Tensor):
            self._check_classes(batch[1])
        return batch

    def _count_skipped(self, samples: DenseScores) -> None:
        if samples.values.shape[1] >= 2 + bool(self.head.include_target):
            return
        self.skipped_batches += 1
        if self.skipped_batches == 1:
            rank_zero_warn(
                f"a batch holds one class only (class {int(self._labels_of_batch[0])}), so it has no in-batch "
                "negatives and is skipped; further ones are counted in skipped_batches (larger batches, a shuffled "
                "data set or negatives='uniform' avoid them)"
            )

    # ---------------------------------------------------------------- evaluation

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
            return cross_entropy_and_rank(self.head, features, labels, self.class_chunk)
        except IndexError:
            self._check_classes(labels)
            raise

    def evaluation_step(self, stage: str, batch: Batch) -> Any:
        """Exact cross-entropy, top-1 and top-5 accuracy over the rows of validation or test.

        Returns:
            ``index``, ``label`` and ``rank`` (how many classes come before it) of each row, for callbacks.
        """
        inputs, labels, index = three_parts(batch, "inputs, labels")
        cross_entropy, rank = self.exact_cross_entropy(self(inputs), labels)
        self.log_metrics(stage, value=cross_entropy, ranks=rank)
        return {"index": index, "label": labels, "rank": rank}

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The most probable classes.

        Returns:
            ``index`` (the row), shape ``(B,)``; ``class`` and ``probability``, shape ``(B, top_k)``, most probable
            first.
        """
        inputs, _, index = batch
        found = most_probable(self.head, self(inputs), self.top_k, self.class_chunk)
        return {"index": index, "class": found.classes, "probability": found.probabilities}

    # ---------------------------------------------------------------- optimiser

    def configure_optimizer(self, parameters: list[Any]) -> Optimizer:
        """Row-sparse SGD; called where the argument ``optimizer`` is None."""
        momentum = cast(float, self.momentum)
        return RowSparseSGD(parameters, lr=self.lr, momentum=momentum, weight_decay=self.weight_decay)
