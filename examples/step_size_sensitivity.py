"""How much SCENT's result depends on log α: by hand over ±10, with and without the guard, and found during the run.

Two cells of robust regression and the glyphs, as in examples/benchmarks/step_size_trials.py, whose runs these are: each
problem's learning rate and schedule of α stay what they are in its configuration. Drawn is what a run ends with against
log α: the gap to the exact optimum in percent, or the exact cross-entropy; mean, least and largest of the seeds. A run
that diverged is drawn at the top.

What is done is kept in the folder --out, a CSV file of the runs, and not done again.

    python examples/step_size_sensitivity.py --glyphs data/glyphs --device cuda

The last line is JSON: for each problem the best and the worst mean over log α, and the mean of auto.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from resumable import append_rows, read_rows

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from step_size_trials import GLYPHS, Rule, add_trial_arguments, by_hand, trial

from scent_lightning.figures import COLOURS, mean_and_range, new_figure, note, save, style
from scent_lightning.updates.auto import AutoConstants

PROBLEMS = ("california_tau1.0", "abalone_tau0.2", GLYPHS)
SHIFTS = range(-10, 11)
METHODS: dict[str, dict[str, Any]] = {
    "SCENT": {"color": COLOURS[1], "marker": "s"},
    "SCENT with the guard": {"color": COLOURS[0], "marker": "o"},
    "SCENT auto": {"color": COLOURS[2]},
}
TITLES = {"california_tau1.0": "California housing, τ 1", "abalone_tau0.2": "abalone, τ 0.2", GLYPHS: "glyphs"}


def rules(problem: str, seeds: list[int]) -> list[tuple[dict[str, Any], Rule]]:
    """What is run, and how the row of the CSV file begins."""
    hand = by_hand(problem)
    assert hand.log_alpha is not None
    assert hand.guard is not None
    guard = min(hand.guard, AutoConstants.largest_guard)
    found = []
    for seed in seeds:
        for shift in SHIFTS:
            log_alpha = hand.log_alpha + shift
            for method, limit in (("SCENT", math.inf), ("SCENT with the guard", guard)):
                row = {"problem": problem, "method": method, "log_alpha": log_alpha, "seed": seed}
                found.append((row, replace(hand, log_alpha=log_alpha, guard=limit, seed=seed)))
        row = {"problem": problem, "method": "SCENT auto", "log_alpha": hand.log_alpha, "seed": seed}
        found.append((row, Rule(seed=seed)))
    return found


def means(rows: list[dict[str, Any]], problem: str, method: str) -> dict[float, list[float]]:
    """What the seeds end with, by log α; infinity where a run diverged."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["problem"] == problem and row["method"] == method:
            value = row["value"] if math.isfinite(row["value"]) else math.inf
            found.setdefault(row["log_alpha"], []).append(value)
    return dict(sorted(found.items()))


@style()
def figure(rows: list[dict[str, Any]], problems: list[str], path: Path) -> None:
    """A panel for each problem; a run that diverged is at its top."""
    figure, panels = new_figure(1, len(problems), size=(3.5, 3.4))
    for panel, problem in zip(panels[0], problems, strict=True):
        finite = [row["value"] for row in rows if row["problem"] == problem and math.isfinite(row["value"])]
        least = min(value for value in finite if value > 0)
        top = least * (30 if problem == GLYPHS else 3e4)
        for method, look in METHODS.items():
            by_log_alpha = means(rows, problem, method)
            values = [[min(value, top) for value in each] for each in by_log_alpha.values()]
            if method == "SCENT auto":
                (by_hand,) = by_log_alpha
                panel.axvline(by_hand, color="#555555", linewidth=0.9, linestyle=":", zorder=0)
                mean_and_range(
                    panel, [by_hand + shift for shift in (SHIFTS[0], SHIFTS[-1])], values * 2, method, **look
                )
            else:
                mean_and_range(panel, list(by_log_alpha), values, method, **look)
        panel.axhline(top, color="#555555", linewidth=0.9, linestyle="--", zorder=0)
        panel.set(yscale="log", ylim=(0.8 * least, 1.2 * top), xlabel="log α", title=TITLES.get(problem, problem))
        panel.set_ylabel("cross-entropy (nats)" if problem == GLYPHS else "gap to the optimum (%)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    seeds = len({row["seed"] for row in rows})
    note(figure, f"mean; band: least to largest of {seeds} seeds; dotted: log α by hand; top line: diverged, or worse")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, help="which (all three)")
    add_trial_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/step_size_sensitivity"), help="folder of what is kept")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "runs.csv"
    for problem in arguments.problems:
        done = [{name: row[name] for name in ("problem", "method", "log_alpha", "seed")} for row in read_rows(file)]
        todo = [(row, rule) for row, rule in rules(problem, arguments.seeds) if row not in done]
        if todo:
            values = trial(problem, [rule for _, rule in todo], arguments)
            append_rows(file, [{**row, "value": value} for (row, _), value in zip(todo, values, strict=True)])
    rows = [row for row in read_rows(file) if row["seed"] in arguments.seeds]
    figure(rows, arguments.problems, arguments.out / "step_size_sensitivity.png")
    summary = {}
    for problem in arguments.problems:
        plain = [statistics.mean(values) for values in means(rows, problem, "SCENT").values()]
        guarded = [statistics.mean(values) for values in means(rows, problem, "SCENT with the guard").values()]
        (auto,) = means(rows, problem, "SCENT auto").values()
        summary[problem] = {
            "best": round(min(plain + guarded), 5),
            "worst with the guard": round(max(guarded), 5),
            "diverged without it": sum(math.isinf(value) for value in plain),
            "auto": round(statistics.mean(auto), 5),
        }
    print(f"figure: {arguments.out / 'step_size_sensitivity.png'}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
