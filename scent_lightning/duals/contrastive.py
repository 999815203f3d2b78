"""The two sides of a contrastive batch: images as anchors and texts as anchors, from one product of all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.duals.samples import DenseScores, Moments, Place, Samples, Side
from scent_lightning.errors import InputError
from scent_lightning.functional import (
    Everyone,
    contrastive_log_means,
    contrastive_log_moments,
    contrastive_loss,
    contrastive_scores,
)

__all__ = ["ContrastiveSamples"]


class ContrastiveSamples(Samples):
    r"""Pairs of embeddings, each compared with the others of the batch; the loss of CLIP training, for two tables.

    The scores, the loss and where they come from: :mod:`scent_lightning.functional.contrastive`. In a distributed run
    the others are the pairs of all processes.

    Args:
        image: normalised embeddings, shape ``(B, D)``.
        text: those of their texts, shape ``(B, D)``.
        tau: temperature, a number or a scalar tensor, above 0.
        rho: ρ, how much a high temperature costs.
        epsilon: ε inside the logarithm, at least 0; not for an update that needs the scores.
        chunk: rows of the matrix of pairs that exist at a time; None keeps all B.
        group: number of each pair's group, integers, shape ``(B,)``: pairs of one group, as the captions of an image,
            are not compared with each other, on whatever process they are. None: each pair is a group.
        fused: make the matrix of pairs tile by tile, in two Triton kernels, and keep none of it: for a GPU, without
            ``chunk``. An update that needs the scores has the whole matrix nevertheless.

    Raises:
        InputError: in :meth:`check`: not as many images as texts, or groups that do not fit; in :meth:`sides`: there is
            but one pair, or ``fused`` is not possible (no GPU, no Triton, float64, or ``chunk``).

    Example:
        >>> import torch
        >>> from scent_lightning.duals import BSGD, ContrastiveSamples, DualVariableMixin
        >>> class Pairs(DualVariableMixin):
        ...     def __init__(self):
        ...         super().__init__()
        ...         for name in ("image", "text"):
        ...             self.add_dual(name, 10, BSGD())
        >>> e = torch.eye(2)
        >>> samples = ContrastiveSamples(e, e, tau=0.5)
        >>> Pairs().entropic_risk(("image", "text"), samples, torch.tensor([3, 7]))  # 0.5 * (-2 - 2)
        tensor(-2.)
    """

    def __init__(
        self,
        image: Tensor,
        text: Tensor,
        tau: Tensor | float,
        rho: float = 0.0,
        epsilon: float = 0.0,
        chunk: int | None = None,
        group: Tensor | None = None,
        fused: bool = False,
    ) -> None:
        self.image = image
        self.text = text
        self.tau = tau
        self.rho = rho
        self.epsilon = epsilon
        self.chunk = chunk
        self.group = group
        self.fused = fused
        self._everyone: Everyone | None = None

    def __len__(self) -> int:
        return len(self.image)

    def check(self, name: str) -> None:
        """As many images as texts."""
        if self.image.shape != self.text.shape:
            shapes = f"{tuple(self.image.shape)} and {tuple(self.text.shape)}"
            raise InputError(f"images and texts must be pairs: got embeddings of shapes {shapes}")
        if (group := self.group) is not None and (
            group.shape != self.image.shape[:1] or group.is_floating_point() or group.dtype == torch.bool
        ):
            raise InputError(
                f"group must be integers of shape ({len(self.image)},), one for each pair, got {group.dtype} of shape "
                f"{tuple(group.shape)}"
            )

    def _gather(self) -> Everyone | None:
        if not distributed.is_distributed():
            return None
        with torch.enable_grad():
            images, start = distributed.gather_with_gradient(self.image)
            texts, _ = distributed.gather_with_gradient(self.text)
        group = None if self.group is None else distributed.of_all_processes(self.group)
        return Everyone(images, texts, start, distributed.processes(), group)

    def sides(self) -> tuple[Side, Side]:
        """ℓ of the images and of the texts."""
        self._everyone = self._gather()
        self._means = contrastive_log_means(
            self.image, self.text, self.tau, self.epsilon, self._everyone, self.chunk, self.group, self.fused
        )
        negatives = self._means.negatives
        return Side(self._means.image, negatives), Side(self._means.text, negatives)

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """τ times the mean objectives of both sides, and 2τρ."""
        image, text = places
        loss, *objectives = contrastive_loss(
            self.image, self.text, self.tau, self._means, image.nu, text.nu, self.rho, self.epsilon, self._everyone
        )
        return loss, (objectives[0], objectives[1])

    def terms(self) -> tuple[float, float]:
        """τ and 2ρ."""
        return float(self.tau), 2 * self.rho

    def moments(self, side: int) -> Moments:
        """From the exponentials of all pairs; with ``chunk`` these are worked out again."""
        return Moments(
            *contrastive_log_moments(self.image, self.text, self.tau, self._means, self._everyone, of_text=bool(side))
        )

    def dense(self) -> Samples:
        """Both matrices of scores."""
        return _ContrastiveScores(
            *contrastive_scores(self.image, self.text, self.tau, self._gather(), self.group), self
        )


class _ContrastiveScores(Samples):
    """The scores themselves, for an update that needs them: an ordinary graph of several B × N matrices."""

    def __init__(self, by_image: Tensor, by_text: Tensor, mask: Tensor, pairs: ContrastiveSamples) -> None:
        self._sides = (DenseScores(by_image, mask), DenseScores(by_text, mask))
        self._tau, self._rho = pairs.tau, pairs.rho

    def __len__(self) -> int:
        return len(self._sides[0])

    def sides(self) -> tuple[Side, ...]:
        return tuple(side for each in self._sides for side in each.sides())

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, tuple[Tensor, ...]]:
        found = [side.loss([place]) for side, place in zip(self._sides, places, strict=True)]
        risk = found[0][0] + found[1][0] + 2 * self._rho
        return self._tau * risk, tuple(objective for _, (objective,) in found)

    def moments(self, side: int) -> Moments | None:
        return self._sides[side].moments(0)

    def bad_rows(self, side: int) -> Tensor | None:
        return self._sides[side].bad_rows(0)

    def dense(self) -> Samples:
        return self

    def scores(self, side: int) -> tuple[Tensor, Tensor | None]:
        return self._sides[side].scores(0)
