"""Where a command of Lightning writes: a new run's folder, or that of the run which a checkpoint is of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info

from scent_lightning.checkpoint import local_path, read_checkpoint
from scent_lightning.errors import InputError
from scent_lightning.runs.folders import LOGS, is_below, run_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["EvaluationLogger", "Place", "place_of"]


class EvaluationLogger(TensorBoardLogger):
    """Writes in the folder of a run that has ended; its events in one below, so that the run's curves stay.

    Args:
        folder: of the run.
        command: "validate" or "test", the name of the folder of the events.
    """

    def __init__(self, folder: Path, command: str) -> None:
        super().__init__(str(folder.parent), name="", version=folder.name, default_hp_metric=False)
        self.command = command
        self._events: SummaryWriter | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of the events."""
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(log_dir=os.path.join(self.log_dir, self.command))
        return self._events

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_events": None}


@dataclass(frozen=True)
class Place:
    """Where a command writes.

    Attributes:
        trainer: arguments of the Trainer that see to it.
        config_file: name of the file of the command's configuration, in the folder of the log.
        is_new: whether it is a fit in a folder that this package has chosen: there the settings are logged.
        goes_on: the folder of the run that a fit goes on with; None for one that begins.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    config_file: str = "config.yaml"
    is_new: bool = False
    goes_on: Path | None = None


def place_of(command: str, trainer: Mapping[str, Any], ckpt_path: Any, name: str | None, is_auto: bool) -> Place:
    """Where a command writes, by its arguments.

    A fit begins a folder ``lightning_logs/version_N``, or ``lightning_logs/NAME/version_N``. From the newest checkpoint
    of a run it goes on in that run's folder, unless the user names another, by ``name``, ``default_root_dir`` or a
    logger; from an older one it branches off, since the folder has what came after. Evaluation writes into the folder
    of the checkpoint's run, and where it is of none into the working folder or ``default_root_dir``.

    Args:
        command: fit, validate, test or predict.
        trainer: arguments of the Trainer, as parsed.
        ckpt_path: of the command, no word.
        name: of the run, or None.
        is_auto: whether the name was made of the settings: a run that goes on keeps its own.

    Raises:
        InputError: a name is given, and a logger that has its own.
    """
    logger = trainer.get("logger")
    of_evaluation = Place(config_file=f"config_{command}.yaml")
    if logger is not None and logger is not True:
        if name is not None and command == "fit":
            kind = "there is no logger" if logger is False else "trainer.logger has a name of its own"
            raise InputError(f"name {name} is for the logger that is there by default, but {kind}; leave one out")
        return Place() if command == "fit" else of_evaluation
    if trainer.get("fast_dev_run") or trainer.get("barebones"):
        return Place() if command == "fit" else of_evaluation
    given = trainer.get("default_root_dir")
    root = os.path.expanduser(os.fspath(given)) if given else os.getcwd()
    checkpoint = local_path(ckpt_path)
    run = run_folder(checkpoint) if checkpoint is not None and checkpoint.is_file() else None
    if run is not None and given and (local := local_path(root)) is not None and not is_below(run, local):
        run = None
    if command != "fit":
        return _of_evaluation(command, checkpoint, run)
    if run is not None and checkpoint is not None and (name is None or is_auto or run.parent.name == name):
        step = _step_to_go_on_from(checkpoint, run)
        if step is not None:
            folder = _as_it_was_called(checkpoint, run)
            return Place({"logger": _logger_of(folder, step)}, f"config_from_step_{step}.yaml", True, folder)
        rank_zero_info(f"{checkpoint} is not the newest state of its run, which is left as it is: this is a new run")
    version = SLURMEnvironment.job_id()
    path = LOGS if name is None else os.path.join(LOGS, name)
    return Place({"logger": TensorBoardLogger(root, path, version, default_hp_metric=False)}, is_new=True)


def _of_evaluation(command: str, checkpoint: Path | None, run: Path | None) -> Place:
    config_file = f"config_{command}.yaml"
    if checkpoint is None or run is None:
        return Place({"logger": False}, config_file)
    folder = _as_it_was_called(checkpoint, run)
    logger = False if command == "predict" else EvaluationLogger(folder, command)
    return Place({"logger": logger, "default_root_dir": str(folder)}, config_file)


def _logger_of(folder: Path, step: int) -> TensorBoardLogger:
    """One that goes on in a run's folder; what TensorBoard has of later steps no longer counts."""
    parts = folder.parts
    inner = parts[parts.index(LOGS) : -1] if LOGS in parts else ()
    root = folder.parents[len(inner)]
    return TensorBoardLogger(
        str(root), os.path.join(*inner) if inner else "", folder.name, default_hp_metric=False, purge_step=step
    )


def _step_to_go_on_from(checkpoint: Path, run: Path) -> int | None:
    """The step of a checkpoint, if its run has none of a later one."""
    step = _logged_steps(checkpoint)
    for path in (run / "checkpoints").glob("last*.ckpt"):
        # One that cannot be read may be why the user takes another.
        with suppress(InputError):
            if path.name != checkpoint.name and _logged_steps(path) > step:
                return None
    return step


def _logged_steps(checkpoint: Path) -> int:
    """How many steps a run has counted for its log."""
    state = read_checkpoint(checkpoint, mmap=True)
    loop = state.get("loops", {}).get("fit_loop", {}).get("epoch_loop.state_dict", {})
    return int(loop.get("_batches_that_stepped", state.get("global_step", 0)))


def _as_it_was_called(checkpoint: Path, run: Path) -> Path:
    """The run's folder by the path that its callbacks know it by: by another one they would count as moved."""
    states = read_checkpoint(checkpoint, mmap=True).get("callbacks", {}).values()
    known = [Path(str(state["dirpath"])) for state in states if isinstance(state, dict) and state.get("dirpath")]
    same = (path.parent for path in known if path.name == "checkpoints" and path.parent.resolve() == run.resolve())
    return next(same, run.absolute())
