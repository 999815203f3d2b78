"""The configurations that come with the package: found by name, and listed with a line each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from scent_lightning.errors import InputError

__all__ = ["configuration_folder", "list_configurations", "with_configurations"]

_OPTIONS = ("--config", "-c")


def configuration_folder() -> Path:
    """The folder of the configurations; in a checkout a link to ``configs``.

    Raises:
        InputError: there is none.
    """
    for folder in (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"):
        if (folder / "dro_diabetes.yaml").is_file():
            return folder
    raise InputError("this installation of scent-lightning has no configurations: give --config the path of a file")


def list_configurations() -> dict[str, str]:
    """What each configuration is, one sentence, by its name; those of published settings come after the others."""
    folder = configuration_folder()
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.relative_to(folder).parts), path))
    return {path.relative_to(folder).with_suffix("").as_posix(): _first_sentence(path) for path in paths}


def with_configurations(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command line, with the path of a packaged configuration wherever one is named.

    A file of that name in the working folder goes first.

    Raises:
        InputError: there is no file of the name and no configuration.
    """
    found: list[str] = []
    is_value = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if is_value:
            found.append(_path_of(argument))
        elif option in _OPTIONS and equals:
            found.append(f"{option}={_path_of(value)}")
        else:
            found.append(argument)
        is_value = argument in _OPTIONS
    return found


def _path_of(name: str) -> str:
    # A text of more than a line is YAML itself, and so is a mapping on one.
    if Path(name).exists() or not re.fullmatch(r"[\w./=-]+", name) or Path(name).is_absolute():
        return name
    inner = name.removeprefix("configs/")
    folder = configuration_folder()
    for path in (folder / inner, folder / f"{inner}.yaml"):
        if path.is_file():
            return str(path)
    close = difflib.get_close_matches(inner.removesuffix(".yaml"), list_configurations(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise InputError(
        f"config {name} is neither a file nor one of the package's configurations, which `scent-lightning configs` "
        f"lists{hint}"
    )


def _first_sentence(path: Path) -> str:
    """Of the comment at the head of a file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return re.split(r"(?<=\.)(?<!et al\.)\s", " ".join(lines), maxsplit=1)[0].rstrip(".")
