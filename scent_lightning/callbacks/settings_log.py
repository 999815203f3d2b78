"""What a run was set to, for the HParams page of TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L

from scent_lightning.callbacks.lookup import tensorboard_loggers

__all__ = ["SettingsLog"]


class SettingsLog(L.Callback):
    """Write the settings of a run and its main metric for TensorBoard's HParams page, and how the run has ended.

    The metric is the module's ``main_metric``, by which the page and ``scent-lightning compare`` rank runs. The command
    line has this callback by itself.

    Args:
        settings: numbers and texts by name.
    """

    def __init__(self, settings: Mapping[str, bool | int | float | str]) -> None:
        super().__init__()
        self.settings = dict(settings)
        self._begun = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the settings: not before, since a fit that is refused leaves the run of its checkpoint as it is."""
        self._begun = True
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
        experiment = api_pb2.Experiment(
            hparam_infos=[
                api_pb2.HParamInfo(name=name, type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
                for name, value in self.settings.items()
            ]
        )
        main = getattr(pl_module, "main_metric", None)
        if main is not None:
            tag, best = main
            experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag), description=f"{best} is best")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in self.settings.items():
            kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(start.hparams[name], kind, value)
        self._write(trainer, metadata.EXPERIMENT_TAG, experiment=experiment)
        self._write(trainer, metadata.SESSION_START_INFO_TAG, session_start_info=start)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write that the run has come to its end, also where a checkpoint's was all that was left to say."""
        self._end(trainer, "STATUS_SUCCESS")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write that it has failed; a run that is interrupted has no end yet."""
        if self._begun and isinstance(exception, Exception):
            self._end(trainer, "STATUS_FAILURE")

    def _end(self, trainer: L.Trainer, status: str) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value(status), end_time_secs=time.time())
        self._write(trainer, metadata.SESSION_END_INFO_TAG, session_end_info=end)

    @staticmethod
    def _write(trainer: L.Trainer, tag: str, **content: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        if not trainer.is_global_zero:
            return
        plugin_data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**content))
        summary = Summary(value=[Summary.Value(tag=tag, metadata=plugin_data, tensor=metadata.NULL_TENSOR)])
        for logger in tensorboard_loggers(trainer):
            writer = logger.experiment.file_writer
            if writer is not None:  # which it is once the logger is closed
                writer.add_summary(summary, trainer.global_step)
