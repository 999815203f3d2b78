"""The table of dual variables: one float32 ν and one visited flag per anchor, addressed by dataset index."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from scent_lightning.errors import InputError
from scent_lightning.functional.repeats import FEW, look_at
from scent_lightning.updates import DualUpdate, StepSizeRule
from scent_lightning.validation import checked_choice, checked_integer

__all__ = ["DualTable", "IfChanged", "Placement"]

Placement = Literal["module", "cpu"]
IfChanged = Literal["error", "grow", "reset"]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DualTable(nn.Module):
    """ν and visited flags of n anchors, the update that moves them, and their place in a state dict.

    The arguments are those of :class:`~scent_lightning.duals.DualVariable`, which is this with a loss.
    """

    def __init__(
        self,
        num_anchors: int,
        update: DualUpdate | dict[str, Any],
        name: str = "nu",
        placement: Placement = "module",
    ) -> None:
        super().__init__()
        checked_integer(f"num_anchors of dual variable {name!r}", num_anchors)
        checked_choice(f"placement of dual variable {name!r}", placement, get_args(Placement))
        self.name = name
        self.placement = placement
        self._shared = False
        self.last: Any = None  # the latest step, as whatever made it describes it
        self.measures_kappa = False  # whether steps work out κ of their samples, which a monitor switches on
        # Anchors that were moved since the last optimiser step; None where nobody says when that was.
        self.moved: list[Tensor] | None = None
        self.if_changed: IfChanged = "error"
        # Set when a state of another size was loaded: reading still works, training does not.
        self.loaded_anchors: int | None = None
        self._warned: set[str] = set()
        zeros = _zeros_in_main_memory if placement == "cpu" else torch.zeros
        self._table = _Table(zeros(num_anchors, dtype=torch.float32), zeros(num_anchors, dtype=torch.bool))
        self.use(update)

    @property
    def nu(self) -> Tensor:
        """ν of every anchor, shape ``(n,)``, float32; 0 where never visited."""
        return self._table.nu

    @nu.setter
    def nu(self, values: Tensor) -> None:
        self._table.nu = values

    @property
    def visited(self) -> Tensor:
        """Which anchors were visited, shape ``(n,)``, bool."""
        return self._table.visited

    @visited.setter
    def visited(self, flags: Tensor) -> None:
        self._table.visited = flags

    @property
    def is_shared(self) -> bool:
        """Whether this belongs to averaged weights, which read the table of the model that is trained."""
        return self._shared

    def share(self) -> None:
        """Use the table and the rule of the variable that this one was copied from, if there still is one."""
        if self._table.copied_from is not None and (table := self._table.copied_from()) is not None:
            self._table, self.auto, self._shared = table, table.auto, True

    @property
    def num_anchors(self) -> int:
        """Number of rows n."""
        return self.nu.shape[0]

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.num_anchors}, update={self.update!r}, placement={self.placement!r}"

    # ---------------------------------------------------------------- access

    def use(self, update: DualUpdate | dict[str, Any]) -> None:
        """Move ν by another update from now on; ν stays.

        Args:
            update: as an object or in the form of :meth:`DualUpdate.config`.

        Raises:
            InputError: neither of them.
        """
        if isinstance(update, dict):
            update = DualUpdate.from_config(update)
        if not isinstance(update, DualUpdate):
            raise InputError(f"update of dual variable {self.name!r} must be a DualUpdate, got {type(update).__name__}")
        self.update = update
        self.auto = self._table.auto = update.step_size_rule(self.num_anchors)
        # The same class, which may say more than its parent does, with what the rule says in place of its arguments.
        self._found = None if self.auto is None else copy.copy(update)
        self.has_step_of_one = update.has_step_of_one
        self.needs_previous = update.needs_previous_scores
        # Whether ν and the objective follow from the log-mean-exp of the scores: all updates but softplus ASGD.
        self.takes_exponentials = update.has_exponential_objective and not update.needs_scores

    def update_at(self, progress: float, rows: Tensor | None = None) -> DualUpdate:
        """The update as it is at ``progress``: ``update`` itself, or a copy with the step size found so far.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            rows: dataset indices of the step, for a step size that differs between anchors.
        """
        if self.auto is None or self._found is None:
            return self.update
        self.auto.turn(progress, lambda: int(torch.count_nonzero(self.visited)))
        self._found.__dict__.update(self.auto.arguments(progress, rows))
        return self._found

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """ν (float32) and visited flags (bool) at ``index``, on the index's device.

        Args:
            index: dataset indices, shape ``(B,)``, any integer dtype.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`check_index`.
        """
        return self.look_up(self.check_index(index), index.device)

    def look_up(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """:meth:`gather` for an index that was checked, to a given device."""
        nu, visited = self.nu, self.visited
        if nu.device != device or index.device != device:
            index = index.to(nu.device)
            return nu.index_select(0, index).to(device), visited.index_select(0, index).to(device)
        return nu.index_select(0, index), visited.index_select(0, index)

    def read(self, rows: Tensor, log_mean: Tensor) -> Tensor:
        """ν where an anchor was visited and ℓ where it was not, float32, on the device of ``log_mean``.

        Args:
            rows: dataset indices, int64, shape ``(B,)``, already checked.
            log_mean: ℓ of each row, shape ``(B,)``.
        """
        nu, visited = self.look_up(rows, log_mean.device)
        return torch.where(visited, nu, log_mean.float())

    def scatter(self, index: Tensor, nu: Tensor) -> None:
        """Write ν at ``index`` and mark those anchors visited.

        Args:
            index: dataset indices, shape ``(B,)``, any integer dtype.
            nu: shape ``(B,)``; where an index repeats, its values must be equal.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`check_index`.
        """
        rows = self.check_index(index, nu.shape[0]).to(self.nu.device)
        self.nu[rows] = nu.detach().to(self.nu)
        self.visited[rows] = True

    def reset(self) -> None:
        """Forget every ν: all anchors count as never visited."""
        self.nu.zero_()
        self.visited.zero_()
        if self.auto is not None:
            self.auto.reset()
        self.last = None
        self.loaded_anchors = None

    def grow(self, num_anchors: int) -> None:
        """Make room for rows that were appended to the data set; they start unvisited, the others keep their ν.

        Args:
            num_anchors: new number of rows n, at least the old one.

        Raises:
            InputError: fewer than there are, or no integer.
        """
        hint = f"; it has {self.num_anchors}"
        checked_integer(f"num_anchors of dual variable {self.name!r}", num_anchors, self.num_anchors, hint=hint)
        more = num_anchors - self.num_anchors
        if self.auto is not None:
            self.auto.grow(num_anchors)
        self.nu, self.visited = (torch.cat([old, old.new_zeros(more)]) for old in (self.nu, self.visited))
        self.last = None

    def check_index(self, index: Tensor, rows: int | None = None) -> Tensor:
        """Validate dataset indices and return them as int64.

        Args:
            index: what came.
            rows: the length it must have, or None for any.

        Raises:
            TypeError: not a tensor of integers.
            ValueError: not one-dimensional, or not ``rows`` long.
            IndexError: an index negative or not below the number of anchors.
        """
        self._check_form(index, rows)
        if index.numel():
            if index.shape[0] <= FEW and index.device.type == "cpu":
                numbers = index.tolist()
                self._check_range(min(numbers), max(numbers))
            else:
                self._check_range(*torch.stack(torch.aminmax(index)).tolist())
        return index.long()

    def check_index_of_step(self, index: Tensor, rows: int) -> tuple[Tensor, bool]:
        """:meth:`check_index`, and whether no index repeats: with one wait for a device, not two."""
        self._check_form(index, rows)
        distinct = True
        if index.numel():
            low, high, distinct = look_at(index)
            self._check_range(low, high)
        return index.long(), distinct

    def _check_form(self, index: Tensor, rows: int | None) -> None:
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        if kind not in _INTEGERS:
            raise TypeError(f"index of dual variable {self.name!r} must be a tensor of integers, got {kind}")
        if index.ndim != 1 or (rows is not None and index.shape[0] != rows):
            expected = "(B,)" if rows is None else f"({rows},), one index for each row of the scores"
            got = tuple(index.shape)
            raise ValueError(f"index of dual variable {self.name!r} must have shape {expected}, got {got}")

    def _check_range(self, low: int, high: int) -> None:
        if low < 0 or high >= self.num_anchors:
            raise IndexError(
                f"index {low if low < 0 else high} of dual variable {self.name!r} is out of range: valid are 0 to "
                f"{self.num_anchors - 1} ({self.num_anchors} anchors)"
            )

    def check_trainable(self) -> None:
        """Raise if the table that was loaded belongs to a training set of another size.

        Raises:
            InputError: with both sizes and the way out.
        """
        if self.loaded_anchors is not None:
            raise InputError(
                f"cannot train dual variable {self.name!r}: the checkpoint holds {self.loaded_anchors} anchors and "
                f"this model has {self.num_anchors}; train on the data set of the checkpoint, or set if_changed_data "
                '(--if_changed_data) to "grow" if rows were appended to it, or to "reset" to start every ν anew'
            )

    def unknown_progress(self) -> float:
        """The progress where nobody says it: 0, with one warning if the step size depends on it."""
        if self.update.needs_progress:
            self.warn_once(
                "progress",
                f"the step size of dual variable {self.name!r} ({self.update!r}) depends on how much of the run is "
                "done, and nobody says so: it stays as at the start. Without a Trainer pass progress (0 to 1) to "
                "entropic_risk, or call set_dual_progress of the module before each step",
            )
        return 0.0

    def warn_once(self, what: str, message: str) -> None:
        """Warn, but only at the first call with the same ``what``."""
        if what not in self._warned:
            self._warned.add(what)
            rank_zero_warn(message)

    # ---------------------------------------------------------------- state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DualTable:
        """Follow the module to another device, but never to another dtype, and nowhere if placed on the CPU."""
        if self.placement == "cpu":
            return self
        if not self._shared:
            probe = fn(torch.empty(0, dtype=torch.float32, device=self.nu.device))
            if probe.dtype == torch.float32:
                self.nu, self.visited = fn(self.nu), fn(self.visited)
            else:
                self.nu, self.visited = self.nu.to(probe.device), self.visited.to(probe.device)
        self.last = None
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination.update({f"{prefix}nu": self.nu, f"{prefix}visited": self.visited})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.auto is None:
            state_dict.pop(f"{prefix}auto._extra_state", None)
        loaded = state_dict.get(f"{prefix}nu")
        if loaded is not None and loaded.shape != self.nu.shape:
            grows = self.if_changed == "grow" and loaded.shape[0] < self.num_anchors
            if not grows:  # the rule's state belongs to the ν that it was found with
                state_dict.pop(f"{prefix}auto._extra_state", None)
            if grows or self.if_changed == "reset":
                self.reset()
            else:
                # Evaluation needs no ν, so a state of another size is not an error yet: see check_trainable.
                self.loaded_anchors = loaded.shape[0]
            if grows:
                self.nu[: loaded.shape[0]] = loaded
                self.visited[: loaded.shape[0]] = state_dict[f"{prefix}visited"]
            return
        self._load_tables(state_dict, prefix, *args)
        if self.auto is not None and loaded is not None:
            self.auto.adopt(self.visited)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.loaded_anchors = None
        self.last = None

    def _load_tables(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: list[str],
    ) -> None:
        for name in ("nu", "visited"):
            loaded, own = state_dict.pop(f"{prefix}{name}", None), getattr(self, name)
            if loaded is None:
                missing_keys += [f"{prefix}{name}"] if strict else []
            elif local_metadata.get("assign_to_params_buffers", False):
                setattr(self, name, loaded.to(own.dtype))
            else:
                own.copy_(loaded)


class _Table:
    """The tensors of a table, and its rule: one object, so that several variables can share it."""

    def __init__(self, nu: Tensor, visited: Tensor) -> None:
        self.nu = nu
        self.visited = visited
        self.auto: StepSizeRule | None = None
        # What this is a deep copy of, for as long as that is in use.
        self.copied_from: weakref.ref[_Table] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Table:
        copied = memo[id(self)] = _Table(copy.deepcopy(self.nu, memo), copy.deepcopy(self.visited, memo))
        copied.auto, copied.copied_from = copy.deepcopy(self.auto, memo), weakref.ref(self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copied_from": None}


def _share_with_average(average: nn.Module, name: str, module: nn.Module | None) -> None:
    """Let the copy of a module that averages its weights use the tables of the module itself."""
    if isinstance(average, AveragedModel) and module is not None:
        for part in module.modules():
            if isinstance(part, DualTable):
                part.share()


# torch asks this at every assignment of a module to a module; the average takes its copy so.
register_module_module_registration_hook(_share_with_average)


def _zeros_in_main_memory(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros, shape ``(size,)``, in memory that random rows are read from quickly.

    NumPy asks the system for large pages, torch does not. A batch's rows of a large table lie in as many pages, and to
    look up where each page is takes longer than to read the row: at 10⁸ anchors a step of 128 took 14 % longer than
    with a small table, and takes 9 % longer so.
    """
    kind = {torch.float32: np.float32, torch.bool: np.bool_}[dtype]
    return torch.from_numpy(np.empty(size, dtype=kind)).zero_()
