r"""The spread κ of an anchor's samples, and how many samples of equal size would tell as much of it.

.. math:: \kappa_i = \frac{\operatorname{mean}_j e^{2 S_{ij}}}{(\operatorname{mean}_j e^{S_{ij}})^2}
          = m_i \frac{\sum_j e^{2 S_{ij}}}{(\sum_j e^{S_{ij}})^2} \in [1, m_i]

is the second-order moment ratio of the paper (Wei et al. 2026, sections 4.2 and 4.3), taken over the samples of a step:
the error of ν grows with it. :math:`m_i / \kappa_i` is Kish's effective sample size: near 1, a single sample makes the
gradient, and a larger batch would help; near :math:`m_i`, all count alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.duals.samples import Moments
from scent_lightning.functional import repeats

__all__ = ["Kappa"]


class Kappa(NamedTuple):
    r"""Means over the different anchors of a step that have a sample; of all processes. NaN if there is none.

    Attributes:
        kappa: of :math:`\kappa_i`, a scalar.
        effective_samples: of :math:`m_i / \kappa_i`, a scalar.
    """

    kappa: Tensor
    effective_samples: Tensor

    @staticmethod
    def of(moments: Moments | None, rows: Tensor, counts: Tensor | int, distinct: bool) -> Kappa | None:
        """Those of a step; None where the moments are not known.

        Args:
            moments: of this process's rows.
            rows: dataset indices of the rows of all processes, shape ``(N,)``.
            counts: number of samples of each of them, shape ``(N,)``, or one number for all.
            distinct: whether none of the rows repeats.
        """
        if moments is None:
            return None
        if distributed.is_distributed():
            (log_mean, log_square), _ = distributed.gather(*moments)
        else:
            log_mean, log_square = moments
        log_mean, log_square = log_mean.to(rows.device), log_square.to(rows.device)
        log_mean, groups = repeats.merge(rows, log_mean, counts, distinct)
        log_square, _ = repeats.merge(rows, log_square, counts, distinct)
        number = torch.full_like(log_mean, counts) if isinstance(counts, int) else counts.to(log_mean.dtype)
        if groups is not None:
            number = torch.zeros_like(number).index_add(0, groups, number)[groups]
        kappa = torch.exp(log_square - 2 * log_mean)
        there = log_mean > -torch.inf
        share = repeats.row_weights(counts, groups, len(rows)).to(log_mean)
        share = torch.where(there, share, 0.0)
        share = share / share.sum()
        kappa = torch.where(there, kappa, 1.0)
        return Kappa((share * kappa).sum(), (share * number / kappa).sum())
