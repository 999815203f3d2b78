"""Binary classification by partial AUC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric, MetricCollection

from scent_lightning import distributed
from scent_lightning.checkpoint import read_plain
from scent_lightning.duals import DualUpdate
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32, check_surrogate, pairwise_scores
from scent_lightning.metrics import OneWayPartialAUC, PartialAUCObjective, TwoWayPartialAUC
from scent_lightning.modules.classifiers import binary_classifier, last_linear
from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.batches import binary_labels, check_range, check_rows, three_parts
from scent_lightning.tasks.training import GivenRate, LearningRate, LearningRateSchedule, nothing_is_given
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["PartialAUCTask"]

Batch = tuple[Tensor, Tensor, Tensor]
Surrogate = Literal["squared_hinge", "squared", "hinge", "logistic"]
Score = Literal["sigmoid", "raw"]
Loss = Literal["partial_auc", "cross_entropy"]
_ANCHOR = "nu"
_BINARY = "0 (negative) or 1 (positive)"


class PartialAUCTask(BaseTask):
    r"""Binary classification that maximises the left end of the ROC curve, for few positives among many negatives.

    .. math:: \min_w \frac{1}{n_+} \sum_{i \in S_+} \tau \log \frac{1}{n_-} \sum_{j \in S_-}
              \exp \frac{\ell(s_w(x_j) - s_w(x_i))}{\tau}

    (Wei et al. 2026, one-way partial AUC maximisation; Zhu et al. 2022): for every positive an entropic risk over the
    negatives, which looks at those that score highest, and the more so the smaller τ is. Each positive training row is
    an anchor with a dual variable, at its dataset index in ``nu``. A batch must hold both classes:
    :class:`~scent_lightning.data.StratifiedBatchSampler` sees to it, and
    :class:`~scent_lightning.data.ImbalancedImageDataModule` uses it.

    **Two stages.** First train the whole network with ``loss="cross_entropy"``. Then give that run's checkpoint as
    ``backbone_checkpoint``: all but the classifier, which is the network's last linear layer, is loaded from it, and
    the classifier starts anew; with ``freeze_backbone`` it alone is trained. Train a frozen backbone on features
    computed once if you can: then the network is a linear head, and a step costs next to nothing.

    Logs ``train/loss``, and for validation and test ``…/objective`` (the training objective over all positives ×
    negatives, exact), ``…/partial_auc`` and ``…/partial_auc_standardized`` (FPR at most ``max_fpr``; McClish),
    ``…/two_way_partial_auc`` (TPR at least ``min_tpr`` as well) and ``…/auroc``. ``predict`` gives a score a row.

    In a distributed run the negatives' scores of all processes are shared, so that the pairs of a step are those of the
    whole batch; each process keeps the ν of its own positives.

    Args:
        num_anchors: number of training rows n, of both classes; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``. Not used with the cross-entropy.
        num_features: number of features D of a linear head, taken from the data module; None where there is a network.
        network: maps inputs to one score a row, ``(B,)`` or ``(B, 1)``; None: a linear head or ``torchvision_model``.
        torchvision_model: a classifier of torchvision by name, with one output, instead of ``network``; None: that,
            or a linear head of the inputs, which are then features ``(B, D)``.
        torchvision_weights: pretrained weights of that model by name ("DEFAULT", say), downloaded; None: random.
        loss: "partial_auc", or "cross_entropy" for the first stage.
        tau: temperature τ in the units of the surrogate, above 0.
        surrogate: "squared_hinge", "squared", "hinge" or "logistic", see
            :func:`~scent_lightning.functional.pairwise_surrogate`.
        margin: margin of the surrogate, in the units of the scores, at least 0.
        score: "sigmoid" of the network's output (published), or the output itself, "raw", which makes the objective
            of a linear head convex.
        backbone_checkpoint: checkpoint of the first stage, or a file with a state dict of the network; None: no
            first stage.
        freeze_backbone: train the classifier only; the rest stays as it is, batch-norm statistics included.
        max_fpr: largest false-positive rate of the partial AUC that is logged, in (0, 1].
        min_tpr: smallest true-positive rate of the two-way partial AUC that is logged, in [0, 1).
        lr: learning rate of SGD, above 0; "auto" finds it during the run; None: "auto" where it can be found and
            neither ``lr_schedule`` nor ``warmup_epochs`` is given, else 0.001.
        momentum: momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, at least 0.
        optimizer: another optimiser by class path, with its own settings, in place of SGD; None: SGD.
        lr_schedule: "cosine" (to 0 over the run), "geometric" (to a ten-thousandth of it, the same factor each step,
            and to 0 over the last twentieth), "constant" or "step" (a tenth after each third of the run); None:
            "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows, in place of
            clipping; "gradient" leaves the gradients alone. See :mod:`scent_lightning.duals.weight_step`.
        independent_sample: move ν by a random half of each batch's negatives and take the gradient of the others, as
            the analysis has it (Wei et al. 2026, algorithm 1); False uses all for both. A single one is not split.

    Raises:
        InputError: an argument out of its range; before training a backbone checkpoint that does not match (which
            keys); in training a batch without positives or without negatives; in a step a batch that is not (inputs,
            labels, index), or labels other than 0 and 1 or not of shape ``(B,)``.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> task = PartialAUCTask(num_anchors=6, num_features=4, dual=SCENT(log_alpha=0.0), tau=0.1)
        >>> batch = (torch.randn(4, 4), torch.tensor([1, 1, 0, 0]), torch.tensor([5, 2, 0, 3]))
        >>> loss = task.training_step(batch, 0)
        >>> task.duals["nu"].visited.nonzero().flatten().tolist()
        [2, 5]
    """

    network: nn.Module
    way_to_train = "give a network whose last linear layer is not frozen"

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(1e-3),
        "gradient": LearningRate(1e-3),
    }

    def __init__(
        self,
        num_anchors: int,
        dual: DualUpdate,
        num_features: int | None = None,
        network: nn.Module | None = None,
        torchvision_model: str | None = None,
        torchvision_weights: str | None = None,
        loss: Loss = "partial_auc",
        tau: float = 0.1,
        surrogate: Surrogate = "squared_hinge",
        margin: float = 0.5,
        score: Score = "sigmoid",
        backbone_checkpoint: str | None = None,
        freeze_backbone: bool = False,
        max_fpr: float = 0.3,
        min_tpr: float = 0.5,
        lr: GivenRate = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        weight_step: WeightStepRule = "proximal",
        independent_sample: bool = False,
        warmup_epochs: float | None = None,
    ) -> None:
        if loss == "partial_auc" and nothing_is_given(lr, optimizer, lr_schedule, weight_step, warmup_epochs):
            lr = "auto"
        super().__init__(lr, momentum, weight_decay, False, optimizer, lr_schedule, weight_step, warmup_epochs)
        self.loss = checked_choice("loss", loss, get_args(Loss))
        if self.loss == "cross_entropy" and self.finds_lr:
            raise InputError("lr 'auto' needs loss 'partial_auc', which has dual variables; got 'cross_entropy'")
        self.score = checked_choice("score", score, get_args(Score))
        self.tau = checked_number("tau", tau, above=0)
        self.independent_sample = independent_sample
        check_surrogate(surrogate, margin)
        if network is not None and torchvision_model is not None:
            raise InputError("network and torchvision_model exclude each other, got both")
        if torchvision_weights is not None and torchvision_model is None:
            raise InputError(f"torchvision_weights {torchvision_weights!r} needs a torchvision_model")
        self.save_hyperparameters()
        self.surrogate = surrogate
        self.margin = margin
        self.backbone_checkpoint = backbone_checkpoint
        self.freeze_backbone = freeze_backbone
        if torchvision_model is not None:
            network = binary_classifier(torchvision_model, torchvision_weights)
        if network is None:
            checked_integer("num_features", num_features, hint="; for images give network or torchvision_model")
            network = nn.Linear(cast(int, num_features), 1)
        self.network = network
        self._started = False
        self._classifier = last_linear(network)
        if (backbone_checkpoint is not None or freeze_backbone) and not self._classifier:
            argument = "freeze_backbone" if freeze_backbone else "backbone_checkpoint"
            found = "is a linear layer itself" if self._classifier == "" else "has no linear layer"
            raise InputError(f"{argument} needs a network whose last linear layer is its classifier; this one {found}")
        if freeze_backbone:
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(self._in_classifier(name))
        self.add_dual(_ANCHOR, num_anchors, dual)
        metrics: dict[str, Metric | MetricCollection] = {
            "objective": PartialAUCObjective(self.tau, surrogate, margin),
            "partial_auc": OneWayPartialAUC(max_fpr),
            "partial_auc_standardized": OneWayPartialAUC(max_fpr, standardized=True),
            "two_way_partial_auc": TwoWayPartialAUC(min_tpr, max_fpr),
            "auroc": OneWayPartialAUC(1.0),
        }
        # One group: all look at the same scores, which are kept once.
        self.add_metrics(
            MetricCollection(metrics, compute_groups=[list(metrics)]), prog_bar=["partial_auc", "objective"]
        )
        self.train(self.training)

    def _in_classifier(self, name: str) -> bool:
        return name.startswith(f"{self._classifier}.")

    def train(self, mode: bool = True) -> PartialAUCTask:
        """As every module's, but a frozen backbone stays in evaluation mode: its batch-norm statistics do not move."""
        super().train(mode)
        if self.freeze_backbone:
            for name, module in self.network.named_modules():
                if name != self._classifier:
                    module.training = False
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's output for each row, shape ``(B,)``, in float32 or better; higher is more positive."""
        output: Tensor = self.network(inputs)
        if output.shape not in ((len(inputs),), (len(inputs), 1)):
            raise InputError(
                f"network must give one score a row: expected shape ({len(inputs)},) or ({len(inputs)}, 1), got "
                f"{tuple(output.shape)}"
            )
        return at_least_float32(output).flatten()

    def scores(self, output: Tensor) -> Tensor:
        """What is ranked: the sigmoid of the network's output, or the output, shape ``(B,)``."""
        return torch.sigmoid(output) if self.score == "sigmoid" else output

    # ---------------------------------------------------------------- backbone

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loaded weights are not to be overwritten by the first stage's."""
        super().on_load_checkpoint(checkpoint)
        self._started = True

    def on_fit_start(self) -> None:
        """Load the backbone, before the first training only."""
        super().on_fit_start()
        if self.backbone_checkpoint is not None and not self._started:
            self.load_backbone(self.backbone_checkpoint)
        self._started = True

    def load_backbone(self, path: str) -> None:
        """Load all of the network but its classifier.

        Args:
            path: a checkpoint of this task, or a file with a state dict of the network, by itself or under
                "state_dict". Entries of a classifier are passed over, whatever their shape.

        Raises:
            InputError: the file is missing, cannot be read without running code in it, or does not match the network.
        """
        own = {name: value for name, value in self.network.state_dict().items() if not self._in_classifier(name)}
        given = {name: value for name, value in _state_of(path).items() if not self._in_classifier(name)}
        problems = []
        for what, names in (
            ("lacks", [name for name in own if name not in given]),
            ("has unknown", [name for name in given if name not in own]),
            (
                "has another shape of",
                [name for name in own if name in given and own[name].shape != given[name].shape],
            ),
        ):
            if names:
                problems.append(f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" * (len(names) > 3)))
        if problems:
            raise InputError(f"backbone_checkpoint {path} does not match the network: it {'; it '.join(problems)}")
        self.network.load_state_dict(given, strict=False)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν at the batch's positives and return τ times the dual objective; or return the cross-entropy."""
        inputs, labels, index = three_parts(batch, "inputs, labels")
        if self.loss == "cross_entropy":
            output = self(inputs)
            check_rows("labels", labels, len(output))
            if labels.device.type == "cpu":
                check_range(labels, 1, _BINARY)
            loss = binary_cross_entropy_with_logits(output, labels.to(output.dtype))
        else:
            previous = self.at_previous_weights(lambda: self._pairs(inputs, labels, index))
            pairs = self._pairs(inputs, labels, index)
            previous_scores = None if previous is None else previous.moving
            dual_scores = None if pairs.moving is pairs.losses else pairs.moving
            risk = self.entropic_risk(
                _ANCHOR, pairs.losses, pairs.anchors, dual_scores=dual_scores, previous_scores=previous_scores
            )
            loss = self.tau * risk
        self.log_loss(loss)
        return loss

    def _pairs(self, inputs: Tensor, labels: Tensor, index: Tensor) -> _Pairs:
        """The losses of a batch's positives with its negatives, over τ."""
        output = self(inputs)
        check_rows("labels", labels, len(output))
        scores = self.scores(output)
        if distributed.is_distributed():
            positives, negatives = distributed.checked(_classes, labels)
        else:
            positives, negatives = _classes(labels)
        negative_scores = scores.index_select(0, negatives)
        if distributed.is_distributed():
            negative_scores, _ = distributed.gather_with_gradient(negative_scores)
        losses = pairwise_scores(
            scores.index_select(0, positives), negative_scores, self.surrogate, self.margin, self.tau
        )
        anchors = index[positives.to(index.device)]
        if self.independent_sample and (halves := self.halves(index[negatives.to(index.device)])) is not None:
            chosen = halves[0].to(losses.device)
            return _Pairs(losses[:, ~chosen], losses[:, chosen], anchors)
        return _Pairs(losses, losses, anchors)

    def evaluation_step(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        """Objective and areas under the ROC curve over the rows of validation or test.

        Returns:
            ``index``, ``score`` and ``label`` of each row, shape ``(B,)`` each, for callbacks.
        """
        inputs, labels, index = three_parts(batch, "inputs, labels")
        scores = self.scores(self(inputs))
        labels = binary_labels(labels, len(scores))
        self.log_metrics(stage, scores=scores, labels=labels)
        return {"index": index, "score": scores, "label": labels}

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Score a batch.

        Returns:
            ``index`` (the row), ``score`` and ``label``, each of shape ``(B,)``; no ``label`` where the batch has None.
        """
        inputs, labels, index = batch
        found = {"index": index, "score": self.scores(self(inputs))}
        return found if labels is None else {**found, "label": labels}


class _Pairs(NamedTuple):
    """Losses of the positives with the negatives in the loss and with those that move ν; the positives' indices."""

    losses: Tensor
    moving: Tensor
    anchors: Tensor


def _classes(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the positive and of the negative rows of a batch, or InputError."""
    positives, negatives = ((labels == value).nonzero().squeeze(1) for value in (1, 0))
    if len(positives) + len(negatives) != len(labels):
        other = labels[(labels != 0) & (labels != 1)][0].item()
        raise InputError(f"labels must be {_BINARY}, got {other}")
    if not len(positives) or not len(negatives):
        lacking = "positive row (label 1)" if len(negatives) else "negative row (label 0)"
        raise InputError(
            f"a training batch of {len(labels)} rows has no {lacking}: use StratifiedBatchSampler, which puts both "
            "classes into every batch"
        )
    return positives, negatives


def _state_of(path: str) -> dict[str, Tensor]:
    """The network's state in a checkpoint of this task, or in a file with a state dict."""
    if not Path(path).is_file():
        raise InputError(f"backbone_checkpoint {path} does not exist")
    state = read_plain(Path(path), f"backbone_checkpoint {path}")
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"backbone_checkpoint {path} must hold a state dict")
    return dict(_without_prefix(state))


def _without_prefix(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    prefix = "network." if any(name.startswith("network.") for name in state) else ""
    for name, value in state.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), value
