"""What an independent sample for ν gains and costs: the ζ' of the analysis beside one sample for both.

With one sample for both, the scores that an anchor weighs by exp(s − ν) are in that ν: the largest weigh less than
they should. That is a bias, the larger the fewer samples there are. Other samples for ν take it away (Wei et al. 2026,
algorithm 1); they are as many scores again, or leave half as many for each. Three ways of spending draws, on a softmax
of 50 classes with noisy labels, whose optimum is known (convex; L-BFGS in float64):

* shared: m classes for ν and the gradient alike, what the tasks do by default;
* split: m/2 for ν, m/2 others for the gradient;
* twice: m for ν, m others for the gradient.

Each with the learning rate and the step size, of those tried, that end lowest in the mean over the seeds; all runs at
once. Then what a step of each task takes with ``independent_sample`` and without.

    python examples/independent_sample.py

The last line is JSON: the gap to the optimum in % of where it started, by update, m and way (null where
all diverged), and by task the time of a step with an independent sample over that of a plain one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.duals import SCENT
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask, PartialAUCTask

CLASSES, FEATURES, ROWS, BATCH = 50, 10, 2000, 50
WAYS = ("shared", "split", "twice")
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# BSGD has no step size; that of SOX is γ, that of SCENT log α.
SIZES: dict[str, tuple[float, ...]] = {"BSGD": (0.0,), "SOX": (0.05, 0.2, 0.7), "SCENT": (-1.0, 1.0, 3.0)}


def problem() -> tuple[Tensor, Tensor]:
    """Features of unit norm, and labels drawn from a softmax of them, so that no classifier is right on all."""
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(ROWS, FEATURES, generator=generator), dim=1)
    logits = 3 * features @ torch.randn(FEATURES, CLASSES, generator=generator)
    return features, torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)


def objective(weight: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Mean over the rows of the log-mean-exp of their scores against all classes; of one or several weights."""
    logits = features.to(weight.dtype) @ weight.mT
    own = logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(dim=-1) - own - math.log(CLASSES)).mean(dim=-1)


