"""Try rules for SCENT's step size: many runs of a small problem at once, in one tensor, minutes for all of them.

A problem is a cell of robust regression (as examples/reproduce_dro_table.py has tuned it), partial AUC with a known
optimum (as examples/pauc_known_optimum.py, with 32 or 4 negatives a batch) or the glyphs (as examples/compare_xc.py).
Batches, learning rates and clipping are theirs; log α, the guard, a factor of the learning rate, its schedule and the
step for the weights are a rule's own: add yours to RULES. "Nothing set" is what the tasks do without being told.
Printed is, mean over seeds (and the worst), the gap to the optimum in percent, or for the glyphs the exact
cross-entropy of 8,000 training rows.

    python examples/benchmarks/step_size_trials.py --problems california_tau0.2 --seeds 0 1 2
    python examples/benchmarks/step_size_trials.py --problems pauc_4_tau0.1 --pauc-features runs/pauc/features
    python examples/benchmarks/step_size_trials.py --problems glyphs --glyphs data/glyphs --device cuda
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import pauc_known_optimum
from compare_xc import SETTINGS as XC_SETTINGS
from compare_xc import fixed_rows
from dro_at_once import decreases
from reproduce_dro_table import CELLS, TUNED, data_module, least_objective, temperature, training_rows

from scent_lightning.duals.auto_rate import AutoRate, Fall
from scent_lightning.modules.class_sampled_linear import log_weight_of_own_class
from scent_lightning.optim import increasing_momentum
from scent_lightning.progress import ending
from scent_lightning.tasks import BaseTask, DRORegressionTask, ExtremeClassificationTask, PartialAUCTask
from scent_lightning.updates.auto import AutoConstants, AutoStepSize
from scent_lightning.updates.windows import FEW_ANCHORS, WindowSums

PAUC = {f"pauc_{count}_tau{tau}": (count, tau) for count, tau in pauc_known_optimum.SETTINGS}
GLYPHS = "glyphs"
PROBLEMS = (*CELLS, *PAUC, GLYPHS)
AUTO = AutoConstants()
RISE = 3.0  # powers of ten by which a learning rate that falls to 0 has risen by the end of the warm-up


@dataclass(frozen=True)
class Rule:
    """How log α goes over a run.

    Attributes:
        log_alpha: by hand; None is auto, as in the package.
        cosine: whether α by hand falls to 0 by a cosine.
        guard: largest log weight; None is that of auto, by the visits.
        constants: of auto.
        lr: factor of the learning rate.
        rate: the learning rate at its largest, whatever the problem's is.
        decades: by how many powers of ten the learning rate falls over the run, and at its end to 0; None is to 0 by
            half a cosine.
        warmup: epochs over which the learning rate rises, by as many powers of ten as it falls by or else by three.
        clip: whether the gradient is clipped as the problem has it.
        proximal: whether the step for the weights is the proximal one, in the exponential part of the loss.
        gradual: whether the own class of a classification comes into the sum over the run; else it is never there.
        auto_lr: find the learning rate, as in the package, with this limit and fall; None: it is given.
        auto_momentum: whether the momentum of a regression increases, as in the package; else it is 0.9.
        seed: of the batches.
    """

    log_alpha: float | None = None
    cosine: bool = False
    guard: float | None = None
    constants: AutoConstants = AUTO
    lr: float = 1.0
    rate: float | None = None
    decades: float | None = None
    warmup: float = 0.0
    clip: bool = True
    proximal: bool = False
    gradual: bool = False
    auto_lr: tuple[float, Fall] | None = None
    auto_momentum: bool = False
    seed: int = 0

    def auto(self, anchors: int, epoch: float) -> AutoStepSize:
        """The package's rule with these constants."""
        rule = AutoStepSize(anchors, self.guard, self.constants)
        rule.epoch = epoch
        return rule


def remaining(progress: float | Tensor) -> Tensor:
    """Half a cosine from 1 to 0."""
    return (1 + torch.cos(math.pi * torch.as_tensor(progress, dtype=torch.float64).clamp(0, 1))) / 2


