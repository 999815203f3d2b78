"""How much a result depends on the learning rate: with gradient steps for the weights, and with proximal ones.

The six cells of robust regression, the glyphs and partial AUC with a known optimum (with 32 and 4 negatives a batch) of
examples/benchmarks/step_size_trials.py, and the twelve problems of examples/auto_on_new_problems.py, at learning rates
from a thousandth of the configured one to a thousand times it; the twelve have none, and the middle of their grid takes
its place. Everything has ``log_alpha: auto`` and a rate that falls by a cosine; no gradient is clipped. In robust
regression the rate rises during the first epoch.

Printed is what runs end with, mean of the seeds: the gap to the optimum in percent (for partial AUC, of the gap at the
start), or the exact cross-entropy; then every run with proximal steps that is not finite, or, in robust regression,
worse than its start. Three panels are drawn, a run that diverged at the top. What is done is kept in the folder --out,
a CSV file of the runs, and not done again.

    python examples/learning_rates.py --glyphs data/glyphs --pauc-features runs/pauc/features

The last line is JSON: how many runs there are with proximal steps, how many are not finite, how many are worse than
their start, and for each problem the mean by learning rate of either step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import auto_on_new_problems
import numpy as np
from reproduce_dro_table import CELLS, data_module, least_objective, temperature, training_rows
from resumable import read_rows, run_missing, silent_process

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from step_size_trials import GLYPHS, PAUC, Rule, add_trial_arguments, kind, trial

from scent_lightning.figures import COLOURS, mean_and_range, new_figure, note, save, style

NEW = auto_on_new_problems.PROBLEMS
PROBLEMS = (*CELLS, *NEW, *PAUC, GLYPHS)
STEPS: dict[str, dict[str, Any]] = {
    "gradient": {"color": COLOURS[1], "marker": "s"},
    "proximal": {"color": COLOURS[0], "marker": "o"},
}
PANELS = {
    "california_tau1.0": "California housing, τ 1",
    "pauc_32_tau0.1": "partial AUC, 32 negatives, τ 0.1",
    GLYPHS: "glyphs",
}
Key = tuple[str, str, float, int]


def kind_of(problem: str) -> str:
    """What a problem is: "regression", "partial AUC" or "classification"."""
    return NEW[problem].kind if problem in NEW else kind(problem)


def factors(problem: str) -> list[float]:
    """What the configured learning rate is multiplied by: half decades, of the long problems decades."""
    parts = 1 if problem in PAUC or problem == GLYPHS else 2
    return [10 ** (power / parts) for power in range(-3 * parts, 3 * parts + 1)]


def keys(problem: str, seeds: list[int]) -> Iterator[Key]:
    """Problem, step, factor and seed of every run; of the glyphs with gradient steps there is one seed."""
    for step in STEPS:
        for factor in factors(problem):
            for seed in seeds[:1] if problem == GLYPHS and step == "gradient" else seeds:
                yield problem, step, float(f"{factor:.4g}"), seed


def objective_at_start(rows: np.ndarray, target: np.ndarray, tau: float) -> float:
    """That of ordinary least squares."""
    scores = (rows @ np.linalg.lstsq(rows, target, rcond=None)[0] - target) ** 2 / tau
    return float(tau * (scores.max() + np.log(np.exp(scores - scores.max()).mean())))


def gap_at_start(problem: str, data_dir: str | None) -> float:
    """In percent; for classification the cross-entropy is not compared."""
    if kind_of(problem) == "classification":
        return math.inf
    if kind_of(problem) == "partial AUC":
        return 100.0
    if problem in NEW:
        pair, tau = NEW[problem].data(), NEW[problem].tau
    else:
        pair, tau = training_rows(data_module(problem, data_dir)), temperature(problem)
    return 100 * (objective_at_start(*pair, tau) / least_objective(*pair, tau) - 1)


def run(problem: str, wanted: list[Key], arguments: Namespace) -> list[dict[str, Any]]:
    """All runs of a problem that are wanted, at once."""
    silent_process(0)
    warmup = 1.0 if kind_of(problem) == "regression" else 0.0
    rules = [
        Rule(proximal=step == "proximal", clip=False, warmup=warmup, lr=factor, seed=seed)
        for _, step, factor, seed in wanted
    ]
    if problem in NEW:
        new = NEW[problem]
        lr, epochs = new.rates[len(new.rates) // 2], arguments.epochs or new.epochs
        values = auto_on_new_problems.trial(problem, auto_on_new_problems.optimum(problem), lr, epochs, rules)
    else:
        values = trial(problem, rules, arguments)
    start = gap_at_start(problem, arguments.data_dir)
    return [
        {
            "problem": problem,
            "step": step,
            "factor": factor,
            "seed": seed,
            "value": value if math.isfinite(value) else math.inf,
            "start": start,
        }
        for (_, step, factor, seed), value in zip(wanted, values, strict=True)
    ]


def by_factor(rows: list[dict[str, Any]], problem: str, step: str) -> dict[float, list[float]]:
    """What the seeds end with, by the factor of the learning rate."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["problem"] == problem and row["step"] == step:
            found.setdefault(row["factor"], []).append(row["value"])
    return dict(sorted(found.items()))


