"""Try rules for SCENT's step size on robust regression: many runs of a cell at once in NumPy, minutes for all six.

Every run is the one of configs/dro_CELL.yaml in float64: least squares, batches of 100, Nesterov momentum 0.9, a cosine
learning rate, the gradient clipped by norm; one dual variable. Only log α is a rule's own. Printed: the gap
(F − F*)/F* in percent at the end, mean over seeds (and the worst).

A rule sees ℓ of the batch and the progress of the run, and gives log α: add yours to RULES.

    python examples/benchmarks/step_size_trials.py --cells abalone_tau0.2 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from reproduce_dro_table import CELLS, CONFIGS, data_module, optimum, temperature

Array = npt.NDArray[np.float64]


def remaining(progress: float) -> float:
    """Half a cosine from 1 to 0."""
    return (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


class Fixed:
    """What the configuration says: log α by hand, constant or with α falling to 0 by a cosine."""

    def __init__(self, settings: dict[str, Any], shift: float = 0.0) -> None:
        self.log_alpha = settings["log_alpha"] + shift
        self.cosine = settings.get("schedule") == "cosine"
        self.guard = settings.get("max_log_weight", math.inf)

    def __call__(self, log_mean: Array, progress: float) -> Array:
        """Log α for this step, shape (seeds,); ``log_mean`` is ℓ of each seed's batch."""
        falling = math.log(max(remaining(progress), 1e-300)) if self.cosine else 0.0
        return np.full_like(log_mean, self.log_alpha + falling)


class Auto:
    """log α = −reference − c: the reference is the least mean of the objective over a window, c rises, α then falls.

    Args:
        rise: c at the end of its rise, from 0.
        until: fraction of the run at which c stops rising and α begins to fall to 0 by a cosine.
        window: fraction of the run after which the reference may fall; α is infinite in the first.
        guard: largest log weight.
        start: c at the start.
    """

    def __init__(
        self, rise: float = 6.0, until: float = 0.8, window: float = 0.01, guard: float = 2.0, start: float = 0.0
    ) -> None:
        self.rise, self.until, self.window, self.guard, self.start = rise, until, window, guard, start
        self.reference: Array | None = None
        self.total: Array | None = None
        self.count = 0
        self.number = 0

    def __call__(self, log_mean: Array, progress: float) -> Array:
        number = int(progress / self.window)
        if number > self.number and self.total is not None:
            estimate = self.total - math.log(self.count)
            self.reference = estimate if self.reference is None else np.minimum(self.reference, estimate)
            self.total, self.count, self.number = None, 0, number
        if self.reference is None:
            log_alpha = np.full_like(log_mean, np.inf)
        else:
            c = self.start + (self.rise - self.start) * min(progress / self.until, 1.0)
            log_alpha = -self.reference - c
            if progress > self.until:
                log_alpha = log_alpha + math.log(max(remaining((progress - self.until) / (1 - self.until)), 1e-300))
        self.total = log_mean.copy() if self.total is None else np.logaddexp(self.total, log_mean)
        self.count += 1
        return log_alpha


RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "by hand": Fixed,
    "by hand − 5": lambda settings: Fixed(settings, -5.0),
    "by hand + 5": lambda settings: Fixed(settings, 5.0),
    "auto, c 0 to 6 until 0.8": lambda _: Auto(),
    "auto, c 0 to 4 until 0.5": lambda _: Auto(rise=4.0, until=0.5),
    "auto, c 0 to 2 until 0.5": lambda _: Auto(rise=2.0, until=0.5),
    "auto, c 3 until 0.5": lambda _: Auto(rise=3.0, start=3.0, until=0.5),
    "auto, c 0 to 6 until 0.5": lambda _: Auto(rise=6.0, until=0.5),
}


