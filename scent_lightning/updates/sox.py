"""SOX, SCGD: a moving average of the inner function."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.schedules import Schedule, ScheduledUpdate, scheduled
from scent_lightning.validation import checked_number

__all__ = ["SOX"]


class SOX(ScheduledUpdate):
    r"""Moving average of the inner function (Wang & Yang 2022; FastCLIP's update; SCGD where there is one anchor).

    .. math:: \nu \leftarrow \log((1 - \gamma) e^{\nu} + \gamma e^{\ell})

    Args:
        gamma: weight of the batch, in [0, 1]; 1 is BSGD, 0 leaves ν alone.
        schedule: "constant" or "cosine". The cosine goes from 1 to ``gamma``, as published, unless ``final`` is set.
        final: where a cosine schedule from ``gamma`` on ends, in [0, 1]; None: it goes from 1 to ``gamma``.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> SOX(gamma=0.5).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.6201])
    """

    def __init__(
        self,
        gamma: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        self.gamma = checked_number("gamma", gamma, least=0, most=1)
        self.final = checked_number("final", final, least=0, most=1, or_none=True)

    def _gamma_at(self, progress: float) -> float:
        start, end = (1.0, self.gamma) if self.final is None else (self.gamma, self.final)
        return self.gamma if self.schedule == "constant" else scheduled(self.schedule, start, end, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.sox_step(nu, log_mean, self._gamma_at(progress))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"gamma": self._gamma_at(progress)}
