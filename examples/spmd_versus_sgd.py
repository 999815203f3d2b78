"""The dual variable alone: SCENT's step against SGD, the proximal point and α = 1/S on Gaussian scores, weights fixed.

With s ~ N(μ, σ²), z = e^s, m = E z and κ = E z² / m², ν is to find log m; its error is F(ν) − F(log m) = e^−u + u − 1
with u = ν − log m. Three parts:

* ratio: what SCENT's error is of SGD's after the same samples, against σ for each μ: with the step sizes of Wei et al.
  (2026), α = 1 for SGD and log α = −7 − μ for SCENT, and with those that are best for each;
* runs: the squared error over a million samples for μ −1 and −10 and σ 0.1, 0.3 and 1, with the paper's step sizes;
* bounds: the error against the number of samples T with the step sizes of the paper's theorems, beside their bounds:
  of SCENT and SGD the average over the run, of 1/S that of the last ν, which no method can have lower in the long run
  than (κ − 1) / (2 T).

    python examples/spmd_versus_sgd.py

draws examples/figures/spmd_versus_sgd.png, in some minutes on one core. The last line is JSON: the ratio by σ, the
log-log slope of the error against T, and whether the bounds hold.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.figures import COLOURS, look_of, new_figure, note, save, style

MEANS, DEVIATIONS = (-1.0, -5.0, -10.0), (0.1, 0.3, 1.0)
RUNS = [(mean, deviation) for mean in (-1.0, -10.0) for deviation in DEVIATIONS]
METHODS = {"SCENT": "SCENT", "1/S": "α = 1/S", "ASGD": "SGD", "ProximalPoint": "proximal point"}
# Scores are cut this many deviations from their mean: the theorems are for bounded ones.
CUT = 4.0
Step = Callable[[Tensor, Tensor, int], Tensor]


def samples(means: Tensor, deviations: Tensor, steps: int, seed: int, cut: float = math.inf) -> Iterator[Tensor]:
    """Scores of all runs, shape ``(R,)`` each, ``steps`` times."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, steps, 4096):
        count = min(4096, steps - start)
        drawn = torch.randn(count, len(means), generator=generator, dtype=torch.float64)
        yield from means + deviations * drawn.clamp(-cut, cut)


def error(nu: Tensor, optimum: Tensor) -> Tensor:
    """F(ν) − F(log m)."""
    difference = nu - optimum
    return torch.expm1(-difference) + difference


def scent(log_alpha: Tensor) -> Step:
    return lambda nu, score, step: functional.proximal_mirror_descent_step(nu, score, log_alpha)


def inverse_sum(nu: Tensor, score: Tensor, step: int) -> Tensor:
    """SCENT with α = 1/S, which is the moving average with γ = 1/t."""
    return functional.sox_step(nu, score, 1 / (step + 1))


def sgd(alpha: Tensor, low: Tensor | float = -math.inf, high: Tensor | float = math.inf) -> Step:
    def step(nu: Tensor, score: Tensor, number: int) -> Tensor:
        moved = nu + alpha * torch.expm1(score - nu)
        return moved.clamp(torch.as_tensor(low), torch.as_tensor(high))

    return step


def proximal_point(alpha: float) -> Step:
    return lambda nu, score, step: functional.proximal_point_step(nu, score, alpha)


# -------------------------------------------------------------------- the ratio of the errors


def mean_errors(methods: dict[str, Step], means: Tensor, deviations: Tensor, steps: int) -> dict[str, Tensor]:
    """Mean error of each run over its last tenth, infinite where it diverged."""
    optimum = means + deviations.square() / 2
    found = {}
    for name, method in methods.items():
        nu, total = torch.zeros_like(means), torch.zeros_like(means)
        for step, score in enumerate(samples(means, deviations, steps, seed=0)):
            nu = method(nu, score, step)
            if step >= 0.9 * steps:
                total += error(nu, optimum)
        found[name] = (total / (0.1 * steps)).nan_to_num(math.inf)
    return found


