"""Folders of images: which files are images, which folders are classes, and what is passed over."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from scent_lightning.errors import InputError

__all__ = ["IMAGE_ENDINGS", "class_folders", "images_in", "images_of_classes", "images_under", "is_junk", "passed_over"]

# Of the formats in images.FORMATS, in lower case; files are read whatever their case.
IMAGE_ENDINGS = (
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".apng", ".webp", ".gif", ".bmp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
)
# What systems and programs leave in folders, in lower case, besides what begins with a dot.
JUNK = ("__macosx", "__pycache__", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found")
HIDDEN = "hidden"


def is_junk(name: str) -> bool:
    """Whether a folder of this name is hidden or a system's or program's own, and no class."""
    return name.startswith(".") or name.casefold() in JUNK


def _sorted_files(names: Iterable[str], folder: str, counts: Counter[str]) -> Iterator[str]:
    """Paths of the images among the files ``names`` of a folder, sorted; the others are counted by their ending."""
    for name in sorted(names):
        ending = os.path.splitext(name)[1].lower()
        if name.startswith("."):  # such as ._x.png, which macOS writes beside x.png
            counts[HIDDEN] += 1
        elif ending in IMAGE_ENDINGS:
            yield os.path.join(folder, name)
        else:
            counts[ending or "without ending"] += 1


def _unreadable(error: OSError) -> NoReturn:
    raise InputError(f"cannot look into folder {error.filename}: {error.strerror}") from error


def _walk(folder: str | Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and all folders in it but junk, each with the names of its files."""
    for place, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        folders[:] = [name for name in folders if not is_junk(name)]
        yield place, names


def images_in(folder: str | Path) -> tuple[list[str], Counter[str]]:
    """Images in a folder itself.

    Args:
        folder: where to look; not in the folders in it.

    Returns:
        Their paths, sorted, and how many other files there are by their ending in lower case, or "hidden".
    """
    counts: Counter[str] = Counter()
    names = (entry.name for entry in os.scandir(folder) if not entry.is_dir())
    return list(_sorted_files(names, str(folder), counts)), counts


def images_under(folder: str | Path) -> tuple[list[str], Counter[str]]:
    """Images in a folder and in all folders in it, but for those that are hidden or a system's own.

    Args:
        folder: where to look.

    Returns:
        Their paths, sorted by folder and then by name, and the other files as :func:`images_in` counts them.

    Raises:
        InputError: a folder cannot be looked into.
    """
    counts: Counter[str] = Counter()
    return [path for place, names in sorted(_walk(folder)) for path in _sorted_files(names, place, counts)], counts


def _has_image(folder: str) -> bool:
    return any(True for place, names in _walk(folder) for _ in _sorted_files(names, place, Counter()))


def class_folders(folder: str | Path) -> tuple[list[str], list[str]]:
    """The classes of a folder with one folder of images for each.

    Args:
        folder: has the classes' folders.

    Returns:
        Names of the folders that are classes, and of those that are none: hidden, a system's or program's own, or
        without an image. Both sorted.

    Raises:
        InputError: a folder cannot be looked into.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    classes = [name for name in names if not is_junk(name) and _has_image(os.path.join(folder, name))]
    return classes, [name for name in names if name not in set(classes)]


def images_of_classes(folder: str | Path, labels: Mapping[str, int]) -> tuple[list[tuple[str, int]], Counter[str]]:
    """Images of each class in a folder with one folder for each.

    Args:
        folder: has the classes' folders.
        labels: label of each class by the name of its folder, in the order to go by.

    Returns:
        Path and label of each image, and the other files as :func:`images_in` counts them.

    Raises:
        InputError: a folder cannot be looked into.
    """
    samples: list[tuple[str, int]] = []
    counts: Counter[str] = Counter()
    for name, label in labels.items():
        images, others = images_under(os.path.join(folder, name))
        samples += [(image, label) for image in images]
        counts += others
    return samples, counts


def passed_over(counts: Counter[str]) -> str:
    """In words what :func:`images_in` or :func:`images_under` counted.

    Example:
        >>> passed_over(Counter({".heic": 3, "hidden": 1}))
        '4 files (3 .heic, 1 hidden)'
    """
    kinds = ", ".join(
        f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"{counts.total():,} {'file' if counts.total() == 1 else 'files'} ({kinds})"
