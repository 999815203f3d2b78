"""Which interactions are left out of training, for validation and test."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scent_lightning.errors import InputError

__all__ = ["LeaveOut", "left_out"]

LeaveOut = Literal["one", "query", "none"]
_LEAST = 3  # interactions of a query, of which one each is for validation and test


def left_out(
    queries: npt.NDArray[np.int64],
    time: npt.NDArray[np.float64] | None,
    how: LeaveOut,
    fractions: tuple[float, float],
    seed: int,
) -> npt.NDArray[Any]:
    """The split of each interaction: "train", "val" or "test", shape ``(n,)``.

    Args:
        queries: number of each interaction's query, shape ``(n,)``.
        time: of each interaction; None: there is none.
        how: "one": one interaction of each query that has three for test and one for validation, the last ones by
            ``time``, or random ones; "query": all interactions of some queries; "none": nothing.
        fractions: of the queries, for validation and test; of "query" alone.
        seed: of what is random.

    Raises:
        InputError: nothing is left for training, or for a split that is asked for.
    """
    generator = np.random.default_rng(seed)
    split = np.full(len(queries), "train", dtype=object)
    if how == "one":
        key = generator.random(len(queries)) if time is None else time
        order = np.lexsort((np.arange(len(queries)), key, queries))
        of, starts, counts = np.unique(queries[order], return_index=True, return_counts=True)
        many = counts >= _LEAST
        if not many.any():
            raise InputError(
                f"leave_out 'one' needs queries with at least {_LEAST} interactions, and the {len(of)} there are have "
                "fewer: give the splits, or set leave_out to 'query' or 'none'"
            )
        ends = (starts + counts)[many]
        split[order[ends - 1]], split[order[ends - 2]] = "test", "val"
    elif how == "query":
        of = np.unique(queries)
        generator.shuffle(of)
        sizes = [round(fraction * len(of)) for fraction in fractions]
        for name, size, fraction in zip(("val", "test"), sizes, fractions, strict=True):
            if fraction > 0 and size == 0:
                raise InputError(f"{name}_fraction {fraction} of {len(of)} queries leaves none")
        split[np.isin(queries, of[: sizes[0]])] = "val"
        split[np.isin(queries, of[sizes[0] : sum(sizes)])] = "test"
    return split
