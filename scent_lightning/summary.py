"""What a fit has read: said once at its start, on the screen and in the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info

__all__ = ["announce"]

TAG = "data"  # of the text in the log


def announce(trainer: L.Trainer, anchors: Mapping[str, int], more: Mapping[str, str] | None = None) -> None:
    """Say what the data module has read, and for how many anchors there are dual variables.

    Rank 0 says it, by Lightning's logging, and in the log of each logger that takes text, as TensorBoard's does, under
    "data". What was read is what the data module's method ``data_summary`` says, where it has one: words by name, such
    as ``{"training": "442 rows"}``.

    Args:
        trainer: at the start of its fit.
        anchors: number of anchors of each dual variable by its name.
        more: further words by name.
    """
    if not trainer.is_global_zero:
        return
    datamodule: Any = getattr(trainer, "datamodule", None)
    said: dict[str, str] = dict(datamodule.data_summary()) if hasattr(datamodule, "data_summary") else {}
    if anchors:
        said["anchors"] = ", ".join(f"{count:,} ({name})" for name, count in anchors.items())
    said |= more or {}
    if not said:
        return
    title = "Data" if datamodule is None else f"Data of {type(datamodule).__name__}"
    rank_zero_info("\n  ".join([f"{title}:", *(f"{name}: {words}" for name, words in said.items())]))
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {_cell(words)} |" for name, words in said.items())])
    for logger in trainer.loggers:
        add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
        if add_text is not None:
            add_text(TAG, table, trainer.global_step)


def _cell(words: str) -> str:
    """Words as a cell of a table in Markdown shows them."""
    for mark in "\\|*_`<":
        words = words.replace(mark, f"\\{mark}")
    return words.replace("\n", " ")
