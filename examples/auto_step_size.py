"""SCENT with no step size set, on the six cells of robust regression: the gap to the exact optimum, beside tuned SCENT.

Each cell is run with the learning rate and the clipping that reproduce_dro_table.py has tuned for it, once with the
step size tuned by hand as well, and once with ``log_alpha: auto``. Printed are the gaps (F − F*)/F* in percent, mean
of the seeds and the worst; the last line is JSON: the mean gap of auto for each cell.

What is done is kept in the folder --out, a CSV file of the runs, and not done again.

    python examples/auto_step_size.py --seeds 0 1 2 --workers 2
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from reproduce_dro_table import CELLS, PUBLISHED, optimum, run
from resumable import read_rows, run_missing

METHODS = ("SCENT tuned", "SCENT auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, help="which cells (all six)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the batches (0 1 2)")
    parser.add_argument("--epochs", type=int, default=300, help="epochs of every run (300)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--data-dir", help="where california_housing and abalone are")
    parser.add_argument("--out", type=Path, default=Path("runs/auto_step_size"), help="folder of what is kept")
    arguments = parser.parse_args()
    file = arguments.out / "runs.csv"
    done = {(row["cell"], row["method"], row["seed"], row["epochs"]) for row in read_rows(file)}
    todo = [
        (cell, method, seed, arguments.epochs, arguments.data_dir)
        for cell in arguments.cells
        for method in METHODS
        for seed in arguments.seeds
        if (cell, method, seed, arguments.epochs) not in done
    ]
    run_missing(run, todo, file, arguments.workers)
    rows = [row for row in read_rows(file) if row["seed"] in arguments.seeds and row["epochs"] == arguments.epochs]
    print("| cell | F* | best published | by hand | auto | worst seed of auto |\n| --- | --- | --- | --- | --- | --- |")
    gaps = {}
    for cell in arguments.cells:
        best = optimum(cell, arguments.data_dir)
        found = {
            method: [
                100 * (row["objective"] / best - 1) if math.isfinite(row["objective"]) else math.inf
                for row in rows
                if row["cell"] == cell and row["method"] == method
            ]
            for method in METHODS
        }
        hand, auto = (sum(found[method]) / len(found[method]) for method in METHODS)
        published = 100 * (min(PUBLISHED[cell].values()) / best - 1)
        gaps[cell] = round(auto, 4)
        cells = [f"{percent:.4f} %" for percent in (hand, auto, max(found["SCENT auto"]))]
        print(f"| {cell} | {best:.5f} | {published:.2f} % | {' | '.join(cells)} |")
    print(json.dumps(gaps))


if __name__ == "__main__":
    main()
