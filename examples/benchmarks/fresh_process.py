"""Measurements of memory in processes of their own: shared by this folder's scripts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_a_process(work: Callable[Arguments, Result], *arguments: Arguments.args, **names: Arguments.kwargs) -> Result:
    """What ``work(*arguments)`` gives in a process that has only imported what this one has.

    It is a fork of this one, which spares it the import of torch and Lightning. Call it before this process computes:
    a fork has none of the threads that computing starts.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *arguments, **names).result()
