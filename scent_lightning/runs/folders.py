"""The folder of a run: how it is named, and which one a checkpoint belongs to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from scent_lightning.errors import InputError

__all__ = ["AUTO", "EVENTS", "LOGS", "check_name", "is_below", "name_of_settings", "run_folder", "step_of_config"]

LOGS = "lightning_logs"
AUTO = "auto"
_LONGEST = 120
_CHECKPOINTS = "checkpoints"
EVENTS = "events.out.tfevents.*"
# What says where and how a run goes, and not what it is.
_NOT_IN_A_NAME = re.compile(
    r"(config|c|name|ckpt_path|weights_only|verbose|print_config|if_changed_data|data\.(num_workers|data_dir)"
    r"|trainer\.(default_root_dir|logger|callbacks|plugins|profiler|enable_|log_every|check_val|devices|accelerator"
    r"|strategy|num_nodes).*)"
)
_CLASSES = ("dual", "model", "data")


def check_name(name: str) -> str:
    """The name of a run, if a folder can have it.

    Raises:
        InputError: it is empty, has a path separator or another character that shells or systems take amiss, begins
            with a dot or is Lightning's own "version_N".
    """
    if not name.strip():
        raise InputError(f"name must not be empty, got {name!r}")
    if (bad := re.search(r'[/\\\0-\x1f:*?"<>|]', name)) is not None:
        raise InputError(f"name is one folder's and cannot hold {bad[0]!r}, got {name!r}")
    if name.startswith((".", "-")) or name != name.strip():
        raise InputError(f"name must not begin with a dot or a dash, nor begin or end with a space, got {name!r}")
    if re.fullmatch(r"version_\d+", name):
        raise InputError(f"name {name!r} is what Lightning numbers the runs of a folder by; give another")
    if len(name.encode()) > 255:
        raise InputError(f"name has {len(name.encode())} bytes, and a folder's can have 255")
    return name


def name_of_settings(arguments: Sequence[str]) -> str:
    """A name by what was set on the command line: ``dro_diabetes,tau=2,SOX,gamma=0.5,seed=1``.

    Args:
        arguments: of the command line, after the command.
    """
    parts, files = [], []
    for option, value in _options(arguments):
        if option in ("config", "c"):
            files.append(Path(value).stem)
        elif option in _CLASSES:
            parts.append(value.rpartition(".")[2])
        elif not _NOT_IN_A_NAME.fullmatch(option):
            short = "seed" if option == "seed_everything" else option.rpartition(".")[2]
            parts.append(f"{short}={Path(value).name if '/' in value else value}")
    # The file of an earlier run says nothing by its name.
    files = [file for file in files if not file.startswith("config")] or ([] if parts else files)
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join([*files, *parts]))
    name = re.sub(r"([=,])_+", r"\1", name).strip("._-,") or "run"
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return check_name(name)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; what stands alone is passed over."""
    position = 0
    while position < len(arguments):
        option, equals, value = arguments[position].partition("=")
        position += 1
        if not option.startswith("-"):
            continue
        if not equals:
            if position == len(arguments) or arguments[position].startswith("--"):
                continue
            value = arguments[position]
            position += 1
        yield option.lstrip("-").rstrip("+"), value


def run_folder(checkpoint: Path) -> Path | None:
    """The folder of the run that has left this checkpoint; None where it lies elsewhere, as a copy does."""
    folder = checkpoint.parent.parent
    is_in_a_run = checkpoint.parent.name == _CHECKPOINTS and any(folder.glob(EVENTS))
    return folder if is_in_a_run else None


def is_below(folder: Path, root: Path) -> bool:
    """Whether a folder is somewhere in another, by whatever links."""
    return root.resolve() in folder.resolve().parents


def step_of_config(path: Path) -> int:
    """The step that the fit of a configuration file began at; −1 for a file of another name."""
    if path.name == "config.yaml":
        return 0
    found = re.fullmatch(r"config_from_step_(\d+)\.yaml", path.name)
    return int(found[1]) if found else -1
