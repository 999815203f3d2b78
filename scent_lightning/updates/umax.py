"""U-max: ASGD with a reset."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.asgd import ASGD
from scent_lightning.updates.schedules import Schedule
from scent_lightning.validation import checked_choice, checked_number

__all__ = ["UMax"]


class UMax(ASGD):
    r"""U-max (Fagan & Iyengar 2018): the ASGD step, reset to ℓ where ν falls more than δ below ℓ.

    Args:
        alpha: step size, above 0.
        delta: how far below ℓ ν may lie before it is reset to ℓ, at least 0.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.
        compare: which ν is compared with ℓ − δ: "new", the result of the step, or "old", the ν before it. The "old"
            comparison also prevents the step from overshooting where ν lies far below ℓ, and is the one that comes
            near the figures published for robust regression.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> UMax(alpha=0.5, delta=1.0).step(torch.zeros(1), torch.full((1, 4), -1.0))
        tensor([-0.3161])
    """

    def __init__(
        self,
        alpha: float,
        delta: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
        compare: Literal["new", "old"] = "new",
    ) -> None:
        super().__init__(alpha, schedule, final, max_log_weight)
        self.compare = checked_choice("compare", compare, ("new", "old"))
        self.delta = checked_number("delta", delta, least=0, infinite=True)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.umax_step(nu, log_mean, self._alpha_at(progress), self.delta, self.compare)
