"""SCENT with nothing set on problems that its rule was not made on, beside log α searched for on each.

Twelve small problems of scikit-learn's data and of synthetic ones: robust regression and partial AUC with a known
optimum, and classification. On each, BSGD, SCENT with log α on a grid (with the guard and without, fixed and falling by
a cosine) and ``log_alpha: auto`` run at every learning rate of a grid, all in the tensor programs of
examples/benchmarks/step_size_trials.py. "By hand" is the lowest of its hundred or more, chosen with the very seeds that
it is shown for; all these take gradient steps for the weights. "By hand, either step" is chosen among twice as many,
with the proximal step, too. "Nothing set" is auto with the proximal step at the learning rate and schedule that the
kind of problem has when none is given, "lr auto" the same with a learning rate that is found.

Printed is, mean of the seeds, each but the last two at its best learning rate: the gap to the optimum in percent (for
partial AUC, of the gap at the start), or for classification the exact cross-entropy over all training rows. What is
done is kept in the folder --out, a CSV file of the runs, and not done again.

    python examples/auto_on_new_problems.py --workers 2

The last line is JSON: for each problem what each ends with.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pauc_known_optimum
import torch
from reproduce_dro_table import least_objective, training_rows
from resumable import read_rows, run_missing, silent_process
from sklearn.datasets import load_breast_cancer, load_digits, make_friedman1
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from step_size_trials import (
    AUTO_LR,
    NOTHING_SET,
    Rule,
    Setting,
    classification,
    cross_entropies,
    partial_auc,
    partial_auc_gaps,
    regression,
)

from scent_lightning.data import SyntheticFeatureDataModule, TabularRegressionDataModule

Pair = tuple[np.ndarray, np.ndarray]


def _standardised(features: np.ndarray, target: np.ndarray) -> Pair:
    rows = np.hstack([StandardScaler().fit_transform(features), np.ones((len(features), 1))])
    return rows, (target - target.mean()) / target.std()


def diabetes() -> Pair:
    """442 rows of 10 features."""
    return training_rows(TabularRegressionDataModule("diabetes"))


def heavy_tailed() -> Pair:
    """5,000 rows of a linear model with noise of Student's t, 5 degrees of freedom."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((5000, 10))
    target = features @ generator.standard_normal(10) / 3 + 0.5 * generator.standard_t(5, 5000)
    return _standardised(features, target)


def friedman() -> Pair:
    """2,000 rows of Friedman's first problem, which is not linear."""
    features, target = make_friedman1(2000, noise=1.0, random_state=0)
    return _standardised(features, target)


def breast_cancer() -> Pair:
    """212 malignant and 357 benign of 30 features."""
    data = load_breast_cancer()
    features = StandardScaler().fit_transform(data.data)
    return features[data.target == 0], features[data.target == 1]


def eights() -> Pair:
    """174 eights and 1,623 other digits of 64 pixels."""
    data = load_digits()
    features = StandardScaler().fit_transform(data.data)
    return features[data.target == 8], features[data.target != 8]


def digits() -> Pair:
    """1,797 digits of ten classes, of length 1."""
    data = load_digits()
    features = StandardScaler().fit_transform(data.data)
    return features / np.linalg.norm(features, axis=1, keepdims=True), data.target


def thousand_classes() -> Pair:
    """10,000 rows of 1,000 classes that overlap."""
    data = SyntheticFeatureDataModule(num_classes=1000, num_features=32, rows=10_000, noise=1.0, batch_size=10_000)
    features, labels, _ = next(iter(data.train_dataloader()))
    return features.numpy(), labels.numpy()


@dataclass(frozen=True)
class Problem:
    """One of the problems.

    Attributes:
        kind: "regression", "partial AUC" or "classification".
        data: rows and target, positives and negatives, or features and labels.
        batch_size: rows of a batch; of partial AUC, of positives.
        epochs: of a run.
        rates: learning rates.
        tau: temperature.
        negatives: of a batch, for partial AUC.
        classes: how many there are, for classification.
    """

    kind: str
    data: Callable[[], Pair]
    batch_size: int
    epochs: int
    rates: tuple[float, ...]
    tau: float = 1.0
    negatives: int = 0
    classes: int = 1

    @property
    def nothing_set(self) -> Rule:
        """What the task of its kind takes of its own accord."""
        own = NOTHING_SET[self.kind]
        return replace(own, rate=self.classes * (own.rate or 0.0))


