"""Sizes that a task takes from the data: which arguments of a task they are, and what the data module says of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, get_args, get_type_hints

import lightning as L
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from scent_lightning.checkpoint import read_checkpoint
from scent_lightning.errors import InputError

__all__ = ["FromCheckpoint", "SizeOfData", "sizes_of"]

_NONE_GIVEN = inspect.Parameter.empty
_OPTIONAL = {int, type(None)}


def sizes_of(task: type) -> dict[str, bool]:
    """Arguments of a task that are sizes, and may come from the data.

    They are the integers that have no default, and those called ``num_…`` whose default is None.

    Args:
        task: the class; where its ``__init__`` has ``**kwargs``, those of its parents count too.

    Returns:
        By name, whether the task cannot do without it.

    Example:
        >>> class Task:
        ...     def __init__(self, vocabulary: int, dual, num_users: int | None = None, width: int = 8): ...
        >>> sizes_of(Task)
        {'vocabulary': True, 'num_users': False}
    """
    return {name: default is _NONE_GIVEN for name, kind, default in _arguments(task) if _is_size(name, kind, default)}


def _arguments(task: type) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each argument."""
    seen: set[str] = set()
    for parent in task.__mro__:
        if "__init__" not in vars(parent):
            continue
        initialise: Any = vars(parent)["__init__"]
        try:
            kinds = get_type_hints(initialise)
        except (NameError, TypeError):  # a name that only a type checker imports
            kinds = {}
        parameters = inspect.signature(initialise).parameters.values()
        for parameter in parameters:
            if parameter.name not in seen:
                seen.add(parameter.name)
                yield parameter.name, kinds.get(parameter.name, parameter.annotation), parameter.default
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            return


def _is_size(name: str, kind: Any, default: Any) -> bool:
    is_integer = kind in (int, "int")
    if not name.startswith("num_"):
        return is_integer and default is _NONE_GIVEN
    # By such a name it is known without a type, too.
    is_integer = is_integer or kind in (_NONE_GIVEN, "int | None", "Optional[int]") or set(get_args(kind)) == _OPTIONAL
    return is_integer and default in (_NONE_GIVEN, None)


class FromCheckpoint:
    """Hands a data module what the checkpoint of the run holds of it, once.

    Attributes:
        path: the checkpoint; None where there is none.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._restored: L.LightningDataModule | None = None

    def __call__(self, data: L.LightningDataModule) -> None:
        """Do so, where it has not been done."""
        if self.path is None or self._restored is data:
            return
        self._restored = data
        state = read_checkpoint(self.path, mmap=True).get(type(data).__qualname__)
        if state:
            data.load_state_dict(apply_to_collection(state, Tensor, Tensor.clone))


class SizeOfData:
    """Gives a size of the task: what the user says, or the data module's attribute of the same name.

    Before that ``restore`` hands the data module what a checkpoint holds of it, from which its sizes follow. A class,
    since the parser is pickled where processes are spawned, and a function within a function cannot be.

    Args:
        name: of the argument and of the attribute.
        given: what the user gave; None for nothing.
        is_needed: whether the task cannot do without it.
        restore: called with the data module.

    Raises:
        InputError: on a call: the user and the data contradict each other, or neither says anything of what is needed.
    """

    def __init__(self, name: str, given: Any, is_needed: bool, restore: FromCheckpoint) -> None:
        self.__name__ = name
        self.given = given
        self.is_needed = is_needed
        self.restore = restore

    def __call__(self, data: L.LightningDataModule) -> Any:
        """The size, given the data module."""
        self.restore(data)
        name, kind = self.__name__, type(data).__name__
        of_data = getattr(data, name, None)
        of_data = int(of_data) if isinstance(of_data, Integral) and not isinstance(of_data, bool) else None
        if self.given is None and of_data is None and self.is_needed:
            raise InputError(
                f"--model needs its argument(s) {name}, as --model.{name} VALUE: {kind} has no integer {name} to take "
                "it from"
            )
        if self.given is not None and of_data not in (None, self.given):
            raise InputError(
                f"--model.{name} {self.given} contradicts the data: {kind} has {name} {of_data}, and without the "
                "argument the task takes that"
            )
        return self.given if of_data is None else of_data
