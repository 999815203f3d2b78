"""Small things of the extraction: near names, hashes, files of JSON."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scent_lightning.errors import InputError

__all__ = ["alike", "digest", "read_json", "reason", "write_json"]


def reason(error: BaseException) -> str:
    """The first sentence of another library's message."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".") or type(error).__name__


def alike(name: str, known: Iterable[str]) -> str:
    """What may have been meant by an unknown name, or all there is if that is little."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or (names if len(names) <= 12 else [])
    return f"; did you mean {' or '.join(near)}?" if near else ""


def write_json(path: Path, content: Any) -> None:
    """Write all or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """What a file of JSON holds; InputError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} as JSON: {reason(error)}") from error


def digest(parts: Iterable[bytes]) -> str:
    """A short hash, to tell one file or list from another."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()[:16]
