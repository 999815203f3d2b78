"""fit, validate, test and predict: LightningCLI with ``--dual`` for the dual update."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from scent_lightning.arguments import check_trainer, explain
from scent_lightning.callbacks import DualVariableMonitor, LastCheckpoint, PredictionWriter
from scent_lightning.callbacks.settings_log import SettingsLog
from scent_lightning.checkpoint import AtomicCheckpointIO, local_path
from scent_lightning.configurations import with_configurations
from scent_lightning.duals import DualUpdate, DualVariableMixin
from scent_lightning.duals.table import IfChanged
from scent_lightning.errors import InputError
from scent_lightning.failure import failure, shows_traceback, users_error
from scent_lightning.help import ShortHelp, asked_for, classes_in_words
from scent_lightning.named_checkpoints import find_checkpoint, is_word
from scent_lightning.private_api import LINKED_TARGETS, checkpoint_io_given, parser_of
from scent_lightning.report import end_of_fit, missing_monitors, write_metrics
from scent_lightning.runs.folders import AUTO, check_name, name_of_settings
from scent_lightning.runs.place import Place, place_of
from scent_lightning.runs.settings import of_task_and_data
from scent_lightning.sizes import FromCheckpoint, SizeOfData, sizes_of

__all__ = ["ScentCLI", "default_callbacks", "run"]

PROGRESS_REFRESH = 50
PROGRAM = "scent-lightning"
DESCRIPTION = (
    "Compositional entropic risk minimisation with PyTorch Lightning. `scent-lightning configs` lists the "
    "configurations that come with the package; --config takes one by its name, or a file."
)


def default_callbacks(trainer_config: dict[str, Any], subcommand: str = "fit") -> list[L.Callback]:
    """Callbacks of every run: progress bar; for fit monitor, learning rate, last checkpoint; for predict the file.

    Args:
        trainer_config: arguments of the Trainer; what they switch off is left out.
        subcommand: fit, validate, test or predict. The Trainer spends time on every callback at every step, so each
            is there only where it has something to do.
    """
    callbacks: list[L.Callback] = []
    if subcommand == "predict":
        callbacks.append(PredictionWriter())
    if subcommand == "fit" and trainer_config.get("logger") is not False:
        callbacks += [DualVariableMonitor(), LearningRateMonitor(logging_interval="step")]
    if subcommand == "fit" and trainer_config.get("enable_checkpointing") is not False:
        callbacks.append(LastCheckpoint())
    if trainer_config.get("enable_progress_bar") is not False:
        callbacks.append(TQDMProgressBar(refresh_rate=PROGRESS_REFRESH))
    return callbacks


class ScentArgumentParser(LightningArgumentParser):
    """Says what is wrong in one sentence, with the names that would be right; does not ask for sizes of the data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": ShortHelp, **kwargs})

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """As jsonargparse's, but what a task takes from the data need not be given."""
        if isinstance(class_type, type) and issubclass(class_type, L.LightningModule):
            kwargs[LINKED_TARGETS] = {*(kwargs.get(LINKED_TARGETS) or ()), *sizes_of(class_type)}
        added: list[str] = super().add_class_arguments(class_type, *args, **kwargs)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2 and a sentence instead of the whole usage and jsonargparse's list of attempts."""
        if not self.exit_on_error:
            super().error(message, ex)
        if ex is not None:
            _leave_to_the_user(ex)
            if shows_traceback():
                traceback.print_exception(ex)
        print(f"scent-lightning: error: {explain(message)}", file=sys.stderr)
        raise SystemExit(2)


def _list(value: Any) -> list[Any]:
    """A setting that may be missing, one thing or a list of them, as a list."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _replaces(given: Any, default: L.Callback) -> bool:
    """Whether a callback of the configuration makes a default one needless."""
    if isinstance(default, ProgressBar):
        return isinstance(given, ProgressBar)
    if isinstance(default, LastCheckpoint) and isinstance(given, ModelCheckpoint):
        # Others keep the best or some of the epochs: there must be a state to resume from beside them. But of two that
        # keep a last.ckpt, each would write over the other's.
        return bool(given.save_last) or given.filename == given.CHECKPOINT_NAME_LAST
    return isinstance(given, type(default))


def _take_for_its_own(callbacks: list[L.Callback], folder: Path) -> None:
    """Have the last checkpoint be written over the one that is there, also where the run's folder was moved."""
    for callback in callbacks:
        if isinstance(callback, LastCheckpoint) and callback.dirpath is None:
            callback.last_model_path = str(folder / "last.ckpt")


