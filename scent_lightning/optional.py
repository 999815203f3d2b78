"""Libraries that only some of the package needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from scent_lightning.errors import InputError

__all__ = ["faiss_module", "of_vision"]


def of_vision(library: str, needed_by: str) -> Any:
    """Import a library of the extra "vision".

    Args:
        library: the module's name.
        needed_by: what asks for it, the beginning of the message.

    Returns:
        The module.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module(library)
    except ImportError as error:
        raise InputError(
            f"{needed_by} needs {library}; install it with pip install 'scent-lightning[vision]'"
        ) from error


def faiss_module(needed_by: str) -> Any:
    """Import FAISS.

    Args:
        needed_by: what asks for it, the beginning of the message.

    Returns:
        The module.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module("faiss")
    except ImportError as error:
        raise InputError(f"{needed_by} needs FAISS; install it with pip install faiss-cpu, or faiss-gpu") from error
