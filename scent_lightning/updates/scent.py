"""SCENT: the stochastic proximal mirror descent step."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.errors import InputError
from scent_lightning.updates.auto import AutoStepSize
from scent_lightning.updates.inverse_sum import InverseSum
from scent_lightning.updates.schedules import Schedule, ScheduledUpdate, scheduled_log
from scent_lightning.updates.step_size import StepSizeRule
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["SCENT"]


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class SCENT(ScheduledUpdate):
    r"""SCENT's stochastic proximal mirror descent step (Wei et al. 2026).

    .. math:: \nu \leftarrow \nu + \log(1 + \alpha e^{\ell}) - \log(1 + \alpha e^{\nu})

    A moving average of :math:`e^\nu` whose factor, the effective γ = sigmoid(log α + ν), is small where ν is small.
    A good start is log α ≈ −ν* − c, with ν* the value ν settles at (watch it in TensorBoard) and c from 0 to 5. "auto"
    finds it during the run: :class:`~scent_lightning.updates.auto.AutoStepSize`.

    Args:
        log_alpha: natural logarithm of the step size α; from −60 to 60 in real use, any size is exact. "auto": the
            table finds it, by the progress of the run. Without a Trainer you have to tell it the progress. "1/S": the
            inverse of the sum of all e^ℓ of the anchor so far, so that ν is the logarithm of their mean:
            :class:`~scent_lightning.updates.inverse_sum.InverseSum`.
        schedule: "constant" (published) or "cosine", which takes α from exp(log_alpha) to exp(final). For a number
            alone.
        final: logarithm of α at the end of a cosine schedule; None means that α goes to 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); 1 to 5 where training is unstable,
            None as published. With "auto", None is 1 to 4, by how often an anchor was seen.
        alpha_multiplier: m, at least 0, of the effective γ = sigmoid(log α + m ν): 1 is SCENT, 0 is SOX with
            γ = sigmoid(log α), and what lies between goes from the one to the other. For a number alone.
        window: of "1/S": how many visits ν goes back at most, at least 2; None: all, for weights that do not move.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> update = SCENT(log_alpha=0.0)
        >>> update.step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.6201])
    """

    def __init__(
        self,
        log_alpha: float | Literal["auto", "1/S"] = "auto",
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
        alpha_multiplier: float = 1.0,
        window: int | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        self.log_alpha: float | str | Tensor = log_alpha
        if isinstance(log_alpha, str) and log_alpha not in ("auto", "1/S"):
            raise InputError(f'log_alpha must be a number, "auto" or "1/S", got {log_alpha!r}')
        if not isinstance(log_alpha, str):
            self.log_alpha = checked_number("log_alpha", log_alpha, infinite=True)
        self.window = checked_integer("window", window, least=2, or_none=True)
        if window is not None and log_alpha != "1/S":
            raise InputError(f'window is for log_alpha="1/S" alone, got {window!r} with log_alpha={log_alpha!r}')
        self.alpha_multiplier = checked_number("alpha_multiplier", alpha_multiplier, least=0)
        if isinstance(log_alpha, str) and alpha_multiplier != 1:
            raise InputError(
                f"alpha_multiplier needs a number for log_alpha, not {log_alpha!r}; got {alpha_multiplier!r}"
            )
        hint = " (it is the logarithm of the last step size)"
        self.final = checked_number("final", final, infinite=True, or_none=True, hint=hint)

    def step_size_rule(self, num_anchors: int) -> StepSizeRule | None:
        """The rule of "auto", or that of "1/S"."""
        if not isinstance(self.log_alpha, str):
            return None
        if self.log_alpha == "1/S":
            return InverseSum(num_anchors, self.window)
        return AutoStepSize(num_anchors, self.max_log_weight)

    def _log_alpha_at(self, progress: float) -> Any:
        if isinstance(self.log_alpha, str):
            raise InputError(
                f'log_alpha="{self.log_alpha}" is found by the table it belongs to: step by a DualVariable'
            )
        if isinstance(self.log_alpha, Tensor):
            return self.log_alpha
        return scheduled_log(self.schedule, self.log_alpha, -math.inf if self.final is None else self.final, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        log_alpha = self._log_alpha_at(progress)
        return functional.proximal_mirror_descent_step(nu, log_mean, log_alpha, self.alpha_multiplier)

    def step_of_one(self, nu: float, log_mean: float, progress: float = 0.0) -> float | None:  # noqa: D102
        log_alpha = self._log_alpha_at(progress)
        if self.alpha_multiplier != 1.0:
            return None
        if math.isinf(log_alpha):
            return log_mean if log_alpha > 0 else nu
        return nu + (_softplus(log_alpha + log_mean) - _softplus(log_alpha + nu))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        log_alpha = self._log_alpha_at(progress)
        return {} if isinstance(log_alpha, Tensor) else {"log_alpha": log_alpha}

    def statistics(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> dict[str, Tensor]:
        """Mean, smallest and largest effective γ = sigmoid(log α + ν) of the batch."""
        gamma = torch.sigmoid(self.alpha_multiplier * functional.wide(nu) + self._log_alpha_at(progress))
        return {
            "effective_gamma": gamma.mean(),
            "effective_gamma_min": gamma.amin(),
            "effective_gamma_max": gamma.amax(),
        }
