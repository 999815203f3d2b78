"""A linear classifier that scores only the classes it is asked for."""

from __future__ import annotations

import math
from typing import Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import DenseScores, Exponentials, Samples
from scent_lightning.functional import at_least_float32
from scent_lightning.modules.class_frequencies import ClassFrequencies
from scent_lightning.modules.margins import MarginType, checked_margin
from scent_lightning.modules.sampled_scores import SampledScores, Scoring, distinct, exponentials_of, score
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["ClassSampledLinear", "Correction", "Negatives", "OwnClass"]

Negatives = Literal["in_batch", "uniform", "all"]
Correction = Literal["frequency", "none"]
OwnClass = bool | Literal["gradual"]
# By how many powers of K − 1 the own class of a row of a rare class counts too little at the start of a run. With more,
# many classes that are apart end lower, and classes that overlap higher.
OWN_CLASS_COMES_IN = 3.0


@overload
def log_weight_of_own_class(num_classes: int, progress: float = 1.0, rarity: float = 1.0) -> float: ...
@overload
def log_weight_of_own_class(num_classes: int, progress: float, rarity: Tensor) -> Tensor: ...
def log_weight_of_own_class(num_classes: int, progress: float = 1.0, rarity: float | Tensor = 1.0) -> float | Tensor:
    """Log ε of the own class that comes in gradually, see :class:`ClassSampledLinear`.

    Args:
        num_classes: number of classes K.
        progress: fraction of the run that is done, in [0, 1].
        rarity: of the rows' classes, see :meth:`ClassFrequencies.rarity`.

    Returns:
        A number, or one for each row, in the shape of ``rarity``; −log(K − 1) at the end of the run.
    """
    log_others = math.log(num_classes - 1)
    return rarity * (-OWN_CLASS_COMES_IN * (1 - progress) * log_others) - log_others


