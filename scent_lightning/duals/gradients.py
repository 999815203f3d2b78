"""The gradient that has gathered between two optimiser steps, as tensors, for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scent_lightning import distributed
from scent_lightning.private_api import entries

__all__ = ["gathered_gradients", "restore_gradients"]

# A dense gradient, a row-sparse one as its indices and values, or none.
Gradient = Tensor | dict[str, Tensor] | None
_NONE, _DENSE, _SPARSE = range(3)


def gathered_gradients(module: nn.Module) -> dict[str, list[Gradient]]:
    """The gradient of each parameter that has one, an entry for each process in rank order.

    To be called by all processes. With several of them the first alone gets the result, in main memory; the others get
    an empty one.

    Args:
        module: its ``.grad`` are taken as they are, without a copy where there is one process.
    """
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    kinds = torch.tensor([[_kind(parameter.grad) for _, parameter in parameters]])
    if distributed.is_distributed():
        kinds = distributed.of_all_processes(kinds)
    found = {
        name: _of_processes(parameter, of_parameter)
        for (name, parameter), of_parameter in zip(parameters, kinds.T.tolist(), strict=True)
        if any(of_parameter)
    }
    return {} if distributed.is_distributed() and dist.get_rank() else found


def _kind(gradient: Tensor | None) -> int:
    return _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _of_processes(parameter: Tensor, kinds: list[int]) -> list[Gradient]:
    gradient = parameter.grad
    if not distributed.is_distributed():
        assert gradient is not None
        if gradient.is_sparse:
            return [dict(zip(("indices", "values"), entries(gradient), strict=True))]
        return [gradient.detach()]
    gathered: list[Gradient] = [None] * len(kinds)
    if _DENSE in kinds:
        dense = gradient if gradient is not None and not gradient.is_sparse else torch.zeros_like(parameter)
        for rank, values in enumerate(distributed.gather_at_first(dense.detach())):
            gathered[rank] = values if kinds[rank] == _DENSE else None
    if _SPARSE in kinds:
        if gradient is None or not gradient.is_sparse:
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
        indices, values = entries(gradient)
        rows, values_of = distributed.of_each_process(indices.T), distributed.of_each_process(values)
        for rank, kind in enumerate(kinds):
            if kind == _SPARSE:
                gathered[rank] = {"indices": rows[rank].cpu().T.contiguous(), "values": values_of[rank].cpu().clone()}
    return gathered


@torch.no_grad()
def restore_gradients(
    module: nn.Module, gradients: dict[str, list[Gradient]], rank: int, processes: int, scale: float = 1.0
) -> None:
    """Set what :func:`gathered_gradients` gave; with another number of processes, the mean over those of before.

    Args:
        module: has parameters of the same names and shapes; one without an entry is left as it is.
        gradients: from :func:`gathered_gradients`.
        rank: number of this process.
        processes: how many there are.
        scale: multiplies them.
    """
    parameters = dict(module.named_parameters())
    for name, of_processes in gradients.items():
        parameter = parameters[name]
        restored = [_restored(gradient, parameter) for gradient in of_processes]
        if len(restored) == processes:
            gradient = restored[rank]
        else:
            first, *others = [gradient for gradient in restored if gradient is not None]
            gradient = sum(others, start=first) / len(restored)
        parameter.grad = gradient if gradient is None or scale == 1 else gradient * scale


def _restored(gradient: Gradient, parameter: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    place: Any = {"device": parameter.device, "dtype": parameter.dtype}
    if isinstance(gradient, dict):
        indices, values = gradient["indices"].to(parameter.device, copy=True), gradient["values"].to(**place, copy=True)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return gradient.to(**place, copy=True)
