"""Keeps a file's import paths from being imported: a module's top level is code, and the file's author chose it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from scent_lightning.checkpoint import local_path, read_checkpoint
from scent_lightning.errors import InputError

__all__ = ["named_by", "read_anywhere", "without_imports_of"]

# Packages whose classes a task's hyperparameters name as a rule. What they do on import is known.
_TRUSTED = ("lightning", "open_clip", "pytorch_lightning", "scent_lightning", "torch", "torchmetrics", "torchvision")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")

# Where Lightning looks for hyperparameters, of old versions too.
_HYPERPARAMETERS = ("hparams", "module_arguments", "hyper_parameters")
_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def _import_paths(value: Any) -> Iterator[str]:
    """All that could be the import path of a class or a function in nested plain data."""
    if isinstance(value, str):
        yield from _IMPORT_PATH.findall(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _import_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _import_paths(item)


def read_anywhere(checkpoint_path: Any) -> dict[str, Any]:
    """What a checkpoint holds, as tensors and plain data.

    Args:
        checkpoint_path: a path, a URL or an open file, which is left where it was.

    Raises:
        InputError: a local file is truncated, is no checkpoint, or holds other objects.
    """
    path = local_path(checkpoint_path)
    if path is not None and path.exists():
        return read_checkpoint(path, mmap=True)
    if hasattr(checkpoint_path, "read"):
        place = checkpoint_path.tell()
        checkpoint = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
        checkpoint_path.seek(place)
    elif str(checkpoint_path).startswith("http"):
        checkpoint = torch.hub.load_state_dict_from_url(checkpoint_path, map_location="cpu", weights_only=True)
    else:
        with get_filesystem(checkpoint_path).open(checkpoint_path, "rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    return cast(dict[str, Any], checkpoint)


def named_by(checkpoint: Mapping[str, Any], name: Any, hparams_file: Any) -> dict[str, Any]:
    """The hyperparameters with which Lightning would build the task of a checkpoint.

    Args:
        checkpoint: its content.
        name: how an error calls it.
        hparams_file: whose text counts in place of the checkpoint's hyperparameters; None for none.

    Raises:
        InputError: the checkpoint has the task built by another function than Lightning's.
    """
    found: dict[str, Any] = {}
    for key in _HYPERPARAMETERS:
        found.update(checkpoint.get(key) or {})
    if hparams_file is not None:
        found["hparams_file"] = Path(hparams_file).read_text(encoding="utf-8")
    builder = found.get("_instantiator", _INSTANTIATORS[0])
    if builder not in _INSTANTIATORS:
        raise InputError(f"checkpoint {name} has the task built by {builder!r}, and not by Lightning")
    return found


class _Refusing(MetaPathFinder):
    """Finds no module, and refuses those that certain import paths lead through.

    Attributes:
        refused: the first import path of which a module was asked for.
    """

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.refused: str | None = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        trusted = fullname.partition(".")[0] in _TRUSTED and not fullname.endswith(".__main__")
        asked = next((named for named in self.paths if f"{named}.".startswith(f"{fullname}.")), None)
        if asked is not None and not trusted:
            self.refused = self.refused or asked
            raise ModuleNotFoundError(f"{fullname} is not imported, and is not to be", name=fullname)


@contextmanager
def without_imports_of(value: Any, what: str) -> Iterator[None]:
    """While it lasts, no module is imported that an import path in ``value`` leads through.

    A module that is imported already is used as always, and the packages that tasks are built from are trusted.

    Args:
        value: nested plain data, as from a file.
        what: the file, for the error.

    Raises:
        InputError: such a module was asked for, and that ended in an error.
    """
    finder = _Refusing(list(_import_paths(value)))
    sys.meta_path.insert(0, finder)
    try:
        yield
    except Exception as error:
        if finder.refused is None:
            raise
        module = finder.refused.rpartition(".")[0]
        raise InputError(
            f"{what} names {finder.refused}, of a module that is not imported, and loading it imports none of others: "
            f"import {module} first, or pass what it stands for as an argument"
        ) from error
    finally:
        sys.meta_path.remove(finder)
