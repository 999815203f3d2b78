"""Sums over a window of the run, of one anchor, of few, or of many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scent_lightning.updates.step_size import Observed

__all__ = ["FEW_ANCHORS", "Window", "WindowSums"]

# Of so few anchors each may be seen many times in a window, and has its own objective over it.
FEW_ANCHORS = 1024


@dataclass(frozen=True)
class WindowSums:
    """What a window saw.

    Attributes:
        seen: rows of all steps.
        squares: Σ (ℓ − ν)² over the rows that had a ν.
        known: how many those are.
        nu: Σ of the new ν over the rows that had samples.
        log_mean: Σ ℓ over them.
        with_samples: how many those are.
        objective: mean over the anchors, if they are few, of the log-mean-exp of ℓ over the visits of each; else None.
    """

    seen: int
    squares: float
    known: float
    nu: float
    log_mean: float
    with_samples: float
    objective: float | None


class Window:
    """Adds up the steps of a window.

    Args:
        num_anchors: number of rows n of the table.
    """

    def __init__(self, num_anchors: int) -> None:
        self.num_anchors = num_anchors
        self.seen = 0
        # Σ (ℓ − ν)² and how many rows had a ν; Σ of the new ν, Σ ℓ and how many rows had samples.
        self.totals: Tensor | None = None
        # One anchor: log Σ e^ℓ, Σ ℓ, and the first two totals. Few: log Σ e^ℓ of each, and how often each was seen.
        self.log_sum, self.sum, self.squares, self.known = -math.inf, 0.0, 0.0, 0
        self.log_sums: Tensor | None = None
        self.counts: Tensor | None = None

    def fit_to(self, num_anchors: int) -> bool:
        """Keep what is kept for each anchor for another number of them; False where the window has to begin anew."""
        self.num_anchors = num_anchors
        if self.log_sums is None or self.counts is None:
            return not (self.seen and 1 < num_anchors <= FEW_ANCHORS)  # one anchor has sums of its own
        more = num_anchors - len(self.counts)
        if num_anchors > FEW_ANCHORS:
            self.log_sums = self.counts = None
        elif more:
            self.log_sums = torch.cat([self.log_sums, self.log_sums.new_full((more,), -math.inf)])
            self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        return True

    def sums(self) -> WindowSums:
        """What was seen so far."""
        objective = self._objective() if self.num_anchors <= FEW_ANCHORS else None
        if self.totals is None:
            return WindowSums(self.seen, self.squares, self.known, 0.0, self.sum, self.seen, objective)
        squares, known, nu, log_mean, with_samples = self.totals.tolist()
        return WindowSums(self.seen, squares, known, nu, log_mean, with_samples, objective)

    def _objective(self) -> float | None:
        if self.log_sums is None or self.counts is None:
            return self.log_sum - math.log(self.seen) if self.seen else None
        seen = self.counts > 0
        return (self.log_sums[seen] - self.counts[seen].double().log()).mean().item()

    def observe_one(self, log_mean: float, before: float | None) -> None:
        """Take in a step of the only anchor: ℓ, and the ν it had, None if it had none."""
        larger, smaller = max(self.log_sum, log_mean), min(self.log_sum, log_mean)
        self.log_sum = larger + math.log1p(math.exp(smaller - larger))
        self.sum += log_mean
        self.seen += 1
        if before is not None:
            self.squares += (log_mean - before) ** 2
            self.known += 1

    def observe(self, step: Observed) -> None:
        """Take in a step."""
        rows, log_mean, nu, before, visited, has_samples = step
        if self.num_anchors == 1:
            if len(rows) and (value := log_mean[0].item()) != -math.inf:
                self.observe_one(value, before[0].item() if visited[0].item() else None)
            return
        self.seen += len(rows)
        difference, count = log_mean - before, log_mean.new_full((), len(rows))
        sums = log_mean
        if has_samples is not None:
            difference, nu, sums = (each.masked_fill(~has_samples, 0.0) for each in (difference, nu, log_mean))
            visited, count = visited & has_samples, has_samples.sum()
        parts = [torch.dot(difference, difference), visited.sum(), nu.sum(dtype=sums.dtype), sums.sum(), count]
        if log_mean.device.type == "cpu":
            totals = torch.tensor([part.item() for part in parts], dtype=log_mean.dtype)
        else:  # no wait for the device
            totals = torch.stack([part.to(log_mean.dtype) for part in parts])
        self.totals = totals if self.totals is None else self.totals.to(totals.device) + totals
        if self.num_anchors <= FEW_ANCHORS:
            self._observe_each(rows, log_mean, has_samples)

    def _observe_each(self, rows: Tensor, log_mean: Tensor, has_samples: Tensor | None) -> None:
        if has_samples is not None:
            rows, log_mean = rows[has_samples], log_mean[has_samples]
        if self.log_sums is None or self.counts is None:
            self.log_sums = log_mean.new_full((self.num_anchors,), -math.inf)
            self.counts = torch.zeros(self.num_anchors, dtype=torch.int64, device=log_mean.device)
        self.log_sums, self.counts = self.log_sums.to(log_mean.device), self.counts.to(log_mean.device)
        # An index that repeats is one visit: its rows have the same ℓ.
        self.log_sums[rows] = torch.logaddexp(self.log_sums[rows], log_mean)
        self.counts[rows] = self.counts[rows] + 1

    STATE = ("seen", "log_sum", "sum", "squares", "known", "totals", "log_sums", "counts")

    def state(self) -> dict[str, Any]:
        """The state as plain data."""
        return {name: getattr(self, name) for name in self.STATE}

    def load(self, state: dict[str, Any]) -> None:
        """Take the state that :meth:`state` gave."""
        for name in self.STATE:
            value = state[name]
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)
