"""What every data module of the package is made of: splits, loaders, what a checkpoint holds, and the summary."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from scent_lightning.changed_data import Change
from scent_lightning.data.fingerprint import fingerprint, sampled
from scent_lightning.data.loading import batch_loader, check_batch_size, evaluation_loader, fetches, place_in_run
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer
from scent_lightning.words import rows_in_words

__all__ = ["EVALUATED", "IndexedDataModule"]

EVALUATED = {"validate": "val", "test": "test"}  # which split, by the stage


class IndexedDataModule(L.LightningDataModule):
    """Base of data modules whose batches end with the dataset index of every row.

    A subclass has one method, :meth:`load`, which gives the rows of a split. All else follows: training batches in a
    new order every epoch, which is a function of the seed and the epoch alone, shared by all processes without a
    repeat, and continued where a run was interrupted within an epoch; evaluation in the order of the rows, each in one
    process and once; ``num_anchors``; a summary at the start of a fit; and a fingerprint of the training rows, by which
    a run that is resumed knows whether its ν belongs to them.

    Further methods may say more: :meth:`summary` and :meth:`note` what was read, :meth:`learned` what was learned from
    the training rows (columns, a scaling), which a checkpoint holds and ``restored`` hands back, and
    :meth:`fingerprint` what the rows are. The sizes that a task asks for, such as ``num_features`` and ``num_classes``,
    are properties of those names; the command line hands them on. A property ``class_counts``, the training rows of
    each class, tells a loss over the classes of a batch how frequent they are.

    Args:
        batch_size: rows of a training batch, in each process.
        eval_batch_size: rows of a batch in validation, test and prediction.
        num_workers: loader processes; 0 loads in the training process.

    Attributes:
        restored: what the checkpoint that was loaded last holds of the training run; empty without one. Lightning loads
            it after ``setup``, and :meth:`forget` then has the splits loaded anew.

    Raises:
        InputError: before training: more rows in a batch than there are, or an argument out of range.

    Example:
        >>> from scent_lightning.data import IndexedTensorDataset
        >>> class Parity(IndexedDataModule):
        ...     num_features = 1
        ...     num_classes = 2
        ...
        ...     def __init__(self, rows: int = 100, batch_size: int = 10) -> None:
        ...         super().__init__(batch_size)
        ...         self.rows = rows
        ...
        ...     def load(self, split):
        ...         counts = {"train": self.rows, "val": 20}
        ...         if split not in counts:
        ...             return None
        ...         numbers = torch.arange(counts[split])
        ...         return IndexedTensorDataset(numbers.float().unsqueeze(1), numbers % 2)
        >>> data = Parity()
        >>> data.num_anchors, data.data_summary()
        (100, {'training': '100 rows', 'validation': '20 rows'})
        >>> features, labels, index = next(iter(data.train_dataloader()))
        >>> features.shape, labels.shape, index.shape
        (torch.Size([10, 1]), torch.Size([10]), torch.Size([10]))
    """

    def __init__(self, batch_size: int = 128, eval_batch_size: int = 512, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size: int = checked_integer("batch_size", batch_size)
        self.eval_batch_size: int = checked_integer("eval_batch_size", eval_batch_size)
        self.num_workers: int = checked_integer("num_workers", num_workers, least=0)
        self.restored: dict[str, Any] = {}
        self._own: dict[str, Any] | None = None
        self._to_compare: dict[str, Any] | None = None
        self._notes: dict[str, dict[str, None]] = {}
        self._loaded: dict[str, Dataset[Any] | None] = {}

    # Splits

    def load(self, split: str) -> Dataset[Any] | None:
        """The rows of a split, read and checked.

        Args:
            split: "train", "val", "test", or "predict". For "predict", None takes the first there is of the test, the
                validation and the training rows.

        Returns:
            A data set with ``__len__`` that gives a whole batch for a list of indices, such as
            :class:`~scent_lightning.data.IndexedTensorDataset` or an :class:`~scent_lightning.data.IndexedRows`: a
            tuple of tensors, of which the last is the index. None if there is no such split.
        """
        raise NotImplementedError

    def split(self, name: str) -> Any:
        """What :meth:`load` gave for a split, loaded once; None if there is none."""
        if name not in self._loaded:
            self._loaded[name] = self.load(name)
        return self._loaded[name]

    def existing(self, split: str) -> Any:
        """The rows of a split.

        Raises:
            InputError: there are none; the message is :meth:`missing`.
        """
        if (rows := self.split(split)) is None:
            raise InputError(self.missing(split))
        return rows

    def missing(self, split: str) -> str:
        """What to say of a split that there is not."""
        return f"{type(self).__name__} has no rows of split {split!r}"

    def forget(self) -> None:
        """Let the splits be loaded anew: the next ones are treated as ``restored`` says."""
        self._loaded = {}

    @property
    def num_anchors(self) -> int:
        """Number of training rows; of the training run, where a checkpoint was loaded and there are none here."""
        if self.restored and self.split("train") is None:
            return int(self.restored["rows"])
        return len(self.existing("train"))

    # Loaders

    def setup(self, stage: str) -> None:
        """Load what the stage needs; see :meth:`load`."""
        if stage == "fit":
            check_batch_size(self.batch_size, len(self.existing("train")))
            self.split("val")
        elif stage != "predict" and (self.restored or self.split("train") is not None):
            # Else a checkpoint that is still to be loaded may have to say how the rows are treated.
            self.existing(EVALUATED[stage])

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches, in a new order every epoch."""
        replicas, rank, epoch = place_in_run(self.trainer)
        rows = self.existing("train")
        return batch_loader(rows, self.batch_size, True, replicas, rank, self.num_workers, epoch=epoch)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows; an empty list, which Lightning skips, if there are none."""
        return [] if (rows := self.split("val")) is None else self.evaluation_loader(rows)

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Test rows."""
        return self.evaluation_loader(self.existing("test"))

    def predict_dataloader(self) -> DataLoader[Any]:
        """The rows to predict, or else the test, validation or training rows."""
        splits = (split for split in ("predict", "test", "val") if self.split(split) is not None)
        return self.evaluation_loader(self.existing(next(splits, "train")))

    def evaluation_loader(self, rows: Dataset[Any]) -> DataLoader[Any]:
        """Loader of rows in their order, each in one process and once."""
        return evaluation_loader(rows, self.eval_batch_size, self.trainer, self.num_workers)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the tensors, without Lightning's walk through an unknown collection."""
        return tuple(part if part is None else part.to(device, non_blocking=True) for part in batch)

    # Summary

    def data_summary(self) -> dict[str, str]:
        """What was read for a fit, as words by name; a task with dual variables shows it at the start of the fit.

        Returns:
            Such as ``{"training": "442 rows", "passed over": "…"}``.
        """
        return {**self.summary(), **{name: "; ".join(sentences) for name, sentences in self._notes.items()}}

    def summary(self) -> dict[str, str]:
        """What was read, as words by name, but for what :meth:`note` was told."""
        rows = self.split("val")
        validation = "none" if rows is None else rows_in_words(len(rows))
        return {"training": rows_in_words(self.num_anchors), "validation": validation}

    def note(self, sentence: str, name: str = "passed over") -> None:
        """Have the summary say, once, what was left out or changed while reading, and why."""
        self._notes.setdefault(name, {})[sentence] = None

    def warn(self, sentence: str) -> None:
        """Warn of what was read, on rank 0, and have the summary say it too."""
        rank_zero_warn(sentence)
        self.note(sentence, "to look at")

    # What a checkpoint holds

    def learned(self) -> dict[str, Any]:
        """What was learned from the training rows, as tensors and plain data; nothing, unless a subclass says it."""
        return {}

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` training rows are.

        This one is of some of them, as their data set gives them. A subclass whose data set gives random numbers, or
        rows that depend on what was learned from others, has to say what they are before that.

        Args:
            rows: at most the number of training rows.
        """
        some = fetches(self.existing("train"))(sampled(rows).tolist())
        return fingerprint(
            [part.detach().contiguous().view(torch.uint8).numpy() for part in some if isinstance(part, Tensor)]
        )

    def state_dict(self) -> dict[str, Any]:
        """What was learned from the training rows, and their number and fingerprint; nothing before a fit."""
        fitted = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if self._own is None and fitted and self.split("train") is not None:
            rows = self.num_anchors
            self._own = {**self.learned(), "rows": rows, "fingerprint": self.fingerprint(rows)}
        return dict(self._own or self.restored)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the training run's preprocessing, for whatever data this module has.

        Args:
            state_dict: from :meth:`state_dict`.
        """
        self.restored = dict(state_dict)
        self._to_compare = self.restored
        self._own = None
        self.forget()

    def changed_rows(self) -> Change:
        """What became of the training rows since the checkpoint that was loaded last; asked again, "none".

        A data module of one's own may have this method as well: where it says "appended" or "replaced", training on
        from a checkpoint stops unless ``if_changed_data`` allows it.

        Returns:
            "none", "appended" (the checkpoint's rows are the first ones), or "replaced".
        """
        saved, self._to_compare = self._to_compare, None
        if saved is None or "fingerprint" not in saved:
            return "none"
        rows = saved["rows"]
        if rows > self.num_anchors or self.fingerprint(rows) != saved["fingerprint"]:
            return "replaced"
        return "none" if rows == self.num_anchors else "appended"
