"""The softmax cross-entropy of an anchor from the mean exponential of some of its scores and its ν."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["softmax_cross_entropy", "softmax_cross_entropy_estimate"]

FURTHEST_BELOW = 1.0


def softmax_cross_entropy(log_mean: Tensor, num_classes: int, includes_target: bool = False) -> Tensor:
    r"""Softmax cross-entropy, :math:`\log(1 + (K - 1) e^{\ell})`.

    Args:
        log_mean: log-mean-exp ℓ of the scores against all other classes, any shape.
        num_classes: number of classes K.
        includes_target: ℓ has the own class in its sum, log(1 / (K − 1) + mean exp).

    Example:
        >>> import torch
        >>> softmax_cross_entropy(torch.zeros(1), num_classes=10).exp()
        tensor([10.])
    """
    log_sum = log_mean + math.log(num_classes - 1)
    return log_sum if includes_target else softplus(log_sum)


def softmax_cross_entropy_estimate(
    log_mean: Tensor, nu: Tensor, num_classes: int, includes_target: bool = False
) -> Tensor:
    r"""Estimate of the softmax cross-entropy from scores whose mean exponential is an unbiased one.

    .. math:: \left( 1 + (K - 1) e^{\ell} \right) e^{-v} + v - 1, \qquad v = \log(1 + (K - 1) e^{\nu})

    Its expectation over the samples is never below the cross-entropy, and equal to it where ν is the log of the true
    mean. The logarithm of the estimated mean would be below, by any factor where a sample is rarely there. A ν that is
    more than 1 below ℓ is taken to be ℓ − 1: one such anchor would else be all there is in the mean over many.

    Args:
        log_mean: log-mean-exp ℓ of the samples' scores, shape ``(B,)``.
        nu: ν of each anchor, shape ``(B,)``, that does not depend on these samples: as it was before the step.
        num_classes: number of classes K.
        includes_target: ℓ and ν have the own class in their sums.

    Example:
        >>> import torch
        >>> nu = torch.zeros(1)
        >>> softmax_cross_entropy_estimate(nu, nu, num_classes=10).exp()
        tensor([10.])
    """
    nu = torch.maximum(nu, log_mean - FURTHEST_BELOW)
    v = softmax_cross_entropy(nu, num_classes, includes_target)
    total = torch.exp(log_mean + math.log(num_classes - 1) - v)
    return (total if includes_target else total + torch.exp(-v)) + v - 1