class StepSizes:
    """The dual step of many runs, each by its rule; "auto" is the package's own, one object for each run.

    Args:
        rules: one for each run.
        anchors: how many there are in a run.
        epoch: an epoch as a fraction of the run.
        device: where the numbers are.
    """

    def __init__(self, rules: list[Rule], anchors: int, epoch: float, device: str) -> None:
        self.anchors, self.seen, self.device = anchors, 0, device
        self.found = {i: rule.auto(anchors, epoch) for i, rule in enumerate(rules) if rule.log_alpha is None}
        by_hand = [rule.log_alpha or 0.0 for rule in rules]
        self.by_hand = torch.tensor(by_hand, dtype=torch.float64, device=device)
        self.cosine = torch.tensor([rule.cosine for rule in rules], device=device)
        guards = [math.inf if rule.guard is None else rule.guard for rule in rules]
        self.guard = torch.tensor(guards, dtype=torch.float64, device=device)
        # Of the windows: Σ (ℓ − ν)² and of how many, Σ of the new ν, Σ ℓ and of how many; of few anchors log Σ e^ℓ and
        # the visits of each.
        self.totals = torch.zeros(5, len(rules), dtype=torch.float64, device=device)
        few = anchors if anchors <= FEW_ANCHORS else 0
        self.log_sums = torch.full((len(rules), few), -math.inf, dtype=torch.float64, device=device)
        self.visits = torch.zeros_like(self.log_sums)

    def _close_windows(self, progress: float) -> None:
        over = [i for i, rule in self.found.items() if rule.window_is_over(progress)]
        if not over or not self.seen:
            return
        each = (self.log_sums - self.visits.log()).masked_fill(self.visits == 0, 0.0)
        objectives = (each.sum(dim=1) / (self.visits > 0).sum(dim=1)).tolist()
        totals = self.totals.T.tolist()
        for i in over:
            if totals[i][-1] == 0:
                continue
            squares, known, nu, log_mean, rows = totals[i]
            objective = objectives[i] if self.log_sums.shape[1] else None
            sums = WindowSums(int(rows), squares, known, nu, log_mean, rows, objective)
            self.found[i].close_window(progress, sums, min(self.seen, self.anchors))
            self.totals[:, i] = 0.0
            self.log_sums[i] = -math.inf
            self.visits[i] = 0.0

    def sizes(self, progress: float) -> tuple[Tensor, Tensor]:
        """Log α and guard of each run, shape ``(R,)`` each."""
        self._close_windows(progress)
        falling = remaining(progress).clamp(min=1e-300).log().to(self.device)
        log_alpha, guard = self.by_hand + torch.where(self.cosine, falling, 0.0), self.guard
        if self.found:
            runs = torch.tensor(list(self.found), device=self.device)
            said = [rule.arguments(progress) for rule in self.found.values()]
            numbers = [[each["log_alpha"], each["max_log_weight"]] for each in said]
            both = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            log_alpha, guard = log_alpha.index_copy(0, runs, both[:, 0]), guard.index_copy(0, runs, both[:, 1])
        return log_alpha.unsqueeze(1), guard.unsqueeze(1)

    def step(self, nu: Tensor, log_mean: Tensor, index: Tensor, progress: float) -> Tensor:
        """New ν of the anchors ``index``, shape ``(R, B)``, from the old (NaN where an anchor is new) and ℓ."""
        known = ~nu.isnan()
        nu = torch.where(known, nu, log_mean)
        log_alpha, guard = self.sizes(progress)
        shifted = log_alpha + nu
        moved = torch.logaddexp(nu, shifted + log_mean) - torch.logaddexp(torch.zeros_like(shifted), shifted)
        moved = torch.where(log_alpha == math.inf, log_mean, moved).maximum(log_mean - guard)
        rows = torch.full_like(self.by_hand, nu.shape[1])
        squares = (log_mean - nu).square().sum(dim=1)  # 0 where ν was not known
        self.totals += torch.stack([squares, known.sum(dim=1), moved.sum(dim=1), log_mean.sum(dim=1), rows])
        if self.log_sums.shape[1]:
            before = self.log_sums.gather(1, index)
            self.log_sums.scatter_(1, index, torch.logaddexp(before, log_mean))
            self.visits.scatter_add_(1, index, torch.ones_like(log_mean))
        self.seen += nu.shape[1]
        return moved


