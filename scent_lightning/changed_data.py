"""Whether training may be resumed from a checkpoint with training rows that have changed."""

from __future__ import annotations

from typing import Literal

from scent_lightning.errors import InputError

__all__ = ["Change", "check_change"]

Change = Literal["none", "appended", "replaced"]


def check_change(change: Change, allowed: str) -> None:
    """Raise InputError unless training may go on with rows that have changed so.

    Args:
        change: what became of the rows.
        allowed: ``if_changed_data``.
    """
    if change == "replaced" and allowed != "reset":
        grow = ", and not only appended" if allowed == "grow" else ""
        raise InputError(
            f"training cannot continue: the training rows are others than the checkpoint's{grow}, and ν belongs to "
            "those; train on the data set of the checkpoint, or set if_changed_data (--if_changed_data) to "
            '"reset" to start every ν anew'
        )
    if change == "appended" and allowed == "error":
        raise InputError(
            "training cannot continue: rows were appended to the checkpoint's training rows; train on the data set of "
            'the checkpoint, or set if_changed_data (--if_changed_data) to "grow" to continue with more rows, or to '
            '"reset" to start every ν anew'
        )
