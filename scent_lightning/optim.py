"""Optimisers that the tasks need and torch lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from scent_lightning import distributed
from scent_lightning.errors import InputError
from scent_lightning.functional.repeats import are_distinct
from scent_lightning.private_api import entries, is_watched, takes_own_records
from scent_lightning.validation import checked_choice, checked_number

__all__ = ["IncreasingMomentumSGD", "RowSparseAdam", "RowSparseSGD", "average_sparse_gradient", "clip_gradients"]

# How many gradients are averaged: one in so many steps, and at least so many.
_STEPS_PER_AVERAGED, _LEAST_AVERAGED = 150, 10


def check_sgd(lr: float, momentum: float, weight_decay: float) -> None:
    """Raise InputError for a setting of SGD that is out of range."""
    checked_number("lr", lr, above=0)
    checked_number("momentum", momentum, least=0, below=1)
    checked_number("weight_decay", weight_decay, least=0)


def increasing_momentum(steps: int) -> tuple[float, float]:
    """Momentum and dampening of :class:`IncreasingMomentumSGD` after so many steps.

    Example:
        >>> increasing_momentum(0)
        (0.9, 0.0)
        >>> increasing_momentum(30_000)  # the mean of some 200 gradients
        (0.995, 0.95)
    """
    averaged = steps / _STEPS_PER_AVERAGED
    if averaged <= _LEAST_AVERAGED:
        return 1 - 1 / _LEAST_AVERAGED, 0.0
    return 1 - 1 / averaged, 1 - _LEAST_AVERAGED / averaged


class IncreasingMomentumSGD(torch.optim.SGD):
    r"""SGD with Nesterov's momentum that increases over the run, and steps that go as far as with a momentum of 0.9.

    .. math:: v_t = \mu_t v_{t-1} + 10 (1 - \mu_t) g_t, \quad w_t = w_{t-1} - \eta (g_t + \mu_t v_t), \quad
              \frac{1}{1 - \mu_t} = \max\left(10, \frac{t}{150}\right)

    So v is 10 times a mean over the last gradients: of ten at first, as with momentum 0.9, and later of a 150th of all
    so far, which in a run of 300 epochs is one epoch in the middle and two at the end. The gradients of an epoch add up
    to that of all rows. Where few rows carry a loss, as in robust regression with outliers, each is in one batch of an
    epoch; with a momentum that is spent before the next, the weights swing between these rows and all others, and the
    mean of where they are is not the optimum. A momentum as long from the start would answer too slowly to steps that
    are large: it increases while the learning rate falls.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η, above 0; what suits a momentum of 0.9.
        weight_decay: L2 penalty, at least 0.

    Raises:
        InputError: an argument out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = IncreasingMomentumSGD([weight], lr=0.1)
        >>> weight.grad = torch.ones(3)
        >>> optimizer.step()
        >>> weight.detach()
        tensor([-0.1900, -0.1900, -0.1900])
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        check_sgd(lr, 0.0, weight_decay)
        momentum, dampening = increasing_momentum(0)
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        self._increase_before_steps()

    def _increase_before_steps(self) -> None:
        # Not in step itself: torch's records and hooks are around it.
        if "increases" not in vars(self):
            self.register_step_pre_hook(_increase)
            self.increases = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._increase_before_steps()  # a copy has lost its hooks, and this attribute


