"""All seeds of a robust regression at once, as examples/reproduce_dro_table.py has it: ten runs in the time of one.

The runs are those of the Trainer: the package's dual updates, batches in the order of each seed, SGD with momentum from
least squares. A run is a row of one weight matrix, and an anchor of one table.
"""

from __future__ import annotations

import itertools
import math
from typing import cast

import torch
from torch import Tensor, nn

from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.data.batch_sampler import ShuffledBatchSampler
from scent_lightning.duals import DualDivergenceError, DualUpdate, DualVariable
from scent_lightning.duals.auto_rate import AutoRate
from scent_lightning.functional import lambert_w, log_mean_exp
from scent_lightning.optim import increasing_momentum
from scent_lightning.tasks import DRORegressionTask
from scent_lightning.tasks.training import rate_factor


class Tables:
    """The dual variable of each run: anchors of one table, or tables of one anchor where the step size is found.

    Args:
        update: of all.
        runs: how many.
        epoch: an epoch as a fraction of the run.
    """

    def __init__(self, update: DualUpdate, runs: int, epoch: float) -> None:
        self.alive = torch.arange(runs)
        self.shared = update.step_size_rule(1) is None
        if self.shared:
            self.tables, self.rows = [DualVariable(runs, update)] * runs, torch.arange(runs)
            return
        self.tables, self.rows = [DualVariable(1, update) for _ in range(runs)], torch.zeros(runs, dtype=torch.int64)
        for table in self.tables:
            assert table.auto is not None
            table.auto.epoch = epoch

    def risk(self, scores: Tensor, progress: float) -> Tensor:
        """Dual objectives of the runs that are alive, added up; those that diverge are so no longer.

        Args:
            scores: of all runs, shape ``(R, B)``.
            progress: fraction of the runs that is done.
        """
        if self.shared:
            try:
                risk = self.tables[0].entropic_risk(scores[self.alive], self.rows[self.alive], progress=progress)
                return risk * len(self.alive)
            except DualDivergenceError:
                pass  # of one run or several: nothing was written
        total, alive = scores.new_zeros(()), []
        for run in self.alive.tolist():
            try:
                row = slice(run, run + 1)
                total = total + self.tables[run].entropic_risk(scores[row], self.rows[row], progress=progress)
                alive.append(run)
            except DualDivergenceError:
                continue
        self.alive = torch.tensor(alive, dtype=torch.int64)
        return total

    def log_exponential_part(self, scores: Tensor) -> Tensor:
        """The logarithm of what is exponential in the dual objective of each run, shape ``(R,)``, in float64."""
        nu = torch.cat([table.nu[row].reshape(1) for table, row in zip(self.tables, self.rows, strict=True)]).double()
        scores, update = scores.detach().double(), self.tables[0].update
        if update.has_exponential_objective:
            return log_mean_exp(scores) - nu
        return (update.objective(nu, scores) + 1 - nu).log()


class Rates:
    """The learning rate of each run: of a schedule, or found.

    Args:
        task: says how it is trained.
        runs: how many.
        epoch: an epoch as a fraction of the run.
    """

    def __init__(self, task: DRORegressionTask, runs: int, epoch: float) -> None:
        self.task, self.warmup = task, task.warmup_epochs * epoch
        self.found = [AutoRate(*task.auto_lr) for _ in range(runs)] if task.finds_lr else []
        self.runs = runs

    def at(self, progress: float) -> Tensor:
        """The rates of the step at ``progress``, shape ``(R,)``, in float64."""
        if self.found:
            return torch.tensor([rate.at(progress) for rate in self.found], dtype=torch.float64)
        lr = self.task.lr * rate_factor(self.task.lr_schedule, progress, self.warmup)
        return torch.full((self.runs,), lr, dtype=torch.float64)

    def observe(self, decreases: Tensor, progress: float) -> None:
        """Take in a step: W(a) of the runs, shape ``(R,)``."""
        if self.found:
            for rate, decrease in zip(self.found, decreases.tolist(), strict=True):
                rate.observe(decrease, progress)


def decreases(gradient: Tensor, lr: Tensor, log_part: Tensor) -> Tensor:
    """W(a) of the runs, shape ``(R,)``, in float64: the proximal step multiplies gradients by exp(−W(a)).

    Args:
        gradient: shape ``(R, …)``; its square may overflow.
        lr: learning rates, shape ``(R,)``.
        log_part: log cE, shape ``(R,)``.
    """
    flat = gradient.flatten(1)
    largest = flat.abs().amax(dim=1).clamp(min=torch.finfo(flat.dtype).tiny)
    log_norm = (flat / largest.unsqueeze(1)).double().norm(dim=1).log() + largest.double().log()
    return lambert_w(lr.log() + 2 * log_norm - log_part, from_log=True)


def train(
    data: TabularRegressionDataModule, task: DRORegressionTask, clip: float | None, seeds: list[int], epochs: int
) -> list[float]:
    """The objective over the training rows that each seed ends with, infinity where it diverged.

    Args:
        data: the rows.
        task: says how it is trained; is not trained itself.
        clip: largest norm of a gradient; None for any.
        seeds: of the orders.
        epochs: of a run.
    """
    batches = [(features, target) for features, target, *_ in data.predict_dataloader()]
    features, target = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    task.start_at_least_squares(batches)
    linear = cast(nn.Linear, task.network)
    start = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()])
    rows = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    weights = nn.Parameter(start.repeat(len(seeds), 1))
    sums = torch.zeros_like(weights)
    rates = Rates(task, len(seeds), 1 / epochs)
    tables = Tables(cast(DualVariable, task.duals["nu"]).update, len(seeds), 1 / epochs)
    samplers = [ShuffledBatchSampler(len(rows), data.batch_size, seed=seed) for seed in seeds]
    steps, step = epochs * len(samplers[0]), 0
    for epoch in range(epochs):
        orders = torch.tensor([list(itertools.chain(*sampler.batches(epoch, 0))) for sampler in samplers])
        for chosen in torch.split(orders, data.batch_size, dim=1):
            progress = step / steps
            residual = torch.bmm(rows[chosen], weights.unsqueeze(2)).squeeze(2) - target[chosen]
            scores = residual.square() / task.tau
            weights.grad = None
            (task.tau * tables.risk(scores, progress)).backward()  # type: ignore[no-untyped-call]
            if not len(tables.alive):
                return [math.inf] * len(seeds)
            assert weights.grad is not None
            gradient, lr = weights.grad, rates.at(progress)
            if task.weight_step == "proximal":
                less = decreases(gradient, lr, math.log(task.tau) + tables.log_exponential_part(scores))
                rates.observe(less, (step + 1) / steps)
                gradient = gradient * (-less).exp().unsqueeze(1).to(gradient)
            if clip is not None:
                gradient = gradient * (clip / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
            auto = task.momentum == "auto"
            momentum, dampening = increasing_momentum(step) if auto else (cast(float, task.momentum), 0.0)
            sums = momentum * sums + (1 - dampening) * gradient
            moves = gradient + momentum * sums if task.nesterov or auto else sums
            weights = nn.Parameter(weights.detach() - lr.unsqueeze(1).to(weights) * moves)
            step += 1
    losses = (weights.detach().double() @ rows.double().T - target.double()).square()
    objectives = task.tau * log_mean_exp(losses / task.tau)
    alive = set(tables.alive.tolist())
    return [value if i in alive else math.inf for i, value in enumerate(objectives.tolist())]
