"""Write the vectors of queries and items, for a search outside of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module

__all__ = ["VectorExport"]


class VectorExport(L.Callback):
    """Write the vectors of all items, and of the queries that are predicted, in a run of ``predict``.

    ``items.npy`` and ``queries.npy`` are float32 of shape ``(K, D)`` and ``(n, D)``; a query's score of an item is the
    product of their vectors. Where the data module has names, ``items.txt`` and ``queries.txt`` have one a line, in the
    same order. In a distributed run every process writes the queries that it has predicted, ``queries_rank1.npy`` and
    so on.

    Args:
        folder: where to write; it is made if need be.
        faiss_index: write ``items.faiss`` as well, an index of the items by inner product: FAISS's name of its kind,
            such as "Flat" (exact) or "HNSW32"; None writes none.

    Raises:
        InputError: an index is asked for and FAISS is not installed or does not know its kind; in a run, the module is
            of another task than retrieval.
    """

    def __init__(self, folder: str, faiss_index: str | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.faiss_index = faiss_index
        if faiss_index is not None:
            optional_module("faiss", "faiss_index")
        self._vectors: list[Tensor] = []
        self._queries: list[Tensor] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the module before anything is predicted."""
        if not hasattr(pl_module, "item_chunks"):
            raise InputError(
                f"VectorExport needs a task with item vectors, such as RetrievalTask, got {type(pl_module).__name__}"
            )
        self._vectors, self._queries = [], []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the vectors of the batch's queries."""
        self._vectors.append(pl_module(batch[0]).float().cpu())
        self._queries.append(batch[-1].cpu())

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names_of: Callable[[str], Any] = getattr(trainer.datamodule, "names_of", lambda column: None)  # type: ignore[attr-defined]
        rank = f"_rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        numbers = torch.cat(self._queries).tolist() if self._queries else []
        self._write(f"queries{rank}", self._vectors, names_of("query"), numbers)
        self._vectors, self._queries = [], []
        if trainer.is_global_zero:
            with torch.inference_mode():
                chunks: Any = pl_module.item_chunks()  # type: ignore[operator]
                parts = [vectors.float().cpu() for _, vectors in chunks]
            vectors = self._write("items", parts, names_of("item"), range(sum(map(len, parts))))
            if self.faiss_index is not None:
                self._write_index(vectors)

    def _write(self, name: str, parts: list[Tensor], names: Any, numbers: Iterable[int]) -> npt.NDArray[np.float32]:
        vectors = torch.cat(parts).numpy() if parts else np.zeros((0, 0), np.float32)
        np.save(self.folder / f"{name}.npy", vectors)
        if names is not None:
            lines = "".join(f"{' '.join(names[number].splitlines())}\n" for number in numbers)
            (self.folder / f"{name}.txt").write_text(lines, encoding="utf-8", errors="surrogatepass")
        return vectors

    def _write_index(self, vectors: npt.NDArray[np.float32]) -> None:
        faiss = optional_module("faiss", "faiss_index")
        try:
            index = faiss.index_factory(vectors.shape[1], self.faiss_index, faiss.METRIC_INNER_PRODUCT)
            index.train(vectors)
            index.add(vectors)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(f"faiss_index {self.faiss_index!r} cannot be built: {reason}") from error
        faiss.write_index(index, str(self.folder / "items.faiss"))
