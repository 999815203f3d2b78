"""SCENT with nothing set on problems that its rule was not made on, beside log α searched for on each.

Twelve small problems of scikit-learn's data and of synthetic ones: robust regression and partial AUC with a known
optimum, and classification. On each, BSGD, SCENT with log α on a grid (with the guard and without, fixed and falling by
a cosine) and ``log_alpha: auto`` run at every learning rate of a grid, all in the tensor programs of
examples/benchmarks/step_size_trials.py. "By hand" is the lowest of its hundred or more, chosen with the very seeds that
it is shown for.

Printed is, mean of the seeds, each at its best learning rate: the gap to the optimum in percent (for partial AUC, of
the gap at the start), or for classification the exact cross-entropy over all training rows. What is done is kept in the
folder --out, a CSV file of the runs, and not done again.

    python examples/auto_on_new_problems.py --workers 2

The last line is JSON: for each problem what BSGD, by hand and auto end with.
"""

from __future__ import annotations

import argparse
import contextlib
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
from step_size_trials import Rule, Setting, classification, cross_entropies, partial_auc, partial_auc_gaps, regression

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
    """

    kind: str
    data: Callable[[], Pair]
    batch_size: int
    epochs: int
    rates: tuple[float, ...]
    tau: float = 1.0
    negatives: int = 0


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
    "digits": Problem("classification", digits, 16, 30, (0.3, 1.0, 3.0, 10.0)),
    "1,000 classes": Problem("classification", thousand_classes, 64, 20, (30.0, 100.0, 300.0)),
}
METHODS = ("BSGD", "by hand", "auto")


def rules(kind: str, reference: float) -> list[tuple[dict[str, Any], Rule]]:
    """What is tried at a learning rate, and how the row of the CSV file begins; ``reference`` is ν at the optimum."""
    found = [({"method": "BSGD", "settings": ""}, Rule(math.inf)), ({"method": "auto", "settings": ""}, Rule())]
    steps, guard = (range(-4, 21, 2), 1.0) if kind == "classification" else (range(-6, 5), 2.0)
    for step in steps:
        for limit in (math.inf, guard):
            for cosine in (False, True):
                log_alpha = round(step - reference, 2)
                named = f"log α {log_alpha:g}{', cosine' if cosine else ''}{f', guard {limit:g}' * (limit < math.inf)}"
                found.append(({"method": "by hand", "settings": named}, Rule(log_alpha, cosine, limit)))
    return found


def run(name: str, lr: float, seeds: list[int], epochs: int) -> list[dict[str, Any]]:
    """All that is tried at a learning rate, at once."""
    silent_process(0)
    problem = PROBLEMS[name]
    first, second = problem.data()
    pair = torch.from_numpy(first), torch.from_numpy(second)
    setting, tau, best = Setting(lr, problem.batch_size, epochs), problem.tau, 0.0
    if problem.kind == "regression":
        best = least_objective(first, second, tau)
    elif problem.kind == "partial AUC":
        with contextlib.redirect_stdout(None):
            best = pauc_known_optimum.solve(first, second, tau)[0]
    tried = [
        ({"problem": name, "lr": lr, "epochs": epochs, **row, "seed": seed}, replace(rule, seed=seed))
        for row, rule in rules(problem.kind, best / tau)
        for seed in seeds
    ]
    each = [rule for _, rule in tried]
    if problem.kind == "regression":
        final = regression(*pair, tau, None, setting, each, "cpu")
        values = [100 * (value - best) / best for value in final]
    elif problem.kind == "partial AUC":
        weights = partial_auc(*pair, tau, problem.negatives, setting, each, "cpu")
        values = partial_auc_gaps(weights, (first, second), tau, best)
    else:
        inputs, labels = pair[0].float(), pair[1].long()
        values = cross_entropies(classification(inputs, labels, setting, each, "cpu"), inputs, labels)
    return [
        {**row, "value": value if math.isfinite(value) else math.inf}
        for (row, _), value in zip(tried, values, strict=True)
    ]


def best_of(rows: list[dict[str, Any]], method: str) -> tuple[float, float, str]:
    """Least mean over the seeds, its learning rate and its settings."""
    found: dict[tuple[float, str], list[float]] = {}
    for row in rows:
        if row["method"] == method:
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
    done = {(row["problem"], row["lr"], row["seed"], row["epochs"]) for row in read_rows(file)}
    todo = []
    for name in arguments.problems:
        for lr in PROBLEMS[name].rates:
            seeds = [seed for seed in arguments.seeds if (name, lr, seed, epochs[name]) not in done]
            if seeds:
                todo.append((name, lr, seeds, epochs[name]))
    run_missing(run, todo, file, arguments.workers)
    rows = [row for row in read_rows(file) if row["seed"] in arguments.seeds]
    print("| problem | BSGD | by hand | auto | by hand with | lr of auto |\n| --- | --- | --- | --- | --- | --- |")
    summary = {}
    for name in arguments.problems:
        mine = [row for row in rows if row["problem"] == name and row["epochs"] == epochs[name]]
        found = {method: best_of(mine, method) for method in METHODS}
        unit = "" if PROBLEMS[name].kind == "classification" else " %"
        values = " | ".join(f"{value:.3g}{unit}" for value, _, _ in found.values())
        _, lr, settings = found["by hand"]
        print(f"| {name} | {values} | lr {lr:g}, {settings} | {found['auto'][1]:g} |")
        summary[name] = {method: round(value, 5) for method, (value, _, _) in found.items()}
    print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
    main()
