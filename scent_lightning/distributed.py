"""What the processes of a distributed run tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

P = ParamSpec("P")
T = TypeVar("T")

_AVAILABLE = dist.is_available()


def is_distributed() -> bool:
    """Whether several processes train together."""
    return _AVAILABLE and dist.is_initialized() and dist.get_world_size() > 1


def _to_backend(tensor: Tensor) -> Tensor:
    """Move a tensor to where the process group's backend can send it from."""
    if "nccl" not in dist.get_backend():
        return tensor.cpu()
    return tensor if tensor.is_cuda else tensor.cuda()


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is True in any process of a distributed run."""
    count = _to_backend(torch.tensor([int(flag)]))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return bool(count.item())


def checked(check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``check`` in every process; if it raises in one, all raise, so that none waits for the others for ever."""
    error: Exception | None = None
    try:
        result = check(*args, **kwargs)
    except (TypeError, ValueError, IndexError) as caught:
        error = caught
    failed = any_rank(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("another process of this run got a batch that cannot be used; see its error")
    return result


def gather(*columns: Tensor) -> tuple[tuple[Tensor, ...], slice]:
    """Rows of all processes in rank order, and which of them are this process's.

    Args:
        *columns: tensors of shape ``(B,)``; B may differ between processes. They travel as float64, which is exact
            for indices below 2⁵³.

    Returns:
        The columns, each of shape ``(ΣB,)``, and the slice of this process's rows.
    """
    everyone, lengths = all_rows(_to_backend(torch.stack([column.double() for column in columns], dim=1)))
    start = sum(lengths[: dist.get_rank()])
    gathered = tuple(everyone[:, i].to(column) for i, column in enumerate(columns))
    return gathered, slice(start, start + columns[0].shape[0])


def all_rows(values: Tensor) -> tuple[Tensor, list[int]]:
    """Rows of all processes in rank order, where each may have another number of them; and these numbers.

    Args:
        values: shape ``(N, …)``, on a device that the process group's backend can send from.
    """
    size = torch.tensor([values.shape[0]], device=values.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(length) for length in sizes]
    padded = torch.cat([values, values.new_zeros(max(lengths) - values.shape[0], *values.shape[1:])])
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]), lengths


def of_all_processes(values: Tensor) -> Tensor:
    """:func:`all_rows` of a tensor on any device, without gradient."""
    return all_rows(_to_backend(values.detach().contiguous()))[0].to(values.device)


def of_each_process(values: Tensor) -> list[Tensor]:
    """:func:`of_all_processes`, as the rows of each process."""
    everyone, lengths = all_rows(_to_backend(values.detach().contiguous()))
    return [rows.to(values.device) for rows in torch.split(everyone, lengths)]  # type: ignore[no-untyped-call]


def gather_at_first(values: Tensor) -> list[Tensor]:
    """A tensor of the same shape of every process, in rank order, in main memory of the first; others get nothing."""
    sent = _to_backend(values.contiguous())
    if dist.get_rank():
        dist.gather(sent)
        return []
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.gather(sent, parts)
    return [part.cpu() for part in parts]


def stack_states(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of all processes in rank order for each name; where they have other shapes, this process's alone."""
    stacked = {}
    for name, values in states.items():
        sizes = all_rows(_to_backend(torch.tensor([values.shape[1]])))[0]
        same = bool((sizes == sizes[0]).all())
        stacked[name] = all_rows(_to_backend(values))[0].cpu() if same else values
    return stacked


class _AllRows(torch.autograd.Function):
    """:func:`all_rows`; a row's gradient is the sum of what all processes have for it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> tuple[Tensor, int]:
        everyone, lengths = all_rows(_to_backend(values.detach().contiguous()))
        start = sum(lengths[: dist.get_rank()])
        ctx.mine = slice(start, start + values.shape[0])
        return everyone.to(values.device), start

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        total = _to_backend(gradient.contiguous()).clone()
        dist.all_reduce(total)
        return total[ctx.mine].to(gradient.device)


def gather_with_gradient(values: Tensor) -> tuple[Tensor, int]:
    """Rows of all processes in rank order, shape ``(ΣN, …)``, as a differentiable function of this one's.

    The gradient that a row gets is the sum over the losses of all processes; DDP then divides by their number.

    Args:
        values: shape ``(N, …)``, floating; N may differ between processes.

    Returns:
        The rows, and the place of this process's first.
    """
    return cast(tuple[Tensor, int], _AllRows.apply(values))  # type: ignore[no-untyped-call]


def processes() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if is_distributed() else 1
