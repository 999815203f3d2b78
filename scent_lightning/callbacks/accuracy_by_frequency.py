"""Draw how accuracy depends on the training rows of a class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from scent_lightning.callbacks.evaluation import Stage
from scent_lightning.callbacks.evaluation_picture import EvaluationPicture
from scent_lightning.errors import InputError
from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.validation import checked_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AccuracyByFrequency", "draw_accuracy_by_frequency"]

_MOST_SINGLE_BINS = 8
_Z = 1.959964  # of a two-sided interval of 95 %
_MARKERS = "osD^v"


class AccuracyByFrequency(EvaluationPicture):
    """Accuracy against the number of training rows of the class, at the end of every validation and test run.

    Rare classes are what a mean over rows does not show. ``validation_step`` and ``test_step`` must return a dictionary
    with "label", shape ``(B,)``, the class of each row, and "rank", shape ``(B,)``, how many classes come before it
    (:class:`~scent_lightning.tasks.ExtremeClassificationTask` does), and the data module must have ``class_counts``,
    the training rows of each class. The rows of all batches, dataloaders and processes are in one picture,
    ``accuracy_by_frequency_val.png`` (and ``.svg``), and the image ``val/accuracy_by_frequency`` of TensorBoard;
    likewise of ``test``.

    Args:
        ks: a row is right where its class is among the first k; a curve for each k.
        every_n_epochs: during a fit, draw in every n-th epoch only.
        folder: folder for the files, made if missing; None is the Trainer's log folder, or its ``default_root_dir`` if
            there is none.

    Raises:
        InputError: an argument is out of range, a step returns something else (at its first batch), or the data module
            has no ``class_counts``.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[AccuracyByFrequency(ks=(1, 10))], logger=False, accelerator="cpu")
    """

    picture = "accuracy_by_frequency"

    def __init__(self, ks: Sequence[int] = (1, 5), every_n_epochs: int = 1, folder: str | Path | None = None) -> None:
        super().__init__(every_n_epochs, folder)
        if isinstance(ks, str) or not isinstance(ks, Sequence) or not 0 < len(ks) <= len(_MARKERS):
            raise InputError(f"ks must be from 1 to {len(_MARKERS)} integers, got {ks!r}")
        self.ks = [checked_integer("ks", k) for k in ks]
        self._counts = self._rows = torch.empty(0)

    def start(self, pl_module: L.LightningModule) -> None:
        """Look up the classes; no rows yet."""
        counts = getattr(getattr(pl_module.trainer, "datamodule", None), "class_counts", None)
        if counts is None:
            raise InputError(
                "AccuracyByFrequency needs a data module with class_counts, the training rows of each class: add such "
                "a property, or leave the callback out"
            )
        self._counts = torch.as_tensor(counts)
        # For each class its rows, and those that were right by each k.
        self._rows = torch.zeros(1 + len(self.ks), len(self._counts), dtype=torch.int64, device=pl_module.device)

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Count the batch's rows by class."""
        label, rank = self.tensors(step, outputs, "label", "rank", shape=", each of shape (B,)")
        if label.shape != rank.shape or label.ndim != 1:
            shapes = f"{tuple(label.shape)} and {tuple(rank.shape)}"
            raise InputError(f"AccuracyByFrequency needs 'label' and 'rank', each of shape (B,), got shapes {shapes}")
        label, rank = (values.detach().to(self._rows.device) for values in (label, rank))
        right = torch.stack([torch.ones_like(rank), *(rank < k for k in self.ks)]).long()
        self._rows.index_add_(1, label.long(), right)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Draw it."""
        counts, rows = self._counts, self._rows
        self._counts = self._rows = torch.empty(0)
        if trainer.world_size > 1:
            rows = trainer.strategy.reduce(rows, reduce_op="sum")  # type: ignore[assignment]
        figure = None
        if trainer.is_global_zero and int(rows[0].sum()):
            right = dict(zip(self.ks, rows[1:].cpu(), strict=True))
            title = self.title(trainer, stage, "accuracy by frequency")
            figure = draw_accuracy_by_frequency(counts, rows[0].cpu(), right, title)
        self.publish(trainer, stage, figure)


class _Bin(NamedTuple):
    name: str
    classes: Tensor  # bool, which ones


@style()
def draw_accuracy_by_frequency(
    counts: Tensor, rows: Tensor, right: dict[int, Tensor], title: str = "Accuracy by frequency"
) -> Figure:
    """Draw accuracy against the training rows of a class, and below how many rows and classes there are of each.

    Args:
        counts: training rows of each class, shape ``(K,)``, integer.
        rows: rows of each class that were evaluated, shape ``(K,)``, integer.
        right: for each k how many of them had their class among the first k, shape ``(K,)``, integer.
        title: title of the picture.

    Returns:
        The figure; ``figure.savefig(path)`` writes it. Up to eight different counts have a place each; of more, those
        from one power of two to the next share one.

    Example:
        >>> import torch
        >>> figure = draw_accuracy_by_frequency(torch.tensor([1, 9]), torch.tensor([4, 4]), {1: torch.tensor([1, 4])})
        >>> [text.get_text() for text in figure.axes[1].get_xticklabels()]
        ['1', '9']
    """
    from matplotlib.ticker import PercentFormatter

    bins = [each for each in _bins(counts) if int(rows[each.classes].sum())]
    places = list(range(len(bins)))
    figure, panels = new_figure(2, 1, size=(max(5.2, 0.6 * len(bins) + 1.5), 2.3), sharex=True, height_ratios=[2, 1])
    accuracy, amounts = panels[:, 0]
    totals = torch.stack([rows[each.classes].sum() for each in bins]).double()
    for number, (k, of_class) in enumerate(right.items()):
        hits = torch.stack([of_class[each.classes].sum() for each in bins]).double()
        low, high = _interval(hits, totals)
        share = hits / totals
        offset = 0.08 * (number - (len(right) - 1) / 2)
        overall = float(of_class.sum() / rows.sum())
        accuracy.errorbar(
            [place + offset for place in places],
            share.tolist(),
            torch.stack([share - low, high - share]).clamp(min=0).tolist(),
            color=COLOURS[number],
            marker=_MARKERS[number],
            capsize=3,
            label=f"top-{k}; of all rows {overall:.1%}",
        )
        accuracy.axhline(overall, color=COLOURS[number], linewidth=0.9, linestyle=":")
    accuracy.set(ylabel="accuracy", ylim=(-0.03, 1.03), title=title)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracy.legend(loc="best", title="bars: 95 % interval; dotted: all rows", title_fontsize=8, alignment="left")
    classes = [int(each.classes.sum()) for each in bins]
    for values, colour, name, shift in (
        (totals.tolist(), COLOURS[7], "rows evaluated", -0.2),
        (classes, COLOURS[5], "classes", 0.2),
    ):
        amounts.bar([place + shift for place in places], values, 0.38, color=colour, label=name)
    amounts.set(yscale="log", ylabel="how many", xlabel="training rows of the class")
    amounts.set(ylim=(0.5, 30 * max(*totals.tolist(), *classes)), xlim=(-0.75, len(bins) - 0.25))
    amounts.set_xticks(places, [each.name for each in bins], rotation=30 if len(bins) > _MOST_SINGLE_BINS else 0)
    amounts.legend(ncols=2, loc="upper right")
    return figure


def _bins(counts: Tensor) -> list[_Bin]:
    """Classes by their number of training rows: each number alone, or from one power of two to the next."""
    different = torch.unique(counts).tolist()
    if len(different) <= _MOST_SINGLE_BINS:
        return [_Bin(f"{value:,}", counts == value) for value in different]
    found = [_Bin("0", counts == 0), _Bin("1", counts == 1)]
    low = 2
    while low <= different[-1]:
        found.append(_Bin(f"{low:,}–{2 * low - 1:,}", (counts >= low) & (counts < 2 * low)))
        low *= 2
    return found


def _interval(hits: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Wilson's interval of 95 % for a share."""
    share, z = hits / totals, _Z
    centre = (share + z**2 / (2 * totals)) / (1 + z**2 / totals)
    half = z / (1 + z**2 / totals) * (share * (1 - share) / totals + z**2 / (4 * totals**2)).sqrt()
    return (centre - half).clamp(min=0), (centre + half).clamp(max=1)
