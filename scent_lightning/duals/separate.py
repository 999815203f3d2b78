"""Samples that move ν beside those of the loss: others, or the same at the weights before the last optimiser step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scent_lightning.duals.samples import DenseScores, Moments, Place, Samples, Side, as_samples
from scent_lightning.duals.table import DualTable
from scent_lightning.errors import InputError
from scent_lightning.functional import wide

__all__ = ["SeparateSamples", "samples_of_step"]


def samples_of_step(
    tables: Sequence[DualTable],
    scores: Tensor | Samples,
    mask: Tensor | None,
    dual_scores: Tensor | Samples | None,
    previous_scores: Tensor | Samples | None,
    fixed: Tensor | None = None,
) -> Samples:
    """The samples of a step, from the arguments of that name of ``entropic_risk``.

    Raises:
        InputError: a mask beside samples, which have their own, or ``fixed``.
    """
    samples = as_samples(scores, mask, fixed)
    if previous_scores is not None and not any(table.needs_previous for table in tables):
        previous_scores = None
    if dual_scores is None and previous_scores is None:
        return samples
    moving = samples if dual_scores is None else _samples(dual_scores, None, "dual_scores")
    previous = None
    if previous_scores is not None:
        own_mask = moving.mask if isinstance(moving, DenseScores) else None
        previous = _samples(previous_scores, own_mask, "previous_scores")
    return SeparateSamples(samples, None if dual_scores is None else moving, previous)


def _samples(scores: Tensor | Samples, mask: Tensor | None, called: str) -> Samples:
    if isinstance(scores, Samples):
        return scores
    return DenseScores(scores.detach() if isinstance(scores, Tensor) else scores, mask, called)


class SeparateSamples(Samples):
    """The loss of some samples at a ν that others move, or that their scores at the previous weights have a part in.

    Args:
        loss: the loss's.
        dual: those that move ν, of which no gradient is taken; None: the same.
        previous: those that move ν, scored at the weights before the last optimiser step; None: nobody needs them.
    """

    def __init__(self, loss: Samples, dual: Samples | None = None, previous: Samples | None = None) -> None:
        self._loss = loss
        self._dual = dual
        self._previous = previous

    def __len__(self) -> int:
        return len(self._loss)

    @property
    def _moving(self) -> Samples:
        return self._loss if self._dual is None else self._dual

    def _parts(self) -> list[Samples]:
        return [part for part in (self._loss, self._dual, self._previous) if part is not None]

    @property
    def has_previous(self) -> bool:
        """Whether there are scores at the previous weights."""
        return self._previous is not None

    def check(self, name: str) -> None:
        """Each by itself, all of as many rows, and the previous scores of the shape of those that they go with."""
        self._loss.check(name)
        for called, part in (("dual_scores", self._dual), ("previous_scores", self._previous)):
            if part is None:
                continue
            part.check(name)
            if len(part) != len(self):
                raise InputError(
                    f"{called} of dual variable {name!r} must have a row for each of the {len(self)} rows of the "
                    f"scores, got {len(part)}"
                )
        moving, previous = self._moving, self._previous
        if isinstance(moving, DenseScores) and isinstance(previous, DenseScores):
            shape, got = tuple(moving.values.shape), tuple(previous.values.shape)
            if shape != got:
                raise InputError(
                    f"previous_scores of dual variable {name!r} must be those of the same samples, of the shape of the "
                    f"{moving.called} {shape}, got {got}"
                )

    def sides(self) -> tuple[Side, ...]:
        """ℓ of the samples that move ν, and of the loss's beside them."""
        self._in_loss = tuple(self._loss.sides())
        moving = self._in_loss if self._dual is None else tuple(self._dual.sides())
        self._before = None if self._previous is None else [side.log_mean for side in self._previous.sides()]
        self.must_be_finite = self._all_that_must_be_finite()
        return tuple(
            Side(
                side.log_mean,
                side.counts,
                None if self._before is None else self._before[i],
                None if self._dual is None else self._in_loss[i],
            )
            for i, side in enumerate(moving)
        )

    def _all_that_must_be_finite(self) -> Tensor | None:
        found = [wide(part.must_be_finite) for part in self._parts() if part.must_be_finite is not None]
        found += [before.masked_fill(before == -math.inf, 0.0) for before in self._before or []]
        return torch.cat([values.to(found[0].device) for values in found]) if found else None

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss's own."""
        return self._loss.loss(places)

    def terms(self) -> tuple[float, float]:
        """The loss's own."""
        return self._loss.terms()

    def moving(self, side: int) -> Tensor | None:
        """The loss's own."""
        return self._loss.moving(side)

    def bad_rows(self, side: int) -> Tensor | None:
        """Of any of the samples."""
        bad = self._in_loss[side].log_mean.isnan()
        if self._before is not None:
            before = self._before[side].to(bad.device)
            bad = bad | before.isnan() | (before == math.inf)
        for part in self._parts():
            if (rows := part.bad_rows(side)) is not None:
                bad = bad | rows.to(bad.device)
        return bad

    def dense(self) -> Samples:
        """From the scores themselves."""
        return SeparateSamples(self._loss.dense(), None if self._dual is None else self._dual.dense(), self._previous)

    def moments(self, side: int) -> Moments | None:
        """Of the samples that move ν."""
        return self._moving.moments(side)

    def scores(self, side: int) -> tuple[Tensor, Tensor | None]:
        """Of the samples that move ν."""
        return self._moving.scores(side)
