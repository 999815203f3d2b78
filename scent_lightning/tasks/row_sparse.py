"""Tasks with parameters whose gradient has few rows a step: kept from DDP, exchanged and clipped row by row."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from scent_lightning.errors import InputError
from scent_lightning.optim import average_sparse_gradient, clip_gradients
from scent_lightning.private_api import keep_from_ddp
from scent_lightning.tasks.base import BaseTask

__all__ = ["RowSparseTask"]

_PLACEHOLDER = "ddp_placeholder.0"


class RowSparseTask(BaseTask):
    """Base of tasks with parameters whose gradient is a row-sparse tensor.

    A subclass may say which in :meth:`row_sparse`, calls :meth:`add_placeholder` at the end of its ``__init__`` and
    :meth:`with_placeholder` at the end of its training step.
    """

    #: What has sparse gradients, and what takes them: the end of the error's sentence.
    sparse_optimizers = (
        "which the embeddings have: leave it out for RowSparseAdam, set it to scent_lightning.optim.RowSparseSGD, or "
        "to SGD or Adagrad without weight_decay"
    )

    def row_sparse(self) -> list[str]:
        """Names of the parameters; those of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``."""
        return [
            f"{name}.weight" if name else "weight"
            for name, module in self.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
        ]

    def add_placeholder(self) -> None:
        """Make room for a parameter that DDP can send."""
        # The last of the parameters: averages of the weights pair those of two copies by their order.
        self.ddp_placeholder = nn.ParameterList()

    def with_placeholder(self, loss: Tensor) -> Tensor:
        """A loss that depends on all that DDP sends."""
        for placeholder in self.ddp_placeholder:
            loss = loss + 0 * placeholder
        return loss

    def setup(self, stage: str) -> None:
        """Keep the parameters from DDP, which has no way to send a sparse gradient."""
        super().setup(stage)
        names = self.row_sparse()
        if stage != "fit" or self.trainer.world_size == 1 or not names:
            return
        for name in names:
            keep_from_ddp(self, name)
        others = [other for other, p in self.named_parameters() if p.requires_grad and other not in names]
        if not others:
            # DDP refuses a module without a parameter of its own to send.
            self.ddp_placeholder.append(nn.Parameter(torch.zeros((), device=self.device)))

    def on_fit_start(self) -> None:
        """All processes start from the first one's parameters."""
        super().on_fit_start()
        for parameter in self._exchanged():
            torch.distributed.broadcast(parameter.data, src=0)

    def _exchanged(self) -> list[Tensor]:
        if self.trainer.world_size == 1:
            return []
        return [self.get_parameter(name) for name in self.row_sparse()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Average the sparse gradients over the processes."""
        for parameter in self._exchanged():
            if parameter.grad is not None:
                average_sparse_gradient(parameter)
        super().on_before_optimizer_step(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint does not depend on the number of processes."""
        super().on_save_checkpoint(checkpoint)
        for state in ("state_dict", "current_model_state"):  # the latter where Lightning averages the weights
            checkpoint.get(state, {}).pop(_PLACEHOLDER, None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nor does a model need it to."""
        super().on_load_checkpoint(checkpoint)
        if len(self.ddp_placeholder):
            for state in {"state_dict", "current_model_state"} & checkpoint.keys():
                checkpoint[state][_PLACEHOLDER] = torch.zeros(())

    def trained_parameters(self) -> list[Any]:
        """All that require a gradient, but for what only DDP needs."""
        return [p for name, p in self.named_parameters() if p.requires_grad and name != _PLACEHOLDER]

    def configure_schedule(self, optimizer: Optimizer) -> Any:
        """The learning-rate schedule, of an optimiser that can train the parameters."""
        if names := self.row_sparse():
            _check_takes_sparse_gradients(
                optimizer, {self.get_parameter(name) for name in names}, self.sparse_optimizers
            )
        return super().configure_schedule(optimizer)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by norm or by value, sparse gradients included."""
        if gradient_clip_val is not None:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
            clip_gradients(parameters, gradient_clip_val, by=algorithm.value)


def _check_takes_sparse_gradients(optimizer: Optimizer, sparse: set[Tensor], others: str) -> None:
    """Raise InputError for torch's own optimisers of dense gradients; of another class only its author knows."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    takes = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam | torch.optim.LBFGS)
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if not takes or decays:
        raise InputError(
            f"optimizer {type(optimizer).__name__}{' with weight_decay' * takes} takes no sparse gradients, {others}"
        )
    dense = {parameter for group in optimizer.param_groups for parameter in group["params"]} - sparse
    if isinstance(optimizer, torch.optim.SparseAdam) and dense:
        raise InputError(
            "optimizer SparseAdam takes sparse gradients only, and some parameters have dense ones: set it to "
            "scent_lightning.optim.RowSparseAdam, which takes both"
        )
