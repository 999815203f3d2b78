"""Which classes are positive and which negative."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scent_lightning.data.imbalanced.source import Source
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["Classes", "Grouping", "grouping"]

Array = npt.NDArray[Any]
Classes = list[str | int]

NUMBER = re.compile(r"\s*[+-]?\d+\s*")
# Of two classes of these names, in whatever case, the first is positive without being told.
OBVIOUS_NAMES = (
    ("positive", "negative"),
    ("pos", "neg"),
    ("1", "0"),
    ("1", "-1"),
    ("true", "false"),
    ("yes", "no"),
    ("defect", "ok"),
)


class Grouping(NamedTuple):
    """All classes of the training run, and for each of them 1 (positive), 0 (negative) or −1 (left out)."""

    classes: list[Any]
    groups: Array

    def named(self, group: int) -> list[Any]:
        """The classes of a group."""
        return [name for name, of in zip(self.classes, self.groups, strict=True) if of == group]


def grouping(source: Source, positive_classes: Classes | None, negative_classes: Classes | None) -> Grouping:
    """The groups of a source's classes.

    Args:
        source: knows the classes.
        positive_classes: names or positions; None for all that are not negative.
        negative_classes: names or positions; None for all that are not positive.

    Raises:
        InputError: an unknown class, one in both groups, or no word on which are positive.
    """
    classes = source.classes()
    positive = _numbers("positive_classes", positive_classes, source, classes)
    negative = _numbers("negative_classes", negative_classes, source, classes)
    both = sorted(set(positive or ()) & set(negative or ()))
    if both:
        raise InputError(
            f"positive_classes and negative_classes must not share a class, both have "
            f"{listed([classes[number] for number in both])}"
        )
    if positive is None and negative is None:
        positive = source.positives(classes)
        positive = _obvious_positives(source, classes) if positive is None else positive
    rest = 1 if positive is None else 0 if negative is None else -1
    groups = np.full(len(classes), rest, dtype=np.int64)
    groups[positive or []] = 1
    groups[negative or []] = 0
    return Grouping(classes, groups)


def _obvious_positives(source: Source, classes: list[Any]) -> list[int]:
    names = [str(name).casefold() for name in classes]
    for positive, negative in OBVIOUS_NAMES:
        if sorted(names) == sorted((positive, negative)):
            return [names.index(positive)]
    pairs = ", ".join(f"{positive} and {negative}" for positive, negative in OBVIOUS_NAMES)
    raise InputError(
        f"positive_classes must say which classes of {source.folder} are positive: {listed(classes)} (only two "
        f"classes called {pairs} need no word)"
    )


def _numbers(argument: str, chosen: Classes | None, source: Source, classes: list[Any]) -> list[int] | None:
    """Positions in ``classes`` of those that an argument names."""
    if chosen is None:
        return None
    numbers = []
    names = {name: number for number, name in enumerate(classes)}
    by_position = source.named_by_position and not any(NUMBER.fullmatch(str(name)) for name in classes)
    for entry in _entries(chosen, names):
        # From the command line a number may come as text, and a name as a number.
        value = int(entry) if isinstance(entry, str) and entry.isascii() and entry.isdigit() else entry
        number = None
        if not isinstance(entry, bool):
            named = [names[name] for name in (entry, str(entry), value) if name in names]
            number = named[0] if named else None
            if number is None and by_position and isinstance(value, int) and 0 <= value < len(classes):
                number = value
        if number is None:
            raise InputError(f"{argument} has an unknown class {entry!r}; {source.known(classes, by_position)}")
        numbers.append(number)
    return numbers


def _entries(classes: Classes, names: Container[Any]) -> Classes:
    """Classes one by one: of ``[yes, no]`` YAML makes no texts, and the command line hands on the whole as one."""
    found: Classes = []
    for entry in classes:
        if isinstance(entry, str) and entry not in names and len(entry) > 2 and entry[0] + entry[-1] == "[]":
            found += [part.strip().strip("'\"") for part in entry[1:-1].split(",")]
        else:
            found.append(entry)
    return found
