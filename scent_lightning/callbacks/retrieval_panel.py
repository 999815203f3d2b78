"""Show what a CLIP model retrieves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from scent_lightning.callbacks.evaluation import EvaluationCallback, Stage
from scent_lightning.callbacks.lookup import tensorboard_loggers
from scent_lightning.validation import checked_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RetrievalPanel", "draw_retrievals"]


class RetrievalPanel(EvaluationCallback):
    """A picture of a few captions with the images that a model finds for them, after every validation and test run.

    ``validation_step`` and ``test_step`` must return a dictionary with "image" and "text", normalised embeddings of
    shape ``(B, D)``, and "index", shape ``(B,)``, and the batch must begin with its images, ``(B, 3, H, W)``. The
    captions are those of the data module, ``captions("val")``; without them the row's number stands there. The first
    ``queries`` pairs are the queries, and all pairs of the first ``items`` what is searched. It goes to every
    TensorBoard logger as ``val/retrieval`` or ``test/retrieval``. In a distributed run the first process shows its own
    pairs. The sanity check draws nothing.

    Args:
        queries: number of captions, a row each.
        top: number of images found for each.
        items: images that are kept and searched.
        every_n_epochs: during a fit, draw in every n-th epoch only.

    Raises:
        InputError: an argument is not a positive integer, or the step returns something else.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[RetrievalPanel(queries=4)], logger=False, accelerator="cpu")
    """

    def __init__(self, queries: int = 8, top: int = 5, items: int = 512, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        for name, value in (("queries", queries), ("top", top), ("items", items)):
            checked_integer(name, value)
        self.queries = queries
        self.top = top
        self.items = items
        self._parts: list[tuple[Tensor, ...]] = []

    def start(self, pl_module: L.LightningModule) -> None:
        """Start with no pairs."""
        self._parts = []

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Keep the first pairs."""
        missing = self.items - sum(len(part[0]) for part in self._parts)
        if missing <= 0 or dataloader_idx > 0 or not trainer.is_global_zero or not tensorboard_loggers(trainer):
            return
        parts = (batch[0], *self.tensors(step, outputs, "image", "text", "index"))
        self._parts.append(tuple(part[:missing].detach().float().cpu() for part in parts))

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
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
        for logger in tensorboard_loggers(trainer):
            logger.experiment.add_figure(f"{stage}/retrieval", figure, trainer.global_step)


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