def _increase(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Set the momentum of the next step, and count it."""
    for group in optimizer.param_groups:
        steps = group.get("steps", 0)  # none before the first, or in a state of another SGD
        group["momentum"], group["dampening"] = increasing_momentum(steps)
        # With dampening, too, which torch's SGD does not take as an argument: g is not in v alone.
        group["nesterov"], group["steps"] = True, steps + 1


class _RowSparse(Optimizer):
    """Base of optimisers that take a row-sparse gradient in one way and a dense one in another."""

    @takes_own_records
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: evaluates the model again and returns the loss; optional.
        """
        if is_watched(self):
            return self._recorded_step(closure)
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    self._sparse_step(parameter, *_distinct_rows(parameter.grad), group)
                else:
                    self._dense_step(parameter, parameter.grad, group)
        return loss

    _recorded_step = Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As every optimiser's, in a tenth of the time: of a step with a sparse gradient that is several per cent."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _sparse_step(self, parameter: Tensor, rows: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """Step of the touched rows; ``rows`` are distinct, shape ``(r,)``, and ``values`` their gradient."""
        raise NotImplementedError

    def _dense_step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def _distinct_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that a sparse gradient touches, each once, and their gradient."""
    indices, values = entries(gradient)
    rows = indices[0]
    # Autograd forgets that a gradient was coalesced, and to do so again takes longer than to look.
    if are_distinct(rows):
        return rows, values
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


class RowSparseSGD(_RowSparse):
    r"""SGD that touches only the rows that have a gradient; dense parameters get ordinary SGD.

    For a parameter with a sparse gradient, row r that has a gradient :math:`g_r` at step t, last touched at step s:

    .. math::
        v_r \leftarrow \mu^{t - s} v_r + g_r + \lambda w_r, \qquad w_r \leftarrow w_r - \eta v_r

    that is, momentum decays as if every step had been taken, lazily, when the row is next touched. It differs from
    dense momentum in one thing: a row without a gradient rests, where dense momentum would go on moving it by
    :math:`\eta \mu^k v_r`. Weight decay λ, too, acts on a row only when it is touched. With momentum 0 and no weight
    decay a step is that of :class:`torch.optim.SGD` exactly.

    Gradient accumulation, learning-rate schedulers and state dicts work as for any optimiser. torch's own gradient
    clipping does not know sparse gradients: use :func:`clip_gradients`, as the task for extreme classification does.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η, above 0.
        momentum: μ, in [0, 1). Needs a buffer as large as the parameter, made at the first step.
        weight_decay: λ, at least 0.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(5, 2))
        >>> optimizer = RowSparseSGD([weight], lr=0.5)
        >>> rows = torch.nn.functional.embedding(torch.tensor([3]), weight, sparse=True)
        >>> rows.sum().backward()
        >>> optimizer.step()
        >>> weight[:, 0].tolist()
        [1.0, 1.0, 1.0, 0.5, 1.0]
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        check_sgd(lr, momentum, weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _sparse_step(self, parameter: Tensor, rows: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            values = values.add(parameter[rows], alpha=group["weight_decay"])
        if group["momentum"]:
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["last_step"] = torch.zeros(parameter.shape[0], dtype=torch.int64, device=parameter.device)
            state["step"] += 1
            waited = (state["step"] - state["last_step"][rows]).to(values.dtype)
            decay = torch.pow(torch.full_like(waited, group["momentum"]), waited)
            buffer = state["momentum_buffer"]
            values = values + decay.reshape(-1, *[1] * (values.ndim - 1)) * buffer[rows]
            buffer[rows] = values
            state["last_step"][rows] = state["step"]
        parameter.index_add_(0, rows, values, alpha=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimiser's, but when each row was touched stays an integer: torch would cast it to a float."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                last_step = state_dict["state"].get(key, {}).get("last_step")
                if last_step is not None:
                    self.state[parameter]["last_step"] = last_step.to(parameter.device, torch.int64, copy=True)

    def _dense_step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        parameter.add_(gradient, alpha=-group["lr"])


class RowSparseAdam(_RowSparse):
    r"""Adam that touches only the rows that have a gradient; dense parameters get ordinary Adam.

    With a sparse gradient it is the lazy Adam of :class:`torch.optim.SparseAdam`: the moments of a row move when it has
    a gradient and rest otherwise, and the number of steps is the parameter's. That class refuses dense parameters, and
    :class:`torch.optim.Adam` sparse gradients: a network behind an embedding has both.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, above 0.
        betas: factors of the moving averages of the gradient and of its square, each in [0, 1).
        eps: added to the denominator, above 0.
        weight_decay: L2 penalty, at least 0; with a sparse gradient on the rows that are touched.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(5, 2))
        >>> optimizer = RowSparseAdam([weight], lr=0.5)
        >>> torch.nn.functional.embedding(torch.tensor([3]), weight, sparse=True).sum().backward()
        >>> optimizer.step()
        >>> [round(number, 4) for number in weight[:, 0].tolist()]
        [1.0, 1.0, 1.0, 0.5, 1.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_sgd(lr, 0.0, weight_decay)
        for beta in betas:
            checked_number("each of betas", beta, least=0, below=1)
        checked_number("eps", eps, above=0)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        state["step"] += 1
        return state

    def _sparse_step(self, parameter: Tensor, rows: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            values = values.add(parameter[rows], alpha=group["weight_decay"])
        state, (beta1, beta2) = self._state_of(parameter), group["betas"]
        moment = state["exp_avg"].index_select(0, rows).lerp_(values, 1 - beta1)
        square = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(values, values, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, moment)
        state["exp_avg_sq"].index_copy_(0, rows, square)
        size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        parameter.index_add_(0, rows, moment.div_(square.sqrt_().add_(group["eps"])), alpha=-size)

    def _dense_step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state, (beta1, beta2) = self._state_of(parameter), group["betas"]
        moment = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        parameter.addcdiv_(moment, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_value: float, by: str = "norm") -> None:
    """Clip gradients in place, sparse ones included.

    Args:
        parameters: whose gradients to clip.
        max_value: the largest norm of all gradients together, or the largest absolute value of each entry; 0 or less
            does nothing, as for Lightning's ``gradient_clip_val``.
        by: "norm" or "value".

    Raises:
        InputError: ``by`` is neither, or ``max_value`` is NaN.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(5, 2))
        >>> torch.nn.functional.embedding(torch.tensor([3]), weight, sparse=True).sum().backward()
        >>> clip_gradients([weight], 0.1, by="value")
        >>> round(weight.grad.coalesce().values().max().item(), 6)
        0.1
    """
    checked_choice("by", by, ("norm", "value"))
    if math.isnan(max_value):
        raise InputError("max_value must be a number, got nan")
    if max_value <= 0:
        return
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            # Repeated rows (from accumulation) must be one before a norm or a limit means anything.
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        else:
            gradients.append(parameter.grad)
    if by == "value":
        for gradient in gradients:
            gradient.clamp_(-max_value, max_value)
        return
    if gradients:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        factor = (max_value / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)


@torch.no_grad()
def average_sparse_gradient(parameter: Tensor) -> None:
    """Average a parameter's sparse gradient over the processes of a distributed run, in place.

    The touched rows travel, and nothing else: NCCL has no sparse all-reduce, and DDP's reducer cannot take a sparse
    gradient on GPUs. Every process ends with the same gradient, bit for bit.

    Args:
        parameter: has a sparse gradient; shape ``(K, …)``. It must be kept from DDP, by the module's
            ``_ddp_params_and_buffers_to_ignore``.
    """
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    all_rows, all_values = distributed.all_rows(rows)[0], distributed.all_rows(values)[0] / dist.get_world_size()
    parameter.grad = torch.sparse_coo_tensor(
        all_rows.unsqueeze(0), all_values, gradient.shape, check_invariants=False
    ).coalesce()
