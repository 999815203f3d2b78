"""The files of the features, which fill up batch by batch and can be gone on with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.errors import InputError
from scent_lightning.extraction.words import read_json, write_json

__all__ = ["Output", "check_classes"]

FINAL = ("features.npy", "labels.npy")
PARTS = tuple(f"{name}.part" for name in FINAL)


class Output:
    """The files of a split, which fill up batch by batch.

    Args:
        folder: OUT/SPLIT.
        settings: of the run; with the number of rows under "rows" and the width under "features".
        overwrite: whether files of other settings, or complete ones, may go.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
        self.folder = folder
        self.settings = settings
        self.rows, self.width = int(settings["rows"]), int(settings["features"])
        self.progress = folder / "progress.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done = 0
        if self.progress.exists():
            self.done = self._resume(overwrite)
        elif not overwrite:
            there = next((folder / name for name in FINAL if (folder / name).exists()), None)
            if there is not None:
                raise InputError(f"{there} exists and has no progress.json beside it; --overwrite replaces it")
        if self.done == 0:
            self._create()

    def _resume(self, overwrite: bool) -> int:
        record = read_json(self.progress)
        before = record.get("settings") if isinstance(record, dict) else None
        if not isinstance(before, dict) or not isinstance(record.get("rows_done"), int):
            if overwrite:
                return 0
            raise InputError(f"{self.progress} is not one of this program; --overwrite starts anew")
        now = self.settings
        if before != now:
            if overwrite:
                return 0
            names = dict.fromkeys([*now, *before])
            changes = [f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names]
            differences = "; ".join(
                change for name, change in zip(names, changes, strict=True) if before.get(name) != now.get(name)
            )
            raise InputError(f"{self.folder} holds a run with other settings ({differences}); --overwrite replaces it")
        done = int(record["rows_done"])
        if done == self.rows and overwrite:
            return 0
        for final, part in zip(FINAL, PARTS, strict=True):
            # Of a complete run killed while it renamed its files, each has one of the names.
            names_left = (part, final) if done == self.rows else (part,)
            if done and not any((self.folder / name).is_file() for name in names_left):
                if overwrite:
                    return 0
                raise InputError(
                    f"{self.progress} counts {done} rows, but {self.folder / names_left[0]} is gone; --overwrite "
                    "starts anew"
                )
        return done

    def _create(self) -> None:
        for path in [self.progress, *(self.folder / name for name in FINAL + PARTS)]:
            path.unlink(missing_ok=True)
        dtype = np.dtype(self.settings["dtype"])
        size = self.rows * (self.width * dtype.itemsize + 8)
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise InputError(f"{self.folder} needs {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free there")
        shapes: list[tuple[npt.DTypeLike, tuple[int, ...]]] = [
            (dtype, (self.rows, self.width)),
            (np.int64, (self.rows,)),
        ]
        for name, (kind, shape) in zip(PARTS, shapes, strict=True):
            np.lib.format.open_memmap(self.folder / name, mode="w+", dtype=kind, shape=shape).flush()
        self._record()

    def _record(self) -> None:
        write_json(self.progress, {"rows_done": self.done, "settings": self.settings})

    def append(self, *arrays: npt.NDArray[Any]) -> None:
        """Write features, shape (B, D), and labels, shape (B,), and count them once they are on disk."""
        count = len(arrays[0])
        for name, array in zip(PARTS, arrays, strict=True):
            # Mapped anew each time: pages written before do not count as this process's memory.
            mapped = np.lib.format.open_memmap(self.folder / name, mode="r+")
            mapped[self.done : self.done + count] = array
            mapped.flush()
        self.done += count
        self._record()

    def finish(self) -> None:
        """Give the files their names."""
        for final, part in zip(FINAL, PARTS, strict=True):
            if (self.folder / part).exists():
                os.replace(self.folder / part, self.folder / final)


def check_classes(out: Path, split: str, classes: list[str] | None, overwrite: bool) -> None:
    """Write OUT/classes.json, or compare: all splits must number the classes alike."""
    path = out / "classes.json"
    if classes is None:
        return
    if path.exists():
        before = read_json(path)
        if before == classes:
            return
        others = [
            entry.name
            for entry in out.iterdir()
            if entry.name != split and any((entry / name).exists() for name in (*FINAL, "progress.json"))
        ]
        if others or not overwrite:
            position = next(
                (i for i, (old, new) in enumerate(zip(before, classes, strict=False)) if old != new),
                min(len(before), len(classes)),
            )
            old, new = (repr(names[position]) if position < len(names) else "none" for names in (before, classes))
            raise InputError(
                f"the class order does not match {path}, which an earlier split wrote: class {position} is {new}, "
                f"there {old}; for the same order give an image folder --classes {path}"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, classes)
