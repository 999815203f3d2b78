"""Read runs from the disk: the settings of ``config.yaml`` and the curves of the TensorBoard log beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import yaml

from scent_lightning.errors import InputError
from scent_lightning.runs.folders import EVENTS, step_of_config
from scent_lightning.runs.settings import Setting, settings_of

__all__ = ["Best", "Run", "find_runs", "read_run"]

Best = Literal["min", "max"]
_PLACEHOLDER = "hp_metric"  # of Lightning's own logger, always -1
_LESS_IS_BETTER = re.compile(r"loss|risk|entropy|error|rmse|mae|objective|perplexity", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A run that has left a log.

    Attributes:
        folder: where it is.
        settings: as of :func:`scent_lightning.runs.settings.settings_of`.
        curves: tag → steps and values, each of shape ``(points,)``.
        main: the metric that the run names as its own, with what is best of it; None where it names none.
        status: "finished", "failed", "unfinished", or "unknown" where the log does not say.
    """

    folder: Path
    settings: dict[str, Setting]
    curves: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
    main: tuple[str, Best] | None
    status: str

    def metric(self) -> tuple[str, Best] | None:
        """The run's own metric, else the first of validation, else the training loss, as far as it is logged."""
        if self.main is not None and self.main[0] in self.curves:
            return self.main
        tags = sorted(tag for tag in self.curves if tag.startswith(("val/", "val_")))
        tags += [tag for tag in ("train/loss", "train_loss", "loss") if tag in self.curves]
        return (tags[0], "min" if _LESS_IS_BETTER.search(tags[0]) else "max") if tags else None

    def best_of(self, tag: str) -> Best:
        """What is best of a metric: as the run says of its own, else by its name."""
        if self.main is not None and self.main[0] == tag:
            return self.main[1]
        return "min" if _LESS_IS_BETTER.search(tag) else "max"


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs in and below some folders: each has a config.yaml and a TensorBoard log.

    Raises:
        InputError: one of the folders is not there.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}")
        found += [file.parent for file in sorted(folder.rglob("config.yaml"), key=_in_order)]
    return [folder for folder in dict.fromkeys(found) if any(folder.glob(EVENTS))]


def _in_order(path: Path) -> list[str | int]:
    """By name, numbers in it by their size."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """Read a run.

    Raises:
        InputError: its configuration or its log cannot be read.
    """
    # A run that was gone on with has a configuration for each time; the last is what it is now.
    file = max(folder.glob("config*.yaml"), key=step_of_config)
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(config, dict) or "model" not in config:
        raise InputError(f"{file} is not the configuration of a run: it has no model")
    log = _Log()
    for path in sorted(folder.glob(EVENTS), key=_in_order):
        log.read(path)
    return Run(folder, settings_of(config), log.curves(), log.main, log.status)


class _Log:
    """What the event files of a run hold, each read in its turn.

    TensorBoard's own reader keeps the first of several statuses, as a run that was gone on with has them.
    """

    def __init__(self) -> None:
        self.main: tuple[str, Best] | None = None
        self.status = "unknown"
        self._points: dict[str, dict[int, float]] = {}

    def read(self, path: Path) -> None:
        """Add a file.

        Raises:
            InputError: it cannot be read.
        """
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.event_pb2 import SessionLog

        try:
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                    self._forget_from(event.step)
                for value in event.summary.value:
                    if value.WhichOneof("value") == "simple_value":
                        self._points.setdefault(value.tag, {})[event.step] = value.simple_value
                    elif value.tag.startswith("_hparams_/"):
                        self._take(value.tag, value.metadata.plugin_data.content)
        except Exception as error:  # of many kinds, by what is wrong with the file
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(f"{path} cannot be read: {reason}") from error

    def curves(self) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Steps and values of each tag, in order; of a step the last that was logged."""
        arrays = {tag: np.array(sorted(points.items())) for tag, points in self._points.items() if points}
        return {tag: (pairs[:, 0].astype(np.int64), pairs[:, 1]) for tag, pairs in arrays.items()}

    def _forget_from(self, step: int) -> None:
        """A run that is gone on with begins at this step, and what is there of later ones no longer counts."""
        for tag, points in self._points.items():
            self._points[tag] = {at: value for at, value in points.items() if at < step}

    def _take(self, tag: str, content: bytes) -> None:
        """What :class:`scent_lightning.callbacks.settings_log.SettingsLog` writes."""
        from tensorboard.plugins.hparams import api_pb2, metadata

        if tag == metadata.EXPERIMENT_TAG:
            for info in metadata.parse_experiment_plugin_data(content).metric_infos:
                if info.name.tag != _PLACEHOLDER:
                    self.main = info.name.tag, "max" if info.description.startswith("max") else "min"
        elif tag == metadata.SESSION_START_INFO_TAG:
            self.status = "unfinished"
        elif tag == metadata.SESSION_END_INFO_TAG:
            end = metadata.parse_session_end_info_plugin_data(content)
            self.status = "finished" if end.status == api_pb2.STATUS_SUCCESS else "failed"
