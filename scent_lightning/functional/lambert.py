r"""Lambert's function W, the solution of :math:`W e^W = x`, on [0, ∞], and the scale of a proximal step, W(a)/a."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from scent_lightning.errors import InputError

__all__ = ["lambert_w", "lambert_w_of_log", "proximal_scale"]

# The logarithm of an argument from which on W is its logarithm, to all digits.
_HUGE = 1e17

_Value = TypeVar("_Value", float, Tensor)


def lambert_w(x: Tensor, from_log: bool = False) -> Tensor:
    r"""The principal branch of Lambert's function, :math:`W(x) e^{W(x)} = x`, on [0, ∞].

    Two steps of the iteration of Fritsch, Shafer and Crowley (1973) in log x, which is of fourth order. The relative
    error is below 10⁻¹² in float64 and below 10⁻⁵ in float32, from the smallest number to e^(10⁶) and beyond.

    Args:
        x: of any shape, floating, at least 0; with ``from_log`` any numbers.
        from_log: whether ``x`` is the logarithm of the argument, which may be far out of the range of floats.

    Returns:
        W, in the shape of ``x``, float64 or float32 as ``x`` (float32 for half precision); NaN where the argument is
        below 0 or NaN.

    Raises:
        InputError: ``x`` is no floating tensor.

    Example:
        >>> lambert_w(torch.tensor([0.0, math.e, math.inf], dtype=torch.float64))
        tensor([0., 1., inf], dtype=torch.float64)
        >>> lambert_w(torch.tensor([1e6], dtype=torch.float64), from_log=True).round()
        tensor([999986.], dtype=torch.float64)
    """
    x = _floats(x)
    log_x = x if from_log else x.log()
    # Where the argument is at hand, log(x/w) of two numbers of one size is exact where log x − log w is not.
    small = log_x < 1
    w = first = torch.where(small, log_x.exp().log1p(), log_x - log_x.clamp(min=1, max=_HUGE).log())
    if from_log:
        w = _refined(_refined(w, lambda w: log_x - w.log()), lambda w: log_x - w.log())
    else:
        w = _refined(_refined(w, lambda w: (x / w).log()), lambda w: (x / w).log())
    # Below the least normal number 0/0 is no number; above _HUGE the first guess is exact, and its square may overflow.
    w = torch.where(log_x < math.log(torch.finfo(x.dtype).tiny), log_x.exp() if from_log else x, w)
    return torch.where(log_x > _HUGE, first, w)


def lambert_w_of_log(log_x: float) -> float:
    """:func:`lambert_w` of one number by its logarithm, without tensors: a twentieth of the time.

    Args:
        log_x: the logarithm of the argument, −∞ for 0.

    Example:
        >>> lambert_w_of_log(1.0)
        1.0
    """
    if log_x < -700.0:
        return math.exp(log_x)
    if not log_x <= _HUGE:
        return log_x
    w = math.log1p(math.exp(log_x)) if log_x < 1 else log_x - math.log(log_x)
    return _refined(_refined(w, lambda w: log_x - math.log(w)), lambda w: log_x - math.log(w))


def _refined(w: _Value, log_ratio: Callable[[_Value], _Value]) -> _Value:
    """A step towards the solution; ``log_ratio`` gives log(x/w)."""
    z = log_ratio(w) - w
    q = 2 * (1 + w) * (1 + w + 2 * z / 3)
    return w * (1 + z / (1 + w) * (q - z) / (q - 2 * z))


def proximal_scale(a: Tensor, from_log: bool = False) -> Tensor:
    r"""W(a)/a: what a proximal step for an exponential multiplies a gradient step by.

    Let :math:`cE` be an exponential part of a loss, g its gradient and η a learning rate. With log E linearised, the
    minimum of :math:`c E\, e^{\langle g, \Delta\rangle/(cE)} + \|\Delta\|^2/(2\eta)` is at

    .. math:: \Delta = -\eta \frac{W(a)}{a} g, \qquad a = \frac{\eta \|g\|^2}{cE}

    since :math:`\Delta = -t g` has :math:`t = \eta e^{-ta/\eta}`. It is gradient descent as a → 0, and lowers log E by
    W(a) ≤ log(1 + a) in that model however large η is: a prox-linear step (Duchi and Ruan 2018, Asi and Duchi 2019)
    that keeps the outer exponential.

    Args:
        a: of any shape, floating, at least 0; with ``from_log`` any numbers.
        from_log: whether ``a`` is the logarithm of that.

    Returns:
        :math:`W(a)/a = e^{-W(a)}`, in (0, 1], in the shape of ``a`` and the dtype of :func:`lambert_w`.

    Raises:
        InputError: ``a`` is no floating tensor.

    Example:
        >>> proximal_scale(torch.tensor([0.0, 1e-3, math.e], dtype=torch.float64))
        tensor([1.0000, 0.9990, 0.3679], dtype=torch.float64)
    """
    return (-lambert_w(a, from_log)).exp()


def _floats(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the argument of Lambert's function must be a floating tensor, got {got}")
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
