"""Joint implicit SGD for the linear softmax (Fagan and Iyengar 2018) beside SCENT's step: what a step costs.

It takes the proximal step of a batch's objective in the class weights and ν together, in the Euclidean distance:

    min over W, ν of  1/B Σ_i [ mean_c exp(x_i·(w_c − w_y) − ν_i) + ν_i + (ν_i − ν⁰_i)²/(2α) ] + ‖W − W⁰‖²/(2η)

for B rows and m sampled classes c other than a row's own class y. W moves by multiples of the batch's rows alone, so
that the unknowns are the logarithms θ of the weights, θ_ic = s_ic − ν_i, with

    θ + M exp(θ) = θ⁰,

M positive semi-definite: Lambert's equation for matrices. Newton's method solves it, its linear systems by conjugate
gradients, each product with M a product of the rows' Gram matrix (B × B) with B × (B + m) numbers. So the step costs
O(B²(B + m) log(1/ε) + B m d), as Wei et al. (2026) say of it, where SCENT's costs O(B m d).

    python examples/benchmarks/implicit_sgd.py

One thread. The last line is JSON: the products with M for each ε; the exponent of a product's time in B at m = B (3 by
the claim); and by (B, m, d) the time of the implicit step over that of SCENT's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scent_lightning import functional

SIZES = ((32, 32, 64), (128, 32, 64), (128, 128, 64), (128, 128, 512), (128, 512, 512), (512, 128, 512))


class Problem(NamedTuple):
    """A step's data, with W⁰ and ν⁰.

    Attributes:
        rows: weights of the classes that the batch has or samples, shape ``(T, d)``.
        features: x, shape ``(B, d)``.
        own: which of ``rows`` is each row's class, int64, shape ``(B,)``.
        sampled: which of ``rows`` are the sampled classes, distinct, int64, shape ``(m,)``.
        nu: ν⁰, shape ``(B,)``.
    """

    rows: Tensor
    features: Tensor
    own: Tensor
    sampled: Tensor
    nu: Tensor


class Solution(NamedTuple):
    """The step: new weights ``(T, d)`` and ν ``(B,)``, the products with M that it took, and the largest residual."""

    rows: Tensor
    nu: Tensor
    products: int
    residual: float


def scores_of(logits: Tensor, problem: Problem) -> Tensor:
    """s, shape ``(B, m)``, of logits of shape ``(B, T)``."""
    return logits[:, problem.sampled] - logits.gather(1, problem.own.unsqueeze(1))


def logits_of(weights: Tensor, problem: Problem) -> Tensor:
    """The adjoint of :func:`scores_of`: from ``(B, m)`` to ``(B, T)``."""
    found = weights.new_zeros(len(weights), len(problem.rows))
    found[:, problem.sampled] = weights
    return found.scatter_add_(1, problem.own.unsqueeze(1), -weights.sum(dim=1, keepdim=True))


def objective(problem: Problem, rows: Tensor, nu: Tensor, eta: float, alpha: float) -> Tensor:
    """What the step minimises."""
    scores = scores_of(problem.features @ rows.T, problem)
    mask = problem.sampled.unsqueeze(0) != problem.own.unsqueeze(1)
    weights = torch.where(mask, torch.exp(scores - nu.unsqueeze(1)), 0.0).sum(dim=1) / mask.sum(dim=1)
    own = weights + nu + (nu - problem.nu).square() / (2 * alpha)
    return own.mean() + (rows - problem.rows).square().sum() / (2 * eta)


def implicit_step(problem: Problem, eta: float, alpha: float, epsilon: float = 1e-6, most: int = 100) -> Solution:
    """The joint proximal step.

    Args:
        problem: where it starts.
        eta: learning rate η of the weights.
        alpha: step size α of ν.
        epsilon: largest error of a weight's logarithm, in nats.
        most: Newton steps at most.
    """
    features, batch = problem.features, len(problem.features)
    mask = problem.sampled.unsqueeze(0) != problem.own.unsqueeze(1)
    counts = mask.sum(dim=1, keepdim=True)
    gram = (eta / batch) * features @ features.T
    scores = scores_of(features @ problem.rows.T, problem)
    target = scores - problem.nu.unsqueeze(1) + alpha
    products = 0

    def times_m(weights: Tensor) -> Tensor:
        nonlocal products
        products += 1
        moved = scores_of(gram @ logits_of(weights, problem), problem)
        return moved + alpha * weights.sum(dim=1, keepdim=True)

    def times_system(root: Tensor, y: Tensor) -> Tensor:
        return y + root * times_m(root * y)

    def weights_of(theta: Tensor) -> Tensor:
        return torch.where(mask, theta.exp() / counts, 0.0)

    def merit(theta: Tensor, weights: Tensor, product: Tensor) -> Tensor:
        """Of the dual problem, Σ q (log q − 1 − θ⁰) + ½ q M q."""
        return (weights * (theta - 1 - target + product / 2)).sum()

    # Each equation by itself, with the others' weights at 0, has a solution in closed form.
    own_m = alpha + 2 * gram.diagonal().unsqueeze(1) / counts.clamp(min=1)
    theta = target - functional.lambert_w(own_m.log() + target, from_log=True).to(target.dtype)
    weights = weights_of(theta)
    product = times_m(weights)
    for _ in range(most):
        residual = torch.where(mask, theta + product - target, 0.0)
        size = residual.abs().max().item()
        if size <= epsilon:
            break
        root = weights.sqrt()
        # (I + M Q) Δ = −r for Q the weights: with y = √Q Δ it is (I + √Q M √Q) y = −√Q r.
        inner = conjugate_gradients(partial(times_system, root), -root * residual, min(0.1, size) * epsilon**0.25)
        step = -residual - times_m(root * inner)
        before, slope, share = merit(theta, weights, product), (residual * weights * step).sum(), 1.0
        while share > 1e-8:
            tried = theta + share * step
            weights = weights_of(tried)
            product = times_m(weights)
            if merit(tried, weights, product) <= before + 1e-4 * share * slope + 1e-12 * before.abs():
                break
            share /= 2
        theta = tried
    new = problem.rows - (eta / batch) * logits_of(weights, problem).T @ features
    return Solution(new, problem.nu - alpha * (1 - weights.sum(dim=1)), products, size)


def conjugate_gradients(times: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, most: int = 200) -> Tensor:
    """The solution y of ``times(y) = right``, to a relative residual of ``tolerance``."""
    y, residual = torch.zeros_like(right), right.clone()
    direction, size = residual, residual.square().sum()
    goal = size * tolerance**2
    for _ in range(most):
        if size <= goal or size == 0:
            break
        product = times(direction)
        length = size / (direction * product).sum()
        y, residual = y + length * direction, residual - length * product
        new = residual.square().sum()
        direction, size = residual + (new / size) * direction, new
    return y


def scent_step(problem: Problem, eta: float, log_alpha: float) -> tuple[Tensor, Tensor]:
    """SCENT's step of the same data: ν in closed form, then a gradient step."""
    mask = problem.sampled.unsqueeze(0) != problem.own.unsqueeze(1)
    counts = mask.sum(dim=1)
    scores = scores_of(problem.features @ problem.rows.T, problem).masked_fill(~mask, -math.inf)
    nu = functional.proximal_mirror_descent_step(problem.nu, scores.logsumexp(dim=1) - counts.log(), log_alpha)
    nu = nu.to(scores.dtype)
    weights = torch.exp(scores - nu.unsqueeze(1)) / counts.unsqueeze(1)
    return problem.rows - (eta / len(nu)) * logits_of(weights, problem).T @ problem.features, nu