def trial(cell: str, seeds: list[int], rules: dict[str, Any], data_dir: str | None) -> dict[str, list[float]]:
    """Objective at the end of every run, by rule and seed."""
    config = yaml.safe_load((CONFIGS / f"dro_{cell}.yaml").read_text())
    model, dual, trainer = config["model"]["init_args"], config["dual"]["init_args"], config["trainer"]
    tau, lr, clip = temperature(cell), float(model["lr"]), trainer["gradient_clip_val"]
    epochs, batch_size = trainer["max_epochs"], config["data"]["init_args"]["batch_size"]
    batches = [batch[:2] for batch in data_module(cell, data_dir).predict_dataloader()]
    features, target = (np.concatenate([batch[i].double().numpy() for batch in batches]) for i in range(2))
    rows = np.hstack([features, np.ones((len(target), 1))])
    made = {name: make(dual) for name, make in rules.items()}
    guards = np.array([rule.guard for rule in made.values()])[:, None]
    shape = (len(made), len(seeds))
    weights = np.broadcast_to(np.linalg.lstsq(rows, target, rcond=None)[0], (*shape, rows.shape[1])).copy()
    momentum = np.zeros_like(weights)
    nu = np.zeros(shape)
    generators = [np.random.default_rng(seed) for seed in seeds]
    per_epoch = -(-len(target) // batch_size)
    step, steps = 0, epochs * per_epoch
    for _ in range(epochs):
        orders = np.stack([generator.permutation(len(target)) for generator in generators])
        for start in range(0, len(target), batch_size):
            progress = step / steps
            chosen = orders[:, start : start + batch_size]
            inputs = rows[chosen]
            residual = np.einsum("sbd,rsd->rsb", inputs, weights) - target[chosen]
            scores = residual**2 / tau
            largest = scores.max(axis=2)
            exponentials = np.exp(scores - largest[:, :, None])
            log_mean = largest + np.log(exponentials.mean(axis=2))
            if step == 0:
                nu = log_mean.copy()
            log_alpha = np.stack([rule(log_mean[i], progress) for i, rule in enumerate(made.values())])
            with np.errstate(invalid="ignore"):
                moved = nu + np.logaddexp(0, log_alpha + log_mean) - np.logaddexp(0, log_alpha + nu)
            nu = np.maximum(np.where(np.isinf(log_alpha), log_mean, moved), log_mean - guards)
            factor = np.exp(np.minimum(largest - nu, 600.0))[:, :, None] * exponentials * residual
            gradient = np.einsum("rsb,sbd->rsd", factor, inputs) * (2 / chosen.shape[1])
            norm = np.sqrt((gradient**2).sum(axis=2, keepdims=True))
            gradient *= np.minimum(1.0, clip / (norm + 1e-6))
            momentum = 0.9 * momentum + gradient
            weights -= lr * remaining(progress) * (gradient + 0.9 * momentum)
            step += 1
    scores = (np.einsum("nd,rsd->rsn", rows, weights) - target) ** 2 / tau
    largest = scores.max(axis=2)
    final = tau * (largest + np.log(np.exp(scores - largest[:, :, None]).mean(axis=2)))
    return {name: final[i].tolist() for i, name in enumerate(made)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, help="which cells (all six)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the batches (0 1 2)")
    parser.add_argument("--data-dir", help="where california_housing and abalone are")
    arguments = parser.parse_args()
    gaps: dict[str, dict[str, float]] = {}
    for cell in arguments.cells:
        start = time.perf_counter()
        best = optimum(cell, arguments.data_dir)
        gaps[cell] = {}
        print(f"{cell}: F* {best:.5f}")
        for name, values in trial(cell, arguments.seeds, RULES, arguments.data_dir).items():
            percent = [100 * (value / best - 1) for value in values]
            gaps[cell][name] = sum(percent) / len(percent)
            print(f"  {name:<28} {gaps[cell][name]:9.4f} %   worst {max(percent):9.4f} %")
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    print(json.dumps({cell: {name: round(gap, 4) for name, gap in found.items()} for cell, found in gaps.items()}))


if __name__ == "__main__":
    main()
