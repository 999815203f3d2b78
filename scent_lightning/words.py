"""Names and numbers as messages and summaries say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["listed", "named_twice", "rows_in_words"]

LISTED = 20


def listed(names: Sequence[Any], most: int = LISTED) -> str:
    """The first ``most`` of the names, and how many there are.

    Example:
        >>> listed(["ant", "bee", "cat"], 2)
        'ant, bee, … (3 in all)'
    """
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names):,} in all)"


def named_twice(names: Sequence[str]) -> str | None:
    """The first name that comes again, or None; empty names do not count.

    Example:
        >>> named_twice(["ant", "", "bee", "", "ant"])
        'ant'
    """
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            return name
        seen.add(name)
    return None


def rows_in_words(count: int) -> str:
    """A number of rows in words.

    Example:
        >>> rows_in_words(1), rows_in_words(20_640)
        ('1 row', '20,640 rows')
    """
    return f"{count:,} {'row' if count == 1 else 'rows'}"
