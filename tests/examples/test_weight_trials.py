"""The trials' step for the weights is the package's."""

import math
from pathlib import Path

import pytest
import torch

from scent_lightning.duals.weight_step import proximal_gradients

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.mark.parametrize("progress", [0.0, 0.4])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6, 1e150])
def test_trials_take_the_packages_step(progress, size, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_size_trials import Rule, WeightSteps, remaining

    rules = [Rule(lr=2.0, proximal=True), Rule(lr=2.0), Rule(lr=50.0, decades=3, proximal=True)]
    steps = WeightSteps(rules, 0.01, 0.1, "cpu")
    generator = torch.Generator().manual_seed(0)
    gradient = size * torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    log_part = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    scaled = steps.scaled(gradient, log_part, progress, log_c=math.log(0.3))
    cosine = float(remaining(progress))
    for i, rate in enumerate([0.02 * cosine, 0.02 * cosine, 0.5 * 10 ** (-3 * progress)]):
        assert steps.rates(progress)[i] == pytest.approx(rate)
        parameter = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
        parameter.grad = gradient[i].clone()
        if rules[i].proximal:
            proximal_gradients(torch.optim.SGD([parameter], lr=rate), 0.3 * log_part[i].exp().mean())
        assert torch.allclose(scaled[i], parameter.grad, rtol=1e-10)


def test_rows_of_one_class_are_one_row(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_size_trials import summed

    labels = torch.tensor([[3, 1, 3, 3], [0, 1, 2, 0]])
    equal = labels.unsqueeze(2) == labels.unsqueeze(1)
    first = ~(equal & torch.ones(4, 4, dtype=torch.bool).tril(-1)).any(dim=2)
    rows = torch.randn(2, 4, 3)
    found = summed(rows, equal, first)
    for i in range(2):
        sums = torch.zeros(4, 3).index_add_(0, labels[i], rows[i])
        assert torch.allclose(torch.zeros(4, 3).index_add_(0, labels[i], found[i]), sums, atol=1e-6)
        assert found[i].square().sum() == pytest.approx(sums.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize(("decades", "rise"), [(None, 3), (4, 4), (5, 5)])
@pytest.mark.parametrize("warmup", [1, 3])
def test_a_learning_rate_rises_to_what_its_schedule_says(decades, rise, warmup, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_size_trials import Rule, WeightSteps

    rules = [Rule(rate=0.5, decades=decades, warmup=warmup), Rule(rate=0.5, decades=decades), Rule(lr=50.0)]
    steps = WeightSteps(rules, 0.01, 1 / 20, "cpu")
    for progress in (0.0, 0.01, 0.03, 0.05, 0.15, 0.151, 0.9, 0.98):
        rising, plain, other = steps.rates(progress).tolist()
        to_come = max(1 - progress * 20 / warmup, 0)
        assert rising == pytest.approx(plain * 10 ** (-rise * to_come))
        falls = 10 ** (-(decades or 0) * progress) * min(20 * (1 - progress), 1)
        assert plain == pytest.approx(0.5 * falls if decades else other)


@pytest.mark.parametrize(
    ("problem", "step", "value", "found"),
    [
        ("california_tau1.0", "proximal", math.inf, (1, 1)),
        ("california_tau1.0", "proximal", 50.1, (0, 1)),
        ("diabetes, τ 5", "proximal", 50.1, (0, 1)),
        ("diabetes, τ 5", "proximal", 50.00001, (0, 0)),
        ("abalone_tau0.2", "gradient", math.inf, (0, 0)),
        ("pauc_4_tau0.1", "proximal", 1e9, (0, 0)),
        ("digits", "proximal", math.inf, (1, 0)),
    ],
)
def test_runs_that_break_the_promise_are_found(problem, step, value, found, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    from learning_rates import broken

    row = {"problem": problem, "step": step, "factor": 10.0, "seed": 0, "value": value, "start": 50.0}
    assert tuple(map(len, broken([row]))) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e30])
def test_a_gradient_too_small_or_too_large_for_its_dtype_stays_finite(size, dtype, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_size_trials import Rule, WeightSteps

    steps = WeightSteps([Rule(proximal=True, rate=1e4)], 1.0, 0.1, "cpu")
    gradient = torch.full((1, 3, 2), size, dtype=dtype)
    for log_part in (-200.0, 0.0, 200.0):
        scaled = steps.scaled(gradient, torch.full((1, 4), log_part, dtype=torch.float64), 0.5)
        assert scaled.isfinite().all()
        assert (scaled.abs() <= gradient.abs()).all()
