"""Draw what the DualVariableMonitor logged: a figure from a TensorBoard event file.

python examples/plot_dual_statistics.py lightning_logs/version_0 --out dual_statistics.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every scalar tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        scalars[tag] = [point.step for point in points], [point.value for point in points]
    return scalars


def draw(scalars: dict[str, tuple[list[int], list[float]]], name: str, axes: Any) -> None:
    """One row of panels for the dual variable ``name``."""

    def of(key: str) -> tuple[list[int], list[float]]:
        return scalars[f"dual/{name}/{key}"]

    def band(low: str, high: str, panel: Any, **look: Any) -> None:
        if f"dual/{name}/{low}" in scalars:
            steps, bottom = of(low)
            panel.fill_between(steps, bottom, of(high)[1], **look)

    def line(key: str, panel: Any, **look: Any) -> None:
        if f"dual/{name}/{key}" in scalars:
            panel.plot(*of(key), **look)

    table, weights, movement, gamma = axes
    if f"dual/{name}/table_q50" in scalars:
        band("table_q01", "table_q99", table, alpha=0.15, label="1 to 99 %", color="C0")
        band("table_q25", "table_q75", table, alpha=0.35, label="25 to 75 %", color="C0")
        line("table_q50", table, color="C0", label="median")
        table.set_title(f"ν of all visited anchors ({name})")
    else:
        line("mean", table, color="C0", label="ν")
        table.set_title(f"ν ({name})")
    line("weight", weights, color="C1", label="mean")
    line("weight_max", weights, color="C1", alpha=0.4, label="largest")
    weights.axhline(1, color="black", linewidth=0.8, linestyle=":")
    weights.set_yscale("log")
    weights.set_title("weight exp(ℓ − ν) of the batch")
    line("change", movement, color="C2", label="mean |new ν − old ν|")
    line("guarded", movement, color="C3", label="fraction guarded")
    movement.set_title("movement")
    if f"dual/{name}/effective_gamma" in scalars:
        band("effective_gamma_min", "effective_gamma_max", gamma, alpha=0.2, color="C4", label="range")
        line("effective_gamma", gamma, color="C4", label="mean")
        gamma.set_ylim(0, 1)
        gamma.set_title("effective γ = sigmoid(log α + ν)")
    for panel in axes:
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if panel.has_data():
            panel.legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="folder of the event file, such as lightning_logs/version_0")
    parser.add_argument("--out", type=Path, default=Path("dual_statistics.png"), help="the figure (PNG, PDF or SVG)")
    arguments = parser.parse_args()
    scalars = read(arguments.log)
    names = sorted({tag.split("/")[1] for tag in scalars if tag.startswith("dual/")})
    if not names:
        parser.error(f"{arguments.log} holds no dual/… tags; was the DualVariableMonitor on?")
    figure, axes = plt.subplots(len(names), 4, figsize=(15, 3.2 * len(names)), layout="constrained", squeeze=False)
    for name, row in zip(names, axes, strict=True):
        draw(scalars, name, row)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=130)
    print(f"figure: {arguments.out}")


if __name__ == "__main__":
    main()