def random_problem(batch: int, samples: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Problem:
    """Rows of unit norm, classes that begin to be told apart, and a ν some steps old."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.nn.functional.normalize(torch.randn(batch, width, generator=generator, dtype=dtype), dim=1)
    rows = 3 * torch.randn(batch + samples, width, generator=generator, dtype=dtype)
    own = torch.randperm(batch, generator=generator)
    sampled = torch.randperm(batch + samples, generator=generator)[:samples]
    nu = torch.randn(batch, generator=generator, dtype=dtype)
    return Problem(rows, features, own, sampled, nu)


def milliseconds(step: Callable[[], object], turns: int) -> float:
    """Least of some turns, since what else the machine does only adds to it."""
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="steps behind each time (9)")
    parser.add_argument("--eta", type=float, default=30.0, help="learning rate of the weights (30)")
    parser.add_argument("--alpha", type=float, default=1.0, help="step size of ν (1)")
    parser.add_argument("--largest", type=int, default=1024, help="largest B of the products (1024)")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    settings = arguments.eta, arguments.alpha
    exact = random_problem(128, 128, 512, dtype=torch.float64)
    products = {
        f"{epsilon:g}": implicit_step(exact, *settings, epsilon).products for epsilon in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
    }
    print("products with M by ε, B = m = 128: " + ", ".join(f"{key}: {value}" for key, value in products.items()))

    sizes = [size for size in (256, 512, 1024, 2048) if size <= arguments.largest]
    times = []
    for size in sizes:
        gram, logits = torch.randn(size, size), torch.randn(size, 2 * size)
        times.append(milliseconds(partial(torch.matmul, gram, logits), arguments.turns))
        print(f"a product with M at B = m = {size}: {times[-1]:.2f} ms")
    exponent = float(np.polyfit(np.log(sizes), np.log(times), 1)[0]) if len(sizes) > 1 else math.nan

    ratios = {}
    for batch, samples, width in SIZES:
        problem = random_problem(batch, samples, width)
        done = implicit_step(problem, *settings, 1e-4)
        implicit = milliseconds(partial(implicit_step, problem, *settings, 1e-4), arguments.turns)
        scent = milliseconds(partial(scent_step, problem, arguments.eta, 0.0), 3 * arguments.turns)
        ratios[f"{batch}, {samples}, {width}"] = round(implicit / scent, 1)
        print(
            f"B {batch:>4}, m {samples:>4}, d {width:>4}: implicit {implicit:8.2f} ms ({done.products} products), "
            f"SCENT {scent:6.2f} ms, {implicit / scent:.1f} times"
        )
    print(json.dumps({"products": products, "exponent": round(exponent, 2), "implicit_over_scent": ratios}))


if __name__ == "__main__":
    main()
