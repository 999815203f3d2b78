"""The joint implicit step of the benchmark is the minimiser of its objective."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from scent_lightning.functional import lambert_w, proximal_point_step

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import implicit_sgd

    return implicit_sgd


def problem_of(benchmark, kind, seed):
    problem = benchmark.random_problem(6, 5, 4, seed, torch.float64)
    if kind == "repeated":  # rows of one class, which is among those sampled, and a row twice
        own = torch.tensor([0, 0, 0, 1, 1, 2])
        features = problem.features.clone()
        features[1] = features[0]
        return problem._replace(own=own, sampled=torch.tensor([0, 2, 7, 8]), features=features)
    if kind == "large":  # scores of some hundred
        return problem._replace(rows=60 * problem.rows)
    return problem


def numeric(benchmark, problem, eta, alpha):
    """The minimiser by quasi-Newton steps in float64, from the start."""
    shape, size = problem.rows.shape, problem.rows.numel()

    def value_and_gradient(x):
        x = torch.from_numpy(x).requires_grad_()
        value = benchmark.objective(problem, x[:size].view(shape), x[size:], eta, alpha)
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient.numpy()

    x = torch.cat([problem.rows.flatten(), problem.nu]).numpy().copy()
    for _ in range(3):
        options = {"maxiter": 20_000, "maxfun": 50_000, "ftol": 0.0, "gtol": 1e-11, "maxcor": 40}
        x = minimize(value_and_gradient, x, jac=True, method="L-BFGS-B", options=options).x
    assert np.abs(value_and_gradient(x)[1]).max() < 1e-8 * max(1, 1 / eta)
    return torch.from_numpy(x[:size]).view(shape), torch.from_numpy(x[size:])


@pytest.mark.parametrize("kind", ["distinct", "repeated"])
@pytest.mark.parametrize(("eta", "alpha"), [(0.1, 0.1), (3.0, 1.0), (30.0, 0.5)])
def test_it_is_the_minimiser(kind, eta, alpha, benchmark):
    for seed in range(2):
        problem = problem_of(benchmark, kind, seed)
        found = benchmark.implicit_step(problem, eta, alpha, 1e-10)
        assert found.residual <= 1e-10
        rows, nu = numeric(benchmark, problem, eta, alpha)
        torch.testing.assert_close(found.rows, rows, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.nu, nu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["distinct", "repeated", "large"])
@pytest.mark.parametrize(("eta", "alpha"), [(1e-3, 1e-3), (30.0, 1.0), (1e4, 1e2)])
def test_its_gradient_is_zero(kind, eta, alpha, benchmark):
    """Where a numerical minimiser has no chance, too: exp of the scores at the start overflows."""
    for seed in range(3):
        problem = problem_of(benchmark, kind, seed)
        found = benchmark.implicit_step(problem, eta, alpha, 1e-9)
        rows, nu = found.rows.clone().requires_grad_(), found.nu.clone().requires_grad_()
        value = benchmark.objective(problem, rows, nu, eta, alpha)
        by_rows, by_nu = torch.autograd.grad(value, (rows, nu))
        scale = (found.rows - problem.rows).abs().max() / eta + 1e-3
        assert by_rows.abs().max() < 1e-6 * scale
        assert by_nu.abs().max() < 1e-6


def test_limits(benchmark):
    """Weights that stay leave the proximal point step of ν; one row and one class are Lambert's function itself."""
    problem = benchmark.random_problem(6, 5, 4, 0, torch.float64)
    mask = problem.sampled.unsqueeze(0) != problem.own.unsqueeze(1)
    scores = benchmark.scores_of(problem.features @ problem.rows.T, problem).masked_fill(~mask, -math.inf)
    log_mean = scores.logsumexp(dim=1) - mask.sum(dim=1).double().log()
    found = benchmark.implicit_step(problem, 1e-12, 0.7, 1e-11)
    torch.testing.assert_close(found.nu, proximal_point_step(problem.nu, log_mean, 0.7), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.rows, problem.rows, rtol=0, atol=1e-9)

    one = problem._replace(
        features=problem.features[:1], own=torch.tensor([0]), sampled=torch.tensor([1]), nu=problem.nu[:1]
    )
    score = (problem.features[0] @ (problem.rows[1] - problem.rows[0])).item()
    found = benchmark.implicit_step(one, 3.0, 0.7, 1e-12)
    m = 0.7 + 2 * 3.0 * problem.features[0].square().sum().item()
    target = torch.tensor(score - problem.nu[0].item() + 0.7, dtype=torch.float64)
    weight = lambert_w(math.log(m) + target, from_log=True) / m
    torch.testing.assert_close(found.nu[0], problem.nu[0] - 0.7 * (1 - weight), rtol=1e-9, atol=1e-9)


def test_more_digits_cost_some_products_more(benchmark):
    problem = benchmark.random_problem(32, 32, 16, 0, torch.float64)
    few, many = (benchmark.implicit_step(problem, 30.0, 1.0, epsilon) for epsilon in (1e-2, 1e-10))
    assert few.residual <= 1e-2
    assert many.residual <= 1e-10
    assert few.products < many.products < 10 * few.products
