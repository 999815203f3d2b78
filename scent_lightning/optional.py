"""Libraries that only some of the package needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from scent_lightning.errors import InputError

__all__ = ["faiss_module", "of_vision", "optuna_module"]


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
    return _module(library, f"{needed_by} needs {library}; install it with pip install 'scent-lightning[vision]'")


def faiss_module(needed_by: str) -> Any:
    """Import FAISS.

    Args:
        needed_by: what asks for it, the beginning of the message.

    Returns:
        The module.

    Raises:
        InputError: it is not installed.
    """
    return _module("faiss", f"{needed_by} needs FAISS; install it with pip install faiss-cpu, or faiss-gpu")


def optuna_module(needed_by: str) -> Any:
    """Import optuna.

    Args:
        needed_by: what asks for it, the beginning of the message.

    Returns:
        The module.

    Raises:
        InputError: it is not installed.
    """
    return _module("optuna", f"{needed_by} needs optuna; install it with pip install 'scent-lightning[sweep]'")


def _module(name: str, otherwise: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(otherwise) from error
