r"""What the anchors of a batch are compared with: one protocol for dense scores, sampled heads and contrastive pairs.

A loss :math:`\frac{1}{B} \sum_i \log \operatorname{mean}_j e^{S_{ij}}` goes one way, whatever makes the scores: the
samples give ℓ of every anchor, the tables move ν by it, and the samples give the loss at the new ν. What a step needs
of the scores is ℓ and, for the objective, the same exponentials again, so that a module which knows a faster way to
both than a matrix of scores hands over its own :class:`Samples`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.errors import InputError
from scent_lightning.updates import DualUpdate

__all__ = ["DenseScores", "Exponentials", "Moments", "Place", "Samples", "Side", "as_samples", "mean_objective"]


class Side(NamedTuple):
    """What one dual variable learns of a batch; everything detached.

    Attributes:
        log_mean: log-mean-exp ℓ of each anchor, shape ``(B,)``, float64 (float32 on devices without it), −inf where
            there is no sample.
        counts: number of samples of each anchor, shape ``(B,)``, or one number for all.
        previous: log-mean-exp of the same samples at the weights before the last optimiser step, shape ``(B,)``, for an
            update that needs it; None where nobody gave it.
        in_loss: ℓ and numbers of the loss's samples, where ν is moved by others than those; None: by the same.
    """

    log_mean: Tensor
    counts: Tensor | int
    previous: Tensor | None = None
    in_loss: Side | None = None


class Moments(NamedTuple):
    """First and second moment of an anchor's samples z = exp(score), −inf where it has none; everything detached.

    Attributes:
        log_mean: logarithm of the mean of z, shape ``(B,)``, float64 (float32 on devices without it).
        log_mean_square: that of the mean of z², likewise.
    """

    log_mean: Tensor
    log_mean_square: Tensor


class Place(NamedTuple):
    """Where the objective of a side is wanted.

    Attributes:
        nu: ν of each anchor, shape ``(B,)``, detached.
        row_weight: what each row counts in the loss, shape ``(B,)``; None: all rows with a sample count alike.
        update: whose objective it is.
    """

    nu: Tensor
    row_weight: Tensor | None
    update: DualUpdate


class Samples(ABC):
    """Base class of what a loss hands to its tables; one object for each batch.

    A loss over several tables (a contrastive one has two) has as many sides.
    """

    # What has to be finite beside the loss, shape ``(B,)``: where a score that is NaN or +∞ could go unseen otherwise.
    must_be_finite: Tensor | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of anchors B."""

    def check(self, name: str) -> None:  # noqa: B027
        """Look at what came, before anything else and before processes wait for each other; nothing by default.

        Args:
            name: how errors call the dual.

        Raises:
            TypeError, ValueError: it does not fit.
        """

    @abstractmethod
    def sides(self) -> Sequence[Side]:
        """ℓ of every anchor, for each side; called without gradient."""

    @abstractmethod
    def loss(self, places: Sequence[Place]) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss at the given ν.

        Args:
            places: for each side.

        Returns:
            The loss, a scalar, with gradient; and the dual objective of each anchor, shape ``(B,)``, of each side. In a
            distributed run the loss is this process's share, of which the mean over processes is the whole.
        """

    def terms(self) -> tuple[float, float]:
        """What the loss is: the first number times the sum of the sides' mean objectives and the second number."""
        return 1.0, 0.0

    def moments(self, side: int) -> Moments | None:
        """Moments of a side's samples, for a monitor that asks; called after :meth:`sides`, without gradient.

        None where they are not known, as by default: then there is nothing to log.
        """
        return None

    def moving(self, side: int) -> Tensor | None:
        """ℓ without what is the same whatever the weights are, shape ``(B,)``; None where there is no such part.

        Called after :meth:`sides`, without gradient. The proximal step for the weights asks for it.
        """
        return None

    def bad_rows(self, side: int) -> Tensor | None:
        """Which anchors have a score that is NaN or +∞, bool, shape ``(B,)``; None where ℓ shows it."""
        return None if self.must_be_finite is None else ~self.must_be_finite.isfinite()

    def dense(self) -> Samples:
        """The same from the scores themselves, for an update that ℓ is not enough for.

        Raises:
            InputError: there are none.
        """
        raise InputError(f"this dual update needs the scores themselves, and {type(self).__name__} does not have them")

    def plus_constant(self, log_constant: float | Tensor) -> Samples:
        """The same with a constant c in the logarithm: ℓ is log(c + mean exp(score)), and the gradient as it was.

        A row without a sample is still none.

        Args:
            log_constant: log c; or that of each row, shape ``(B,)``.

        Raises:
            InputError: these samples cannot do it.
        """
        raise InputError(f"{type(self).__name__} has no way to add a constant to the mean of its exponentials")

    def scores(self, side: int) -> tuple[Tensor, Tensor | None]:
        """The scores of a side, shape ``(B, m)``, and their mask; of what :meth:`dense` gives."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix of scores: call dense first")


class Exponentials(Samples):
    """One exponential of the scores: log-mean-exp, objective and gradient follow from it. Everything is detached.

    Args:
        largest: largest score M of each anchor, shape ``(B,)``, −inf where it has no sample.
        mean: mean of exp(scores − M) over the samples, shape ``(B,)``, 0 where there is none.
        counts: number of samples of each anchor, shape ``(B,)``, or one number for all.
        may_be_empty: False if it is known that every anchor has a sample.
        with_gradient: makes the loss, a scalar, a function of the scores, with the gradient
            exp(scores − M) · weight for a weight of shape ``(B,)``.
        dense: makes the same from the scores themselves, for an update that needs them.
        must_be_finite: shape ``(B,)``, not finite where a score is not; None: ``mean`` shows it.
        squares: gives the mean of exp(2 (scores − M)) over the samples, shape ``(B,)``; called at logging steps only.
        moving: gives ℓ without what no weight moves, shape ``(B,)``; None: there is no such part.
    """

    def __init__(
        self,
        largest: Tensor,
        mean: Tensor,
        counts: Tensor | int,
        may_be_empty: bool,
        with_gradient: Callable[[Tensor, Tensor], Tensor],
        dense: Callable[[], Samples] | None = None,
        must_be_finite: Tensor | None = None,
        squares: Callable[[], Tensor] | None = None,
        moving: Callable[[], Tensor] | None = None,
    ) -> None:
        self.largest = largest
        self.mean = mean
        self.counts = counts
        self.may_be_empty = may_be_empty
        self.with_gradient = with_gradient
        self._dense = dense
        self.must_be_finite = must_be_finite
        self._squares = squares
        self._moving = moving

    def __len__(self) -> int:
        return self.largest.shape[0]

    def sides(self) -> tuple[Side]:
        """ℓ from the largest score and the mean."""
        return (Side(self._log_mean(), self.counts),)

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, tuple[Tensor]]:
        """The exponential objective; its gradient is known in closed form, and is one node of the graph."""
        counts = self.counts
        nu, row_weight, _ = places[0]
        with torch.no_grad():
            objective, weight = functional.exponential_objective_from(nu, self.largest, self.mean, self.may_be_empty)
            loss = mean_objective(objective, row_weight, counts)
            number = max(counts, 1) if isinstance(counts, int) else counts.clamp(min=1)
            if row_weight is None:
                weight = weight / (_valid_rows(objective, counts) * number)
            else:
                weight = weight * row_weight.to(weight.dtype) / number
        return self.with_gradient(loss, weight), (objective,)

    def moments(self, side: int) -> Moments | None:
        """From the largest score, the mean and the squares."""
        if self._squares is None:
            return None
        return Moments(
            self._log_mean(), functional.log_mean_exp_from(2 * functional.wide(self.largest), self._squares())
        )

    def moving(self, side: int) -> Tensor | None:
        """What the argument of that name gives."""
        return None if self._moving is None else self._moving()

    def dense(self) -> Samples:
        """What the argument of that name makes."""
        return super().dense() if self._dense is None else self._dense()

    def plus_constant(self, log_constant: float | Tensor) -> Exponentials:
        """From the largest score and the mean."""
        if isinstance(log_constant, Tensor):
            log_constant = log_constant.to(self.largest)
        # A constant above all scores is the largest, and where there is no sample nothing is.
        largest = self.largest.clamp(min=log_constant)
        if self.may_be_empty:
            largest = torch.where(self.largest == -math.inf, self.largest, largest)
            lower = torch.where(largest == -math.inf, 0.0, self.largest - largest).exp()
        else:
            lower = (self.largest - largest).exp_()
        constant = (log_constant - largest).exp_().to(self.mean.dtype)
        if self.may_be_empty:
            constant = torch.where(largest == -math.inf, 0.0, constant)
        lower = lower.to(self.mean.dtype)
        given, with_gradient, squares = self.mean, self.with_gradient, self._squares

        def of_all() -> Tensor:
            assert squares is not None
            return lower.square() * squares() + constant * (2 * lower * given + constant)

        return Exponentials(
            largest,
            torch.addcmul(constant, given, lower),
            self.counts,
            self.may_be_empty,
            lambda loss, weight: with_gradient(loss, weight * lower),
            None if self._dense is None else lambda: self.dense().plus_constant(log_constant),
            self.must_be_finite,
            None if squares is None else of_all,
            self._moving or self._log_mean,
        )

    def _log_mean(self) -> Tensor:
        return functional.log_mean_exp_from(self.largest, self.mean)


class DenseScores(Samples):
    """A matrix of scores, one row per anchor.

    Args:
        scores: shape ``(B, m)``, any floating dtype; carries the gradient. A score of −∞ is a sample of weight 0; a row
            of nothing else has no sample.
        mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
        called: how errors call the scores.
        fixed: bool, broadcasts to ``(B, m)``, True for samples whose scores stay what they are, such as that of an own
            class less itself; None: there are none. The proximal step for the weights leaves them out of what it takes
            for exponential; ν and the loss are the same with it and without.
    """

    def __init__(
        self, scores: Tensor, mask: Tensor | None = None, called: str = "scores", fixed: Tensor | None = None
    ) -> None:
        self.values = scores
        self.mask = mask
        self.called = called
        self.fixed = fixed

    def __len__(self) -> int:
        return self.values.shape[0]

    def check(self, name: str) -> None:
        """Scores of two dimensions, and a mask of their shape."""
        scores, mask = self.values, self.mask
        if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.is_floating_point():
            got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
            raise ValueError(f"{self.called} of dual variable {name!r} must be floating with shape (B, m), got {got}")
        if mask is not None and not (
            isinstance(mask, Tensor) and mask.shape == scores.shape and mask.dtype == torch.bool
        ):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"mask of dual variable {name!r} must be bool with the shape of the {self.called} "
                f"{tuple(scores.shape)}, got {got}"
            )
        if self.fixed is not None and not (
            isinstance(self.fixed, Tensor) and self.fixed.dtype == torch.bool and _broadcasts(self.fixed, scores)
        ):
            fixed = self.fixed
            got = f"{fixed.dtype} of shape {tuple(fixed.shape)}" if isinstance(fixed, Tensor) else repr(fixed)
            raise ValueError(
                f"fixed of dual variable {name!r} must be bool and broadcast to the shape of the {self.called} "
                f"{tuple(scores.shape)}, got {got}"
            )

    def sides(self) -> tuple[Side]:
        """ℓ by the one exponential of the scores."""
        scores, mask = self.values, self.mask
        counts, may_be_empty = _count_valid(scores, mask)
        largest, self._shifted = functional.shift_by_largest(scores, mask)
        if functional.may_be_infinite(largest):
            counts, may_be_empty = torch.where(largest == -math.inf, 0, counts), True
        exponentials = self._shifted.exp()
        self._each = exponentials.detach()
        mean = functional.mean_over(exponentials, counts)
        self._exponentials = Exponentials(
            largest,
            mean,
            counts,
            may_be_empty,
            lambda loss, weight: functional.with_gradient(scores, loss, exponentials, weight),
            squares=lambda: functional.mean_over(exponentials.detach().square(), counts),
        )
        return self._exponentials.sides()

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, tuple[Tensor]]:
        """The exponential objective in closed form, another one by the update's own function."""
        nu, row_weight, update = places[0]
        if update.has_exponential_objective:
            return self._exponentials.loss(places)
        objective = update.objective(nu, self.values, self.mask)
        return mean_objective(objective, row_weight, self._exponentials.counts), (objective,)

    def moments(self, side: int) -> Moments | None:
        """From the exponentials."""
        return self._exponentials.moments(0)

    def moving(self, side: int) -> Tensor | None:
        """The sum over the samples that are not fixed, divided by the number of all."""
        if self.fixed is None:
            return None
        # Not from the scores: what is too small for an exponential has no gradient either.
        exponentials = self._each.masked_fill(self.fixed, 0.0)
        mean = functional.mean_over(exponentials, self._exponentials.counts)
        return functional.log_mean_exp_from(self._exponentials.largest, mean)

    def bad_rows(self, side: int) -> Tensor | None:
        """In a row of scores −∞ is a sample of weight 0; NaN and +∞ are NaN less the largest."""
        return self._shifted.isnan().any(dim=1)

    def dense(self) -> DenseScores:
        """This is dense."""
        return self

    def plus_constant(self, log_constant: float | Tensor) -> DenseScores:
        """One more column, which is the same for all rows but for their numbers of samples."""
        scores, mask = functional.at_least_float32(self.values), self.mask
        if mask is None:
            mask = torch.ones_like(scores, dtype=torch.bool)
        counts = mask.sum(dim=1, keepdim=True).to(scores.dtype)
        # The mean is over one more: what was the mean before has to stay it.
        log_more = torch.log1p(1 / counts.clamp(min=1))
        if isinstance(log_constant, Tensor):
            log_constant = log_constant.to(scores).unsqueeze(1)
        constant = log_constant + torch.log(counts + 1)
        there = counts > 0
        fixed = torch.zeros_like(mask) if self.fixed is None else self.fixed.expand_as(mask)
        return DenseScores(
            torch.cat([scores + log_more, constant], dim=1),
            torch.cat([mask, there], dim=1),
            self.called,
            torch.cat([fixed, torch.ones_like(there)], dim=1),
        )

    def scores(self, side: int) -> tuple[Tensor, Tensor | None]:
        """The scores, detached and in float32 or better, and their mask."""
        return functional.at_least_float32(self.values.detach()), self.mask