class WeightSteps:
    """Learning rates of many runs, and what multiplies their gradients.

    Args:
        rules: one for each run.
        lr: of the problem.
        epoch: an epoch as a fraction of the run.
        device: where the numbers are.
    """

    def __init__(self, rules: list[Rule], lr: float, epoch: float, device: str) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self.lr = column([rule.lr * (lr if rule.rate is None else rule.rate) for rule in rules])
        self.decades = column([math.nan if rule.decades is None else rule.decades for rule in rules])
        self.warmup = column([rule.warmup * epoch for rule in rules])
        self.rising = max(rule.warmup for rule in rules) * epoch
        self.proximal = column([rule.proximal for rule in rules]) > 0
        self.clip = column([rule.clip for rule in rules]) > 0
        self.found = {i: AutoRate(*rule.auto_lr) for i, rule in enumerate(rules) if rule.auto_lr is not None}
        self.places = torch.tensor(list(self.found), dtype=torch.int64, device=device)

    def rates(self, progress: float) -> Tensor:
        """The learning rate of each run now, shape ``(R,)``."""
        factor = torch.where(
            self.decades.isnan(), remaining(progress).to(self.lr), 10 ** (-self.decades * progress) * ending(progress)
        )
        if progress < self.rising:
            risen = torch.where(progress < self.warmup, progress / self.warmup, 1.0)
            factor = factor * 10 ** (self.decades.nan_to_num(RISE) * (risen - 1))
        rates = self.lr * factor
        if self.found:
            rates[self.places] = rates.new_tensor([rate.at(progress) for rate in self.found.values()])
        return rates

    def scaled(self, gradient: Tensor, log_part: Tensor, progress: float, log_c: float = 0.0) -> Tensor:
        """The gradients of the runs with a proximal step multiplied by W(a)/a, shape ``(R, …)``.

        Args:
            gradient: of c E, shape ``(R, …)``.
            log_part: ℓ − ν of the anchors of the batch, shape ``(R, B)``: E is the mean of its exponential.
            progress: fraction of the run that is done.
            log_c: the logarithm of what the loss multiplies E by.
        """
        if not self.proximal.any():
            return gradient
        decrease = decreases(gradient, self.rates(progress), log_mean_exp(log_part) + log_c)
        half = (decrease / -2).exp()
        half = torch.where(self.proximal, half, 1.0).view(-1, *[1] * (gradient.ndim - 1)).to(gradient)
        if self.found:
            self.decreases = decrease.tolist()
        return gradient * half * half

    def observe(self, progress: float) -> None:
        """Rates that are found take in the step that was scaled last; ``progress`` is what is done with it."""
        for i, rate in self.found.items():
            rate.observe(self.decreases[i], progress)

    def clipped(self, gradient: Tensor, norm: float | None) -> Tensor:
        """Of no larger norm, where the rule has it so."""
        if norm is None:
            return gradient
        factor = (norm / (gradient.norm(dim=1) + 1e-6)).clamp(max=1)
        return gradient * torch.where(self.clip, factor, 1.0).unsqueeze(1)


def orders(size: int, rules: list[Rule], generators: dict[int, torch.Generator], device: str) -> Tensor:
    """A permutation for each run, the same for the same seed, shape ``(R, size)``."""
    drawn = {seed: torch.randperm(size, generator=generator) for seed, generator in generators.items()}
    return torch.stack([drawn[rule.seed] for rule in rules]).to(device)


def seeded(rules: list[Rule]) -> dict[int, torch.Generator]:
    return {rule.seed: torch.Generator().manual_seed(rule.seed) for rule in rules}


def log_mean_exp(scores: Tensor) -> Tensor:
    return torch.logsumexp(scores, dim=-1) - math.log(scores.shape[-1])


@dataclass(frozen=True)
class Setting:
    """How a problem is trained, but for log α.

    Attributes:
        lr: learning rate at the start; it falls to 0 by half a cosine.
        batch_size: rows of a batch.
        epochs: of a run.
    """

    lr: float
    batch_size: int
    epochs: int