def ratios(steps: int, seeds: int) -> dict[str, dict[tuple[float, float], float]]:
    """SCENT's mean error over SGD's by μ and σ: with the published step sizes, and with the best of each."""
    pairs = [(mean, deviation) for mean in MEANS for deviation in DEVIATIONS]
    choices = [-10 + 0.5 * i for i in range(21)]  # of log α + ν* for SCENT, and of log α for SGD
    found = {}
    for kind, chosen in (("published", [math.nan]), ("best", choices)):
        grid = [(*pair, choice) for pair in pairs for choice in chosen for _ in range(seeds)]
        means, deviations, choice = (torch.tensor(column, dtype=torch.float64) for column in zip(*grid, strict=True))
        by_hand, rate = -7.0 - means, torch.ones_like(means)
        if kind == "best":
            by_hand, rate = choice - (means + deviations.square() / 2), choice.exp()
        errors = mean_errors({"SCENT": scent(by_hand), "ASGD": sgd(rate)}, means, deviations, steps)
        scents, sgds = (each.view(len(pairs), -1, seeds).mean(dim=2).amin(dim=1) for each in errors.values())
        found[kind] = dict(zip(pairs, (scents / sgds).tolist(), strict=True))
    return found


# -------------------------------------------------------------------- single runs


def single_runs(steps: int) -> dict[str, tuple[list[int], Tensor]]:
    """Of each method the steps and the squared error, shape ``(points, runs)``, as the paper set it."""
    means, deviations = (torch.tensor(column, dtype=torch.float64) for column in zip(*RUNS, strict=True))
    log_alpha = torch.where(means == -1.0, -6.0, 3.0).double()
    optimum = means + deviations.square() / 2
    methods: dict[str, Step] = {
        "SCENT": scent(log_alpha),
        "1/S": inverse_sum,
        "ASGD": sgd(torch.ones_like(means)),
        "ProximalPoint": proximal_point(1.0),
    }
    kept = sorted({round(steps ** (i / 200)) for i in range(201)})
    found = {}
    for name, method in methods.items():
        nu, points = torch.zeros_like(means), []
        wanted = iter(kept)
        following = next(wanted)
        for step, score in enumerate(samples(means, deviations, steps, seed=1)):
            nu = method(nu, score, step)
            if step + 1 == following:
                points.append((nu - optimum).square())
                following = next(wanted, -1)
        found[name] = (kept, torch.stack(points))
    return found


# -------------------------------------------------------------------- the bounds


@dataclass(frozen=True)
class Law:
    """Moments of z = e^s for s ~ N(μ, σ²) cut at ``CUT`` deviations.

    Attributes:
        low: least score c₀.
        high: largest score c₁.
        mean: m = E z.
        variance: of z.
    """

    low: float
    high: float
    mean: float
    variance: float

    @staticmethod
    def of(mean: float, deviation: float) -> Law:
        x = np.linspace(-CUT, CUT, 200_001)
        density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        tail = math.erfc(CUT / math.sqrt(2)) / 2

        def moment(power: int) -> float:
            z = np.exp(power * (mean + deviation * x))
            return float(np.sum((z * density)[1:] + (z * density)[:-1]) / 2 * (x[1] - x[0]) + tail * (z[0] + z[-1]))

        first, second = moment(1), moment(2)
        return Law(mean - CUT * deviation, mean + CUT * deviation, first, second - first * first)

    @property
    def excess(self) -> float:
        """κ − 1."""
        return self.variance / self.mean**2


