"""What a checkpoint holds of the data (what was learned from the training rows, a fingerprint), and their summary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from scent_lightning.changed_data import Change

__all__ = ["TrainedDataModule", "fingerprint", "sampled"]

SAMPLED = 64


def fingerprint(parts: Iterable[npt.NDArray[Any] | bytes | str]) -> str:
    """A hash of arrays, bytes and strings, each with its length."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            content: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        else:
            content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.hexdigest()


def sampled(rows: int) -> npt.NDArray[np.int64]:
    """Some of ``rows`` positions, ascending: where to look at all rows would take long."""
    chosen: npt.NDArray[np.int64] = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, SAMPLED)).astype(np.int64))
    return chosen


class TrainedDataModule(L.LightningDataModule):
    """Base of data modules that go on with the training run's preprocessing, whatever data they are given.

    A checkpoint holds :meth:`_learn`, and a fingerprint of the training rows. Lightning hands it back after ``setup``,
    so that a subclass works out its splits when they are asked for, and :meth:`_forget` makes it do so anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_checkpoint: dict[str, Any] = {}  # what a checkpoint has told
        self._own: dict[str, Any] | None = None
        self._to_compare: dict[str, Any] | None = None
        self._notes: dict[str, dict[str, None]] = {}

    @property
    def num_anchors(self) -> int:
        """Number of training rows."""
        raise NotImplementedError

    def data_summary(self) -> dict[str, str]:
        """What was read for a fit, as words by name; a task with dual variables shows it at the start of the fit.

        Returns:
            Such as ``{"training": "442 rows", "passed over": "…"}``.
        """
        return {**self._summary(), **{name: "; ".join(sentences) for name, sentences in self._notes.items()}}

    def _note(self, sentence: str, name: str = "passed over") -> None:
        """Have ``data_summary`` say, once, what was left out or changed while reading, and why."""
        self._notes.setdefault(name, {})[sentence] = None

    def _warn(self, sentence: str) -> None:
        """Warn of what was read, on rank 0, and have ``data_summary`` say it too."""
        rank_zero_warn(sentence)
        self._note(sentence, "to look at")

    def _summary(self) -> dict[str, str]:
        """What was read, as words by name, but for what :meth:`_note` was told."""
        raise NotImplementedError

    def _learn(self) -> dict[str, Any]:
        """What was learned from the training rows, as tensors and plain data."""
        raise NotImplementedError

    def _fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` training rows are, before any preprocessing."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Let the splits be worked out anew."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What was learned from the training rows, and their number and fingerprint; nothing before a fit."""
        fitted = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if self._own is None and fitted:
            rows = self.num_anchors
            self._own = {**self._learn(), "rows": rows, "fingerprint": self._fingerprint(rows)}
        return dict(self._own or self._of_checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the training run's preprocessing, for whatever data this module has.

        Args:
            state_dict: from :meth:`state_dict`.
        """
        self._of_checkpoint = dict(state_dict)
        self._to_compare = self._of_checkpoint
        self._own = None
        self._forget()

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
        if rows > self.num_anchors or self._fingerprint(rows) != saved["fingerprint"]:
            return "replaced"
        return "none" if rows == self.num_anchors else "appended"