def regression(
    rows: Tensor, target: Tensor, tau: float, clip: float | None, setting: Setting, rules: list[Rule], device: str
) -> list[float]:
    """Objective of every run at the end: robust least squares from the ordinary one, with momentum, one anchor.

    Args:
        rows: features with a column of ones, shape ``(n, D + 1)``.
        target: shape ``(n,)``.
        tau: temperature.
        clip: largest norm of a gradient; None for any.
        setting: how it is trained.
        rules: one for each run.
        device: where the numbers are.
    """
    rows, target = rows.to(device), target.to(device)
    weights = torch.linalg.lstsq(rows, target.unsqueeze(1)).solution.T.repeat(len(rules), 1)
    sums = torch.zeros_like(weights)
    increases = torch.tensor([[rule.auto_momentum] for rule in rules], device=device)
    weight_steps = WeightSteps(rules, setting.lr, 1 / setting.epochs, device)
    steps = setting.epochs * -(-len(target) // setting.batch_size)
    sizes = StepSizes(rules, 1, 1 / setting.epochs, device)
    only = torch.zeros(len(rules), 1, dtype=torch.int64, device=device)
    nu = torch.full((len(rules), 1), math.nan, dtype=torch.float64, device=device)
    generators, step = seeded(rules), 0
    for _ in range(setting.epochs):
        order = orders(len(target), rules, generators, device)
        for chosen in torch.split(order, setting.batch_size, dim=1):
            inputs = rows[chosen]
            residual = torch.bmm(inputs, weights.unsqueeze(2)).squeeze(2) - target[chosen]
            scores = residual.square() / tau
            log_mean = log_mean_exp(scores).unsqueeze(1)
            nu = sizes.step(nu, log_mean, only, step / steps)
            factor = (scores - nu).clamp(max=600).exp() * residual * (2 / chosen.shape[1])
            gradient = torch.bmm(factor.unsqueeze(1), inputs).squeeze(1)
            gradient = weight_steps.scaled(gradient, log_mean - nu, step / steps, math.log(tau))
            gradient = weight_steps.clipped(gradient, clip)
            momentum, dampening = increasing_momentum(step)
            sums = torch.where(increases, momentum * sums + (1 - dampening) * gradient, 0.9 * sums + gradient)
            moves = gradient + torch.where(increases, momentum, 0.9) * sums
            weights = weights - weight_steps.rates(step / steps).unsqueeze(1) * moves
            step += 1
            weight_steps.observe(step / steps)
    return (tau * log_mean_exp((weights @ rows.T - target).square() / tau)).tolist()


def partial_auc(
    positives: Tensor, negatives: Tensor, tau: float, count: int, setting: Setting, rules: list[Rule], device: str
) -> Tensor:
    """Weights of every run at the end, shape ``(R, D)``: a linear head from 0, squared hinge, momentum 0.9.

    Args:
        positives: the anchors' features, shape ``(n, D)``.
        negatives: shape ``(m, D)``.
        tau: temperature.
        count: negatives of a batch.
        setting: how it is trained; the batch size is of the positives.
        rules: one for each run.
        device: where the numbers are.
    """
    positives, negatives = positives.to(device), negatives.to(device)
    batch, margin = setting.batch_size, pauc_known_optimum.MARGIN
    steps = setting.epochs * ((len(positives) + len(negatives)) // (2 * batch))
    weight_steps = WeightSteps(rules, setting.lr, 1 / setting.epochs, device)
    sizes = StepSizes(rules, len(positives), 1 / setting.epochs, device)
    weights = torch.zeros(len(rules), positives.shape[1], dtype=torch.float64, device=device)
    momentum = torch.zeros_like(weights)
    nu = torch.full((len(rules), len(positives)), math.nan, dtype=torch.float64, device=device)
    generators = seeded(rules)
    taken: list[list[Tensor]] = [[], []]
    for step in range(steps):
        for i, (size, part) in enumerate(((len(positives), batch), (len(negatives), count))):
            if not taken[i] or taken[i][-1].shape[1] < part:
                taken[i] = list(torch.split(orders(size, rules, generators, device), part, dim=1))[::-1]
                taken[i] = [rows for rows in taken[i] if rows.shape[1] == part]
        index, others = taken[0].pop(), taken[1].pop()
        high, low = positives[index], negatives[others]
        by_high, by_low = (torch.bmm(rows, weights.unsqueeze(2)).squeeze(2) for rows in (high, low))
        hinge = (by_low.unsqueeze(1) - by_high.unsqueeze(2) + margin).relu_()
        scores = hinge.square() / tau
        log_mean = log_mean_exp(scores)
        moved = sizes.step(nu.gather(1, index), log_mean, index, step / steps)
        nu.scatter_(1, index, moved)
        factor = (scores - moved.unsqueeze(2)).exp_() * hinge * (2 / (batch * count))
        gradient = torch.bmm(factor.sum(dim=1).unsqueeze(1), low) - torch.bmm(factor.sum(dim=2).unsqueeze(1), high)
        gradient = weight_steps.scaled(gradient.squeeze(1), log_mean - moved, step / steps, math.log(tau))
        momentum = 0.9 * momentum + gradient
        weights = weights - weight_steps.rates(step / steps).unsqueeze(1) * momentum
        weight_steps.observe((step + 1) / steps)
    return weights


def partial_auc_gaps(weights: Tensor, pair: tuple[np.ndarray, np.ndarray], tau: float, best: float) -> list[float]:
    """Gap of every run in percent of the gap at the start, infinity where it diverged.

    Args:
        weights: shape ``(R, D)``.
        pair: positives and negatives.
        tau: temperature.
        best: the least possible objective.
    """
    start = pauc_known_optimum.MARGIN**2
    return [
        100 * (pauc_known_optimum.objective(weight, *pair, tau) - best) / (start - best)
        if np.isfinite(weight).all()
        else math.inf
        for weight in weights.cpu().numpy()
    ]


def classification(features: Tensor, labels: Tensor, setting: Setting, rules: list[Rule], device: str) -> Tensor:
    """Weights of every run at the end, shape ``(R, K, D)``: a linear classifier from 0, in-batch negatives.

    Args:
        features: shape ``(n, D)``, float32.
        labels: shape ``(n,)``, int64.
        setting: how it is trained.
        rules: one for each run.
        device: where the numbers are.
    """
    features, labels = features.to(device), labels.to(device)
    (size, width), classes, runs = features.shape, int(labels.max()) + 1, len(rules)
    steps = setting.epochs * -(-size // setting.batch_size)
    weights = torch.zeros(runs * classes, width, device=device)
    nu = torch.full((runs * size,), math.nan, device=device)
    sizes = StepSizes(rules, size, 1 / setting.epochs, device)
    weight_steps = WeightSteps(rules, setting.lr, 1 / setting.epochs, device)
    run = torch.arange(runs, device=device).unsqueeze(1)
    before = torch.ones(setting.batch_size, setting.batch_size, dtype=torch.bool, device=device).tril(-1)
    gradual = torch.tensor([[rule.gradual] for rule in rules], device=device)
    generators, step = seeded(rules), 0
    for _ in range(setting.epochs):
        order = orders(size, rules, generators, device)
        for index in torch.split(order, setting.batch_size, dim=1):
            inputs, own = features[index], labels[index]
            equal = own.unsqueeze(2) == own.unsqueeze(1)
            first = ~(equal & before[: index.shape[1], : index.shape[1]]).any(dim=2)
            counts = first.unsqueeze(1) & ~equal
            number = counts.sum(dim=2)
            places, anchors = (run * classes + own).flatten(), (run * size + index).flatten()
            rows = weights.index_select(0, places).view(*index.shape, width)
            scores = torch.bmm(inputs, rows.transpose(1, 2))
            scores = (scores - scores.diagonal(dim1=1, dim2=2).unsqueeze(2)).masked_fill_(~counts, -1e30)
            largest = scores.amax(dim=2, keepdim=True)
            exponentials = (scores - largest).exp_()
            others = largest.squeeze(2).double() + (exponentials.sum(dim=2).double() / number).log()
            log_own = log_weight_of_own_class(classes, step / steps)
            log_mean = torch.where(gradual, torch.logaddexp(others, torch.full_like(others, log_own)), others)
            moved = sizes.step(nu[anchors].view(index.shape).double(), log_mean, index, step / steps)
            nu[anchors] = moved.flatten().float()
            weight = ((largest.squeeze(2) - moved).exp() / (number * index.shape[1])).float()
            gradient = exponentials * weight.unsqueeze(2)
            gradient -= torch.diag_embed(gradient.sum(dim=2))
            moves = torch.bmm(gradient.transpose(1, 2), inputs)
            if weight_steps.proximal.any():
                moves = weight_steps.scaled(summed(moves, equal, first), others - moved, step / steps)
            moves *= -weight_steps.rates(step / steps).to(moves).view(-1, 1, 1)
            weights.index_add_(0, places, moves.view(-1, width))
            step += 1
            weight_steps.observe(step / steps)
    return weights.view(runs, classes, width)


def summed(rows: Tensor, equal: Tensor, first: Tensor) -> Tensor:
    """Rows of one class added up in the first of them, the others 0, shape ``(R, B, D)``."""
    return torch.bmm((equal & first.unsqueeze(2)).to(rows), rows)


def cross_entropies(weights: Tensor, features: Tensor, labels: Tensor) -> list[float]:
    """Exact cross-entropy of every run."""
    features, labels = features.to(weights.device), labels.to(weights.device)
    return [torch.nn.functional.cross_entropy(features @ each.T, labels).item() for each in weights]


def trial(problem: str, rules: list[Rule], arguments: argparse.Namespace) -> list[float]:
    """What each run ends with: the gap in percent, to the optimum or of the gap at the start, or the cross-entropy."""
    device, epochs = arguments.device, arguments.epochs
    if problem in PAUC:
        count, tau = PAUC[problem]
        pairs = pauc_known_optimum.read_features(arguments.pauc_features)
        lr = pauc_known_optimum.SETTINGS[count, tau]["SCENT"][0]
        setting = Setting(lr, pauc_known_optimum.POSITIVES_PER_BATCH, epochs or 60)
        positives, negatives = (torch.from_numpy(rows) for rows in pairs)
        weights = partial_auc(positives, negatives, tau, count, setting, rules, device)
        return partial_auc_gaps(weights, pairs, tau, pauc_known_optimum.solve(*pairs, tau)[0])
    if problem == GLYPHS:
        folder = arguments.glyphs / "train"
        features = torch.from_numpy(np.load(folder / "features.npy")).float()
        labels = torch.from_numpy(np.load(folder / "labels.npy").astype(np.int64))
        setting = Setting(XC_SETTINGS["SCENT"][0] or 1.0, 128, epochs or 20)
        weights = classification(features, labels, setting, rules, device)
        return cross_entropies(weights, *fixed_rows(str(arguments.glyphs), "train"))
    lr, clip, _ = TUNED[problem]
    setting = Setting(lr, 100, epochs or 300)
    rows, target = training_rows(data_module(problem, arguments.data_dir))
    tau = temperature(problem)
    best = least_objective(rows, target, tau)
    final = regression(torch.from_numpy(rows), torch.from_numpy(target), tau, clip, setting, rules, device)
    return [100 * (value / best - 1) for value in final]


def by_hand(problem: str) -> Rule:
    """The step size that was tuned for the problem."""
    if problem == GLYPHS:
        given = XC_SETTINGS["SCENT"][1]
    elif problem in PAUC:
        given = pauc_known_optimum.SETTINGS[PAUC[problem]]["SCENT"][1]
    else:
        given = TUNED[problem][2]
    return Rule(given["log_alpha"], given.get("schedule") == "cosine", given.get("max_log_weight", math.inf))


TASKS: dict[str, type[BaseTask]] = {
    "regression": DRORegressionTask,
    "partial AUC": PartialAUCTask,
    "classification": ExtremeClassificationTask,
}
# What the tasks take of their own accord; of classification the rate is for each class, in partial AUC it is found.
NOTHING_SET = {
    "regression": Rule(proximal=True, clip=False, rate=0.01, decades=4, warmup=1, auto_momentum=True),
    "partial AUC": Rule(proximal=True, rate=1e-3, auto_lr=PartialAUCTask.auto_lr),
    "classification": Rule(proximal=True, rate=1.0, gradual=True),
}
# The same with a learning rate that is found, as the task of the kind has it.
AUTO_LR = {kind: replace(rule, auto_lr=TASKS[kind].auto_lr) for kind, rule in NOTHING_SET.items()}
GLYPH_CLASSES = 20_902
RULES: dict[str, Rule | Callable[[Rule], Rule]] = {
    "BSGD": Rule(math.inf),
    "by hand − 3": lambda hand: replace(hand, log_alpha=(hand.log_alpha or 0.0) - 3),
    "by hand + 3": lambda hand: replace(hand, log_alpha=(hand.log_alpha or 0.0) + 3),
    "auto": Rule(),
    "auto, no limit by the visits": Rule(constants=replace(AUTO, share=math.inf)),
    "auto, no limit of the lag": Rule(constants=replace(AUTO, lag_to_noise=math.inf)),
    "auto, no limit by the noise": Rule(constants=replace(AUTO, variance=1e-30)),
    "auto, c to 3": Rule(constants=replace(AUTO, rise=3.0)),
    "auto, c to 6": Rule(constants=replace(AUTO, rise=6.0)),
    "auto, one over 0.6 %": Rule(constants=replace(AUTO, share_of_run=0.006)),
    "auto, one over 2.4 %": Rule(constants=replace(AUTO, share_of_run=0.024)),
    "auto, until 0.5": Rule(constants=replace(AUTO, risen=0.5)),
    "auto, until 0.9": Rule(constants=replace(AUTO, risen=0.9)),
    "auto, guard 2": Rule(guard=2.0),
    "auto, no clipping": Rule(clip=False),
    "auto, proximal": Rule(proximal=True, clip=False),
}


def kind(problem: str) -> str:
    """What a problem is, as in :data:`NOTHING_SET`."""
    return "partial AUC" if problem in PAUC else "classification" if problem == GLYPHS else "regression"


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`trial` reads but the problem, and the seeds."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the batches (0 1 2)")
    parser.add_argument("--epochs", type=int, help="epochs of every run (as each problem's)")
    parser.add_argument("--data-dir", help="where california_housing and abalone are")
    parser.add_argument("--glyphs", type=Path, default=Path("data/glyphs"), help="folder of the glyphs (data/glyphs)")
    parser.add_argument("--device", default="cpu", help="where to compute (cpu)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(CELLS), choices=PROBLEMS, help="which (the six cells)")
    parser.add_argument("--rules", nargs="+", default=[""], help="those whose names contain one of these words (all)")
    parser.add_argument("--pauc-features", type=Path, help="folder 'features' that pauc_known_optimum.py made")
    add_trial_arguments(parser)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for problem in arguments.problems:
        start = time.perf_counter()
        hand = by_hand(problem)
        own = NOTHING_SET[kind(problem)]
        if problem == GLYPHS:
            own = replace(own, rate=GLYPH_CLASSES * (own.rate or 0.0))
        named = {"by hand": hand, "nothing set": own, "nothing set, lr auto": AUTO_LR[kind(problem)]}
        named |= {name: rule(hand) if callable(rule) else rule for name, rule in RULES.items()}
        named = {name: rule for name, rule in named.items() if any(word in name for word in arguments.rules)}
        runs = [replace(rule, seed=seed) for rule in named.values() for seed in arguments.seeds]
        values = trial(problem, runs, arguments)
        found[problem] = {}
        print(problem)
        for i, name in enumerate(named):
            mine = values[i * len(arguments.seeds) : (i + 1) * len(arguments.seeds)]
            found[problem][name] = round(sum(mine) / len(mine), 4)
            print(f"  {name:<36} {found[problem][name]:9.4f}   worst {max(mine):9.4f}")
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