def horizons(lengths: list[int], runs: int, mean: float = -1.0, deviation: float = 1.0) -> dict[str, Any]:
    """Mean error against T by method, and the bounds of the theorems."""
    law = Law.of(mean, deviation)
    optimum = torch.tensor(math.log(law.mean), dtype=torch.float64)
    start = law.high  # ν₀, within [c₀, c₁]
    means, deviations = (torch.full((runs,), value, dtype=torch.float64) for value in (mean, deviation))
    constant = 2 * (1 + law.high - law.low)  # C with ρ = 1
    ratio = math.exp(optimum.item() - start)
    # e^−ν* − e^−ν₀ + e^−ν₀ (ν* − ν₀)
    divergence = math.exp(-optimum.item()) - math.exp(-start) * (1 + start - optimum.item())
    first = error(torch.tensor(start, dtype=torch.float64), optimum).item()
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    bounds: dict[str, list[float]] = {name: [] for name in ("SCENT", "1/S", "ASGD", "least")}
    for length in lengths:
        alpha = math.sqrt(divergence * law.mean / (2 * constant * length * law.variance))
        alpha = min(alpha, law.mean / (4 * constant * law.variance), math.exp(-law.high))
        rate = abs(start - optimum.item()) * math.exp(law.low) / math.sqrt(2 * length * law.variance)
        rate = min(rate, math.exp(law.low) / law.mean)
        methods: dict[str, Step] = {
            "SCENT": scent(torch.full_like(means, math.log(alpha))),
            "1/S": inverse_sum,
            "ASGD": sgd(torch.full_like(means, rate), law.low, law.high),
            "ProximalPoint": proximal_point(rate),
        }
        for name, method in methods.items():
            nu = torch.full_like(means, start)
            total = torch.zeros_like(means)
            for step, score in enumerate(samples(means, deviations, length, seed=length, cut=CUT)):
                nu = method(nu, score, step)
                total += error(nu, optimum)
            found[name].append((error(nu, optimum) if name == "1/S" else total / length).mean().item())
        excess = law.excess
        inner = constant * excess * (1 - ratio + ratio * math.log(ratio)) / length
        bounds["SCENT"].append(4 * math.sqrt(2) * math.sqrt(inner) + first / length)
        size = math.exp(optimum.item() - law.low)
        bounds["ASGD"].append(math.sqrt(2) * abs(start - optimum.item()) * size * math.sqrt(excess / length))
        tail = math.exp(1.5 * deviation**2 - length / (16 * (1 + excess)))
        bounds["1/S"].append(2 * excess / length + tail)
        bounds["least"].append(excess / (2 * length))
    return {"lengths": lengths, "found": found, "bounds": bounds}


def slope(lengths: list[int], errors: list[float]) -> float:
    """Of log error against log T, over the latter half of the lengths."""
    half = len(lengths) // 2
    return float(np.polyfit(np.log(lengths[half:]), np.log(errors[half:]), 1)[0])


# -------------------------------------------------------------------- the picture


