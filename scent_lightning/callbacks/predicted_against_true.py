"""Draw predictions against what was to be predicted, and which rows the worst case is made of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.callbacks.evaluation import Stage
from scent_lightning.callbacks.evaluation_picture import EvaluationPicture, warn_of_rows_left_out
from scent_lightning.errors import InputError
from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.validation import checked_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PredictedAgainstTrue", "draw_predicted_against_true"]

# Of the points that are kept, these are the ones of the largest weights; the others are drawn at random.
_HEAVIEST = 0.2
# Areas of points, in square points of print: of the heaviest row at most, any row at least, an average one at most.
_LARGEST, _SMALLEST, _AVERAGE = 320.0, 3.0, 8.0
# A row that counts as so many is drawn in the second colour.
_HEAVY = 10.0


class PredictedAgainstTrue(EvaluationPicture):
    """Predictions against true values at the end of every validation and test run; a point's area is its weight.

    The weight of a row is what it has in the worst case, p ∝ exp(loss/τ): where a few rows carry the objective, one
    sees which. ``validation_step`` and ``test_step`` must return a dictionary with "prediction", "target" and
    "log_weight", each of shape ``(B,)``: both values in the units of the target, and the logarithm of the weight up to
    a constant (:class:`~scent_lightning.tasks.DRORegressionTask` does). The rows of all batches, dataloaders and
    processes are in one picture, ``predicted_against_true_val.png`` (and ``.svg``), and the image
    ``val/predicted_against_true`` of TensorBoard; likewise of ``test``. Rows that are not finite are left out, with a
    warning.

    Args:
        rows: points that are drawn at most; of more rows the heaviest, and others at random. Weights are relative to
            all rows, drawn or not.
        every_n_epochs: during a fit, draw in every n-th epoch only.
        folder: folder for the files, made if missing; None is the Trainer's log folder, or its ``default_root_dir`` if
            there is none.

    Raises:
        InputError: an argument is out of range, or a step returns something else (at its first batch).

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[PredictedAgainstTrue()], logger=False, accelerator="cpu")
    """

    picture = "predicted_against_true"

    def __init__(self, rows: int = 5000, every_n_epochs: int = 1, folder: str | Path | None = None) -> None:
        super().__init__(every_n_epochs, folder)
        self.rows: int = checked_integer("rows", rows)
        self._forget()

    def _forget(self) -> None:
        self._kept = torch.empty(0, 4, dtype=torch.float64)  # prediction, target, log-weight, and a random number
        self._seen, self._left_out, self._log_total, self._log_squares = 0, 0, -math.inf, -math.inf
        self._random = torch.Generator().manual_seed(0)  # not torch's own: a picture changes no run

    def start(self, pl_module: L.LightningModule) -> None:
        """Start with no rows."""
        self._forget()

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Count all rows, and keep some."""
        shape = ", each of shape (B,)"
        values = self.tensors(step, outputs, "prediction", "target", "log_weight", shape=shape)
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) > 1 or values[0].ndim != 1:
            names = "'prediction', 'target' and 'log_weight'"
            raise InputError(f"PredictedAgainstTrue needs {names}{shape}, got shapes {shapes}")
        rows = torch.stack([value.detach().cpu().double() for value in values], dim=1)
        finite = rows[rows.isfinite().all(dim=1)]
        self._left_out += len(rows) - len(finite)
        self._seen += len(finite)
        self._log_total = _log_add(self._log_total, finite[:, 2])
        self._log_squares = _log_add(self._log_squares, 2 * finite[:, 2])
        chance = torch.rand(len(finite), 1, generator=self._random, dtype=torch.float64)
        self._kept = _thinned(torch.cat([self._kept, torch.cat([finite, chance], dim=1)]), self.rows)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Draw the points."""
        of_all = [self._seen, self._left_out, self._log_total, self._log_squares]
        kept, sums = self._kept, torch.tensor([of_all], dtype=torch.float64)
        self._forget()
        if distributed.is_distributed():
            kept = _thinned(distributed.of_all_processes(kept), self.rows)
            sums = distributed.of_all_processes(sums)
        figure = None
        if trainer.is_global_zero and len(kept):
            log_total, log_squares = (torch.logsumexp(sums[:, i], dim=0) for i in (2, 3))
            figure = draw_predicted_against_true(
                kept[:, 0],
                kept[:, 1],
                (kept[:, 2] - log_total).exp(),
                rows=int(sums[:, 0].sum()),
                effective_rows=float((2 * log_total - log_squares).exp()),
                title=self.title(trainer, stage, "predicted against true"),
                name=getattr(getattr(trainer, "datamodule", None), "target", None) or "target",
            )
        warn_of_rows_left_out(self, stage, int(sums[:, 1].sum()), drawn=figure is not None)
        self.publish(trainer, stage, figure)


@style()
def draw_predicted_against_true(
    prediction: Tensor,
    target: Tensor,
    weight: Tensor,
    rows: int | None = None,
    effective_rows: float | None = None,
    title: str = "Predicted against true",
    name: str = "target",
) -> Figure:
    """Draw predictions against true values, each point's area its worst-case weight.

    Args:
        prediction: shape ``(n,)``, in the units of the target.
        target: shape ``(n,)``.
        weight: what each row has in the worst case, at least 0, shape ``(n,)``; they sum to 1 over all rows.
        rows: number of all rows, where those given are a part of them; None: n.
        effective_rows: 1/Σp² over all rows, where those given are a part of them; None: over those given.
        title: title of the picture.
        name: what is predicted, with its unit, for the axes.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Example:
        >>> import torch
        >>> values = torch.arange(4.0)
        >>> figure = draw_predicted_against_true(values, values, torch.full((4,), 0.25))
        >>> figure.axes[0].get_xlabel()
        'true target'
    """
    from matplotlib.lines import Line2D

    rows = len(weight) if rows is None else rows
    if effective_rows is None:
        effective_rows = float(1 / weight.double().square().sum())
    order = weight.argsort(descending=True)  # light rows are drawn over heavy ones, which are larger
    x, y, counts = (values.double().cpu()[order.cpu()] for values in (target, prediction, rows * weight))
    scale = min(_AVERAGE, _LARGEST / max(float(counts.max()), 1e-300))

    def areas(values: Tensor) -> Tensor:
        return (scale * values).clamp(min=_SMALLEST)

    figure, panels = new_figure(size=(5.2, 5.2))
    axes = panels[0, 0]
    heavy = counts >= _HEAVY
    for chosen, colour in ((~heavy, COLOURS[0]), (heavy, COLOURS[1])):
        axes.scatter(
            x[chosen], y[chosen], s=areas(counts[chosen]), color=colour, alpha=0.45, linewidths=0, rasterized=True
        )
    low, high = float(torch.minimum(x.min(), y.min())), float(torch.maximum(x.max(), y.max()))
    margin = 0.04 * (high - low) or 0.5
    ends = low - margin, high + margin
    axes.plot(ends, ends, color="#555555", linewidth=1, linestyle="--")
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"true {name}", ylabel=f"predicted {name}", title=title)
    handles = [Line2D([], [], color="#555555", linewidth=1, linestyle="--", label="predicted = true")]
    handles += [
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            color=COLOURS[1 if value >= _HEAVY else 0],
            alpha=0.45,
            markeredgewidth=0,
            markersize=math.sqrt(float(areas(torch.tensor(value)))),
            label=f"counts as {value:,.0f} row{'s' * (value != 1)}",
        )
        for value in _legend_values(float(counts.max()))
    ]
    of = f"{len(weight):,} of {rows:,}" if rows > len(weight) else f"{rows:,}"
    head = f"{of} rows; in the worst case\nas many as {effective_rows:,.4g} count (1/Σp²)"
    axes.legend(handles=handles, loc="upper left", title=head, title_fontsize=8, alignment="left", labelspacing=0.9)
    return figure


def _legend_values(largest: float) -> list[float]:
    """Powers of ten from 1 up to the largest count, three at most; where there is but one, the largest, too."""
    powers = [10.0**power for power in range(math.floor(math.log10(max(largest, 1.0))) + 1)]
    if len(powers) == 1 and largest >= 2:
        return [1.0, float(round(largest))]
    return powers if len(powers) <= 3 else [powers[0], powers[len(powers) // 2], powers[-1]]


def _thinned(rows: Tensor, most: int) -> Tensor:
    """At most so many rows: the heaviest, and of the others those of the least random numbers."""
    if len(rows) <= most:
        return rows
    order = rows[:, 3].clone()
    order[rows[:, 2].topk(math.ceil(_HEAVIEST * most)).indices] = -1.0
    return rows[order.topk(most, largest=False).indices]


def _log_add(total: float, values: Tensor) -> float:
    return float(torch.logsumexp(torch.cat([values.new_tensor([total]), values]), dim=0))
