"""The weights before the last optimiser step, for an update that compares the scores of now with those of then.

What a step does not touch is not kept: of a parameter with a row-sparse gradient the rows that are in it, where the
optimiser moves no others. So the weights of a sampled head cost as many rows a step as the batch has classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.optim import Optimizer

from scent_lightning.compiling import outside_graphs
from scent_lightning.duals.variable import DualVariable
from scent_lightning.errors import InputError
from scent_lightning.optim import RowSparseSGD
from scent_lightning.private_api import entries, skips_backward, trainer_of

__all__ = ["PreviousWeights", "PreviousWeightsMixin"]

# Strategies under which no process has the whole weights, or the whole gradients.
SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)

# A parameter as a whole, or some of its rows: {"rows": (r,), "values": (r, …)}.
Kept = Tensor | dict[str, Tensor]
Result = TypeVar("Result")


class PreviousWeights:
    """What the last optimiser step has changed, as it was before."""

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, Kept] | None = None
        self._tables: Sequence[DualVariable] = ()

    @torch.no_grad()
    def keep(self, optimizer: Optimizer, tables: Sequence[DualVariable]) -> None:
        """Keep what the optimiser is about to change; those of an earlier step are forgotten.

        Several optimisers may take steps before the next batch comes in: that is one change of the weights.

        Args:
            optimizer: that takes the step; the gradients are there.
            tables: that follow the weights; each notes from now on which anchors it has moved since.
        """
        self._tables = tables
        if self._kept is None or any(table.moved is None or table.moved for table in tables):
            self._kept = {}
            for table in tables:
                table.moved = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_rows = _moves_rows_alone(optimizer, group)
                    self._kept[parameter] = _kept(parameter, by_rows, self._kept.get(parameter))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The parameters have the values of before within this context."""
        now: dict[nn.Parameter, Kept] = {}
        for parameter, kept in (self._kept or {}).items():
            now[parameter] = _exchange(parameter, kept)
        try:
            yield
        finally:
            for parameter, kept in now.items():
                _exchange(parameter, kept)

    def state(self, module: nn.Module) -> dict[str, Any] | None:
        """As plain tensors, for a checkpoint; None where no update needs it.

        Args:
            module: has names for the parameters.
        """
        if self._kept is None:
            return None
        weights = {name: self._kept[p] for name, p in module.named_parameters() if p in self._kept}
        moved = {table.name: torch.cat(table.moved) for table in self._tables if table.moved}
        return {"weights": weights, "moved": moved}

    def restore(self, state: dict[str, Any], module: nn.Module, tables: Sequence[DualVariable]) -> None:
        """Set what :meth:`state` gave.

        Args:
            state: from a checkpoint.
            module: has parameters of the same names.
            tables: of the module; nothing is restored where none needs it.
        """
        self._tables = [table for table in tables if table.needs_previous]
        if self._tables:
            parameters = dict(module.named_parameters())
            names = [name for name in state["weights"] if name in parameters]
            self._kept = {parameters[name]: _moved_to(parameters[name], state["weights"][name]) for name in names}
            for table in self._tables:
                table.moved = [state["moved"][table.name]] if table.name in state["moved"] else []


