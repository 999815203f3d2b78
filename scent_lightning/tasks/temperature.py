"""What a temperature means for the rows at hand: said at the start of a fit, and looked at again at its end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from scent_lightning.figures import COLOURS, new_figure, style
from scent_lightning.functional import effective_rows, temperature_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TemperatureOfRows"]

_FRACTIONS = (0.01, 0.1, 0.5)
# Spacing of float32 numbers, relative; and what scores may lose by it, in nats.
_SPACING, _TOLERANCE = 2.0**-23, 0.01
_MOST_ROWS = 1_000_000  # more are thinned out: fractions of them are the same
_FEW, _ALONE = 10, 2.0


@dataclass
class TemperatureOfRows:
    """Losses of the training rows at least squares, and the temperature that is to weigh them.

    Least squares is where a linear model starts, and a measure of the losses for any other. Minimising the entropic
    risk then lowers the largest losses, so that more rows count at its end than here.

    Args:
        losses: loss of each row, shape ``(n,)``, in its units.
        tau: temperature in the units of the loss.
    """

    losses: Tensor
    tau: float

    def __post_init__(self) -> None:
        rows = len(self.losses)
        if rows > _MOST_ROWS:
            self.losses = self.losses[:: -(-rows // _MOST_ROWS)]

    def rows(self, tau: float) -> float:
        """Effective number of rows at a temperature."""
        return effective_rows(self.losses, tau).item()

    @cached_property
    def temperatures(self) -> dict[float, float]:
        """The temperature at which a fraction of the rows is effective, by that fraction, where there is one."""
        total = len(self.losses)
        found = {part: temperature_for(self.losses, part * total) for part in _FRACTIONS if 1 <= part * total < total}
        return {part: tau for part, tau in found.items() if tau > 0}

    def in_words(self) -> str:
        """A sentence: how many rows count now, and at which temperatures others would."""
        said = f"tau {self.tau:g} looks at {self.rows(self.tau):,.1f} of {len(self.losses):,} rows at least squares"
        found = self.temperatures
        if not found:
            return said
        parts, taus = (
            ", ".join(f"{100 * part:.0f} %" for part in found),
            ", ".join(f"{tau:.3g}" for tau in found.values()),
        )
        return f"{said}; at {parts} of them with tau {taus}"

    def warning(self) -> str | None:
        """A sentence where float32 cannot hold the losses over τ; else None."""
        largest = self.losses.max().item()
        if not largest / self.tau * _SPACING > _TOLERANCE:
            return None
        said = (
            f"tau {self.tau:g} is {largest / self.tau:.0e} times below the largest loss at least squares, "
            f"{largest:.3g}: float32 cannot hold such exponents. tau has the units of the loss"
        )
        tenth = self.temperatures.get(0.1)
        return said if tenth is None else f"{said}; with tau {tenth:.3g} a tenth of the rows counts"

    def warning_at_end(self, effective: float) -> str | None:
        """A sentence where the objective of a fit that has ended hangs on one row of many; else None.

        Args:
            effective: the effective number of rows then.
        """
        if len(self.losses) < _FEW or not effective < _ALONE:
            return None
        return (
            f"the objective hangs on {effective:.1f} effective rows: the model is fitted to hardly more than one. "
            f"A larger tau than {self.tau:g} looks at more; the weights of predict tell which row it is"
        )

    @style()
    def figure(self) -> Figure:
        """The effective number of rows against the temperature."""
        figure, ((panel,),) = new_figure(size=(5.0, 3.4))
        ends = [self.tau, *self.temperatures.values()]
        taus = np.geomspace(min(ends) / 10, max(ends) * 10, 80)
        panel.plot(taus, [self.rows(tau) for tau in taus], color=COLOURS[0])
        panel.axvline(self.tau, color=COLOURS[1], linestyle="--", label=f"tau {self.tau:g}")
        panel.axhline(len(self.losses), color="0.6", linewidth=0.8, label=f"all {len(self.losses):,} rows")
        panel.set(xscale="log", yscale="log", xlabel="temperature tau, units of the loss", ylabel="effective rows")
        panel.set_title("Rows that count at least squares")
        panel.legend(loc="best")
        return figure