class ClassSampledLinear(nn.Module):
    r"""Linear classifier without bias over K classes, trained on a few of them at a time.

    The score of anchor i against class k is :math:`h_i^\top (w_k - w_{y_i})` (Wei et al. 2026, algorithm for extreme
    classification). With :math:`\ell` their log-mean-exp over all classes other than :math:`y_i`, the softmax
    cross-entropy is :math:`\log(1 + (K - 1) e^{\ell})`. The gradient of the weights has one row for each class that was
    scored and is a sparse tensor: nothing of size K × D is made in a step, whatever K is.

    **Choosing the negatives.** "in_batch" takes the distinct labels of the batch: no extra rows, and the published
    algorithm, but it needs batches of many classes. "uniform" draws classes evenly; it costs one more row a negative,
    and most draws are easy. "all" is the exact softmax, for K of some ten thousand at most.

    **Correction.** The labels of a batch are of frequent classes more often than of rare ones, so that the mean over
    them is not that over all classes, and frequent ones are pushed away at each step. With ``correction`` "frequency"
    the score of class k has :math:`-\log \pi_k + \log \frac{m_i}{K - 1}` added, :math:`\pi_k` its probability to be
    among the other labels of the batch and :math:`m_i` the number of the anchor's negatives: the mean of exp(score) has
    :math:`\frac{1}{K - 1} \sum_{k \neq y_i} e^{h_i^\top (w_k - w_{y_i})}` as its expectation. π comes from
    :attr:`frequencies`. Classes without a training row are in no batch, and their part of the sum is left out. A mean
    over classes that are drawn evenly needs no correction.

    **The own class in the sum.** Without it the loss falls without end where classes are apart: the "decoupled" loss of
    contrastive learning (Yeh et al. 2022). ``include_target`` has :math:`\log(\varepsilon + \ldots)` with
    :math:`\varepsilon = \frac{1}{K - 1}`, which is the softmax cross-entropy less log(K − 1), bounded below, and whose
    gradient fades where a row is right. Many classes that are apart train faster without it; classes that overlap, or
    of which some are rare, are wrong without it. With "gradual" it comes in as the run goes on,

    .. math:: \log \varepsilon_i = -(1 + 3 (1 - p) r_i) \log(K - 1)

    with the progress p of the run, in [0, 1]: the softmax with a margin of :math:`3 (1 - p) r_i \log(K - 1)` nats on
    the own class, fast at first and right at the end. Rows of frequent classes have less of it, since they are many,
    and a margin of theirs is at the cost of rare classes: :math:`r_i` is the smaller of 1 and n / (K · rows of the
    class), by :attr:`frequencies`.

    **Margins** on the own class, see :mod:`scent_lightning.modules.margins`: only :meth:`forward` and :meth:`samples`
    have them, not the :meth:`logits` of evaluation.

    Args:
        num_features: number of features D.
        num_classes: number of classes K, at least 2.
        negatives: "in_batch", "uniform" or "all".
        num_negatives: classes drawn for a batch; "uniform" only.
        normalize: scale features and class weights to unit norm before scoring (cosine similarity).
        scale: multiplies the scores, above 0; use 10 to 64 with ``normalize``.
        correction: "frequency" weighs in-batch negatives by how probable they are; "none" leaves them alone.
        include_target: :meth:`samples` has the own class in the sum: False, True, or "gradual".
        margin: of the own class, at least 0 (below π/2 for an angle); with ``normalize`` only.
        margin_type: "cosine" or "angular".

    Attributes:
        frequencies: how often each class is among the training rows; :meth:`ClassFrequencies.give` sets the counts, and
            without them whoever trains tells :meth:`ClassFrequencies.see` the labels of each batch.
        progress: fraction of the run that is done, in [0, 1], for ``include_target`` "gradual"; whoever trains sets it,
            and it is 1 until then.
        weight: shape ``(K, D)``; starts at 0, where all classes are equal, or, with
            ``normalize``, at random about the unit sphere.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> head = ClassSampledLinear(num_features=4, num_classes=100_000)
        >>> scores, mask = head(torch.randn(3, 4), torch.tensor([5, 99_999, 5]))
        >>> scores.shape, mask.tolist()
        (torch.Size([3, 2]), [[False, True], [True, False], [False, True]])
        >>> scores.sum().backward()
        >>> head.weight.grad.coalesce().indices().tolist()
        [[5, 99999]]
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        negatives: Negatives = "in_batch",
        num_negatives: int = 128,
        normalize: bool = False,
        scale: float = 1.0,
        correction: Correction = "none",
        include_target: OwnClass = False,
        margin: float = 0.0,
        margin_type: MarginType = "cosine",
    ) -> None:
        super().__init__()
        checked_integer("num_features", num_features)
        checked_integer("num_classes", num_classes, least=2)
        checked_integer("num_negatives", num_negatives)
        checked_choice("negatives", negatives, get_args(Negatives))
        checked_number("scale", scale, above=0)
        self.negatives = negatives
        self.num_negatives = num_negatives
        self.normalize = normalize
        self.scale = scale
        self.correction = checked_choice("correction", correction, get_args(Correction))
        checked_choice("include_target", include_target, (False, True, "gradual"))
        self.include_target: OwnClass = "gradual" if include_target == "gradual" else bool(include_target)
        self.scoring = Scoring(normalize, scale, checked_margin(margin, margin_type, normalize), margin_type)
        self.frequencies = ClassFrequencies(num_classes)
        self.progress = 1.0
        self.weight = nn.Parameter(torch.zeros(num_classes, num_features))
        if normalize:
            nn.init.normal_(self.weight, std=num_features**-0.5)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self.weight.shape[0]

    @property
    def uses_frequencies(self) -> bool:
        """Whether the scores depend on :attr:`frequencies`."""
        return self.correction == "frequency" and self.negatives == "in_batch"

    def extra_repr(self) -> str:  # noqa: D102
        drawn = f" ({self.num_negatives})" if self.negatives == "uniform" else ""
        return f"{self.weight.shape[1]}, {self.num_classes}, negatives={self.negatives}{drawn}"

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        all_labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores of a batch against sampled classes.

        Args:
            features: shape ``(B, D)``.
            labels: class of each row, shape ``(B,)``, int64, in [0, K).
            all_labels: where a batch is spread over processes, the labels of all of it, for "in_batch".
            generator: of "uniform", on the CPU; None draws from torch's global random state.

        Returns:
            Scores :math:`h_i^T (w_k - w_{y_i})`, shape ``(B, m)``, and the mask of those that count, bool, ``(B, m)``:
            a column of the anchor's own class does not. In a batch of one class "in_batch" leaves no negative. They are
            corrected, and have the margin; the own class is in no column.
        """
        if self.normalize:
            features = F.normalize(features, dim=1)
        if self.negatives == "all":
            return self._all_scores(features, labels.unsqueeze(1))
        if self.negatives == "in_batch":
            classes, own = distinct(labels, all_labels)
            columns, asked = None, torch.arange(len(classes), device=labels.device)
        else:
            device = labels.device if generator is None else torch.device("cpu")
            drawn = torch.randint(self.num_classes, (self.num_negatives,), generator=generator, device=device)
            drawn = drawn.to(labels.device)
            classes, place = torch.unique(torch.cat([labels, drawn]), return_inverse=True)
            own, columns = place[: len(labels)].unsqueeze(1), place[len(labels) :]
            asked = columns
        scores: Tensor = SampledScores.apply(features, self.weight, classes, own, columns, self.scoring)  # type: ignore[no-untyped-call]
        if self.uses_frequencies:
            scores = at_least_float32(scores)
            scores = scores + self._offsets(classes, labels, all_labels, scores.dtype)
        return scores, asked != own

    def _all_scores(self, features: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(features, self.weight)
        mask = torch.ones_like(logits, dtype=torch.bool).scatter_(1, own, False)
        own_logits = logits.gather(1, own)
        if self.scoring.margin > 0:
            value, slope = self.scoring.own(own_logits)
            own_logits = value + slope * (own_logits - own_logits.detach())
        return logits - own_logits, mask

    def _offsets(self, classes: Tensor, labels: Tensor, all_labels: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = len(labels) if all_labels is None else len(all_labels)
        return self.frequencies.offsets(classes, rows - 1, dtype)

    def samples(
        self,
        features: Tensor,
        labels: Tensor,
        all_labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Samples:
        """The scores of :meth:`forward` for a dual variable, without the matrix of them where there is a faster way.

        Of in-batch negatives, or all, the exponentials are taken here: the same loss and the same gradient in half of
        the passes over the scores and one node of the graph. A subclass that overrides :meth:`forward` gets its scores.
        With ``include_target`` the own class is in the sum.

        Args:
            features: as for :meth:`forward`.
            labels: as for :meth:`forward`.
            all_labels: as for :meth:`forward`.
            generator: as for :meth:`forward`.

        Returns:
            What :meth:`~scent_lightning.duals.DualVariableMixin.entropic_risk` takes in place of scores and mask. In a
            batch of one class "in_batch" leaves no negative: a :class:`~scent_lightning.duals.DenseScores` of no valid
            sample.
        """
        samples: Samples | None = None
        if self.negatives != "uniform" and type(self).forward is ClassSampledLinear.forward:
            samples = self._exponentials(features, labels, all_labels)
        if samples is None:
            samples = DenseScores(*self(features, labels, all_labels, generator))
        return self.with_target(samples, labels)

    @outside_graphs
    def with_target(self, samples: Samples, labels: Tensor) -> Samples:
        """Samples with the own class in the sum, where ``include_target`` says so; :meth:`samples` does it itself.

        Args:
            samples: of the rows.
            labels: class of each, shape ``(B,)``, int64.
        """
        if not self.include_target:
            return samples
        if self.include_target != "gradual" or self.progress == 1:
            return samples.plus_constant(log_weight_of_own_class(self.num_classes))
        rarity = self.frequencies.rarity(labels)
        return samples.plus_constant(log_weight_of_own_class(self.num_classes, self.progress, rarity))

    def _exponentials(self, features: Tensor, labels: Tensor, all_labels: Tensor | None = None) -> Exponentials | None:
        """Exponentials of the scores against in-batch negatives, or all; None where there is no negative."""
        inputs = features
        if self.normalize:
            features = F.normalize(features, dim=1)
        with torch.no_grad():
            classes: Tensor | None = None
            if self.negatives == "all":
                own, number = labels.unsqueeze(1), self.num_classes
            else:
                classes, own = distinct(labels, all_labels)
                number = len(classes)
            if number < 2 or not len(labels):
                return None
            logits, scored = score(features, self.weight, classes, self.scoring)
            logits, offsets = at_least_float32(logits), None
            if classes is not None and self.uses_frequencies:
                offsets = self._offsets(classes, labels, all_labels, logits.dtype)

        def dense() -> DenseScores:
            return DenseScores(*self(inputs, labels, all_labels))

        return exponentials_of(logits, own, features, self.weight, scored, self.scoring, offsets, dense)

    def logits(self, features: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits of the classes ``start`` to ``stop``, shape ``(B, stop − start)``, for evaluation in chunks.

        Args:
            features: shape ``(B, D)``.
            start: first class.
            stop: class after the last; None is K.
        """
        if self.normalize:
            features = F.normalize(features, dim=1)
        return self._logits(features, self.weight[start:stop])

    def _logits(self, features: Tensor, rows: Tensor) -> Tensor:
        if self.normalize:
            rows = F.normalize(rows, dim=1)
        logits = features @ rows.T
        return logits if self.scale == 1 else self.scale * logits
