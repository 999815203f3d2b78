"""The tokenizer of captions: a model's of open_clip, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scent_lightning.data.images import first_line
from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module
from scent_lightning.words import listed

__all__ = ["Tokenizer", "load_tokenizer"]

Tokenizer = Callable[[list[str]], Tensor]
NAMED = 5  # models in a message


def load_tokenizer(tokenizer: Any, context_length: int | None) -> Tokenizer:
    """A function of a list of n captions that returns their token numbers, integers of shape ``(n, L)``.

    Args:
        tokenizer: a model's name for ``open_clip.get_tokenizer``, or such a function.
        context_length: tokens of a caption L, for a name; None takes that of the model.

    Raises:
        InputError: it cannot be had, or gives something else.
    """
    found: Tokenizer = tokenizer if callable(tokenizer) else _named(tokenizer, context_length)
    tokens: Any = found(["", "a"])
    integers = isinstance(tokens, Tensor) and not (tokens.is_floating_point() or tokens.is_complex())
    if not integers or tokens.ndim != 2 or len(tokens) != 2:
        raise InputError(
            "tokenizer must give integers of shape (n, L) for n captions, for 2 it gave "
            f"{tuple(tokens.shape) if isinstance(tokens, Tensor) else tokens!r}"
        )
    return found


def _named(name: Any, context_length: int | None) -> Tokenizer:
    open_clip = optional_module("open_clip", f"tokenizer {name!r}")
    if not isinstance(name, str):
        raise InputError(f"tokenizer must be a name or a function, got {name!r}")
    if ":" not in name and name not in open_clip.list_models():
        known = listed(open_clip.list_models(), NAMED)
        raise InputError(f"tokenizer {name!r} is not a model of open_clip; known are: {known}")
    try:
        tokenizer: Tokenizer = open_clip.get_tokenizer(name, context_length=context_length)
    except Exception as error:  # of whichever library the model takes its tokenizer from
        raise InputError(f"tokenizer {name!r} cannot be loaded: {first_line(error)}") from error
    return tokenizer
