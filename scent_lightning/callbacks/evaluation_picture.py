"""What draws a picture of every validation and test run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from scent_lightning.callbacks.evaluation import EvaluationCallback, Stage
from scent_lightning.callbacks.lookup import tensorboard_loggers
from scent_lightning.figures import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EvaluationPicture", "warn_of_rows_left_out"]


class EvaluationPicture(EvaluationCallback):
    """A picture at the end of every validation and test run.

    It is written to ``NAME_val.png`` or ``NAME_test.png`` with an SVG file of the same name beside it, where each
    picture replaces the one before, and as an image ``val/NAME`` or ``test/NAME`` to every TensorBoard logger. The
    sanity check draws nothing.

    Args:
        every_n_epochs: during a fit, draw in every n-th epoch only.
        folder: folder for the files, made if missing; None is the Trainer's log folder, or its ``default_root_dir`` if
            there is none.

    Raises:
        InputError: ``every_n_epochs`` is no whole number of at least 1.
    """

    #: NAME of the files and of the image.
    picture: ClassVar[str]

    def __init__(self, every_n_epochs: int = 1, folder: str | Path | None = None) -> None:
        super().__init__(every_n_epochs)
        self.folder = folder

    def publish(self, trainer: L.Trainer, stage: Stage, figure: Figure | None) -> None:
        """Write the picture and log it; every process has to come here, and those but the first have none."""
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)  # log_dir waits for all processes
        if figure is None:
            return
        save(figure, folder / f"{self.picture}_{stage}.png")
        for logger in tensorboard_loggers(trainer):
            logger.experiment.add_figure(f"{stage}/{self.picture}", figure, trainer.global_step)

    @staticmethod
    def title(trainer: L.Trainer, stage: Stage, what: str) -> str:
        """Which run it is of, what it shows, and when."""
        run = {"val": "Validation", "test": "Test"}[stage]
        return f"{run}: {what}, epoch {trainer.current_epoch}, step {trainer.global_step}"


def warn_of_rows_left_out(callback: EvaluationPicture, stage: Stage, count: int, drawn: bool) -> None:
    """Say that a picture lacks rows which are not finite: a run that diverges does not end by its picture."""
    if count:
        what = f"leaves out {count} rows" if drawn else f"draws no {stage} picture: {count} rows"
        rank_zero_warn(f"{type(callback).__name__} {what} that are not finite")
