"""``scent-lightning configs``: the configurations that come with the package."""

from __future__ import annotations

import argparse
import os
import sys

from scent_lightning.configurations import list_configurations

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Print the names of the package's configurations, with a sentence each."""
    parser = argparse.ArgumentParser(
        "scent-lightning configs",
        description="List the configurations that come with the package; --config takes one by its name, or a file.",
    )
    parser.parse_args(arguments)
    found = list_configurations()
    width = max(map(len, found))
    try:
        print("\n".join(f"{name:<{width}}  {sentence}" for name, sentence in found.items()), flush=True)
    except BrokenPipeError:  # as by `head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
