"""Learning to rank: lists of documents with graded relevance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from scent_lightning.duals import DualUpdate
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.functional import list_scores, log_mean_exp
from scent_lightning.metrics import GradedNDCG, ListMRR
from scent_lightning.metrics.ranking import Gain, gain_of
from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.training import GivenRate, LearningRate, LearningRateSchedule
from scent_lightning.validation import checked_choice, checked_integer

__all__ = ["RankingTask"]

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
_ANCHOR = "nu"
# 2 to the power of a relevance beyond this is of no use, and of 128 infinite in float32.
_MOST_EXPONENTIAL = 60.0


class RankingTask(BaseTask):
    r"""Listwise ranking: the softmax over each query's documents, drawn to the relevant ones.

    .. math:: \min_w \frac{1}{Q} \sum_q \Big[\log \sum_{j} e^{f_w(x_{qj})} - \sum_j p_{qj} f_w(x_{qj})\Big],
              \qquad p_{qj} \propto \text{gain}(\text{relevance}_{qj})

    (Cao et al. 2007, ListNet's top-one loss; with one relevant document it is ListMLE's first term and the softmax loss
    of retrieval). Every training query is an anchor with a dual variable, ``nu``, which comes to the logarithm of the
    sum: where lists are long, a step scores a sample of each (``list_size`` of
    :class:`~scent_lightning.data.RankingDataModule`), of which the dual variable makes an unbiased gradient.

    Logs ``train/loss`` (dual objective), and for validation and test, over whole lists, ``…/cross_entropy`` (the loss,
    exact), ``…/ndcg@k`` of the gain 2^relevance − 1, and ``…/mrr`` (of documents that are relevant at all). Queries
    without a relevant document are left out of all three. ``predict`` gives a score for every document.

    Args:
        num_features: number of features D; the command line takes it from the data module.
        num_anchors: number of training queries; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``.
        network: maps the features of documents, ``(N, D)``, to scores, ``(N,)`` or ``(N, 1)``; None is linear.
        gain: what a document counts among the relevant ones of its list: "exponential", 2^relevance − 1, or "linear",
            the relevance.
        ks: numbers of documents k that NDCG@k looks at.
        lr: learning rate of SGD, above 0; "auto" finds it during the run; None: 0.1.
        momentum: momentum of SGD, in [0, 1).
        nesterov: Nesterov's form of the momentum.
        weight_decay: L2 penalty of SGD, at least 0.
        optimizer: another optimiser by class path, with its own settings, in place of SGD; None: SGD.
        lr_schedule: "cosine" (to 0 over the run), "geometric" (to a ten-thousandth of it, the same factor each step,
            and to 0 over the last twentieth), "constant" or "step" (a tenth after each third of the run); None:
            "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        weight_step: "proximal" limits each step of SGD to what the exponential part of the loss allows, in place of
            clipping; "gradient" leaves the gradients alone. See :mod:`scent_lightning.duals.weight_step`.

    Raises:
        InputError: an argument out of its range; in a step a batch that is not (features, relevance, mask, index) or of
            shapes that do not fit, a negative relevance, or a network that does not give one score a document.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> task = RankingTask(num_features=4, num_anchors=10, dual=SCENT(log_alpha=0.0))
        >>> relevance = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        >>> mask = torch.tensor([[True, True, True], [True, True, False]])
        >>> loss = task.training_step((torch.randn(2, 3, 4), relevance, mask, torch.tensor([3, 8])), 0)
        >>> torch.allclose(loss, torch.tensor([3.0, 2.0]).log().mean())  # all scores are 0
        True
    """

    network: nn.Module

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(0.1),
        "gradient": LearningRate(0.1),
    }

    def __init__(
        self,
        num_features: int,
        num_anchors: int,
        dual: DualUpdate,
        network: nn.Module | None = None,
        gain: Gain = "exponential",
        ks: Sequence[int] = (1, 5, 10),
        lr: GivenRate = None,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        weight_step: WeightStepRule = "proximal",
        warmup_epochs: float | None = None,
    ) -> None:
        super().__init__(lr, momentum, weight_decay, nesterov, optimizer, lr_schedule, weight_step, warmup_epochs)
        checked_integer("num_features", num_features)
        self.gain: Gain = checked_choice("gain", gain, get_args(Gain))
        if not ks:
            raise InputError(f"ks must hold at least one k, got {ks!r}")
        ks = [checked_integer("each of ks", k) for k in ks]
        self.save_hyperparameters()
        if network is None:
            network = nn.Linear(
                num_features, 1, bias=False
            )  # the same for all documents of a list, a bias does nothing
            nn.init.zeros_(network.weight)
        self.network = network
        self.add_dual(_ANCHOR, num_anchors, dual)
        ndcg: dict[str, Metric] = {f"ndcg@{k}": GradedNDCG(k) for k in ks}
        metrics = {"cross_entropy": MeanMetric(), **ndcg, "mrr": ListMRR()}
        self.add_metrics(metrics, prog_bar=[f"ndcg@{ks[-1]}"])

    def forward(self, features: Tensor) -> Tensor:
        """Scores, shape ``(N,)``, of documents with features of shape ``(N, D)``."""
        scores: Tensor = self.network(features)
        if scores.shape not in ((len(features),), (len(features), 1)):
            raise InputError(
                f"network must give one score a document: expected shape ({len(features)},) or ({len(features)}, 1), "
                f"got {tuple(scores.shape)}"
            )
        return scores.squeeze(-1) if scores.ndim == 2 else scores

    def scores(self, features: Tensor, mask: Tensor) -> Tensor:
        """Scores, shape ``(B, L)``, of lists of shape ``(B, L, D)``, 0 where there is no document."""
        there = mask > 0
        # Not of the places without a document: their zeros would be in the statistics of batch norm.
        found: Tensor = self(features[there])
        return found.new_zeros(there.shape).masked_scatter(there, found)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν and return the dual objective of the batch."""
        features, relevance, mask, index = self._checked(batch)
        weights = gain_of(relevance, self.gain)
        previous = self.at_previous_weights(lambda: list_scores(self.scores(features, mask), weights, mask)[0])
        scores, valid = list_scores(self.scores(features, mask), weights, mask)
        loss = self.entropic_risk(_ANCHOR, scores, index, valid, previous_scores=previous)
        self.log_loss(loss)
        return loss

    def evaluation_step(self, stage: str, batch: Batch) -> None:
        """Cross-entropy, NDCG@k and reciprocal rank of the lists of validation or test."""
        features, relevance, mask, _ = self._checked(batch)
        scores = self.scores(features, mask)
        of_loss, valid = list_scores(scores, gain_of(relevance, self.gain), mask)
        losses = log_mean_exp(of_loss, valid)[valid.any(dim=1)]
        self.log_metrics(stage, value=losses, scores=scores, relevance=relevance, mask=mask > 0)

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Score the documents.

        Returns:
            Of every document in the batch, in the order of the lists, each of shape ``(N,)``: ``index`` (its query),
            ``document`` (its place in the query's list, from 0, in the order of the file) and ``score``.
        """
        features, _, mask, index = _four_parts(batch)
        query, document = (mask > 0).nonzero(as_tuple=True)
        return {"index": index[query], "document": document, "score": self.scores(features, mask)[query, document]}

    def _checked(self, batch: Any) -> Batch:
        """The parts of a batch, of shapes that fit; the values are looked at where that does not wait for a device."""
        features, relevance, mask, index = _four_parts(batch)
        if features.ndim != 3 or relevance.shape != features.shape[:2] or mask.shape != features.shape[:2]:
            raise InputError(
                "a batch must have features of shape (B, L, D), and relevance and mask of shape (B, L), got "
                f"{tuple(features.shape)}, {tuple(relevance.shape)} and {tuple(mask.shape)}"
            )
        if relevance.device.type == "cpu" and relevance.numel():
            least, most = (value.item() for value in relevance.aminmax())
            if not least >= 0 or (most > _MOST_EXPONENTIAL and self.gain == "exponential"):
                allowed = f", and at most {_MOST_EXPONENTIAL:g} where gain is 'exponential'" * (least >= 0)
                raise InputError(f"relevance must be at least 0{allowed}, got {most if least >= 0 else least:g}")
        return features, relevance, mask, index


def _four_parts(batch: Any) -> tuple[Any, Any, Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 4:
        count = f"{len(batch)} part(s)" if isinstance(batch, list | tuple) else type(batch).__name__
        raise InputError(
            f"a batch must be (features, relevance, mask, index), where index is each query's position, got {count}"
        )
    features, relevance, mask, index = batch
    return features, relevance, mask, index
