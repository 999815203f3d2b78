"""Draw the ROC curve of a validation or test run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from scent_lightning.callbacks.evaluation import Stage
from scent_lightning.callbacks.evaluation_picture import EvaluationPicture
from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.functional.roc import check_max_fpr, missing_class, partial_auc, roc_curve
from scent_lightning.metrics.partial_auc import ScoresAndLabels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ROCCurve", "draw_roc_curve"]

_MOST_POINTS = 2000


class ROCCurve(EvaluationPicture):
    """Draw the ROC curve at the end of every validation and test run, with its partial AUC.

    ``validation_step`` and ``test_step`` must return a dictionary with "score", shape ``(B,)``, any real numbers, and
    "label", shape ``(B,)``, 0 or 1. The rows of all batches, dataloaders and processes make one curve. It is written to
    ``roc_curve_val.png`` or ``roc_curve_test.png`` with an SVG file beside it, where each picture replaces the one
    before, and as an image ``val/roc_curve`` or ``test/roc_curve`` to every TensorBoard logger. The sanity check draws
    nothing.

    Args:
        max_fpr: false positive rates up to this one, in (0, 1], are shaded and make the partial AUC.
        every_n_epochs: during a fit, draw in every n-th epoch only.
        folder: folder for the files, made if missing; None is the Trainer's log folder, or its ``default_root_dir`` if
            there is none.

    Raises:
        InputError: an argument is out of range, or a step returns something else (at its first batch).

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ROCCurve(max_fpr=0.3)], logger=False, accelerator="cpu")
    """

    picture = "roc_curve"

    def __init__(self, max_fpr: float = 0.3, every_n_epochs: int = 1, folder: str | Path | None = None) -> None:
        super().__init__(every_n_epochs, folder)
        self.max_fpr = check_max_fpr(max_fpr)
        self._rows = ScoresAndLabels()

    def start(self, pl_module: L.LightningModule) -> None:
        """Start with no rows."""
        self._rows = ScoresAndLabels().to(pl_module.device)

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Collect the batch's scores and labels."""
        score, label = self.tensors(step, outputs, "score", "label", shape=", each of shape (B,)")
        self._rows.update(score.to(self._rows.device), label)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Draw the curve."""
        rows, self._rows = self._rows, ScoresAndLabels()
        # This waits for all processes, so every process has to come here.
        scores, labels = (values.reshape(-1) for values in rows.compute())
        missing, figure = missing_class(labels), None
        if missing:
            rank_zero_warn(f"ROCCurve draws no {stage} curve: it needs both classes but got {missing}")
        elif trainer.is_global_zero:
            figure = draw_roc_curve(scores, labels, self.max_fpr, self.title(trainer, stage, "ROC curve"))
        self.publish(trainer, stage, figure)


@style()
def draw_roc_curve(scores: Tensor, labels: Tensor, max_fpr: float = 0.3, title: str = "ROC curve") -> Figure:
    """Draw a ROC curve with the region up to ``max_fpr`` shaded, and its AUC and partial AUC in the legend.

    The areas are exact; the drawn curve has 2,000 points at most, so a million rows draw as fast as a thousand. Uses no
    global state of matplotlib and needs no display.

    Args:
        scores: score of each row, shape ``(n,)``, any real dtype and range, without NaN.
        labels: 0 or 1, shape ``(n,)``, integer or bool.
        max_fpr: largest false positive rate of the partial AUC, in (0, 1].
        title: title of the picture.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        InputError: ``max_fpr`` is out of range, or the scores and labels have no ROC curve.

    Example:
        >>> import torch
        >>> figure = draw_roc_curve(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 0]), max_fpr=0.5)
        >>> figure.axes[0].get_xlabel()
        'False positive rate'
    """
    from matplotlib.ticker import MultipleLocator

    scores, labels = scores.detach().cpu(), labels.detach().cpu()
    area = partial_auc(scores, labels, max_fpr).item()
    standardised = partial_auc(scores, labels, max_fpr, standardized=True).item()
    auc = partial_auc(scores, labels, 1.0).item()
    fpr, tpr = _thinned(*roc_curve(scores, labels), _MOST_POINTS)
    inside_fpr, inside_tpr = _up_to(fpr, tpr, max_fpr)

    figure, panels = new_figure(size=(5.2, 5.2))
    axes = panels[0, 0]
    axes.fill_between(
        inside_fpr.numpy(),
        inside_tpr.numpy(),
        color=COLOURS[0],
        alpha=0.2,
        linewidth=0,
        label=f"FPR ≤ {max_fpr:g}: partial AUC {area:.4f}\n(standardised {standardised:.4f})",
    )
    axes.plot(fpr.numpy(), tpr.numpy(), color=COLOURS[0], linewidth=1.8, label=f"ROC curve: AUC {auc:.4f}")
    axes.plot([0, 1], [0, 1], color="#555555", linewidth=1, linestyle="--", label="chance")
    if max_fpr < 1:
        axes.axvline(max_fpr, color=COLOURS[0], linewidth=0.9, linestyle=":")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    axes.set(xlabel="False positive rate", ylabel="True positive rate", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(0.2))
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: ("ROC", "FPR", "chance").index(names[i].split()[0]))
    axes.legend([handles[i] for i in order], [names[i] for i in order], loc="lower right")
    return figure


def _thinned(fpr: Tensor, tpr: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most ``most`` points of the curve, its ends among them, evenly spaced along it."""
    if fpr.shape[0] <= most:
        return fpr, tpr
    # Both rates never decrease, so their sum is the distance along the curve.
    kept = torch.searchsorted(fpr + tpr, torch.linspace(0, 2, most, dtype=fpr.dtype)).clamp(max=fpr.shape[0] - 1)
    kept[-1] = fpr.shape[0] - 1
    kept = torch.unique(kept)
    return fpr[kept], tpr[kept]


def _up_to(fpr: Tensor, tpr: Tensor, max_fpr: float) -> tuple[Tensor, Tensor]:
    """The curve's points up to ``max_fpr``, and the interpolated one there."""
    inside = int((fpr <= max_fpr).sum())
    if inside == fpr.shape[0]:
        return fpr, tpr
    part = (max_fpr - fpr[inside - 1]) / (fpr[inside] - fpr[inside - 1])
    end = tpr[inside - 1] + part * (tpr[inside] - tpr[inside - 1])
    return torch.cat([fpr[:inside], fpr.new_tensor([max_fpr])]), torch.cat([tpr[:inside], end.reshape(1)])