def broken(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The runs with proximal steps that are not finite, and those of robust regression that are worse than their start.

    A learning rate of a thousandth may leave a run where it began: 1e-6 more is no worse.
    """
    proximal = [row for row in rows if row["step"] == "proximal"]
    infinite = [row for row in proximal if not math.isfinite(row["value"])]
    worse = [
        row for row in proximal if kind_of(row["problem"]) == "regression" and row["value"] > row["start"] * (1 + 1e-6)
    ]
    return infinite, worse


def table(name: str, found: dict[str, dict[float, list[float]]]) -> str:
    """Mean and worst of the seeds of a problem at each learning rate, of either step."""
    headings = [f"{step}{word}" for step in found for word in (" step", ", worst")]
    lines = [f"| {name} | {' | '.join(headings)} |", "| --- " * (1 + len(headings)) + "|"]
    for factor in found["proximal"]:
        values = [of(found[step][factor]) for step in found for of in (statistics.mean, max)]
        lines.append(f"| × {factor:g} | {' | '.join(f'{value:.4g}' for value in values)} |")
    return "\n".join(lines)


@style()
def figure(rows: list[dict[str, Any]], problems: list[str], path: Path) -> None:
    """A panel for each problem; a run that diverged is at its top."""
    figure, panels = new_figure(1, len(problems), size=(3.5, 3.4))
    for panel, problem in zip(panels[0], problems, strict=True):
        least = min(row["value"] for row in rows if row["problem"] == problem and row["value"] > 0)
        top = least * (100 if problem == GLYPHS else 1e6)
        for step, look in STEPS.items():
            found = by_factor(rows, problem, step)
            values = [[min(value, top) for value in each] for each in found.values()]
            mean_and_range(panel, list(found), values, f"{step} step", **look)
        panel.axvline(1.0, color="#555555", linewidth=0.9, linestyle=":", zorder=0)
        panel.axhline(top, color="#555555", linewidth=0.9, linestyle="--", zorder=0)
        panel.set(xscale="log", yscale="log", ylim=(0.7 * least, 1.4 * top), title=PANELS.get(problem, problem))
        panel.set_xlabel("learning rate / configured learning rate")
        of_classes = kind_of(problem) == "classification"
        panel.set_ylabel("cross-entropy (nats)" if of_classes else "gap to the optimum (%)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STEPS))
    seeds = {len({row["seed"] for row in rows if row["problem"] == problem}) for problem in problems}
    said = "one seed" if max(seeds) == 1 else f"mean; band: least to largest of {max(seeds)} seeds"
    note(figure, said + " (without a band: of one)" * (len(seeds) > 1) + "; dashed: diverged, or worse than that")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, help="which (all)")
    parser.add_argument("--pauc-features", type=Path, help="folder 'features' that pauc_known_optimum.py made")
    add_trial_arguments(parser)
    parser.add_argument("--workers", type=int, default=1, help="problems at a time, one thread each (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/learning_rates"), help="folder of what is kept")
    arguments = parser.parse_args()
    file = arguments.out / "runs.csv"
    done = {(row["problem"], row["step"], row["factor"], row["seed"]) for row in read_rows(file)}
    missing = {name: [key for key in keys(name, arguments.seeds) if key not in done] for name in arguments.problems}
    run_missing(run, [(name, todo, arguments) for name, todo in missing.items() if todo], file, arguments.workers)
    wanted = {key for name in arguments.problems for key in keys(name, arguments.seeds)}
    rows = [row for row in read_rows(file) if (row["problem"], row["step"], row["factor"], row["seed"]) in wanted]
    summary = {}
    for name in arguments.problems:
        found = {step: by_factor(rows, name, step) for step in STEPS}
        print(table(name, found))
        summary[name] = {
            step: {f"{factor:g}": round(statistics.mean(values), 5) for factor, values in each.items()}
            for step, each in found.items()
        }
    infinite, worse = broken(rows)
    for word, which in (("not finite", infinite), ("worse than its start", worse)):
        for row in which:
            place = f"{row['problem']}, learning rate × {row['factor']:g}, seed {row['seed']}"
            print(f"{word}: {place}: {row['value']:.4g}, at the start {row['start']:.4g}")
    drawn = [name for name in PANELS if name in arguments.problems] or arguments.problems[:3]
    figure(rows, drawn, arguments.out / "learning_rates.png")
    print(f"figure: {arguments.out / 'learning_rates.png'}")
    runs = sum(row["step"] == "proximal" for row in rows)
    print(json.dumps({"runs": runs, "not finite": len(infinite), "worse": len(worse), **summary}, ensure_ascii=False))


if __name__ == "__main__":
    main()
