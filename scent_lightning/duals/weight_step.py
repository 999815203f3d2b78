r"""The step for the weights: proximal in the exponential part of the loss, in closed form.

Let :math:`cE` be the exponential part of the loss of a step, :math:`E` the mean of exp(S − ν) over the anchors and c
what the loss multiplies it by, g its gradient and η the learning rate. Samples that no weight moves, such as the own
class less itself in a softmax, are no part of E: they would make a step look safe that is not. With log E linearised
and the exponential kept,

.. math:: \min_\Delta\; cE\, e^{\langle g, \Delta\rangle/(cE)} + \frac{\|\Delta\|^2}{2\eta}
          \quad\text{is at}\quad \Delta = -\eta \frac{W(a)}{a} g, \qquad a = \frac{\eta\|g\|^2}{cE}

(W is Lambert's function). So the gradient is multiplied by W(a)/a ≤ 1 before the optimiser takes its step: nothing
changes where a is small, and the model's log E falls by W(a) ≤ log(1 + a) however large the learning rate or a weight
exp(S − ν) is. It is a prox-linear step (Duchi and Ruan 2018, Asi and Duchi 2019) that keeps the outer exponential.

With parameter groups of their own rates :math:`a = \sum_k \eta_k \|g_k\|^2 / (cE)`. Momentum and weight decay are the
optimiser's, as always, and so is what else is in the loss: its gradient is in g and is multiplied, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from scent_lightning import distributed
from scent_lightning.duals.one_anchor import StepOfOne
from scent_lightning.duals.previous import SHARDED
from scent_lightning.duals.samples import Samples, mean_objective
from scent_lightning.duals.step import DualStep
from scent_lightning.duals.table import DualTable
from scent_lightning.errors import InputError
from scent_lightning.functional import lambert_w_of_log, wide, wide_dtype
from scent_lightning.functional.repeats import are_distinct
from scent_lightning.optim import RowSparseSGD
from scent_lightning.private_api import entries, multiply, norms, unscales_itself
from scent_lightning.validation import checked_choice

__all__ = [
    "ExponentialPart",
    "WeightStep",
    "WeightStepRule",
    "checked_weight_step",
    "exponential_part",
    "proximal_gradients",
]

WeightStepRule = Literal["proximal", "gradient"]
Number: TypeAlias = float | Tensor

# Optimisers whose step is the learning rate times the gradient, or times a sum of gradients.
_LINEAR = (torch.optim.SGD, RowSparseSGD)


class WeightStep(NamedTuple):
    """What :func:`proximal_gradients` did: W(a), the nats that the model's log E falls by, and the scale W(a)/a."""

    decrease: float
    scale: float


def proximal_gradients(
    optimizer: Optimizer, exponential: Number, loss_scale: float = 1.0, gradients_scale: float = 1.0
) -> WeightStep | None:
    """Multiply the gradients of an optimiser's parameters so that its step is proximal; in place.

    To be called after ``backward`` and before ``optimizer.step()``; clip afterwards, if at all.

    Args:
        optimizer: of SGD's kind: its step is the learning rate times the gradient, or momentum's sum of gradients.
        exponential: cE, the part of the loss that is exponential, times ``loss_scale``: for ``loss = tau * risk``, tau
            times :func:`exponential_part`. In a distributed run that of the whole batch.
        loss_scale: what a gradient scaler has multiplied ``exponential`` by.
        gradients_scale: and the gradients, where they are not unscaled yet.

    Returns:
        What was done; None where the gradients are left as they are: no parameter has one, or they or ``exponential``
        are not finite, or ``exponential`` is not above 0.

    Raises:
        InputError: a parameter group has no learning rate, or one below 0.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> step = proximal_gradients(optimizer, exponential=25 / math.e)  # a = e, and so W(a) = 1
        >>> round(step.decrease, 6), round(step.scale, 6)
        (1.0, 0.367879)
        >>> weight.grad
        tensor([1.1036, 1.4715])
    """
    values: list[Tensor] = []
    rates: list[float] = []
    for group in optimizer.param_groups:
        rate = learning_rate(optimizer, group)
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                if gradient.is_sparse or gradient.requires_grad:
                    gradient = _values(parameter, gradient)
                values.append(gradient)
                rates.append(rate)
    if not values:
        return None
    *sizes, exponential = _numbers(norms(values), exponential)
    log_a = _log_sum_of_squares(sizes, rates, values) - 2 * math.log(gradients_scale)
    if not 0 < exponential < math.inf or math.isnan(log_a) or log_a == math.inf:
        return None
    decrease = lambert_w_of_log(log_a - math.log(exponential) + math.log(loss_scale))
    # In several factors where one would be too small for the gradients' dtype.
    times = max(1, math.ceil(decrease / 60))
    if (factor := math.exp(-decrease / times)) < 1:
        for _ in range(times):
            multiply(values, factor)
    return WeightStep(decrease, math.exp(-decrease))


