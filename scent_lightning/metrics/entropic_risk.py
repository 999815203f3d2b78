"""The entropic risk of a set of losses, as a metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.validation import checked_number

__all__ = ["EntropicRisk"]


def log_sum_exp_over_processes(stacked: Tensor) -> Tensor:
    return torch.logsumexp(stacked, dim=0)


class EntropicRisk(Metric):
    r"""Entropic risk :math:`\tau \log \frac{1}{n} \sum_i \exp(\text{loss}_i / \tau)` over all rows of all batches.

    Exact across batches and processes: the state is a running log-sum-exp in float64, so nothing overflows. It is the
    worst-case mean loss under a KL penalty, :math:`\max_p \sum_i p_i\, \text{loss}_i - \tau\, KL(p, 1/n)`
    (Wei et al. 2026, KL-regularised distributionally robust optimisation).

    Args:
        tau: temperature, in the units of the loss, above 0. Small values look at the worst rows, large ones at the
            mean.

    Raises:
        InputError: ``tau`` is not a finite number above 0.

    Example:
        >>> metric = EntropicRisk(tau=1.0)
        >>> metric.update(torch.tensor([0.0, 1000.0]))
        >>> metric.update(torch.tensor([1000.0, 1000.0]))
        >>> round(metric.compute().item(), 4)
        999.7123
    """

    is_differentiable = True
    higher_is_better = False
    full_state_update = False
    log_sum_exp: Tensor
    count: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = checked_number("tau", tau, above=0)
        self.add_state(
            "log_sum_exp", torch.tensor(-math.inf, dtype=torch.float64), dist_reduce_fx=log_sum_exp_over_processes
        )
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Tensor) -> None:
        """Add rows.

        Args:
            losses: loss of each row, any shape and floating dtype.
        """
        if losses.numel() == 0:
            return
        batch = torch.logsumexp(losses.detach().double().flatten() / self.tau, dim=0)
        self.log_sum_exp = torch.logaddexp(self.log_sum_exp, batch)
        self.count = self.count + losses.numel()

    def compute(self) -> Tensor:
        """Entropic risk of all rows so far, a float64 scalar in the units of the loss; NaN if there were none."""
        if int(self.count) == 0:
            return torch.full_like(self.log_sum_exp, math.nan)
        return self.tau * (self.log_sum_exp - self.count.double().log())