@style()
def draw(
    by_pair: dict[str, dict[tuple[float, float], float]],
    runs: dict[str, tuple[list[int], Tensor]],
    horizon: dict[str, Any],
    path: Path,
) -> None:
    figure, panels = new_figure(3, 3, size=(3.5, 2.7))
    ratio, bounds, curves = panels[0, 0], panels[0, 1], panels[1:].flatten()
    for number, mean in enumerate(MEANS):
        for kind, line in (("published", "-"), ("best", "--")):
            values = [by_pair[kind][mean, deviation] for deviation in DEVIATIONS]
            look = {"color": (COLOURS[2], COLOURS[4], COLOURS[5])[number], "marker": "o", "linestyle": line}
            ratio.plot(DEVIATIONS, values, label=f"μ = {mean:g}" if kind == "published" else None, **look)
    ratio.set(xlabel="σ", ylabel="error of SCENT / error of SGD", xscale="log", yscale="log")
    ratio.set_xticks(DEVIATIONS, [f"{deviation:g}" for deviation in DEVIATIONS])
    ratio.minorticks_off()
    looks = {name: look_of(name, list(METHODS)) for name in METHODS}
    for name, label in METHODS.items():
        bounds.plot(horizon["lengths"], horizon["found"][name], label=label, **looks[name])
        if name in horizon["bounds"]:
            bounds.plot(horizon["lengths"], horizon["bounds"][name], color=looks[name]["color"], linestyle=":")
    bounds.plot(horizon["lengths"], horizon["bounds"]["least"], color="#777777", linestyle="--", label="(κ − 1)/(2T)")
    bounds.set(xlabel="samples T", ylabel="error F(ν) − F(ν*) (nats)", xscale="log", yscale="log")
    bounds.set_title("step sizes of the theorems; dotted: bounds")
    # Both legends have the place of the third panel.
    free = panels[0, 2]
    free.axis("off")
    first = free.legend(*ratio.get_legend_handles_labels(), loc="upper left", alignment="left", ncols=3)
    first.set_title("first panel: published step sizes\n(dashed: the best)")
    free.add_artist(first)
    free.legend(*bounds.get_legend_handles_labels(), loc="lower left", title="other panels", alignment="left")
    for number, ((mean, deviation), panel) in enumerate(zip(RUNS, curves, strict=True)):
        for name, (steps, errors) in runs.items():
            panel.plot(steps, errors[:, number], color=looks[name]["color"], linewidth=0.9)
        panel.set(xscale="log", yscale="log", title=f"μ = {mean:g}, σ = {deviation:g}", xlabel="samples")
        if number % 3 == 0:
            panel.set_ylabel("(ν − ν*)² of one run (nats²)")
    note(figure, "first two panels: means over runs; others: one run each, with the published step sizes")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="samples of the single runs (1000000)")
    parser.add_argument(
        "--ratio-steps", type=int, default=100_000, help="samples of the runs behind the ratio (100000)"
    )
    parser.add_argument("--seeds", type=int, default=8, help="runs behind each point of the ratio (8)")
    parser.add_argument("--longest", type=int, default=100_000, help="largest T beside the bounds (100000)")
    parser.add_argument("--runs", type=int, default=256, help="runs behind each error beside the bounds (256)")
    parser.add_argument("--out", type=Path, default=Path("examples/figures/spmd_versus_sgd.png"), help="the picture")
    arguments = parser.parse_args()
    print(__doc__)
    by_pair = ratios(arguments.ratio_steps, arguments.seeds)
    for kind, of_pairs in by_pair.items():
        for (mean, deviation), ratio in of_pairs.items():
            print(f"{kind} step sizes, μ {mean:5g}, σ {deviation:3g}: error of SCENT / of SGD {ratio:.5f}")
    runs = single_runs(arguments.steps)
    for name, (_, errors) in runs.items():
        print(f"{name:<14} (ν − ν*)² at the end: " + "  ".join(f"{value:.2e}" for value in errors[-1].tolist()))
    lengths = [round(100 * (arguments.longest / 100) ** (i / 6)) for i in range(7)]
    horizon = horizons(lengths, arguments.runs)
    held = all(
        all(e <= b for e, b in zip(horizon["found"][name], horizon["bounds"][name], strict=True))
        for name in ("SCENT", "1/S", "ASGD")
    )
    for name, errors in horizon["found"].items():
        print(f"{name:<14} error at T = {lengths}: " + "  ".join(f"{value:.2e}" for value in errors))
    draw(by_pair, runs, horizon, arguments.out)
    print(f"drawn: {arguments.out}")
    logs = {d: np.mean([np.log(by_pair["published"][mean, d]) for mean in MEANS]) for d in DEVIATIONS}
    by_deviation = {str(deviation): float(f"{math.exp(log):.4g}") for deviation, log in logs.items()}
    slopes = {name: round(slope(lengths, horizon["found"][name]), 3) for name in METHODS}
    print(json.dumps({"ratio": by_deviation, "slope": slopes, "bounds_hold": held}))


if __name__ == "__main__":
    main()
