"""Classification into very many classes of which several are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from scent_lightning import distributed
from scent_lightning.data import IndexedDataModule
from scent_lightning.duals import DenseScores, DualUpdate, DualVariable, Samples
from scent_lightning.duals.table import Placement
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.metrics import PrecisionAtK, PropensityScoredPrecision, RecallAtK, label_propensities
from scent_lightning.modules.class_chunks import most_probable
from scent_lightning.modules.class_sampled_linear import Correction, Negatives
from scent_lightning.modules.hard_negatives import HardNegatives, first_but, read_hard_negatives
from scent_lightning.modules.several_answers import Answers, answer_scores, cross_entropy_and_most_probable
from scent_lightning.tasks.extreme_classification import ExtremeClassificationTask
from scent_lightning.tasks.training import GivenRate, LearningRateSchedule
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["MultiLabelTask"]

_ANCHOR = "nu"


class MultiLabelTask(ExtremeClassificationTask):
    r"""Softmax over up to millions of classes of which several are right for a row, in any number and weight.

    .. math:: \min_W \frac{1}{n} \sum_i \Big[\log \sum_k \exp h_i^\top w_k - \sum_{k \in P_i} p_{ik}\, h_i^\top w_k\Big]

    with shares :math:`p_{ik}` that sum to 1 over the right classes :math:`P_i`: alike, or in proportion to weights.
    Every training row is an anchor with one dual variable, ``nu``, whatever the number of its right classes; it comes
    to the log of the sum over all classes, less log(K − 1). A batch scores the right classes of all of its rows (or
    draws some, or takes all); right classes of a row are never its negatives. See
    :class:`~scent_lightning.tasks.ExtremeClassificationTask` for what both have in common.

    A batch is ``(inputs, answers, index)`` or ``(inputs, answers, weights, index)``: ``answers`` int64 of shape
    ``(B, P)``, −1 where a row has no more, each class once, or ``(B,)`` where each row has one; ``weights`` of the same
    shape, at least 0. A row without a right class adds nothing. :class:`~scent_lightning.data.FeatureDataModule` gives
    them where the labels are a matrix.

    Logs ``train/loss`` (dual objective) and the exact softmax cross-entropy of a batch, or of some of its rows, as
    ``train/cross_entropy``. For validation and test it logs, over all classes and exact, ``…/cross_entropy``,
    ``…/precision@k``, ``…/psp@k`` (propensity-scored precision; NaN where the data module does not say how frequent the
    classes are) and ``…/recall@k``. Rows without a right class are left out. ``predict`` gives the most probable
    classes.

    Args:
        num_features: number of features D; the command line takes it from the data module.
        num_classes: number of classes K; the command line takes it from the data module.
        num_anchors: number of training rows n; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``.
        negatives: "in_batch" (right classes of the batch's other rows), "uniform" or "all" other classes.
        num_negatives: classes drawn for a batch; "uniform" only.
        normalize: scale features and class weights to unit norm.
        scale: multiplies the scores, above 0.
        backbone: maps the batch's inputs to features ``(B, D)``; None takes the inputs as they are.
        correction: "frequency" weighs in-batch negatives by how probable they are; "none" takes them as drawn evenly.
        ks: numbers of classes k that the metrics look at.
        propensity_a: A of the labels' propensities, above 0, see :func:`~scent_lightning.metrics.label_propensities`.
        propensity_b: B of the labels' propensities, above 0.
        lr: learning rate of SGD, above 0; "auto" finds it during the run; None: 1 for each class with the proximal
            step, else 1.
        momentum: momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, at least 0; on the class weights that are touched.
        optimizer: another optimiser by class path, with its own settings, in place of SGD; None: SGD.
        lr_schedule: "cosine", "geometric", "constant" or "step"; None: "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        top_k: number of classes that ``predict`` gives.
        class_chunk: classes scored at a time in evaluation; on a GPU memory is batch × ``class_chunk`` numbers.
        dual_placement: "module" keeps the table of ν on the module's device, "cpu" in main memory.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows; "gradient"
            leaves the gradients alone.
        hard_negatives: mined for each training row, h: the h classes that the model scores highest and that are not
            right, over all classes, in chunks. 0: none. They are in the row's sum with every batch it is in, and the
            sum over all classes is still estimated without bias.
        mine_every_n_epochs: epochs after which hard negatives are found anew, from the start of the second on.
        hard_negatives_file: a file of NumPy with hard negatives of each training row, integers of shape ``(n, h)``, −1
            where a row has no more; None: none are given.

    Raises:
        InputError: an argument out of its range; in a step a batch of other parts, answers that are no integers of
            shape ``(B, P)`` from −1 to K − 1, or weights of another shape.

    Example:
        >>> import math
        >>> from scent_lightning.duals import SCENT
        >>> task = MultiLabelTask(8, num_classes=100, num_anchors=50, dual=SCENT(log_alpha=0.0), negatives="all")
        >>> batch = (torch.randn(2, 8), torch.tensor([[3, 17], [99, -1]]), torch.tensor([0, 1]))
        >>> math.isclose(task.training_step(batch, 0).item() + math.log(99), math.log(100), rel_tol=1e-6)
        True
    """

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
        correction: Correction = "frequency",
        ks: Sequence[int] = (1, 3, 5),
        propensity_a: float = 0.55,
        propensity_b: float = 1.5,
        lr: GivenRate = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        top_k: int = 5,
        class_chunk: int = 16384,
        dual_placement: Placement = "module",
        weight_step: WeightStepRule = "proximal",
        warmup_epochs: float | None = None,
        hard_negatives: int = 0,
        mine_every_n_epochs: int = 1,
        hard_negatives_file: str | None = None,
    ) -> None:
        if not ks:
            raise InputError(f"ks must hold at least one k, got {ks!r}")
        self._ks = [checked_integer("each of ks", k) for k in ks]
        super().__init__(
            num_features,
            num_classes,
            num_anchors,
            dual,
            negatives=negatives,
            num_negatives=num_negatives,
            normalize=normalize,
            scale=scale,
            backbone=backbone,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            top_k=top_k,
            class_chunk=class_chunk,
            dual_placement=dual_placement,
            weight_step=weight_step,
            warmup_epochs=warmup_epochs,
            correction=correction,
            include_target=True,  # they are in the sum
        )
        metrics: dict[str, Metric] = {"cross_entropy": MeanMetric()}
        for name, kind in (("precision", PrecisionAtK), ("psp", PropensityScoredPrecision), ("recall", RecallAtK)):
            metrics |= {f"{name}@{k}": kind(k) for k in self._ks}
        self.add_metrics(metrics, prog_bar=["cross_entropy", f"precision@{self._ks[0]}"])
        self.propensity_a = checked_number("propensity_a", propensity_a, above=0)
        self.propensity_b = checked_number("propensity_b", propensity_b, above=0)
        self._propensities: Tensor | None = None
        checked_integer("hard_negatives", hard_negatives, least=0)
        self.mine_every_n_epochs: int = checked_integer("mine_every_n_epochs", mine_every_n_epochs)
        self.hard_negatives: HardNegatives | None = None
        self._mines = hard_negatives > 0
        if hard_negatives_file is not None:
            if self._mines:
                raise InputError(f"hard_negatives must be 0 with hard_negatives_file, got {hard_negatives}")
            given = read_hard_negatives(hard_negatives_file, num_anchors, num_classes)
            self.hard_negatives = HardNegatives(num_anchors, given.shape[1])
            self.hard_negatives.put(torch.arange(num_anchors), given)
        elif self._mines:
            self.hard_negatives = HardNegatives(num_anchors, min(hard_negatives, num_classes - 1))

    def on_fit_start(self) -> None:
        """The data module says how frequent the classes are: for the correction, and for the propensities."""
        super().on_fit_start()
        counts = getattr(self.trainer.datamodule, "class_counts", None)  # type: ignore[attr-defined]
        if counts is not None:
            self.head.frequencies.give(counts, rows=self._num_rows)
            self._propensities = None

    @property
    def _num_rows(self) -> int:
        return len(cast(DualVariable, self.duals[_ANCHOR]).nu)

    # ---------------------------------------------------------------- training

    def _parts(self, batch: Any) -> tuple[Tensor, Any, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) not in (3, 4):
            got = f"{len(batch)} part(s)" if isinstance(batch, list | tuple) else type(batch).__name__
            raise InputError(
                "a batch must be (inputs, answers, index) or (inputs, answers, weights, index), where index is the "
                f"position of each row in the data set, got {got}"
            )
        inputs, answers, *weights, index = batch
        if isinstance(answers, Tensor) and answers.ndim == 1:  # one each
            answers = answers.unsqueeze(1)
        hard = None
        if self.hard_negatives is not None and self.training and isinstance(answers, Tensor) and answers.ndim == 2:
            hard = self.hard_negatives.of(index, answers)
        return inputs, Answers(answers, weights[0] if weights else None, hard), index

    def on_train_epoch_start(self) -> None:
        """Find the hard negatives, where it is time to."""
        super().on_train_epoch_start()
        epoch, hard = self.current_epoch, self.hard_negatives
        if (
            hard is not None
            and self._mines
            and epoch > hard.epoch
            and epoch > 0
            and epoch % self.mine_every_n_epochs == 0
        ):
            self.mine(self.trainer.datamodule)  # type: ignore[attr-defined]
            hard.epoch = epoch

    @torch.no_grad()
    def mine(self, data: Any) -> None:
        """Find the hard negatives of all training rows, each process those of its share, and exchange them.

        Args:
            data: an :class:`~scent_lightning.data.IndexedDataModule`.

        Raises:
            InputError: there is no such data module.
        """
        if not isinstance(data, IndexedDataModule):
            raise InputError(
                "hard negatives are mined from the training rows of a data module of this package, got "
                f"{'none' if data is None else type(data).__name__}: give them in hard_negatives_file"
            )
        hard = cast(HardNegatives, self.hard_negatives)
        trains, mined = self.training, []
        self.eval()
        try:
            for batch in data.evaluation_loader(data.existing("train")):
                plugin = self.trainer.precision_plugin
                batch = self.trainer.strategy.batch_to_device(plugin.convert_input(batch))
                with plugin.forward_context():
                    inputs, answers, index = self._parts(batch)
                    number = min(hard.number + answers.classes.shape[1], self.head.num_classes)
                    found = most_probable(self.head, self(inputs), number, self.class_chunk).classes
                hard.put(index, first_but(found, answers.classes, hard.number))
                mined.append(index)
        finally:
            self.train(trains)
        if distributed.is_distributed():
            rows = torch.cat(mined)
            classes = distributed.of_all_processes(hard.table[rows.cpu()].to(self.device))
            hard.put(distributed.of_all_processes(rows), classes)

    def _samples(self, inputs: Tensor, labels: Any) -> tuple[Samples, Samples]:
        """The loss's, which move ν as well."""
        features = self(inputs)
        answers = self._checked(labels, len(features))
        of_batch = answers.classes[answers.classes >= 0]
        rows = len(features)
        if self.head.negatives == "in_batch" and distributed.is_distributed():
            # One −1 for each row, to know their number by.
            everyone = distributed.of_all_processes(torch.cat([of_batch, of_batch.new_full((rows,), -1)]))
            of_batch = everyone[everyone >= 0]
            rows = len(everyone) - len(of_batch)
        # Not by way of nn.Module's __setattr__, which looks for parameters first.
        self.__dict__.update(_features_of_batch=features.detach(), _labels_here=answers, _labels_of_batch=of_batch)
        draws = self.draws_of_step() if self.head.negatives == "uniform" else None
        try:
            samples = answer_scores(self.head, features, answers, of_batch, rows, draws)
        except (IndexError, RuntimeError):
            self._check_classes(of_batch)  # only now: it costs nothing otherwise
            raise
        return samples, samples

    def _checked(self, answers: Answers, rows: int) -> Answers:
        classes, weights, hard = answers
        if not isinstance(classes, Tensor) or classes.ndim != 2 or len(classes) != rows:
            got = tuple(classes.shape) if isinstance(classes, Tensor) else type(classes).__name__
            raise InputError(f"answers must have shape ({rows}, P), one row for each of the batch, got {got}")
        if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
            raise InputError(f"answers must be integers, the numbers of the right classes, got {classes.dtype}")
        if weights is not None and weights.shape != classes.shape:
            raise InputError(f"weights must have the answers' shape {tuple(classes.shape)}, got {tuple(weights.shape)}")
        return Answers(classes.long(), weights, hard)

    def _exact_losses(self, features: Tensor, labels: Any, rows: int) -> Tensor:
        classes, weights, _ = labels
        answers = Answers(classes[:rows], None if weights is None else weights[:rows])
        return cross_entropy_and_most_probable(self.head, features[:rows], answers, 1, self.class_chunk)[0]

    def _check_on_the_way(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, list | tuple) and len(batch) in (3, 4) and isinstance(batch[1], Tensor):
            self._check_classes(batch[1].clamp(min=0))
        return batch

    def _count_skipped(self, samples: DenseScores) -> None:
        """A batch without negatives is not skipped: the right classes are in the sum."""

    # ---------------------------------------------------------------- evaluation

    def propensities(self) -> Tensor | None:
        """Of all classes, shape ``(K,)``; None where nobody has said how frequent they are."""
        frequencies = self.head.frequencies
        if self._propensities is None and frequencies.are_given and frequencies.counts is not None:
            found = label_propensities(frequencies.counts, self._num_rows, self.propensity_a, self.propensity_b)
            self._propensities = found.to(self.device)
        return self._propensities

    def evaluation_step(self, stage: str, batch: Any) -> None:
        """Exact cross-entropy, and the metrics of the first classes, over the rows of validation or test."""
        inputs, labels, _ = self._parts(batch)
        features = self(inputs)
        answers = self._checked(labels, len(features))
        most = min(max(self._ks), self.head.num_classes)
        try:
            losses, found = cross_entropy_and_most_probable(self.head, features, answers, most, self.class_chunk)
        except IndexError:
            self._check_classes(answers.classes.clamp(min=0))
            raise
        self.log_metrics(
            stage,
            value=losses[~losses.isnan()],
            classes=found.classes,
            answers=answers.classes,
            propensities=self.propensities(),
        )

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The most probable classes; see :meth:`ExtremeClassificationTask.predict_step`."""
        inputs, _, index = self._parts(batch)
        return super().predict_step((inputs, None, index), batch_idx)