def as_samples(scores: Tensor | Samples, mask: Tensor | None, fixed: Tensor | None = None) -> Samples:
    """Scores as samples; samples as they are.

    Raises:
        InputError: a mask beside samples, which have their own, or ``fixed``.
    """
    if not isinstance(scores, Samples):
        return DenseScores(scores, mask, fixed=fixed)
    for name, given, what in (("mask", mask, "which samples count"), ("fixed", fixed, "which samples stay")):
        if given is not None:
            raise InputError(f"{name} goes with a tensor of scores; {type(scores).__name__} says itself {what}")
    return scores


def _broadcasts(values: Tensor, to: Tensor) -> bool:
    """Whether one shape broadcasts to the other."""
    sizes = zip(reversed(values.shape), reversed(to.shape), strict=False)
    return values.ndim <= to.ndim and all(size in (1, whole) for size, whole in sizes)


def mean_objective(objective: Tensor, row_weight: Tensor | None, counts: Tensor | int) -> Tensor:
    """Mean objective over the anchors of the step, as this process's share of it.

    Args:
        objective: shape ``(B,)``, 0 where there is no sample.
        row_weight: see :class:`Place`.
        counts: see :class:`Side`.
    """
    if row_weight is None:
        return objective.sum() / _valid_rows(objective, counts)
    return (objective * row_weight.to(objective.dtype)).sum()


def _count_valid(scores: Tensor, mask: Tensor | None) -> tuple[Tensor | int, bool]:
    """Number of valid samples of each row, one number where it is the same for all; and whether it may be 0."""
    if mask is None or scores.shape[0] == 0:
        return scores.shape[1], scores.shape[1] == 0
    counts = mask.sum(dim=1)
    if counts.device.type != "cpu":  # not worth a wait for the device
        return counts, True
    numbers = counts.tolist()
    fewest = min(numbers)
    return fewest if fewest == max(numbers) else counts, fewest == 0


def _valid_rows(objective: Tensor, counts: Tensor | int) -> Tensor | int:
    """Number of rows that have a valid sample, at least 1."""
    return max(objective.shape[0], 1) if isinstance(counts, int) else torch.count_nonzero(counts).clamp(min=1)
