"""What a command says at its end: the last metrics, where the results are, and how to go on from them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info

from scent_lightning.callbacks.lookup import tensorboard_loggers

__all__ = ["end_of_fit", "missing_monitors", "write_metrics"]

_MOST_METRICS = 8


def end_of_fit(trainer: L.Trainer, config_file: str = "config.yaml") -> Iterator[str]:
    """Lines on a fit that has ended.

    Args:
        trainer: of the fit.
        config_file: name of the configuration's file in the folder of the log.
    """
    if metrics := _metrics(trainer):
        yield f"Metrics: {metrics}"
    for logger in tensorboard_loggers(trainer):
        yield f"TensorBoard log: {logger.log_dir}  (watch it: tensorboard --logdir {logger.save_dir})"
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    paths = list(dict.fromkeys(each.last_model_path for each in callbacks if each.last_model_path))
    for path in paths:
        yield f"Last checkpoint: {path}"
    config = Path(trainer.log_dir or trainer.default_root_dir) / config_file
    if paths and config.is_file():
        given = f"--config {_short(str(config))} --ckpt_path {_short(paths[-1])}"
        yield f"Predict: scent-lightning predict {given}"
        yield f"Train on: scent-lightning fit {given} --trainer.max_epochs {2 * trainer.current_epoch or 1}"


def missing_monitors(trainer: L.Trainer) -> Iterator[str]:
    """A sentence for each callback that was told to look at a metric which the run did not log."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics))
            name = type(callback).__name__
            yield f"{name} monitors {monitor!r}, which was not logged in this run; logged were {logged}"


def write_metrics(trainer: L.Trainer, command: str) -> None:
    """Write what ``validate`` or ``test`` has measured to ``metrics_COMMAND.json`` in the log's folder, and say so.

    Args:
        trainer: of the command.
        command: its name.
    """
    folder = trainer.log_dir or trainer.default_root_dir  # which all processes have to ask for
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    path = Path(folder) / f"metrics_{command}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    rank_zero_info(f"Metrics: {path}")


def _metrics(trainer: L.Trainer) -> str:
    """Those of validation, the task's own first, and the training loss, as they were last."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    main, _ = getattr(trainer.lightning_module, "main_metric", None) or (None, None)
    found = sorted((name for name in values if name.startswith("val/")), key=lambda name: name != main)
    shown = found[:_MOST_METRICS]
    shown += [name for name in ("train/loss",) if name in values]
    return ", ".join(f"{name} {values[name]:.5g}" for name in shown)


def _short(path: str) -> str:
    """A path as a shell takes it: from the working folder, where that is shorter."""
    relative = os.path.relpath(path) if Path(path).is_absolute() else path
    return shlex.quote(min(relative, path, key=len))
