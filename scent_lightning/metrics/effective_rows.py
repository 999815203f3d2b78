"""How many rows carry the entropic risk, as a metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.metrics.entropic_risk import log_sum_exp_over_processes
from scent_lightning.validation import checked_number

__all__ = ["EffectiveRows"]


class EffectiveRows(Metric):
    r"""Effective number of rows :math:`1/\sum_i p_i^2` of the worst-case weights over all rows of all batches.

    The worst-case weights are :math:`p_i \propto \exp(\text{loss}_i / \tau)`; see
    :func:`~scent_lightning.functional.effective_rows`. Near 1, a single row is all that the objective looks at. Exact
    across batches and processes: the state is two running log-sum-exps in float64.

    Args:
        tau: temperature, in the units of the loss, above 0.

    Raises:
        InputError: ``tau`` is not a finite number above 0.

    Example:
        >>> metric = EffectiveRows(tau=1.0)
        >>> metric.update(torch.tensor([0.0, 500.0]))
        >>> metric.update(torch.tensor([500.0]))
        >>> round(metric.compute().item(), 6)
        2.0
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    log_sum: Tensor
    log_sum_of_squares: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = checked_number("tau", tau, above=0)
        for name in ("log_sum", "log_sum_of_squares"):
            empty = torch.tensor(-math.inf, dtype=torch.float64)
            self.add_state(name, empty, dist_reduce_fx=log_sum_exp_over_processes)

    def update(self, losses: Tensor) -> None:
        """Add rows.

        Args:
            losses: loss of each row, any shape and floating dtype.
        """
        if losses.numel() == 0:
            return
        scores = losses.detach().double().flatten() / self.tau
        self.log_sum = torch.logaddexp(self.log_sum, torch.logsumexp(scores, dim=0))
        self.log_sum_of_squares = torch.logaddexp(self.log_sum_of_squares, torch.logsumexp(2 * scores, dim=0))

    def compute(self) -> Tensor:
        """Effective number of all rows so far, a float64 scalar of at least 1; NaN if there were none."""
        return torch.exp(2 * self.log_sum - self.log_sum_of_squares)
