"""Libraries that only some of the package needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from scent_lightning.errors import InputError

__all__ = ["optional_module"]

_VISION = "'scent-lightning[vision]'"
# What pip installs each by.
_INSTALLED_BY = {
    "braceexpand": _VISION,
    "faiss": "faiss-cpu, or faiss-gpu",
    "open_clip": _VISION,
    "optuna": "'scent-lightning[sweep]'",
    "triton": "triton",
}


def optional_module(library: str, needed_by: str) -> Any:
    """Import a library of an extra.

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
            f"{needed_by} needs {library}; install it with pip install {_INSTALLED_BY[library]}"
        ) from error
