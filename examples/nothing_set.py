"""SCENT with nothing set, neither for ν nor for the weights: the six cells of robust regression, and 20,902 classes.

No learning rate, no clipping, no step size and no guard is given: the tasks have their defaults, one for each kind of
problem, and take proximal steps. The cells are those of reproduce_dro_table.py, the classes those of compare_xc.py.

Printed are, mean of the seeds and the worst, the gap (F − F*)/F* in percent, and the exact cross-entropy of 8,000
training rows. What is done is kept in the folder --out and not done again.

    python examples/nothing_set.py --workers 2

The last line is JSON: the mean of each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import compare_xc
from reproduce_dro_table import CELLS, all_runs, optimum
from resumable import read_rows, run_missing

GLYPHS = "glyphs"
METHOD = compare_xc.DEFAULT


def run_glyphs(seed: int, epochs: int, path: str) -> list[dict[str, Any]]:
    """Train on the glyphs; the last epoch's row."""
    return compare_xc.run(METHOD, seed, epochs, path)[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*CELLS, GLYPHS)
    parser.add_argument("--problems", nargs="+", default=list(names), choices=names, help="which (all seven)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (0 1 2)")
    parser.add_argument("--epochs", type=int, help="epochs of every run (300, and 20 of the glyphs)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--data-dir", help="where california_housing and abalone are")
    parser.add_argument("--glyphs", default="data/glyphs", help="folder of the glyphs (data/glyphs)")
    parser.add_argument("--out", type=Path, default=Path("runs/nothing_set"), help="folder of what is kept")
    arguments = parser.parse_args()
    cells, glyphs = arguments.out / "cells.csv", arguments.out / "glyphs.csv"
    chosen = [cell for cell in arguments.problems if cell != GLYPHS]
    epochs = {True: arguments.epochs or 20, False: arguments.epochs or 300}
    all_runs(cells, chosen, [METHOD], arguments.seeds, epochs[False], arguments.data_dir, arguments.workers)
    if GLYPHS in arguments.problems:
        found = {(row["seed"], row["epochs"]) for row in read_rows(glyphs)}
        missing = [(s, epochs[True], arguments.glyphs) for s in arguments.seeds if (s, epochs[True]) not in found]
        run_missing(run_glyphs, missing, glyphs, arguments.workers)
    summary = {}
    print("| problem | mean | worst seed |\n| --- | --- | --- |")
    for name in arguments.problems:
        rows = read_rows(glyphs if name == GLYPHS else cells)
        rows = [r for r in rows if r["seed"] in arguments.seeds and r["epochs"] == epochs[name == GLYPHS]]
        if name == GLYPHS:
            values, unit = [row["train_cross_entropy"] for row in rows], ""
        else:
            best, unit = optimum(name, arguments.data_dir), " %"
            values = [100 * (row["objective"] / best - 1) for row in rows if row["cell"] == name]
        values = [value if math.isfinite(value) else math.inf for value in values]
        summary[name] = round(statistics.mean(values), 5)
        print(f"| {name} | {summary[name]:.4f}{unit} | {max(values):.4f}{unit} |")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