FROM_1E_5 = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
FROM_1E_4 = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
PROBLEMS = {
    "diabetes, τ 0.2": Problem("regression", diabetes, 32, 300, FROM_1E_4, 0.2),
    "diabetes, τ 1": Problem("regression", diabetes, 32, 300, FROM_1E_4, 1.0),
    "diabetes, τ 5": Problem("regression", diabetes, 32, 300, FROM_1E_4, 5.0),
    "heavy tails, τ 0.2": Problem("regression", heavy_tailed, 100, 100, FROM_1E_5, 0.2),
    "heavy tails, τ 1": Problem("regression", heavy_tailed, 100, 100, FROM_1E_5, 1.0),
    "Friedman, τ 0.2": Problem("regression", friedman, 50, 100, FROM_1E_4, 0.2),
    "breast cancer, 16 negatives": Problem("partial AUC", breast_cancer, 16, 100, FROM_1E_5, 0.1, 16),
    "breast cancer, 2 negatives": Problem("partial AUC", breast_cancer, 16, 100, FROM_1E_5, 0.1, 2),
    "digit 8, 32 negatives": Problem("partial AUC", eights, 16, 100, FROM_1E_5, 0.1, 32),
    "digit 8, 4 negatives": Problem("partial AUC", eights, 16, 100, FROM_1E_5, 0.1, 4),
    "digits": Problem("classification", digits, 16, 30, (0.3, 1.0, 3.0, 10.0), classes=10),
    "1,000 classes": Problem("classification", thousand_classes, 64, 20, (30.0, 100.0, 300.0), classes=1000),
}
# What is printed, and of which rows of the CSV file it is the best.
COLUMNS = {
    "BSGD": ("BSGD",),
    "by hand": ("by hand",),
    "by hand, either step": ("by hand", "by hand, proximal"),
    "auto": ("auto",),
    "nothing set": ("nothing set",),
    "lr auto": ("lr auto",),
}


def optimum(name: str) -> float:
    """The least possible objective, 0 for classification."""
    problem = PROBLEMS[name]
    if problem.kind == "regression":
        return least_objective(*problem.data(), problem.tau)
    if problem.kind == "partial AUC":
        with contextlib.redirect_stdout(None):
            return pauc_known_optimum.solve(*problem.data(), problem.tau)[0]
    return 0.0


def rules(kind: str, reference: float) -> list[tuple[str, str, Rule]]:
    """Method, settings and rule of all that is tried at a learning rate; ``reference`` is ν at the optimum."""
    found = [("BSGD", "", Rule(math.inf)), ("auto", "", Rule())]
    steps, guard = (range(-4, 21, 2), 1.0) if kind == "classification" else (range(-6, 5), 2.0)
    for step in steps:
        for limit in (math.inf, guard):
            for cosine in (False, True):
                log_alpha = round(step - reference, 2)
                named = f"log α {log_alpha:g}{', cosine' if cosine else ''}{f', guard {limit:g}' * (limit < math.inf)}"
                by_hand = Rule(log_alpha, cosine, limit)
                found.append(("by hand", named, by_hand))
                found.append(("by hand, proximal", f"{named}, proximal", replace(by_hand, proximal=True)))
    return found


def trial(name: str, best: float, lr: float, epochs: int, rules: list[Rule]) -> list[float]:
    """What each run ends with, infinity where it diverged; ``best`` is the optimum."""
    problem = PROBLEMS[name]
    first, second = problem.data()
    pair = torch.from_numpy(first), torch.from_numpy(second)
    setting, tau = Setting(lr, problem.batch_size, epochs), problem.tau
    if problem.kind == "regression":
        final = regression(*pair, tau, None, setting, rules, "cpu")
        values = [100 * (value - best) / best for value in final]
    elif problem.kind == "partial AUC":
        weights = partial_auc(*pair, tau, problem.negatives, setting, rules, "cpu")
        values = partial_auc_gaps(weights, (first, second), tau, best)
    else:
        inputs, labels = pair[0].float(), pair[1].long()
        values = cross_entropies(classification(inputs, labels, setting, rules, "cpu"), inputs, labels)
    return [value if math.isfinite(value) else math.inf for value in values]