class SaveConfig(SaveConfigCallback):
    """Writes the configuration; of a run that goes on only once it does, since a fit that is refused changes nothing.

    Args:
        args: as Lightning's.
        goes_on: whether the run goes on.
        more: as Lightning's.
    """

    def __init__(self, *args: Any, goes_on: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.goes_on = goes_on

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write, unless it has to wait."""
        if not self.goes_on:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what has waited."""
        super().setup(trainer, pl_module, "fit")


class NoProfiler(PassThroughProfiler):
    """No profiling, at no cost: Lightning's default builds a context some fifty times a step (5 % of a small one)."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        """The same empty context every time."""
        return self._nothing


def _setting(cli: LightningCLI, config: Any, key: str, default: Any = None) -> Any:
    """A setting, which is among those of the subcommand where there is one."""
    return config.get(str(cli.subcommand), config).get(key, default)


class ScentCLI(LightningCLI):
    """LightningCLI in subclass mode for the task and the data, with the dual update as an argument of its own."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._from_checkpoint = FromCheckpoint()
        self._place = Place()
        arguments = more.get("args")
        self._given = list(arguments) if isinstance(arguments, list) else sys.argv[1:]
        defaults = {"parser_class": ScentArgumentParser, "save_config_callback": SaveConfig}
        super().__init__(*args, **{**defaults, **more})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--dual`` and give the task what it says."""
        parser.add_subclass_arguments(
            DualUpdate,
            "dual",
            required=True,
            help="The dual update: SCENT, SOX, MSVR, BSGD, ASGD, SoftplusASGD, UMax, ProximalPoint, or the import path "
            "of your own.",
        )
        parser.link_arguments("dual", "model.init_args.dual")
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Name of the run, whose folder is then lightning_logs/NAME/version_N; auto: named by what was set on "
            "the command line (default: lightning_logs/version_N). A fit that goes on from a run's newest checkpoint "
            "stays in that run's folder.",
        )
        parser.add_argument(
            "--if_changed_data",
            type=IfChanged,
            default="error",
            help="What becomes of ν where --ckpt_path has another number of anchors than the data: error, grow (rows "
            "were appended to the data; they start unvisited) or reset (all rows start unvisited).",
        )

    def _link_sizes(self, config: Any) -> None:
        """Have the task's sizes come from the data module, where the user does not give them."""
        arguments = config.model.get("init_args") or {}
        task = locate(config.model.class_path)
        for name, is_needed in sizes_of(task).items() if isinstance(task, type) else ():
            if name in arguments:
                size = SizeOfData(name, arguments[name], is_needed, self._from_checkpoint)
                target = f"model.init_args.{name}"
                parser_of(self).link_arguments("data", target, size, apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """What is on the command line is what runs: a checkpoint's hyperparameters do not override it."""

    def before_instantiate_classes(self) -> None:
        """Refuse to evaluate random weights; link the sizes."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        self._link_sizes(config)
        if self.subcommand is None:
            return
        checkpoint = config.get("ckpt_path")
        is_auto = config.get("name") == AUTO
        name = None if is_auto or config.get("name") is None else check_name(config["name"])
        if is_word(checkpoint):
            word, checkpoint = checkpoint, find_checkpoint(checkpoint, config.get("trainer") or {}, name)
            config["ckpt_path"] = checkpoint
            rank_zero_info(f"Checkpoint {word}: {checkpoint}")
        if self.subcommand != "fit" and checkpoint is None:
            raise InputError(
                f"{self.subcommand} needs --ckpt_path: without a checkpoint it would run on untrained weights "
                "(checkpoints lie in the folder 'checkpoints' beside the TensorBoard log of the run)"
            )
        if checkpoint is not None and not is_word(checkpoint) and not Path(checkpoint).exists():
            raise InputError(f"ckpt_path {checkpoint} does not exist")
        path = local_path(checkpoint)
        if self.subcommand == "predict" and path is not None and path.is_file():
            self._from_checkpoint.path = path  # the data may lack what the training rows told of the model
        if config.get("weights_only") is False:
            raise InputError(
                "weights_only must not be false: what a checkpoint holds besides plain data could run code"
            )
        config["weights_only"] = True
        check_trainer(config.get("trainer") or {})
        if is_auto:
            config["name"] = name = name_of_settings(self._given)
        self._place = place_of(self.subcommand, config.get("trainer") or {}, checkpoint, name, is_auto)

    def instantiate_classes(self) -> None:
        """Have the data looked at, and tell the task what becomes of ν if they have changed."""
        super().instantiate_classes()
        # To know it, the training rows are read: what is wrong with them is told before anything is written.
        getattr(self.datamodule, "num_anchors", None)
        if isinstance(self.model, DualVariableMixin):
            self.model.if_changed_data = _setting(self, self.config, "if_changed_data")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add the default callbacks and the way of checkpoints, each unless the configuration has one of its kind."""
        config = {**_setting(self, self.config_init, "trainer", {}), **kwargs}
        callbacks, plugins = _list(config.get("callbacks")), _list(config.get("plugins"))
        given = tuple(callbacks)
        for callback in default_callbacks(config, self.subcommand or "fit"):
            if not any(_replaces(other, callback) for other in given):
                callbacks.append(callback)
        if self._place.goes_on is not None:
            _take_for_its_own(callbacks, self._place.goes_on / "checkpoints")
        of_strategy = checkpoint_io_given(config.get("strategy"))
        if of_strategy is None and not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        if self._place.is_new:
            callbacks.append(SettingsLog(of_task_and_data(self._plain_config())))
        self.save_config_kwargs = {**self.save_config_kwargs, "config_filename": self._place.config_file}
        if self.save_config_callback is SaveConfig:
            self.save_config_kwargs["goes_on"] = self._place.goes_on is not None
        profiler = config.get("profiler") or NoProfiler()
        defaults = {"callbacks": callbacks, "plugins": plugins, "profiler": profiler}
        return super().instantiate_trainer(**{**kwargs, **defaults, **self._place.trainer})

    def _plain_config(self) -> dict[str, Any]:
        """The configuration as it is written to a file."""
        config: dict[str, Any] = self.config.get(str(self.subcommand), self.config).as_dict()
        return config

    def after_fit(self) -> None:
        """Say what came out, where it is, and how to go on."""
        for line in end_of_fit(self.trainer, self._place.config_file):
            rank_zero_info(line)
        for sentence in missing_monitors(self.trainer):
            rank_zero_warn(sentence)

    def after_validate(self) -> None:
        """Write the metrics, and say where."""
        write_metrics(self.trainer, "validate")

    def after_test(self) -> None:
        """Write the metrics, and say where."""
        write_metrics(self.trainer, "test")

    def after_predict(self) -> None:
        """Say where the predictions are."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PredictionWriter) and callback.written is not None:
                rank_zero_info(f"Predictions: {callback.written}")


def _of_thread(otherwise: Callable[[threading.ExceptHookArgs], Any], raised: threading.ExceptHookArgs) -> None:
    """Leave it to the main thread to tell of a file that cannot be written: TensorBoard's thread hands it on."""
    if not isinstance(raised.exc_value, OSError):
        otherwise(raised)


def _leave_to_the_user(error: BaseException) -> None:
    """Raise what the user's own code has raised: jsonargparse tells of it in a list of attempts, without its place."""
    if (theirs := users_error(error)) is not None:
        raise theirs from theirs.__cause__


def run(args: ArgsType = None) -> None:
    """Run a command of Lightning.

    Args:
        args: arguments as a list; None takes those of the process.

    Raises:
        SystemExit: with one sentence on standard error for all that :func:`failure` knows: code 2 for a wrong argument,
            setting, file or folder, and code 1 where training diverges.
    """
    given = sys.argv[1:] if args is None else args if isinstance(args, list) else []
    if (option := asked_for(given)) is not None:
        print(classes_in_words(option))
        return
    before, folder, command = threading.excepthook, os.getcwd(), sys.argv
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)  # the last place: no file there stands in for an installed module
    threading.excepthook = partial(_of_thread, before)
    # The death of a loader process may interrupt a logger as it writes, which would print a traceback of its own.
    loggers_tell, logging.raiseExceptions = logging.raiseExceptions, shows_traceback()
    try:
        if args is None:
            # In its place: Lightning warns of arguments that are handed over where the process has some.
            sys.argv = [command[0], *with_configurations(command[1:])]
        elif isinstance(args, list):
            args = with_configurations(args)
        ScentCLI(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            # Without a logger every run's configuration has one place, and the second run would stop at the first's.
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            parser_kwargs={"prog": PROGRAM, "description": DESCRIPTION, "version": version(PROGRAM)},
            args=args,
        )
    except Exception as error:
        known = failure(error)
        if known is None:
            _leave_to_the_user(error)
            raise
        if shows_traceback():
            traceback.print_exc()
        print(f"scent-lightning: error: {known[1]}", file=sys.stderr)
        raise SystemExit(known[0]) from None
    finally:
        threading.excepthook, sys.argv = before, command
        logging.raiseExceptions = loggers_tell
        if is_new:
            sys.path.remove(folder)
