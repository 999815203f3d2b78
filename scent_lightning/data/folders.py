"""Folders of data: where they are, and what to say of one that is missing."""

from __future__ import annotations

import os
from pathlib import Path

from scent_lightning.words import listed

__all__ = ["elsewhere", "leads_outside", "missing_split"]


def elsewhere(path: str) -> str:
    """The path in the folder that the environment variable SCENT_LIGHTNING_DATA names."""
    return os.path.join(os.environ.get("SCENT_LIGHTNING_DATA") or "", path)


def leads_outside(path: str) -> bool:
    """Whether a relative path leaves the folder it is relative to."""
    return not os.path.isabs(path) and os.path.normpath(path).split(os.sep)[0] == os.pardir


def missing_split(path: Path, split: str) -> str:
    """What to say of a split without a folder in ``path``, and which folders are there."""
    there = sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    return f"{split!r}: missing split, there is no folder {path / split}; {path} has: " + (
        listed(there) or "no folder at all"
    )
