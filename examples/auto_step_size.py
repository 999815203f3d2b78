"""SCENT with no step size set, on the six cells of robust regression: the gap to the exact optimum, beside tuned SCENT.

Each cell is run with the learning rate and the clipping that reproduce_dro_table.py has tuned for it, once with the
step size tuned by hand as well and once with ``log_alpha: auto``, and once with nothing set at all. Printed are the
gaps (F − F*)/F* in percent, mean of the seeds and the worst; the last line is JSON: the mean gaps of each cell.

What is done is kept in a CSV file in the folder --out, which is that of reproduce_dro_table.py, and not done again.

    python examples/auto_step_size.py --seeds 0 1 2 3 4 5 6 7 8 9 --workers 2
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from reproduce_dro_table import CELLS, PUBLISHED, all_runs, optimum

METHODS = {"SCENT tuned": "by hand", "SCENT auto": "auto, the rest by hand", "SCENT default": "nothing set"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, help="which cells (all six)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the batches (0 1 2)")
    parser.add_argument("--epochs", type=int, default=300, help="epochs of every run (300)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--data-dir", help="where california_housing and abalone are")
    parser.add_argument("--out", type=Path, default=Path("runs/dro_table"), help="folder of what is kept")
    arguments = parser.parse_args()
    given = arguments.seeds, arguments.epochs, arguments.data_dir, arguments.workers
    rows = all_runs(arguments.out / "runs.csv", arguments.cells, list(METHODS), *given)
    columns = [name for method in METHODS.values() for name in (method, "its worst seed")]
    print(f"| cell | F* | best published | {' | '.join(columns)} |\n| --- | --- | --- |{' --- |' * len(columns)}")
    summary: dict[str, dict[str, float]] = {}
    for cell in arguments.cells:
        best, texts = optimum(cell, arguments.data_dir), []
        summary[cell] = {}
        for method in METHODS:
            mine = [row["objective"] for row in rows if (row["cell"], row["method"]) == (cell, method)]
            gaps = [100 * (value / best - 1) if math.isfinite(value) else math.inf for value in mine]
            summary[cell][method] = round(statistics.mean(gaps), 4)
            texts += [f"{summary[cell][method]:.4f} %", f"{max(gaps):.4f} %"]
        published = 100 * (min(PUBLISHED[cell].values()) / best - 1)
        print(f"| {cell} | {best:.5f} | {published:.2f} % | {' | '.join(texts)} |")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
