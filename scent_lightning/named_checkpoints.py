"""The words that stand for a checkpoint: last, best, hpc and registry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.imports import RequirementCache

from scent_lightning.checkpoint import local_path, read_checkpoint
from scent_lightning.errors import InputError
from scent_lightning.runs.folders import LOGS

__all__ = ["find_checkpoint", "is_word"]

_REGISTRY = re.compile(r"registry(:.*)?$", re.IGNORECASE)


def is_word(ckpt_path: Any) -> bool:
    """Whether Lightning takes this for a word, whatever files there are."""
    return isinstance(ckpt_path, str) and (ckpt_path in ("last", "best", "hpc") or bool(_REGISTRY.match(ckpt_path)))


def find_checkpoint(word: str, trainer: Mapping[str, Any], name: str | None = None) -> str:
    """The file that a word stands for, by what earlier runs have left on the disk.

    Lightning itself knows the last and the best checkpoint of its own process only. A command's process has none yet:
    it would go on without a word from untrained weights.

    Args:
        word: "last", the newest ``last.ckpt`` below the folder that this run would log to; "best", the best checkpoint
            of the run which that file is of; "hpc", the one that SLURM's requeueing left in ``default_root_dir``; or
            "registry", "registry:NAME", which Lightning looks up by itself.
        trainer: the Trainer's arguments, as parsed.
        name: of the runs that are looked through; None: all of that folder, those with a name, too.

    Returns:
        The path; for "registry" the word itself.

    Raises:
        InputError: there is no such file, or litmodels is not installed.
    """
    if _REGISTRY.match(word):
        if not RequirementCache("litmodels"):
            raise InputError(f"ckpt_path {word} needs litmodels, which is not installed: give the checkpoint's file")
        return word
    root = local_path(trainer.get("default_root_dir") or ".")
    if root is None:
        raise InputError(f"ckpt_path {word} is looked up on a local disk only: give the checkpoint's file")
    if word == "hpc":
        return str(_of_requeueing(root))
    last = _last(word, trainer, root, name)
    return str(last if word == "last" else _best(last))


def _last(word: str, trainer: Mapping[str, Any], root: Path, name: str | None) -> Path:
    patterns = list(_patterns(trainer, root, name))
    found = [path for folder, pattern in patterns for path in folder.glob(f"{pattern}last*.ckpt")]
    if not found:
        places = ", ".join(dict.fromkeys(str(folder / pattern) for folder, pattern in patterns))
        raise InputError(f"ckpt_path {word}: no run has left a last.ckpt in {places}; give the checkpoint's file")
    return max(found, key=_age)


def _age(path: Path) -> tuple[int, list[int]]:
    """The time of the last writing; of two written at the same time, the later run's comes later."""
    return path.stat().st_mtime_ns, [int(number) for number in re.findall(r"\d+", str(path))]


def _patterns(trainer: Mapping[str, Any], root: Path, name: str | None) -> Iterator[tuple[Path, str]]:
    """Folders in which a run of this Trainer leaves its checkpoints, each as where to look and what for."""
    for callback in _settings(trainer.get("callbacks")):
        if callback.get("dirpath"):
            yield Path(callback["dirpath"]), ""
    loggers = list(_settings(trainer.get("logger")))
    for logger in loggers:
        folder = Path(logger.get("save_dir") or logger.get("root_dir") or root)
        yield (folder / str(logger["name"]), "*/checkpoints/") if logger.get("name") else (folder, "*/*/checkpoints/")
    if loggers:
        return
    if name is not None:
        yield root / LOGS / name, "*/checkpoints/"
        return
    yield root / LOGS, "*/checkpoints/"
    yield root / LOGS, "*/*/checkpoints/"
    yield root, "checkpoints/"


def _settings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The arguments of classes in a configuration: of one or of a list; what is no class is passed over."""
    for item in value if isinstance(value, list) else [value]:
        if hasattr(item, "get") and item.get("class_path"):
            yield item.get("init_args") or {}


def _best(last: Path) -> Path:
    states: Iterable[Any] = read_checkpoint(last, mmap=True).get("callbacks", {}).values()
    kept = [state for state in states if isinstance(state, dict) and state.get("best_model_path")]
    best = {Path(state["best_model_path"]) for state in kept if state.get("monitor")}
    found = sorted(path for path in best if path.is_file())
    if not found:
        raise InputError(
            f"ckpt_path best: the newest run, that of {last}, has kept no best checkpoint (the callback "
            "ModelCheckpoint with a monitor does); give the checkpoint's file"
        )
    if len(found) > 1:
        raise InputError(f"ckpt_path best may be any of {', '.join(map(str, found))}: give the one")
    return found[0]


def _of_requeueing(root: Path) -> Path:
    names = ((re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", path.name), path) for path in root.glob("hpc_ckpt_*.ckpt"))
    found = {int(match[1]): path for match, path in names if match}
    if not found:
        raise InputError(f"ckpt_path hpc: there is no hpc_ckpt_N.ckpt in {root}; give the checkpoint's file")
    return found[max(found)]
