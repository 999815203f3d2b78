"""Checkpoint files: written whole or not at all, read without a second copy and without running anything in them."""

from __future__ import annotations

import os
import pickle
import re
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from scent_lightning.errors import InputError

__all__ = ["AtomicCheckpointIO"]

# A file that nothing was written to for so long belongs to a process that was killed.
ABANDONED_AFTER_S = 3600.0

# In this file Lightning's spawned processes (ddp_spawn) leave the bare weights to the process that started them.
OF_SPAWNED = ".temp.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside the old one and put it in its place when it is complete; read it as plain data only.

    The tensors go straight into a temporary file in the same folder (Lightning's own way builds the whole file in
    memory first), which replaces the old file at the end: a process that dies or a disk that fills up in between leaves
    the old one as it was. Reading maps the file, so that the model's parameters and tables are filled from it without a
    copy in between, and never runs anything: a file with other objects than tensors and plain data is refused.

    The command line uses it by itself. With a Trainer of one's own it is a plugin. Files that are not on a local disk
    (``s3://…``) take Lightning's way, and are read as plain data as well.

    Example:
        >>> import lightning as L
        >>> from scent_lightning.checkpoint import AtomicCheckpointIO
        >>> trainer = L.Trainer(plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; the file at ``path`` is the old one or the new one at any time.

        Args:
            checkpoint: what to write.
            path: the file; its folder is made if need be.
            storage_options: must be None, as for every file of torch.

        Raises:
            OSError: the file cannot be written, the disk is full for instance. No part of it is left.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f".{local.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            _remove_abandoned(local, part)
            os.replace(part, local)
        except BaseException as error:
            with suppress(OSError):
                part.unlink()
            # torch reports its own surprise at the position in the file and keeps the reason to itself.
            reason = _os_error(error)
            if reason is None or not isinstance(error, Exception):
                raise
            text = f"cannot write checkpoint {local}: {reason.strerror or reason}; what was there before is unchanged"
            raise OSError(reason.errno, text) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint.

        The tensors under "state_dict" are views of the mapped file, meant to be copied into a module; all others are
        in memory.

        Args:
            path: the file.
            map_location: as for :func:`torch.load`.
            weights_only: has no effect; a checkpoint is always read as tensors and plain data.

        Raises:
            FileNotFoundError: there is no such file.
            InputError: the file is truncated, is no checkpoint, or holds other objects than tensors and plain data.
        """
        local = local_path(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only=True)
        if not local.exists():
            raise FileNotFoundError(f"checkpoint {local} does not exist")
        if local.name == OF_SPAWNED:
            return dict(read_plain(local, f"weights {local}", map_location))
        checkpoint = read_checkpoint(local, map_location, mmap=True)
        # An optimiser keeps the tensors it is given: these must not depend on the file any longer.
        return {
            key: value if key == "state_dict" else apply_to_collection(value, Tensor, Tensor.clone)
            for key, value in checkpoint.items()
        }


def read_checkpoint(path: Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """What a checkpoint of Lightning holds; arguments as :func:`read_plain`.

    Raises:
        InputError: as :func:`read_plain`; or the file holds something else, a bare state dict for instance.
    """
    checkpoint = read_plain(path, f"checkpoint {path}", map_location, mmap)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError(f"checkpoint {path} is no checkpoint of a run: it has no state_dict beside its other states")
    if "pytorch-lightning_version" not in checkpoint:
        raise InputError(f"checkpoint {path} is no checkpoint of Lightning: it does not name a version of it")
    return checkpoint


def read_plain(path: Path, what: str, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What a file of torch holds, tensors and plain data only; nothing in it is run.

    Args:
        path: the file.
        what: how an error calls it.
        map_location: as for :func:`torch.load`.
        mmap: map the tensors and do not read them.

    Raises:
        InputError: the file is missing, truncated, of another kind, or holds other objects.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"  # as all that torch has written since version 1.6
    except OSError as error:
        raise InputError(f"{what} cannot be read: {error.strerror or error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the kind of file, of which the error says enough
            return torch.load(path, map_location, weights_only=True, mmap=mmap and zipped)
    except Exception as error:  # of many kinds, by what the file is and where it ends
        raise InputError(f"{what} {_fault(error, zipped)}") from error


def _fault(error: Exception, zipped: bool) -> str:
    """What is wrong with a file that torch could not read."""
    foreign = re.search(r"GLOBAL (\S+) (?:was not|whose)|Unsupported class (\S+)", str(error))
    if foreign or (zipped and isinstance(error, pickle.UnpicklingError)):
        what = f"a {foreign[1] or foreign[2]}" if foreign else "other objects"
        return f"holds {what}, and not only tensors and plain data: it is not read, because that could run code"
    if zipped:
        return "is truncated, damaged or of another kind: torch cannot read it to its end"
    return "is of another kind: torch cannot read it as tensors and plain data"


def _os_error(error: BaseException | None) -> OSError | None:
    """The error of the operating system behind an error, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def local_path(path: Any) -> Path | None:
    """The path of a file on a local disk; None for a URL and for an open file."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = str(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return None if re.match(r"\w[\w+.-]+:", text) and not Path(text).is_absolute() else Path(text)


def _remove_abandoned(path: Path, own: Path) -> None:
    """Remove what killed processes have left of this file: parts untouched for an hour, by the clock of the disk."""
    now = own.stat().st_mtime
    for part in path.parent.glob(f".{path.name.translate(_NO_PATTERN)}.*.part"):
        with suppress(OSError):
            if now - part.stat().st_mtime > ABANDONED_AFTER_S:
                part.unlink()


_NO_PATTERN = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})
