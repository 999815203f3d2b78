"""The arguments of a command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from scent_lightning.errors import InputError

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """As argparse's, but what is wrong is one sentence, as of the other commands; texts keep their lines.

    Args:
        command: its name.
        description: what it does.
        epilog: what comes after the arguments in its help.
        usage: in place of the one that argparse makes.
    """

    def __init__(self, command: str, description: str, epilog: str | None = None, usage: str | None = None) -> None:
        super().__init__(
            f"scent-lightning {command}",
            usage,
            description,
            epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise InputError."""
        raise InputError(f"{message} ({self.prog} --help has all arguments)")