def learning_rate(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The learning rate of a parameter group.

    Raises:
        InputError: there is none, or one below 0.
    """
    rate = group.get("lr")
    if type(rate) is float and 0 <= rate < math.inf:  # as a rule; the rest takes longer
        return rate
    if not isinstance(rate, int | float | Tensor) or isinstance(rate, bool):
        raise InputError(
            f"weight_step 'proximal' needs the learning rate of each parameter group, and {type(optimizer).__name__} "
            f"has {rate!r} under 'lr'; set weight_step to 'gradient'"
        )
    rate = float(rate)
    if not 0 <= rate < math.inf:
        raise InputError(
            f"weight_step 'proximal' needs learning rates above 0, and {type(optimizer).__name__} has {rate!r}"
        )
    return rate


def _values(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The numbers of a parameter's gradient, those of a sparse one with each row once."""
    if not gradient.is_sparse:
        return gradient.detach()  # after backward with create_graph
    rows, values = entries(gradient)
    if len(rows) == 1 and are_distinct(rows[0]):
        return values
    parameter.grad = gradient = gradient.coalesce()
    return gradient.values()


def _numbers(sizes: list[Tensor], exponential: Number) -> list[float]:
    """All as numbers, with one wait for a device that is not the CPU."""
    place = sizes[0].device
    if place.type == "cpu":
        return [size.item() for size in sizes] + [float(exponential)]
    kind = wide_dtype(place)
    values = [torch.as_tensor(value, dtype=kind, device=place).detach() for value in (*sizes, exponential)]
    numbers: list[float] = torch.stack(values).tolist()
    return numbers


def _log_sum_of_squares(sizes: list[float], rates: list[float], values: list[Tensor]) -> float:
    """The logarithm of Σ η‖g‖², −∞ for 0, without overflow."""
    if all(1e-15 < size < 1e15 for size in sizes):
        total = sum(rate * size * size for rate, size in zip(rates, sizes, strict=True))
        return math.log(total) if total > 0 else -math.inf
    logs = []
    for size, rate, gradient in zip(sizes, rates, values, strict=True):
        # A square may have been out of the range of the dtype.
        norm, log_unit = (size, 0.0) if 1e-15 < size < 1e15 else _norm_in_units(gradient)
        if rate > 0 and norm != 0:
            logs.append(math.log(rate) + 2 * (math.log(norm) + log_unit))
    largest = max(logs, default=-math.inf)
    return largest if math.isinf(largest) else largest + math.log(sum(math.exp(log - largest) for log in logs))


def _norm_in_units(gradient: Tensor) -> tuple[float, float]:
    """The norm of a gradient in units of its largest entry, and the logarithm of that."""
    unit = wide(gradient).abs().max().item() if gradient.numel() else 0.0
    if not 0 < unit < math.inf:
        return unit, 0.0
    return (wide(gradient) / unit).norm().item(), math.log(unit)


# -------------------------------------------------------------------- what is exponential in a loss


def exponential_part(tables: Sequence[DualTable], samples: Samples, risk: Tensor) -> Number:
    """cE: what is exponential in a risk, as a number, or as a tensor on another device than the CPU.

    For an update whose objective is not exp(S − ν), it is what stands in the place of it: all but ν − 1.

    Args:
        tables: those of :func:`~scent_lightning.duals.step.entropic_risk`, which has just returned the risk.
        samples: its samples.
        risk: what it returned.
    """
    scale, offset = samples.terms()
    last = tables[0].last
    if isinstance(last, StepOfOne):
        return math.exp(last.log_mean - last.nu) * scale
    if all(table.update.has_exponential_objective for table in tables):
        part = sum(
            _mean_of(table, lambda log_mean, nu: (log_mean - nu).exp(), samples.moving(i))
            for i, table in enumerate(tables)
        )
    else:
        rest = sum(
            _mean_of(table, lambda log_mean, nu: torch.where(log_mean > -math.inf, 1 - nu, 0.0)) for table in tables
        )
        part = (wide(risk) / scale - offset + rest) * _moving_share(tables, samples)
    part = torch.as_tensor(part * scale)
    return part.item() if part.device.type == "cpu" else part


def _moving_share(tables: Sequence[DualTable], samples: Samples) -> Number:
    """What the weights move, as a share of the mean of exp(S − ν)."""
    moving = [samples.moving(i) for i in range(len(tables))]
    if all(log_mean is None for log_mean in moving):
        return 1.0
    last = [cast(DualStep, table.last) for table in tables]
    # The same number from all exponents, so that none overflows.
    largest = torch.stack([wide(step.log_mean - step.nu).amax() for step in last]).amax()

    def mean(table: DualTable, log_mean: Tensor | None) -> Tensor:
        return _mean_of(table, lambda ours, nu: (ours - nu - largest).exp(), log_mean)

    whole = sum(mean(table, None) for table in tables)
    return sum(mean(table, log_mean) for table, log_mean in zip(tables, moving, strict=True)) / whole


def _mean_of(table: DualTable, of: Callable[[Tensor, Tensor], Tensor], log_mean: Tensor | None = None) -> Tensor:
    """Mean of a function of ℓ and the new ν over the anchors of the latest step, as this process's share of it.

    Args:
        table: has taken the step.
        of: the function.
        log_mean: what takes the place of ℓ, shape ``(B,)``; None: ℓ itself.
    """
    step = table.last
    assert isinstance(step, DualStep)
    counts = 1 if step.all_seen is None else step.log_mean > -math.inf
    log_mean = step.log_mean if log_mean is None else log_mean.to(step.log_mean)
    return mean_objective(of(log_mean, step.nu.to(log_mean.dtype)), step.row_weight, counts)


class ExponentialPart:
    """Σ cE over the batches since the last step: c is the derivative of what is differentiated by each risk in it.

    The backward pass tells of c. So whatever a module multiplies a risk by is known, the temperature, the share of a
    batch in an accumulated gradient and a gradient scaler's factor included, and a risk that is not in the loss does
    not count.
    """

    def __init__(self) -> None:
        self._total: Number = 0.0
        self._taken = False

    def watch(self, tables: Sequence[DualTable], samples: Samples, risk: Tensor) -> None:
        """Add the exponential part of a risk when the gradient comes to it."""
        if risk.requires_grad:
            part = exponential_part(tables, samples, risk)
            risk.register_hook(partial(self._add, part))  # type: ignore[no-untyped-call]

    def _add(self, part: Number, c: Tensor) -> None:
        if self._taken:
            self._total, self._taken = 0.0, False
        self._total = self._total + part * (c.item() if isinstance(part, float) else wide(c))

    def take(self) -> Number:
        """The sum, in a distributed run the mean over the processes; the next batch starts anew."""
        total = self._total
        # Kept until the next backward pass: several optimisers may take steps of one backward pass.
        self._taken = True
        if distributed.is_distributed():
            shares = total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64)
            total = distributed.of_all_processes(shares.reshape(1)).mean()
        return total

    def state(self) -> Tensor | None:
        """What is gathered between two steps, of all processes, shape ``(P,)``; None where nothing is."""
        total = torch.as_tensor(0.0 if self._taken else self._total, dtype=torch.float64).reshape(1).cpu()
        totals = distributed.of_all_processes(total) if distributed.is_distributed() else total
        return totals if bool(totals.any()) else None

    def restore(self, totals: Tensor, rank: int, processes: int, scale: float = 1.0) -> None:
        """Set what :meth:`state` gave; with another number of processes, the mean over those of before."""
        own = totals[rank] if len(totals) == processes else totals.mean()
        self._total, self._taken = own.item() * scale, False