def _moves_rows_alone(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step moves no other rows than those in a sparse gradient."""
    if type(optimizer) is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    return isinstance(optimizer, RowSparseSGD | torch.optim.SparseAdam | torch.optim.Adagrad)


def _kept(parameter: Tensor, by_rows: bool, before: Kept | None) -> Kept:
    """What a step may change, as it is now; but what an earlier step has changed already, as it was before that."""
    if isinstance(before, Tensor):
        return before
    gradient = cast(Tensor, parameter.grad)
    if not (gradient.is_sparse and by_rows and gradient.sparse_dim() == 1):
        whole = parameter.detach().clone()
        return whole if before is None else whole.index_copy_(0, before["rows"], before["values"])
    rows = torch.unique(entries(gradient)[0][0])
    if before is not None:
        rows = rows[~torch.isin(rows, before["rows"])]
    values = parameter.detach().index_select(0, rows)
    if before is None:
        return {"rows": rows, "values": values}
    return {"rows": torch.cat([before["rows"], rows]), "values": torch.cat([before["values"], values])}


def _moved_to(parameter: Tensor, kept: Kept) -> Kept:
    place = parameter.device
    return kept.to(place) if isinstance(kept, Tensor) else {name: values.to(place) for name, values in kept.items()}


def _exchange(parameter: Tensor, kept: Kept) -> Kept:
    """Give a parameter the values that were kept, and return those that it had."""
    data = parameter.data
    if isinstance(kept, Tensor):
        parameter.data = kept.to(data)
        return data
    rows, values = kept["rows"].to(data.device), kept["values"].to(data)
    had = data.index_select(0, rows)
    data.index_copy_(0, rows, values)
    return {"rows": rows, "values": had}


@contextmanager
def _without_a_trace(module: nn.Module) -> Iterator[None]:
    """A forward pass that draws the random numbers of the next one, and leaves buffers (batch norm's) as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    caches = torch.is_autocast_cache_enabled()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # Autocast would keep the weights in half precision for the pass that follows.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for buffer, values in buffers:
            buffer.data.copy_(values)


class PreviousWeightsMixin(L.LightningModule):
    """Keeps the weights before each optimiser step where a dual update needs the scores at them."""

    duals: nn.ModuleDict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._previous_weights = PreviousWeights()

    def updates_duals(self) -> bool:
        """Whether this is training, where ν is written; elsewhere, and in averaged weights, it is read only."""
        trainer = trainer_of(self)
        stage = None if trainer is None else trainer.state.stage
        if stage is RunningStage.TRAINING:
            # Lightning's averaging of weights passes over the data once more, for the statistics of batch norm alone.
            return trainer is None or not skips_backward(trainer)
        return stage is None and self.training and not any(v.is_shared for v in self._variables())

    def _variables(self) -> list[DualVariable]:
        return [cast(DualVariable, variable) for variable in self.duals.values()]

    def _compares(self) -> bool:
        # A loop, since any() would take longer.
        for variable in self.duals.values():  # noqa: SIM110
            if variable.needs_previous:
                return True
        return False

    def at_previous_weights(self, function: Callable[[], Result]) -> Result | None:
        """What a function gives at the weights before the last optimiser step; None where no dual update needs it.

        Call it before the forward pass: the function draws the random numbers that the pass is going to draw (those of
        dropout), and buffers, such as batch norm's statistics, stay as they are. Before the first optimiser step the
        weights are those of now.

        Args:
            function: works the scores of a batch out; called without gradient, in training only, and at once. What it
                returns must not look at the weights later.

        Example:
            >>> import torch
            >>> from scent_lightning.duals import MSVR, DualVariableMixin
            >>> class Softmax(DualVariableMixin):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.linear = torch.nn.Linear(4, 3)
            ...         self.add_dual("nu", 8, MSVR(gamma=0.5, beta=0.5))
            ...     def scores(self, features, labels):
            ...         logits = self.linear(features)
            ...         return logits - logits.gather(1, labels[:, None])
            ...     def training_step(self, batch, batch_idx):
            ...         features, labels, index = batch
            ...         previous = self.at_previous_weights(lambda: self.scores(features, labels))
            ...         scores = self.scores(features, labels)
            ...         return self.entropic_risk("nu", scores, index, previous_scores=previous)
            >>> batch = (torch.randn(2, 4), torch.tensor([0, 2]), torch.tensor([5, 1]))
            >>> loss = Softmax().training_step(batch, 0)
        """
        return self._at_previous_weights(function) if self._compares() else None

    @outside_graphs
    def _at_previous_weights(self, function: Callable[[], Result]) -> Result | None:
        if not self.updates_duals():
            return None
        with self._previous_weights.installed(), _without_a_trace(self):
            return function()

    def keep_weights(self, optimizer: Any) -> None:
        """Keep the weights for :meth:`at_previous_weights`; in a plain loop before each ``optimizer.step()``.

        The Trainer calls it. Nothing is kept where no dual update needs it.

        Args:
            optimizer: that takes the step, after ``backward``.
        """
        if self._compares():
            optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper of one
            tables = [variable for variable in self._variables() if variable.needs_previous]
            self._previous_weights.keep(optimizer, tables)

    def on_train_start(self) -> None:
        """Stop where the weights cannot be kept.

        Raises:
            InputError: the strategy shares the parameters among the processes, and an update compares with them.
        """
        super().on_train_start()
        if self._compares() and isinstance(strategy := self.trainer.strategy, SHARDED):
            update = next(variable.update for variable in self._variables() if variable.needs_previous)
            raise InputError(
                f"{update!r} needs the scores at the weights before, and {type(strategy).__name__} shares the weights "
                "among the processes; take another strategy or another dual update"
            )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the weights if an update needs them."""
        super().on_before_optimizer_step(optimizer)
        self.keep_weights(optimizer)