def run(name: str, lr: float, epochs: int, wanted: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """The methods and seeds that are wanted at a learning rate, all at once."""
    silent_process(0)
    problem, best = PROBLEMS[name], optimum(name)
    known = [
        *rules(problem.kind, best / problem.tau),
        ("nothing set", "", problem.nothing_set),
        ("lr auto", "", AUTO_LR[problem.kind]),
    ]
    tried = [(row, seed) for row in known for seed in sorted({seed for _, seed in wanted}) if (row[0], seed) in wanted]
    values = trial(name, best, lr, epochs, [replace(rule, seed=seed) for (_, _, rule), seed in tried])
    return [
        {"problem": name, "lr": lr, "epochs": epochs, "method": method, "settings": named, "seed": seed, "value": value}
        for ((method, named, _), seed), value in zip(tried, values, strict=True)
    ]


def missing(names: list[str], seeds: list[int], epochs: dict[str, int], file: Path) -> list[tuple[Any, ...]]:
    """Arguments of :func:`run` for what is not in the file."""
    done = {tuple(row[key] for key in ("problem", "lr", "epochs", "method", "seed")) for row in read_rows(file)}
    found = []
    for name in names:
        problem = PROBLEMS[name]
        searched = ("BSGD", "auto", *COLUMNS["by hand, either step"])
        own = problem.nothing_set.rate
        assert own is not None
        todo: dict[float, list[tuple[str, int]]] = {}
        for lr, method in [*itertools.product(problem.rates, searched), (own, "nothing set"), (own, "lr auto")]:
            for seed in seeds:
                if (name, lr, epochs[name], method, seed) not in done:
                    todo.setdefault(lr, []).append((method, seed))
        found += [(name, lr, epochs[name], wanted) for lr, wanted in todo.items()]
    return found


def best_of(rows: list[dict[str, Any]], methods: tuple[str, ...]) -> tuple[float, float, str]:
    """Least mean over the seeds, its learning rate and its settings."""
    found: dict[tuple[float, str], list[float]] = {}
    for row in rows:
        if row["method"] in methods:
            found.setdefault((row["lr"], row["settings"]), []).append(row["value"])
    return min((statistics.mean(values), *key) for key, values in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, help="which (all twelve)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the batches (0 1 2)")
    parser.add_argument("--epochs", type=int, help="epochs of every run (as each problem's)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/auto_on_new_problems"), help="folder of what is kept")
    arguments = parser.parse_args()
    file = arguments.out / "runs.csv"
    epochs = {name: arguments.epochs or PROBLEMS[name].epochs for name in arguments.problems}
    todo = missing(arguments.problems, arguments.seeds, epochs, file)
    run_missing(run, todo, file, arguments.workers)
    rows = [row for row in read_rows(file) if row["seed"] in arguments.seeds]
    print(f"| problem | {' | '.join(COLUMNS)} | by hand with | either step with | lr of auto |")
    print("| --- " * (len(COLUMNS) + 4) + "|")
    summary = {}
    for name in arguments.problems:
        mine = [row for row in rows if row["problem"] == name and row["epochs"] == epochs[name]]
        found = {column: best_of(mine, methods) for column, methods in COLUMNS.items()}
        unit = "" if PROBLEMS[name].kind == "classification" else " %"
        values = " | ".join(f"{value:.3g}{unit}" for value, _, _ in found.values())
        given = [f"lr {found[column][1]:g}, {found[column][2]}" for column in ("by hand", "by hand, either step")]
        print(f"| {name} | {values} | {' | '.join(given)} | {found['auto'][1]:g} |")
        summary[name] = {column: round(value, 5) for column, (value, _, _) in found.items()}
    print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
    main()
