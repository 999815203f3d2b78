"""Show what a CLIP model retrieves."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from scent_lightning.callbacks.evaluation import EvaluationCallback, Stage
from scent_lightning.callbacks.lookup import tensorboard_loggers
from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.validation import checked_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RetrievalPanel", "draw_retrievals"]


_WIDTH = 6.4  # inches: a card of TensorBoard shows it at about two thirds of its size
_HEAD, _CAPTION, _LABEL = 0.65, 0.8, 0.3  # inches: above all, above and below a row of images, and of it below
_CHARACTERS, _LINES = 66, 2  # of a caption
_RIGHT = COLOURS[2]


class RetrievalPanel(EvaluationCallback):
    """A picture of a few captions with the images that a model finds for them, after every validation and test run.

    ``validation_step`` and ``test_step`` must return a dictionary with "image" and "text", normalised embeddings of
    shape ``(B, D)``, and "index", shape ``(B,)``, and the batch must begin with its images, ``(B, 3, H, W)``. With
    "group", shape ``(B,)``, integers, the images of one group are right for each other's captions. The captions are
    those of the data module, ``captions("val")``, where equal ones are right for each other, too; without them the
    row's number stands there. The first ``queries`` pairs are the queries, and all pairs of the first ``items`` what is
    searched. It goes to every TensorBoard logger as ``val/retrieval`` or ``test/retrieval``. In a distributed run the
    first process shows its own pairs. The sanity check draws nothing.

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
        image, text, index = self.tensors(step, outputs, "image", "text", "index")
        group = outputs.get("group")
        parts = (batch[0].float(), image.float(), text.float(), index, index if group is None else group)
        self._parts.append(tuple(part[:missing].detach().cpu() for part in parts))

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Draw and log the picture."""
        if not self._parts:
            return
        pictures, images, texts, index, group = (torch.cat(column) for column in zip(*self._parts, strict=True))
        self._parts = []
        captions_of = getattr(getattr(trainer, "datamodule", None), "captions", None)
        known = captions_of("val") if captions_of is not None else None
        captions = [f"row {row}" if known is None else known[row] for row in index.tolist()]
        queries = min(self.queries, len(captions))
        figure = draw_retrievals(
            pictures,
            images,
            texts[:queries],
            captions[:queries],
            self.top,
            right=_right_answers(group, captions, queries),
        )
        for logger in tensorboard_loggers(trainer):
            logger.experiment.add_figure(f"{stage}/retrieval", figure, trainer.global_step)


def _right_answers(group: Tensor, captions: list[str], queries: int) -> Tensor:
    """Which images are right for the first captions: those of the same group, and those of an equal caption."""
    numbers = {caption: number for number, caption in enumerate(captions) if caption}
    caption = torch.tensor([numbers.get(each, -1 - row) for row, each in enumerate(captions)])
    return (group[:queries, None] == group) | (caption[:queries, None] == caption)


@style()
def draw_retrievals(
    pictures: Tensor,
    images: Tensor,
    queries: Tensor,
    captions: list[str],
    top: int = 5,
    right: Tensor | None = None,
) -> Figure:
    """Draw the nearest images of each caption; frames mark those that are right, and the place of the first is said.

    Args:
        pictures: what to show, shape ``(n, 3, H, W)``, of any range: each is stretched to full contrast.
        images: normalised embeddings of the pictures, shape ``(n, D)``.
        queries: those of the captions, shape ``(q, D)``; query i belongs to picture i.
        captions: q texts.
        top: how many images for each.
        right: which pictures are right for each caption, bool, shape ``(q, n)``; None: its own alone.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.
    """
    from matplotlib.patches import Patch

    top = min(top, len(pictures))
    right = torch.eye(len(queries), len(pictures), dtype=torch.bool) if right is None else right
    scores = queries @ images.T
    places = scores.topk(top, dim=1).indices
    best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
    ranks = (1 + (scores > best).sum(dim=1)).tolist()
    side = _WIDTH / top  # of a cell
    height = _HEAD + len(queries) * (side + _CAPTION)
    figure, grid = new_figure(len(queries), top, size=(side, height / len(queries)))
    figure.set_layout_engine("none")  # it would make the first column as wide as the captions
    legend = Patch(facecolor="white", edgecolor=_RIGHT, linewidth=3, label="right: its own image, or one as good")
    figure.legend(
        handles=[legend],
        loc="upper center",
        fontsize=12,
        title=f"similarity below each image; {len(pictures):,} images searched",
        title_fontsize=12,
    )
    for row, caption in enumerate(captions):
        found = f" [right one at rank {ranks[row]:,}]" if ranks[row] > top else ""
        grid[row, 0].set_title(_wrapped(caption, found), loc="left", fontsize=13)
        bottom = 1 - (_HEAD + (row + 1) * (side + _CAPTION) - _LABEL) / height
        for column, (axes, place) in enumerate(zip(grid[row], places[row].tolist(), strict=True)):
            axes.set_position([(column + 0.05) / top, bottom, 0.9 / top, 0.9 * side / height])
            picture = pictures[place]
            low, high = picture.amin(), picture.amax()
            axes.imshow(((picture - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy())
            axes.set(xticks=[], yticks=[])
            axes.set_xlabel(f"{scores[row, place]:.2f}", fontsize=11, labelpad=4)
            for spine in axes.spines.values():
                spine.set_visible(bool(right[row, place]))
                spine.set(color=_RIGHT, linewidth=5)
    return figure


def _wrapped(caption: str, found: str) -> str:
    """A caption in two lines at most, and what was found behind it."""
    caption, room = " ".join(caption.split()), _LINES * _CHARACTERS - len(found) - 12
    if len(caption) > room:
        caption = f"{caption[:room]}…"  # not by words: some scripts have no spaces
    return "\n".join(textwrap.wrap(caption + found, _CHARACTERS))