def optimum(features: Tensor, labels: Tensor) -> float:
    """The least objective."""
    weight = torch.zeros(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=3000, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value = objective(weight, features, labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(closure)  # type: ignore[no-untyped-call]
    return objective(weight, features, labels).item()


def moved(name: str, nu: Tensor, log_mean: Tensor, sizes: Tensor) -> Tensor:
    """ν after a step, shape ``(R, B)``, with a step size for each run."""
    if name == "BSGD":
        return log_mean
    if name == "SOX":
        return functional.proximal_mirror_descent_step(nu, log_mean, torch.logit(sizes).unsqueeze(1), 0.0)
    return functional.proximal_mirror_descent_step(nu, log_mean, sizes.unsqueeze(1))


def final_objectives(name: str, way: str, m: int, epochs: int, grid: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    """The objective at the end of each run, shape ``(R,)``; of a grid of learning rate and step size, ``(R, 2)``."""
    features, labels = data
    runs, count = len(grid), m // 2 if way == "split" else m
    rates, sizes = grid.T
    generator = torch.Generator().manual_seed(m)
    weight = torch.zeros(runs, CLASSES, FEATURES)
    nu, visited = torch.zeros(runs, ROWS), torch.zeros(ROWS, dtype=torch.bool)
    total = epochs * ROWS // BATCH
    order = (rows for _ in range(epochs) for rows in torch.randperm(ROWS, generator=generator).view(-1, BATCH))
    for step, rows in enumerate(order):
        logits = torch.einsum("bd,rkd->rbk", features[rows], weight)
        own = labels[rows].expand(runs, -1).unsqueeze(-1)

        def draw(logits: Tensor = logits, own: Tensor = own) -> tuple[Tensor, Tensor]:
            classes = torch.randint(CLASSES, (runs, 1, count), generator=generator).expand(-1, BATCH, -1)
            return classes, logits.gather(2, classes) - logits.gather(2, own)

        classes, scores = draw()
        moving = scores if way == "shared" else draw()[1]
        log_mean = (moving.logsumexp(dim=2) - math.log(count)).double()
        before = torch.where(visited[rows], nu[:, rows].double(), log_mean)
        new = moved(name, before, log_mean, sizes)
        nu[:, rows], visited[rows] = new.float(), True
        weights = torch.exp(scores - new.float().unsqueeze(2)) / (count * BATCH)
        by_logits = torch.zeros_like(logits).scatter_add_(2, classes, weights)
        by_logits.scatter_add_(2, own, -weights.sum(dim=2, keepdim=True))
        rate = rates * 0.5 * (1 + math.cos(math.pi * step / total))
        weight -= rate.view(-1, 1, 1) * torch.einsum("rbk,bd->rkd", by_logits, features[rows])
    return objective(weight.double(), features, labels).nan_to_num(math.inf)


def gaps(name: str, way: str, m: int, arguments: argparse.Namespace, data: Any, least: float) -> tuple[float, ...]:
    """Least mean gap in % over the seeds, its deviation, and the learning rate and step size that it is of."""
    choices = list(itertools.product(RATES, SIZES[name]))
    grid = torch.tensor(choices).repeat_interleave(arguments.seeds, dim=0)
    start = objective(torch.zeros(CLASSES, FEATURES), *data).item()
    found = 100 * (final_objectives(name, way, m, arguments.epochs, grid, data) - least) / (start - least)
    by_choice = found.view(len(choices), arguments.seeds)
    best = int(by_choice.mean(dim=1).argmin())
    return by_choice[best].mean().item(), by_choice[best].std().item(), *choices[best]


# -------------------------------------------------------------------- what a step takes


def tasks(independent: bool) -> dict[str, tuple[Any, Any]]:
    """Each task with a batch."""
    labels = torch.randint(10_000, (128,))
    rows = torch.arange(128)
    of: dict[str, Any] = {"independent_sample": independent}
    network = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    classes = {
        f"classification, {negatives}": (
            ExtremeClassificationTask(512, 10_000, 128, SCENT(8.0), negatives=negatives, **of),
            (torch.randn(128, 512), labels, rows),
        )
        for negatives in ("uniform", "in_batch")
    }
    return {
        **classes,
        "regression, linear": (
            DRORegressionTask(64, SCENT(0.0), initial="zeros", **of),
            (torch.randn(100, 64), torch.randn(100), torch.arange(100)),
        ),
        "regression, network": (
            DRORegressionTask(64, SCENT(0.0), network=network, **of),
            (torch.randn(100, 64), torch.randn(100), torch.arange(100)),
        ),
        "partial AUC": (
            PartialAUCTask(128, SCENT(0.0), num_features=64, **of),
            (torch.randn(128, 64), rows % 2, rows),
        ),
    }


def step_times(turns: int) -> dict[str, list[float]]:
    """Median microseconds of a step of each task, plain and with an independent sample; the two take turns."""
    both = [tasks(independent) for independent in (False, True)]
    times: dict[str, list[list[float]]] = {name: [[], []] for name in both[0]}
    for _ in range(turns):
        for which, of in enumerate(both):
            for name, (task, batch) in of.items():
                start = time.perf_counter()
                task.training_step(batch, 0).backward()
                times[name][which].append(time.perf_counter() - start)
                task.zero_grad(set_to_none=True)
    return {name: [1e6 * statistics.median(each) for each in pair] for name, pair in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of a run, of 40 steps each (40)")
    parser.add_argument("--seeds", type=int, default=4, help="runs behind each mean (4)")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 8, 32], help="draws m, even numbers (2 8 32)")
    parser.add_argument("--turns", type=int, default=400, help="steps behind each median of the times (400)")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    data = problem()
    least = optimum(*data)
    print(f"optimum {least:.5f}, from 0 at the start")
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, m in itertools.product(SIZES, arguments.samples):
        line = []
        for way in WAYS:
            gap, spread, rate, size = gaps(name, way, m, arguments, data, least)
            found.setdefault(name, {}).setdefault(str(m), {})[way] = float(f"{gap:.4g}") if gap < math.inf else None
            line.append(f"{way} {gap:.4g} ± {spread:.2g} % (lr {rate:g}, {size:g})")
        print(f"{name:<6} m {m:>3}: " + "; ".join(line), flush=True)
    times = step_times(arguments.turns)
    for name, (plain, independent) in times.items():
        print(f"a step of {name}: {plain:.0f} µs, with an independent sample {independent:.0f} µs")
    costs = {name: round(independent / plain, 2) for name, (plain, independent) in times.items()}
    print(json.dumps({"gap": found, "step": costs}))


if __name__ == "__main__":
    main()
