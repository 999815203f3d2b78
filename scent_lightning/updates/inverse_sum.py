r"""SCENT's step size α = 1/S: ν is the logarithm of the mean of all :math:`e^\ell` so far.

With :math:`S_{t-1} = \sum_{k < t} e^{\ell_k}` over the visits of an anchor, :math:`\alpha_t = 1/S_{t-1}` makes SCENT's
effective γ, :math:`\alpha_t e^{\nu_{t-1}} / (1 + \alpha_t e^{\nu_{t-1}})`, equal to 1/t: the scheme that is optimal for
fixed weights, with an error of O(κ/T) (Wei et al. 2026, appendix on the analysis of the SPMD update). Weights that move
make old samples worthless; a window keeps γ from falling below the inverse of its length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.updates.step_size import Observed, StepSizeRule

__all__ = ["InverseSum"]


class InverseSum(StepSizeRule):
    """Counts how often each anchor was visited: 4 bytes an anchor beside the table's 5.

    Args:
        num_anchors: number of rows n of the table.
        window: how many visits the average goes back at most; None: all.

    Raises:
        InputError: in training: the table was loaded from a checkpoint without these counts.
    """

    needs_progress = False

    def __init__(self, num_anchors: int, window: int | None = None) -> None:
        self.window = window
        super().__init__(num_anchors)

    def reset(self) -> None:
        """Begin anew."""
        self.visits = torch.zeros(self.num_anchors, dtype=torch.int32)
        self.is_known = True

    def grow(self, num_anchors: int) -> None:
        """Go on with a table that has more anchors now, which were never visited."""
        more = num_anchors - self.num_anchors
        self.visits = torch.cat([self.visits, self.visits.new_zeros(more)])
        super().grow(num_anchors)

    def observe(self, step: Observed) -> None:
        """Count a visit of each anchor that had a sample."""
        rows = step.rows if step.has_samples is None else step.rows[step.has_samples]
        # An index that repeats is one visit, and each of its rows writes the same number.
        self.visits[rows] = self.visits[rows] + 1

    def arguments(self, progress: float, rows: Tensor | None = None) -> dict[str, Any]:
        """The logit of γ = 1/t of each row."""
        if not self.is_known:
            raise InputError(
                'log_alpha="1/S" needs to know how often each anchor was visited, and the checkpoint does not say so: '
                'train from the start, or with if_changed_data "reset" (--if_changed_data reset)'
            )
        if rows is None:
            rows = torch.arange(0)
        if self.visits.device != rows.device:
            self.visits = self.visits.to(rows.device)
        visits = self.visits[rows]
        if self.window is not None:
            visits = visits.clamp(max=self.window - 1)
        return {"log_alpha": -visits.double().log(), "alpha_multiplier": 0.0, "schedule": "constant"}

    def adopt(self, visited: Tensor) -> None:
        """Anchors that have a ν were visited, nobody knows how often."""
        self.reset()
        self.is_known = not bool(visited.any())

    def get_extra_state(self) -> dict[str, Any]:
        """The counts."""
        return {"visits": self.visits}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the counts."""
        self.visits = state["visits"].clone()
        self.is_known = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, dict) and isinstance(state.get("visits"), Tensor):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            if len(self.visits) < self.num_anchors:  # rows that were appended
                old, self.num_anchors = self.num_anchors, len(self.visits)
                self.grow(old)
            return
        state_dict.pop(f"{prefix}_extra_state", None)