def checked_weight_step(word: Any) -> Any:
    """Return ``word`` if it is "proximal" or "gradient", else raise InputError."""
    return checked_choice("weight_step", word, get_args(WeightStepRule))


# -------------------------------------------------------------------- under a Trainer


def check_training(trainer: L.Trainer) -> None:
    """Raise where a proximal step is not to be had.

    Raises:
        InputError: the strategy shares the parameters among the processes; an optimiser has no learning rate, or none
            above 0.
    """
    for optimizer in trainer.optimizers:
        if not takes_proximal(optimizer):
            continue  # its step is no multiple of the gradients, which are left as they are
        if isinstance(trainer.strategy, SHARDED):
            raise InputError(
                "weight_step 'proximal' needs whole gradients in each process, and "
                f"{type(trainer.strategy).__name__} shares them among the processes; set weight_step to 'gradient'"
            )
        for group in optimizer.param_groups:
            learning_rate(optimizer, group)
            if not learning_rate(optimizer, {"lr": group.get("initial_lr", group["lr"])}) > 0:
                raise InputError(
                    f"weight_step 'proximal' needs learning rates above 0, and {type(optimizer).__name__} has 0"
                )


def takes_proximal(optimizer: Optimizer) -> bool:
    """Whether an optimiser's step is its learning rate times the gradient, or times momentum's sum of gradients."""
    return isinstance(optimizer, _LINEAR)


def scales(trainer: L.Trainer | None, optimizer: Optimizer) -> tuple[float, float]:
    """What mixed precision has multiplied the loss by, and the gradients as they are before the optimiser's step."""
    scaler = None if trainer is None else getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return 1.0, 1.0
    scale = scaler.get_scale()
    return scale, scale if unscales_itself(optimizer) else 1.0
