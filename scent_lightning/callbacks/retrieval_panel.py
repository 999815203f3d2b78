"""Show what a CLIP model retrieves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from scent_lightning.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RetrievalPanel", "draw_retrievals"]


class RetrievalPanel(L.Callback):
    """A picture of a few captions with the images that a model finds for them, after every validation.

    ``validation_step`` must return a dictionary with "image" and "text", normalised embeddings of shape ``(B, D)``, and
    the batch must begin with its images, ``(B, 3, H, W)``. The captions are those of the data module,
    ``captions("val")``, at the batch's "index"; without them the row's number stands there. The first ``queries`` pairs
    of the split are the queries, and all pairs of the first ``items`` what is searched. It goes to every TensorBoard
    logger as ``val/retrieval``. In a distributed run the first process shows its own pairs.

    Args:
        queries: number of captions, a row each.
        top: number of images found for each.
        items: images that are kept and searched.

    Raises:
        InputError: an argument is not a positive integer, or the step returns something else.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[RetrievalPanel(queries=4)], logger=False, accelerator="cpu")
    """

    def __init__(self, queries: int = 8, top: int = 5, items: int = 512) -> None:
        super().__init__()
        for name, value in (("queries", queries), ("top", top), ("items", items)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a positive integer, got {value!r}")
        self.queries = queries
        self.top = top
        self.items = items
        self._parts: list[tuple[Tensor, ...]] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start with no pairs."""
        self._parts = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first pairs."""
        if trainer.sanity_checking or not trainer.is_global_zero or not _writers(trainer):
            return
        missing = self.items - sum(len(part[0]) for part in self._parts)
        if missing <= 0:
            return
        if not isinstance(outputs, dict) or not {"image", "text", "index"} <= set(outputs):
            raise InputError(
                "RetrievalPanel needs validation_step to return a dict with the tensors 'image', 'text' and 'index', "
                f"got {type(outputs).__name__}"
            )
        parts = (batch[0], outputs["image"], outputs["text"], outputs["index"])
        self._parts.append(tuple(part[:missing].detach().float().cpu() for part in parts))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw and log the picture."""
        if not self._parts:
            return
        pictures, images, texts, index = (torch.cat(column) for column in zip(*self._parts, strict=True))
        self._parts = []
        captions_of = getattr(getattr(trainer, "datamodule", None), "captions", None)
        known = captions_of("val") if captions_of is not None else None
        rows = [int(row) for row in index[: self.queries]]
        captions = [f"row {row}" if known is None else known[row] for row in rows]
        figure = draw_retrievals(pictures, images, texts[: self.queries], captions, self.top)
        for writer in _writers(trainer):
            writer.experiment.add_figure("val/retrieval", figure, trainer.global_step)


def _writers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def draw_retrievals(pictures: Tensor, images: Tensor, queries: Tensor, captions: list[str], top: int = 5) -> Figure:
    """Draw the nearest images of each caption; a frame marks its own.

    Args:
        pictures: what to show, shape ``(n, 3, H, W)``, of any range: each is stretched to full contrast.
        images: normalised embeddings of the pictures, shape ``(n, D)``.
        queries: those of the captions, shape ``(q, D)``; query i belongs to picture i.
        captions: q texts.
        top: how many images for each.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = min(top, len(pictures))
    scores = queries @ images.T
    found = scores.topk(top, dim=1).indices
    figure = Figure(figsize=(3.2 + 1.1 * top, 1.2 * len(queries)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(queries), top + 1, squeeze=False, width_ratios=[2.8, *[1.0] * top])
    for row, (caption, places) in enumerate(zip(captions, found.tolist(), strict=True)):
        axes = grid[row][0]
        axes.axis("off")
        axes.text(1.0, 0.5, caption[:120], ha="right", va="center", wrap=True, fontsize=8, transform=axes.transAxes)
        for column, place in enumerate(places, start=1):
            axes = grid[row][column]
            picture = pictures[place]
            low, high = picture.amin(), picture.amax()
            axes.imshow(((picture - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy())
            axes.set(xticks=[], yticks=[])
            own = place == row
            axes.set_xlabel(f"{scores[row, place]:.2f}", fontsize=7, labelpad=1)
            for spine in axes.spines.values():
                spine.set_visible(own)
                spine.set(color="#2a9d3a", linewidth=2.5)
    return figure
