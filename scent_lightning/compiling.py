"""What ``torch.compile`` is kept from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Run a function as it is where it is called from compiled code; otherwise it costs half a microsecond.

    What depends on the numbers of a step (the table, the Trainer's counts) would be compiled anew at each of them.
    """
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
