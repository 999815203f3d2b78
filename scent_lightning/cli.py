"""The command line: ``scent-lightning fit --config dro_diabetes --dual SOX --dual.gamma 0.5``, and what goes with it.

Each command imports what it needs when it is called: to list configurations or to compare runs takes no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from scent_lightning.errors import InputError

__all__ = ["main"]

PROGRAM = "scent-lightning"
OF_LIGHTNING = {
    "fit": "train a task; with --ckpt_path go on with a run",
    "validate": "evaluate a checkpoint on the validation rows",
    "test": "evaluate a checkpoint on the test rows",
    "predict": "write the predictions of a checkpoint to a file",
}
# Each has its own module in scent_lightning/commands, with a function main(arguments).
OTHERS = {
    "configs": "list the configurations that come with the package",
    "compare": "put runs side by side: a table over seeds, a CSV file, a figure",
    "sweep": "run a grid of fits in processes, and compare them",
    "export": "write a checkpoint's weights for other libraries: open_clip, NumPy",
    "extract": "turn images into the features that FeatureDataModule reads",
}
PAGE = """usage: {program} COMMAND ...

Compositional entropic risk minimisation with PyTorch Lightning.

commands:
{commands}

options:
  -h, --help  this page; {program} COMMAND --help has all about one
  --version   print the version

{program} fit --model.help lists the tasks, --data.help the data modules, --dual.help the dual updates."""


def _page() -> str:
    commands = {**OF_LIGHTNING, **OTHERS}
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:<{width}}  {sentence}" for name, sentence in commands.items())
    return PAGE.format(program=PROGRAM, commands=lines)


def _command(name: str) -> Callable[[list[str]], Any]:
    found: Callable[[list[str]], Any] = import_module(f"scent_lightning.commands.{name}").main
    return found


def _leave(sentence: str) -> NoReturn:
    print(f"{PROGRAM}: error: {sentence}", file=sys.stderr)
    raise SystemExit(2) from None


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: arguments as a list; None takes those of the process. Where ``--config`` names one of the package's
            configurations, it is taken.

    Raises:
        SystemExit: with one sentence on standard error for all that is known to go wrong: code 2 for a wrong argument,
            setting, file or folder, and code 1 where training diverges or a run of a sweep fails.
    """
    given = sys.argv[1:] if args is None else args if isinstance(args, list) else []
    if given in (["-h"], ["--help"]):
        print(_page())
        raise SystemExit(0)
    if given == ["--version"]:
        print(f"{PROGRAM} {version(PROGRAM)}")
        raise SystemExit(0)
    known = [*OF_LIGHTNING, *OTHERS]
    if not given:
        _leave(f"a command is needed: {', '.join(known)}")
    if not given[0].startswith("-") and given[0] not in known:
        close = get_close_matches(given[0], known, n=1)
        _leave(f"unknown command {given[0]!r}: {f'did you mean {close[0]}?' if close else ', '.join(known)}")
    if given[0] not in OTHERS:
        from scent_lightning.lightning_cli import run

        run(args)
        return
    try:
        _command(given[0])(given[1:])
    except InputError as error:
        _leave(str(error))
    except OSError as error:
        _leave(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
