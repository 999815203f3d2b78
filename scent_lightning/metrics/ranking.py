"""How well lists of documents are ordered: NDCG and reciprocal rank, of graded relevance."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.functional import at_least_float32
from scent_lightning.validation import checked_choice, checked_integer

__all__ = ["Gain", "GradedNDCG", "ListMRR", "gain_of", "graded_ndcg", "list_reciprocal_rank"]

Gain = Literal["exponential", "linear"]


def gain_of(relevance: Tensor, gain: Gain = "exponential") -> Tensor:
    """What a document of a relevance is worth: 2^relevance − 1 ("exponential") or the relevance itself ("linear")."""
    relevance = at_least_float32(relevance)
    return torch.exp2(relevance) - 1 if gain == "exponential" else relevance


def graded_ndcg(scores: Tensor, relevance: Tensor, mask: Tensor, k: int, gain: Gain = "exponential") -> Tensor:
    """Normalised discounted cumulative gain of the first k documents of each list (Järvelin and Kekäläinen 2002).

    Documents of equal score share their places: the mean over their orders, as scikit-learn's ``ndcg_score`` has it.

    Args:
        scores: shape ``(B, L)``.
        relevance: at least 0, shape ``(B, L)``.
        mask: bool, shape ``(B, L)``, True where there is a document.
        k: how many of the first documents count.
        gain: what a relevance is worth, see :func:`gain_of`; scikit-learn's is "linear".

    Returns:
        Shape ``(B,)``, from 0 to 1; NaN where no document is relevant.

    Example:
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> graded_ndcg(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]]), mask, k=3)
        tensor([0.5000])
    """
    gains = gain_of(relevance, gain).masked_fill(~mask, 0.0)
    ordered, order = at_least_float32(scores).masked_fill(~mask, -torch.inf).sort(dim=1, descending=True)
    places = torch.arange(gains.shape[1], device=gains.device)
    discount = torch.where(places < k, 1 / torch.log2(places + 2.0), 0.0).to(gains.dtype)
    found = (gains.gather(1, order) * _shared(discount, ordered)).sum(dim=1)
    best = (gains.sort(dim=1, descending=True).values * discount).sum(dim=1)
    return torch.where(best > 0, found / best, torch.nan)


def _shared(discount: Tensor, ordered: Tensor) -> Tensor:
    """The mean discount of the places of equal scores, shape ``(B, L)``; ``ordered`` are the scores in their order."""
    new = torch.ones_like(ordered, dtype=torch.int64)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = new.cumsum(dim=1) - 1
    sums = torch.zeros_like(ordered, dtype=discount.dtype).scatter_add_(1, group, discount.expand_as(ordered))
    sizes = torch.zeros_like(sums).scatter_add_(1, group, torch.ones_like(sums))
    return (sums / sizes.clamp(min=1)).gather(1, group)


def list_reciprocal_rank(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """One over the place of the first document that is relevant at all; others of equal score come before it.

    Args:
        scores: shape ``(B, L)``.
        relevance: shape ``(B, L)``, relevant above 0.
        mask: bool, shape ``(B, L)``, True where there is a document.

    Returns:
        Shape ``(B,)``; NaN where no document is relevant.

    Example:
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> list_reciprocal_rank(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 2.0]]), mask)
        tensor([0.5000])
    """
    scores = at_least_float32(scores)
    relevant = mask & (relevance > 0)
    best = scores.masked_fill(~relevant, -torch.inf).amax(dim=1, keepdim=True)
    before = (mask & ~relevant & (scores >= best)).sum(dim=1)
    return torch.where(relevant.any(dim=1), 1 / (before + 1.0), torch.nan)


class _MeanOfLists(Metric):
    """Mean over the lists of all batches and processes; those without a relevant document are left out."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor
    left_out: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("left_out", torch.tensor(0), dist_reduce_fx="sum")

    def of_lists(self, scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
        """The value of each list, NaN where no document is relevant."""
        raise NotImplementedError

    def update(self, scores: Tensor, relevance: Tensor, mask: Tensor) -> None:
        """Add lists.

        Args:
            scores: shape ``(B, L)``.
            relevance: at least 0, shape ``(B, L)``.
            mask: bool, shape ``(B, L)``, True where there is a document.
        """
        values = self.of_lists(scores, relevance, mask)
        counts = ~values.isnan()
        self.total = self.total + values.nan_to_num().sum().to(self.total.dtype)
        self.count = self.count + counts.sum()
        self.left_out = self.left_out + (~counts).sum()

    def compute(self) -> Tensor:
        """The mean, a scalar; NaN where there was no list with a relevant document."""
        return (self.total / self.count).float()


class GradedNDCG(_MeanOfLists):
    """Mean NDCG@k over lists with a relevant document, see :func:`graded_ndcg`.

    Args:
        k: how many of the first documents count.
        gain: "exponential" (2^relevance − 1) or "linear".

    Attributes:
        left_out: number of lists without a relevant document.

    Raises:
        InputError: k is no integer of at least 1, or an unknown gain.

    Example:
        >>> metric = GradedNDCG(10)
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> relevance = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> metric.update(torch.zeros(2, 3), relevance, mask)
        >>> metric.compute(), int(metric.left_out)
        (tensor(0.8155), 1)
    """

    def __init__(self, k: int, gain: Gain = "exponential") -> None:
        super().__init__()
        self.k: int = checked_integer("k", k)
        self.gain: Gain = checked_choice("gain", gain, get_args(Gain))

    def of_lists(self, scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
        """NDCG of each list."""
        return graded_ndcg(scores, relevance, mask, self.k, self.gain)


class ListMRR(_MeanOfLists):
    """Mean reciprocal rank over lists with a relevant document, see :func:`list_reciprocal_rank`.

    Attributes:
        left_out: number of lists without a relevant document.
    """

    def of_lists(self, scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
        """Reciprocal rank of each list."""
        return list_reciprocal_rank(scores, relevance, mask)
