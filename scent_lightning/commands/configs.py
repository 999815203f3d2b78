"""``scent-lightning configs``: the configurations that come with the package."""

from __future__ import annotations

import os
import sys

from scent_lightning.commands.parser import CommandParser
from scent_lightning.configurations import list_configurations

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Print the names of the package's configurations, with a sentence each."""
    description = "List the configurations that come with the package; --config takes one by its name, or a file."
    CommandParser("configs", description).parse_args(arguments)
    found = list_configurations()
    width = max(map(len, found))
    try:
        print("\n".join(f"{name:<{width}}  {sentence}" for name, sentence in found.items()), flush=True)
    except BrokenPipeError:  # as by `head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
