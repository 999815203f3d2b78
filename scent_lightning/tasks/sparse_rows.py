"""Tasks whose embeddings have row-sparse gradients, in one process and in several."""

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

__all__ = ["SparseRowsTask"]

_PLACEHOLDER = "ddp_placeholder.0"


class SparseRowsTask(BaseTask):
    """A task with embeddings (``sparse=True``) anywhere among its modules.

    In a distributed run their gradients are kept from DDP, whose reducer cannot take them on GPUs, and exchanged row by
    row. A subclass calls :meth:`add_placeholder` at the end of its ``__init__``, and adds :meth:`placeholders` to its
    loss.
    """

    def add_placeholder(self) -> None:
        """Make room for what DDP needs where no other parameter is left to it; after all parameters.

        Averages of the weights pair those of two copies by their order.
        """
        self.ddp_placeholder = nn.ParameterList()

    def placeholders(self) -> Tensor | float:
        """0, as a function of what DDP has."""
        total: Tensor | float = 0.0
        for placeholder in self.ddp_placeholder:
            total = total + 0 * placeholder
        return total

    def sparse_parameters(self) -> dict[str, Tensor]:
        """Parameters whose gradients are row-sparse, by name: those of ``nn.Embedding`` and ``nn.EmbeddingBag``."""
        return {
            f"{name}.weight" if name else "weight": module.weight
            for name, module in self.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
        }

    def setup(self, stage: str) -> None:
        """Keep the embeddings from DDP."""
        super().setup(stage)
        if stage != "fit" or self.trainer.world_size == 1:
            return
        names = self.sparse_parameters()
        for name in names:
            keep_from_ddp(self, name)
        others = [name for name, p in self.named_parameters() if p.requires_grad and name not in names]
        if not others:
            # DDP refuses a module without a parameter of its own to send.
            self.ddp_placeholder.append(nn.Parameter(torch.zeros((), device=self.device)))

    def on_fit_start(self) -> None:
        """All processes start from the first one's embeddings."""
        super().on_fit_start()
        if self.trainer.world_size > 1:
            for parameter in self.sparse_parameters().values():
                torch.distributed.broadcast(parameter.data, src=0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Average the embeddings' gradients over the processes."""
        if self.trainer.world_size > 1:
            for parameter in self.sparse_parameters().values():
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
        """The learning-rate schedule, of an optimiser that can train the embeddings."""
        if sparse := self.sparse_parameters():
            self._check_optimizer(optimizer, {id(parameter) for parameter in sparse.values()})
        return super().configure_schedule(optimizer)

    def _check_optimizer(self, optimizer: Optimizer, sparse: set[int]) -> None:
        """Raise InputError for torch's own optimisers of dense gradients; of another class only its author knows."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return
        takes = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam)
        decays = any(group.get("weight_decay") for group in optimizer.param_groups)
        if not takes or decays:
            raise InputError(
                f"optimizer {type(optimizer).__name__}{' with weight_decay' * takes} takes no sparse gradients, which "
                "the embeddings have: leave it out for RowSparseAdam, set it to scent_lightning.optim.RowSparseSGD, "
                "or to SGD or Adagrad without weight_decay"
            )
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if isinstance(optimizer, torch.optim.SparseAdam) and trained - sparse:
            raise InputError(
                "optimizer SparseAdam takes sparse gradients only, and some parameters of the towers have dense ones: "
                "leave it out for RowSparseAdam, which takes both"
            )

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
