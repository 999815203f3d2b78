"""What both estimators share: their arguments, rows in memory, and a fit that leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import check_random_state
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.ops import MLP

from scent_lightning.data import IndexedDataModule, IndexedTensorDataset
from scent_lightning.duals import DualUpdate
from scent_lightning.errors import InputError
from scent_lightning.tasks.base import BaseTask
from scent_lightning.validation import checked_integer

Array = npt.NDArray[np.float64]

# A run is at least so long where it is not said: in steps, and in epochs.
_STEPS, _EPOCHS = 2000, 30
_ROWS = 8192  # that a network is given at a time
# Lightning's loggers: of the devices, the seed, the model.
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning")


class RowsInMemory(IndexedDataModule):
    """Training rows that are tensors.

    Args:
        rows: shape ``(n, …)`` each.
        batch_size: rows of a batch.
    """

    def __init__(self, rows: tuple[Tensor, ...], batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows = rows

    def load(self, split: str) -> Dataset[Any] | None:
        """The training rows; there are no others."""
        return IndexedTensorDataset(*self.rows) if split == "train" else None


def dual_of(dual: DualUpdate | str | None) -> DualUpdate:
    """A dual update: the one given, one of that name with its defaults, or SCENT with its own.

    Raises:
        InputError: neither.
    """
    if isinstance(dual, DualUpdate):
        # One of its own for each fit, as clones of an estimator may share the object.
        return DualUpdate.from_config(dual.config())
    if dual is not None and not isinstance(dual, str):
        raise InputError(f"dual must be a DualUpdate or the name of one, got {dual!r}")
    return DualUpdate.from_config({"class_path": dual or "SCENT"})


def network_of(num_features: int, hidden_layer_sizes: tuple[int, ...]) -> nn.Module:
    """A linear model, or layers of ReLU before it, with one output."""
    sizes = [checked_integer("hidden_layer_sizes", size) for size in hidden_layer_sizes]
    return MLP(num_features, [*sizes, 1]) if sizes else nn.Linear(num_features, 1)


def outputs_of(network: nn.Module, features: Array) -> Array:
    """What a network of float32 makes of standardised features, shape ``(n,)``, some thousand rows at a time."""
    parts = torch.split(torch.tensor(features, dtype=torch.float32), _ROWS)
    found: Array = torch.cat([network(part) for part in parts]).squeeze(1).double().numpy()
    return found


def epochs_of(max_epochs: int | None, batches: int) -> int:
    """Epochs of a run: those given, or enough for a run of some thousand steps."""
    if max_epochs is not None:
        given: int = checked_integer("max_epochs", max_epochs)
        return given
    return max(_EPOCHS, math.ceil(_STEPS / batches))


def seed_of(random_state: Any) -> int:
    """A seed from what scikit-learn takes as ``random_state``."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


@contextlib.contextmanager
def isolated(seed: int, verbose: bool) -> Iterator[None]:
    """Random numbers of their own, and none of Lightning's messages and warnings unless they are wanted."""
    loggers = [] if verbose else [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), torch.random.fork_rng():
        torch.manual_seed(seed)
        if not verbose:
            warnings.filterwarnings("ignore", module=r"lightning\..*")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def train(task: BaseTask, data: L.LightningDataModule, epochs: int, accelerator: str, verbose: bool) -> None:
    """Train, and leave no file behind.

    Args:
        task: to train; on the CPU afterwards.
        data: with the training rows.
        epochs: of the run.
        accelerator: Lightning's, such as "cpu" or "gpu".
        verbose: show a progress bar and a summary of the model.
    """
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=verbose,
        enable_model_summary=verbose,
    )
    trainer.fit(task, datamodule=data)
    task.cpu()
