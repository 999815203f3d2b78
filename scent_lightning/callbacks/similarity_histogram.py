"""Draw how similar right and wrong pairs are to a CLIP model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from scent_lightning.callbacks.evaluation import Stage
from scent_lightning.callbacks.evaluation_picture import EvaluationPicture, warn_of_rows_left_out
from scent_lightning.errors import InputError
from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.validation import checked_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SimilarityHistogram", "draw_similarities"]

_BINS = 80
_CHUNK = 512  # images that are compared with all texts at a time


class SimilarityHistogram(EvaluationPicture):
    """Cosine similarities of right and of wrong pairs, at the end of every validation and test run.

    Three histograms: images with their own texts; with all other texts; and with the nearest of those, which is what
    decides whether the right one is found. ``validation_step`` and ``test_step`` must return a dictionary with "image"
    and "text", normalised embeddings of shape ``(B, D)`` (:class:`~scent_lightning.tasks.CLIPTask` does); with "group",
    shape ``(B,)``, integers, pairs of one group (the same caption, or the same image) are right for each other as well.
    It is written to ``similarities_val.png`` (and ``.svg``) and as the image ``val/similarities`` to TensorBoard;
    likewise of ``test``. In a distributed run the first process shows its own pairs. Pairs that are not finite are
    left out, with a warning.

    Args:
        rows: pairs that are kept at most, the first ones; each image is compared with each of their texts.
        every_n_epochs: during a fit, draw in every n-th epoch only.
        folder: folder for the files, made if missing; None is the Trainer's log folder, or its ``default_root_dir`` if
            there is none.

    Raises:
        InputError: an argument is out of range, or a step returns something else (at its first batch).

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[SimilarityHistogram()], logger=False, accelerator="cpu")
    """

    picture = "similarities"

    def __init__(self, rows: int = 4096, every_n_epochs: int = 1, folder: str | Path | None = None) -> None:
        super().__init__(every_n_epochs, folder)
        self.rows: int = checked_integer("rows", rows)
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._left_out = 0

    def start(self, pl_module: L.LightningModule) -> None:
        """Start with no pairs."""
        self._parts, self._left_out = [], 0

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Keep the first pairs."""
        image, text = self.tensors(step, outputs, "image", "text", shape=", each of shape (B, D)")
        if image.shape != text.shape or image.ndim != 2:
            shapes = f"{tuple(image.shape)} and {tuple(text.shape)}"
            raise InputError(f"SimilarityHistogram needs 'image' and 'text', each of shape (B, D), got shapes {shapes}")
        seen = sum(len(part[0]) for part in self._parts)
        if seen >= self.rows or dataloader_idx > 0 or not trainer.is_global_zero:
            return
        group = outputs.get("group")
        if group is None:
            group = torch.arange(seen, seen + len(image))  # each pair has one of its own
        image, text, group = image.detach().float().cpu(), text.detach().float().cpu(), group.detach().cpu()
        finite = (image.isfinite() & text.isfinite()).all(dim=1)
        self._left_out += int((~finite).sum())
        image, text, group = (part[finite][: self.rows - seen] for part in (image, text, group))
        self._parts.append((image, text, group))

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Draw it; one pair alone has no wrong one."""
        parts, self._parts = self._parts, []
        figure = None
        if sum(len(part[0]) for part in parts) > 1:
            image, text, group = (torch.cat(column) for column in zip(*parts, strict=True))
            figure = draw_similarities(image, text, group, self.title(trainer, stage, "similarities"))
        warn_of_rows_left_out(self, stage, self._left_out, drawn=figure is not None)
        self.publish(trainer, stage, figure)


@style()
def draw_similarities(
    image: Tensor, text: Tensor, group: Tensor | None = None, title: str = "Similarities of pairs"
) -> Figure:
    """Draw histograms of the cosine similarities of right pairs, wrong pairs, and each image's nearest wrong text.

    Args:
        image: normalised embeddings, shape ``(n, D)``.
        text: those of their texts, shape ``(n, D)``.
        group: number of each pair's group, shape ``(n,)``: pairs of one group are right for each other. None: each pair
            stands alone.
        title: title of the picture.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Example:
        >>> import torch
        >>> figure = draw_similarities(torch.eye(3), torch.eye(3))
        >>> figure.axes[0].get_xlabel()
        'cosine similarity of image and text'
    """
    group = torch.arange(len(image)) if group is None else group
    own, wrong, nearest = _similarities(image, text, group)
    edges = torch.linspace(-1.0, 1.0, _BINS + 1).tolist()
    figure, panels = new_figure(size=(5.6, 3.8))
    axes = panels[0, 0]
    drawn: list[tuple[_Values, str, dict[str, Any]]] = [
        (own, "image and its own text", {"color": COLOURS[0], "alpha": 0.55, "fill": True}),
        (wrong, "image and another's text", {"color": COLOURS[4], "alpha": 0.55, "fill": True}),
        (nearest, "image and the nearest of others' texts", {"color": COLOURS[1], "linewidth": 1.6}),
    ]
    for values, name, look in drawn:
        if values.number:
            label = f"{name}: mean {round(values.mean, 3) + 0.0:.3f}"
            axes.stairs((values.histogram / values.number).tolist(), edges, label=label, **look)
    used = torch.stack([values.histogram for values, _, _ in drawn]).sum(dim=0).nonzero().flatten()
    axes.set_xlim(edges[max(int(used[0]) - 2, 0)], edges[min(int(used[-1]) + 3, _BINS)])
    axes.set(xlabel="cosine similarity of image and text", ylabel=f"share of the pairs in a bin of {2 / _BINS:g}")
    head = f"{len(image):,} pairs"
    if nearest.number:
        head += f"; of {nearest.below:.1%} the own text is the nearest"
    axes.set_ylim(0, 1.55 * axes.get_ylim()[1])  # room for the legend
    axes.set_title(title)
    axes.legend(loc="upper left", title=head, title_fontsize=8, alignment="left")
    return figure


class _Values(NamedTuple):
    """Similarities in sum: their histogram from -1 to 1, number, mean, and the share below the own pair's."""

    histogram: Tensor
    number: int
    mean: float
    below: float = 0.0


def _in_sum(values: Tensor, below: float = 0.0) -> _Values:
    histogram = torch.histc(values.clamp(-1, 1), _BINS, -1, 1)
    return _Values(histogram, len(values), float(values.double().mean()) if len(values) else 0.0, below)


def _similarities(image: Tensor, text: Tensor, group: Tensor) -> tuple[_Values, _Values, _Values]:
    """Of right pairs, of wrong ones, and of each image with the nearest wrong text, where it has one."""
    own, nearest = (image * text).sum(dim=1), torch.full((len(image),), -torch.inf)
    parts = []
    for start in range(0, len(image), _CHUNK):
        rows = slice(start, start + _CHUNK)
        similarity, wrong = image[rows] @ text.T, group[rows, None] != group[None, :]
        parts.append(_in_sum(similarity[wrong]))
        nearest[rows] = similarity.masked_fill(~wrong, -torch.inf).amax(dim=1)
    count = sum(part.number for part in parts)
    mean = sum(part.mean * part.number for part in parts) / max(count, 1)
    histogram = torch.stack([part.histogram for part in parts]).sum(dim=0)
    has_one = nearest > -torch.inf
    below = float((own > nearest)[has_one].double().mean()) if bool(has_one.any()) else 0.0
    return _in_sum(own), _Values(histogram, count, mean), _in_sum(nearest[has_one], below)
