"""Write what ``predict`` gives to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from scent_lightning.errors import InputError

__all__ = ["PredictionWriter"]


class PredictionWriter(BasePredictionWriter):
    """Write the predictions of a run as a table, one row for each row of the data.

    A prediction step that returns a dictionary of tensors with one entry a row gives one column for each name; a
    two-dimensional tensor gives one column for each position, ``name_0``, ``name_1``, …. Where the data module has the
    names of a column's numbers (its method ``names_of``), the file has those. In a distributed run every process writes
    its own file.

    Args:
        path: a ``.csv`` or ``.parquet`` file; None is ``predictions.csv`` in the Trainer's log folder, which on the
            command line is that of the checkpoint's run.

    Raises:
        InputError: the path has another ending.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="epoch")
        if path is not None and Path(path).suffix not in (".csv", ".parquet"):
            raise InputError(f"path of the predictions must end in .csv or .parquet, got {path!r}")
        self.path = path
        self.written: Path | None = None

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write the table."""
        path = Path(self.path) if self.path else Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        if trainer.world_size > 1:
            path = path.with_stem(f"{path.stem}_rank{trainer.global_rank}")
        names_of = getattr(trainer.datamodule, "names_of", lambda column: None)  # type: ignore[attr-defined]
        columns: dict[str, list[Tensor]] = {}
        names: dict[str, Any] = {}
        for batch in predictions:
            if not isinstance(batch, dict):
                return
            for name, value in batch.items():
                parts = {name: value} if value.ndim == 1 else {f"{name}_{i}": v for i, v in enumerate(value.unbind(1))}
                of_name = names_of(name)
                for column, part in parts.items():
                    names[column] = of_name
                    columns.setdefault(column, []).append(part.detach().cpu())
        table: dict[str, npt.NDArray[Any]] = {}
        for name, parts_of_column in columns.items():
            joined = torch.cat(parts_of_column)
            table[name] = (joined.float() if joined.dtype in (torch.bfloat16, torch.float16) else joined).numpy()
            if names[name] is not None:
                table[name] = _named(table[name], names[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(table)
        if path.suffix == ".csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path, index=False)
        self.written = path


def _named(numbers: npt.NDArray[np.int64], names: Sequence[str]) -> npt.NDArray[Any]:
    """Names of numbers; none of one below 0."""
    different, place = np.unique(numbers, return_inverse=True)
    return np.array(["" if number < 0 else names[number] for number in different.tolist()], dtype=object)[place]
