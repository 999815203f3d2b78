"""MSVR: a moving average of the inner function that follows the weights."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.errors import InputError
from scent_lightning.updates.schedules import Schedule
from scent_lightning.updates.sox import SOX
from scent_lightning.validation import checked_number

__all__ = ["MSVR"]


class MSVR(SOX):
    r"""Variance-reduced moving average of the inner function (Jiang et al. 2022, multi-block-single-probe estimator).

    SOX's average of e^ν, and how much the same samples changed in the last step of the weights:

    .. math:: e^\nu \leftarrow (1 - \gamma) e^{\nu} + \gamma e^{\ell} + \beta (e^{\ell} - e^{\ell'})

    with :math:`\ell'` the log-mean-exp of the batch's scores at the weights before the last optimiser step. So it needs
    those scores: the tasks work them out, which costs a second forward pass; elsewhere they are the argument
    ``previous_scores`` of :meth:`~scent_lightning.duals.DualVariableMixin.entropic_risk`. Where several batches make an
    optimiser step, an anchor gets the correction of a step once.

    The right side can be 0 or less, where ν would be no number; the analysis takes the inner function to be bounded
    below instead, and implementations clamp it. Here a correction leaves at least ``floor`` of the moving average
    :math:`(1 - \gamma) e^{\nu} + \gamma e^{\ell}`, a bound that goes with the size of the scores. No mean weight
    :math:`e^{\ell - \nu}` exceeds 1/(``gamma`` · ``floor``) so.

    Args:
        gamma: weight of the batch, in [0, 1].
        beta: weight of the correction, at least 0; 0 is SOX. For n anchors of which B are in a batch the analysis has
            (n − B)/(B (1 − γ)) + 1 − γ, which is 1 − γ for a single anchor.
        schedule: "constant" or "cosine". The cosine goes from 1 to ``gamma``, unless ``final`` is set.
        final: where a cosine schedule from ``gamma`` on ends, in [0, 1]; None: it goes from 1 to ``gamma``.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.
        floor: least share of the moving average that a correction leaves, in (0, 1].

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> scores, previous = torch.full((1, 4), 1.0), torch.full((1, 4), 0.5)
        >>> MSVR(gamma=0.5, beta=0.5).step(torch.zeros(1), scores, previous_scores=previous)
        tensor([0.8729])
    """

    def __init__(
        self,
        gamma: float,
        beta: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
        floor: float = 0.1,
    ) -> None:
        super().__init__(gamma, schedule, final, max_log_weight)
        self.beta = checked_number("beta", beta, least=0)
        self.floor = checked_number("floor", floor, above=0, most=1)

    def step_with_previous(  # noqa: D102
        self, nu: Tensor, log_mean: Tensor, previous: Tensor, progress: float = 0.0
    ) -> Tensor:
        return functional.msvr_step(nu, log_mean, previous, self._gamma_at(progress), self.beta, self.floor)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:
        """Raise InputError: the step needs the scores at the previous weights."""
        raise InputError(f"{self!r} needs the scores at the previous weights, too: call step with previous_scores")
