"""Checks of arguments, each with one message: the name of the argument, what is allowed, and what came."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, overload

from scent_lightning.errors import InputError

__all__ = ["checked_choice", "checked_integer", "checked_number"]


def checked_integer(
    name: str, value: Any, least: int = 1, most: int | None = None, or_none: bool = False, hint: str = ""
) -> Any:
    """Return ``value`` if it is an integer (and no bool) from ``least`` to ``most``.

    Args:
        name: of the argument, as the message calls it.
        value: what came.
        least: smallest value allowed.
        most: largest value allowed; None: there is none.
        or_none: whether None is allowed too.
        hint: what the message ends with.

    Raises:
        InputError: it is not.

    Example:
        >>> checked_integer("batch_size", 0)
        Traceback (most recent call last):
            ...
        scent_lightning.errors.InputError: batch_size must be an integer of at least 1, got 0
    """
    if or_none and value is None:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most):
        return value
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise InputError(f"{name} must be {'None or ' if or_none else ''}{allowed}, got {value!r}{hint}")


@overload
def checked_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    hint: str = "",
) -> float: ...


@overload
def checked_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    or_none: bool,
    hint: str = "",
) -> float | None: ...


def checked_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    or_none: bool = False,
    hint: str = "",
) -> float | None:
    """Return ``value`` as a float if it is a finite number (and no bool) within the bounds.

    Args:
        name: of the argument, as the message calls it.
        value: what came.
        least: smallest value allowed.
        above: a bound that is not allowed itself.
        most: largest value allowed.
        below: a bound that is not allowed itself.
        infinite: whether ±∞ is allowed too, within the bounds.
        or_none: whether None is allowed too.
        hint: what the message ends with.

    Raises:
        InputError: it is not.

    Example:
        >>> checked_number("max_fpr", 1.5, above=0, most=1)
        Traceback (most recent call last):
            ...
        scent_lightning.errors.InputError: max_fpr must be a number in (0, 1], got 1.5
    """
    if or_none and value is None:
        return None
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (not math.isnan(value) if infinite else math.isfinite(value))
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    ):
        return float(value)
    low, high = (above if least is None else least), (below if most is None else most)
    if low is not None and high is not None:
        allowed = f"a number in {'(' if least is None else '['}{low:g}, {high:g}{')' if most is None else ']'}"
    else:
        words = (("of at least", least), ("above", above), ("at most", most), ("below", below))
        bounds = "".join(f" {word} {bound:g}" for word, bound in words if bound is not None)
        allowed = f"a {'' if infinite else 'finite '}number{bounds}"
    raise InputError(f"{name} must be {'None or ' if or_none else ''}{allowed}, got {value!r}{hint}")


def checked_choice(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Return ``value`` if it is one of ``allowed``.

    Raises:
        InputError: it is not; the message lists what is allowed.

    Example:
        >>> checked_choice("schedule", "linear", ["constant", "cosine"])
        Traceback (most recent call last):
            ...
        scent_lightning.errors.InputError: schedule must be one of constant, cosine, got 'linear'
    """
    if not isinstance(value, str | int) or value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value
