"""Precomputed features with a class label: from memory-mapped files, or synthetic and never stored."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from scent_lightning.data.indexed import batch_loader, check_batch_size, evaluation_loader, place_in_run
from scent_lightning.data.state import TrainedDataModule, fingerprint, sampled
from scent_lightning.errors import InputError
from scent_lightning.summary import rows_in_words

__all__ = ["FeatureDataModule", "SyntheticFeatureDataModule"]

RELEASE_EVERY = 32
COUNTED_AT_ONCE = 2**20  # labels: of many rows not all are in memory
NAMED = 5  # classes in a warning
Array = npt.NDArray[Any]
Batch = tuple[Tensor, Tensor | None, Tensor]  # labels are None where a split to predict has none


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(f"{name} must be a finite number of at least 0, got {value!r}")


class _Split(Dataset[Batch]):
    """Rows of one split; a subclass says how a batch of them is fetched.

    Attributes:
        epoch: of the batch at hand, where it is one of training.
    """

    epoch = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def _fetch(self, index: Array) -> tuple[Array, Array | None]:
        """Features (B, D), float32, and labels (B,), int64, or None, of the rows ``index``, shape (B,), int64."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        features, labels, position = self.__getitems__([index])
        return features[0], None if labels is None else labels[0], position[0]

    def _rows_of(self, indices: Sequence[int]) -> Array:
        """The rows of a batch, shape (B,), int64, checked; notes the epoch they are of."""
        self.epoch = getattr(indices, "epoch", 0)
        index = np.asarray(indices, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"index out of range: the split has {len(self)} rows")
        return index

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        index = self._rows_of(indices)
        features, labels = self._fetch(index)
        found = None if labels is None else torch.from_numpy(labels)
        return torch.from_numpy(features), found, torch.from_numpy(index)


class _FeatureDataModule(TrainedDataModule):
    """What both data modules share: the training loader, the evaluation loaders' batches, the transfer."""

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int) -> None:
        super().__init__()
        _check_integer("eval_batch_size", eval_batch_size, 1)
        _check_integer("num_workers", num_workers, 0)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers

    def _train_split(self) -> _Split:
        raise NotImplementedError

    @property
    def num_anchors(self) -> int:
        """Number of training rows."""
        if self._of_checkpoint and not self._has_train_split():
            return int(self._of_checkpoint["rows"])
        return len(self._train_split())

    def _has_train_split(self) -> bool:
        """Whether there are training rows; with a checkpoint it does without, unless it is to train."""
        return True

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the three tensors, without Lightning's walk through an unknown collection."""
        return tuple(part if part is None else part.to(device, non_blocking=True) for part in batch)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        replicas, rank, epoch = place_in_run(self.trainer)
        return batch_loader(self._train_split(), self.batch_size, True, replicas, rank, self.num_workers, epoch=epoch)

    def _evaluation_loader(self, split: _Split) -> DataLoader[Any]:
        return evaluation_loader(split, self.eval_batch_size, self.trainer, self.num_workers)


# Files


def _open(folder: Path, name: str) -> tuple[Array, Path]:
    """The array in ``name``.npy or else ``name``.pt, mapped and not read, and the file's path."""
    path = next((path for path in (folder / f"{name}.npy", folder / f"{name}.pt") if path.is_file()), None)
    if path is None:
        raise InputError(f"{folder} has neither {name}.npy nor {name}.pt")
    array: Any
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            array = array.detach().numpy() if isinstance(array, Tensor) else array
    except Exception as error:
        reason = re.split(r"\.\s|\n", str(error))[0].rstrip(".")
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds objects other than tensors"
        raise InputError(f"cannot read {path} as one plain array, whole and not pickled: {reason}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} must hold one array, got {type(array).__name__}")
    return array, path


def _release(array: Array) -> None:
    """Let go of the pages that a memory map has read: they stay in the system's cache, not in this process.

    Each row that is read maps its neighbourhood as well, so that a long run would come to hold the whole file.
    """
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class _Length:
    """Watches the length of a file that is mapped, at a microsecond a look.

    A file that is cut after the look and before the rows are read, some 40 microseconds later, still ends the process
    that reads it. To read the rows by calls of the system instead, which would fail with an error, takes 2.4 times as
    long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The file that is mapped stays the one it is if another takes its place.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._bytes = os.fstat(self._descriptor).st_size

    def check(self) -> None:
        """Raise InputError if the file has become shorter."""
        size = os.fstat(self._descriptor).st_size
        if size < self._bytes:
            raise InputError(f"{self.path} was cut from {self._bytes} to {size} bytes while it was in use")


class _FileSplit(_Split):
    """The rows of a split's folder, gathered from the memory map batch by batch.

    Args:
        folder: has features.npy or features.pt, shape ``(n, D)``, and labels.npy or labels.pt, shape ``(n,)``.
        labelled: it must have the labels; else they are not looked at, and None.
    """

    def __init__(self, folder: Path, labelled: bool = True) -> None:
        self.folder = folder
        self.features, self.path = _open(folder, "features")
        if self.features.dtype not in (np.float16, np.float32):
            raise InputError(f"{self.path} must be float16 or float32, got {self.features.dtype}")
        if self.features.ndim != 2 or self.features.shape[1] == 0:
            raise InputError(f"{self.path} must have shape (n, D) with D at least 1, got {self.features.shape}")
        if len(self.features) == 0:
            raise InputError(f"split {folder.name!r} is empty: {self.path} has no rows")
        # Reading a page of a map that its file has no more ends the process.
        self._files = [_Length(self.path)]
        self._labels = self._open_labels() if labelled else None
        self._fetches = 0

    def _open_labels(self) -> Array:
        labels, path = _open(self.folder, "labels")
        if labels.dtype.kind not in "iu":
            raise InputError(f"{path} must hold integers, got {labels.dtype}")
        if labels.ndim != 1:
            raise InputError(f"{path} must have shape (n,), got {labels.shape}")
        if len(self.features) != len(labels):
            raise InputError(
                f"features and labels of split {self.folder.name!r} differ in length: {self.path} has "
                f"{len(self.features)} rows, {path} has {len(labels)}"
            )
        self._files.append(_Length(path))
        return labels

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path, bool]]:
        # A loader process maps the files itself: pickled, a memory map would be copied whole.
        return type(self), (self.folder, self._labels is not None)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def labels(self) -> Array:
        """Labels of all rows, shape (n,); there must be some."""
        assert self._labels is not None
        return self._labels

    def fingerprint(self, rows: Array, labels: Array) -> str:
        """Hash of rows of the split, shape (m,), by their labels, shape (m,), and some of their features."""
        some = np.asarray(self.features[rows[sampled(len(rows))]], dtype=np.float32)
        return fingerprint([np.asarray(labels, dtype=np.int64), np.array(some.shape), some])

    def check_files(self) -> None:
        """Raise InputError if a file has become shorter."""
        for file in self._files:
            file.check()

    def _fetch(self, index: Array) -> tuple[Array, Array | None]:
        self.check_files()
        order = np.argsort(index)
        ascending = index[order]
        found = self.features[ascending]
        features = np.empty(found.shape, dtype=np.float32)
        features[order] = found
        with np.errstate(over="ignore", invalid="ignore"):
            total = features.sum()
        if not np.isfinite(total):  # or the sum has overflowed
            bad = ascending[~np.isfinite(found).all(axis=1)]
            if bad.size:
                raise InputError(
                    f"features of split {self.folder.name!r} are NaN or infinite in row {bad[0]} (counted from 0) "
                    f"of {self.path}"
                )
        self._fetches += 1
        if self._fetches % RELEASE_EVERY == 0:
            _release(self.features)
        return features, None if self._labels is None else np.asarray(self._labels[index], dtype=np.int64)

    def class_counts(self, num_classes: int) -> Array:
        """Rows of each class, shape (num_classes,); the labels are checked before."""
        counts = np.zeros(num_classes, dtype=np.int64)
        for start in range(0, len(self), COUNTED_AT_ONCE):
            labels = np.asarray(self.labels[start : start + COUNTED_AT_ONCE], dtype=np.int64)
            counts += np.bincount(labels, minlength=num_classes)
        return counts

    def check_labels(self, num_classes: int | None) -> int:
        """Return the largest label; raise InputError unless all are at least 0 and below ``num_classes``."""
        largest = int(self.labels.max())
        if self.labels.min() < 0 or (num_classes is not None and largest >= num_classes):
            bad = self.labels < 0
            if num_classes is not None:
                bad |= self.labels >= num_classes
            row = int(bad.argmax())
            limit = "" if num_classes is None else f" and below num_classes {num_classes}"
            raise InputError(
                f"labels of split {self.folder.name!r} must be at least 0{limit}, got {self.labels[row]} in row {row} "
                "(counted from 0)"
            )
        return largest


def _some_classes(classes: Array) -> str:
    shown = ", ".join(map(str, classes[:NAMED].tolist()))
    return shown if len(classes) <= NAMED else f"{shown}, …, {classes[-1]}"


class FeatureDataModule(_FeatureDataModule):
    """Precomputed features with a class label, from files, as whole batches ``(features, labels, index)``.

    ``features`` is float32 of shape ``(B, D)``, ``labels`` int64 of shape ``(B,)``, ``index`` int64 of shape ``(B,)``:
    the row's position in its split. Training batches are shuffled anew every epoch; the others keep the files' order.

    ``path`` has a folder per split: ``train``, and for evaluation ``val`` and ``test``. Each holds ``features.npy``
    (float16 or float32, shape ``(n, D)``) and ``labels.npy`` (integers, shape ``(n,)``), or the same as tensors in
    ``features.pt`` and ``labels.pt``. The files are memory-mapped: a batch reads its own rows.

    ``fit`` without a validation split trains without validation, and warns of classes without a training row (where
    labels start at 1, or a class is in another split only). ``predict`` goes over the folder ``predict``, or the
    files in ``path`` itself, or else the test split, the validation split or the training rows. It needs no labels,
    which are None in the batches where there are none.

    With what a checkpoint holds of the training run (the Trainer's ``ckpt_path``, or :meth:`load_state_dict`), only
    ``fit`` needs the training split; K and D are those of the training run.

    Args:
        path: the folder with the splits.
        batch_size: rows of a training batch, in each process.
        eval_batch_size: rows of a batch in validation, test and prediction.
        num_classes: number of classes K; None takes the largest label of all splits, plus 1.
        num_workers: loader processes; 0 loads in the training process.
        val_split: the validation split's folder in ``path``; may be "test" or "train" as well. One of another name
            than "val" must be there.
        test_split: the test split's folder in ``path``; one of another name than "test" must be there to be used.

    Raises:
        InputError: before training, in one sentence: a missing folder, split or file, one that cannot be read, a wrong
            type or shape, splits that do not match, a label out of range (which), too few rows, or an argument out of
            range. When a batch is fetched: a NaN or infinite feature (in which row of which split), or a file that has
            become shorter.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "train").mkdir()
        >>> np.save(folder / "train" / "features.npy", np.ones((6, 4), dtype=np.float16))
        >>> np.save(folder / "train" / "labels.npy", np.array([0, 1, 2, 0, 1, 2]))
        >>> data = FeatureDataModule(str(folder), batch_size=3)
        >>> data.num_features, data.num_classes, data.num_anchors
        (4, 3, 6)
        >>> features, labels, index = next(iter(data.train_dataloader()))
        >>> features.shape, features.dtype, labels.shape, index.dtype
        (torch.Size([3, 4]), torch.float32, torch.Size([3]), torch.int64)
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        num_classes: int | None = None,
        num_workers: int = 0,
        val_split: str = "val",
        test_split: str = "test",
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        if num_classes is not None:
            _check_integer("num_classes", num_classes, 1)
        self.path = Path(path)
        self.val_split = val_split
        self.test_split = test_split
        self._num_classes = self._given_classes = num_classes
        self._splits: dict[str, _FileSplit] | None = None
        self._predicted: _FileSplit | None = None

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return int(self._of_checkpoint.get("num_features") or self._loaded()["train"].features.shape[1])

    @property
    def num_classes(self) -> int:
        """Number of classes K: as given, or the largest label of all splits, plus 1."""
        if self._num_classes is None:
            self._loaded()
        assert self._num_classes is not None
        return self._num_classes

    def setup(self, stage: str) -> None:
        """Map the files and check them, once; and that the split to evaluate on is there."""
        if stage != "fit" and not (self._of_checkpoint or self._has_train_split()):
            return  # a checkpoint that is still to be loaded says what the features and classes are
        if stage == "validate":
            self._existing("val_split")
        elif stage == "test":
            self._existing("test_split")
        elif stage == "fit":
            splits = self._loaded()
            if "train" not in splits:
                raise InputError(f"path needs a split {self._missing('train')}")
            check_batch_size(self.batch_size, len(splits["train"]))
            self._name_dead_classes(splits)
            if self.val_split != "val":
                self._existing("val_split")

    def _name_dead_classes(self, splits: dict[str, _FileSplit]) -> None:
        """Warn of classes without a training row, of which nothing can be learned, and where other splits have them."""
        dead = splits["train"].class_counts(self.num_classes) == 0
        if not dead.any():
            return
        which = np.flatnonzero(dead)
        said = [f"{len(which)} of {self.num_classes} classes have no training row: {_some_classes(which)}"]
        if dead[0] and len(which) == 1:
            said.append("do the labels start at 1? Then subtract 1 from them")
        for name, split in splits.items():
            if name != "train" and (rows := np.where(dead, split.class_counts(self.num_classes), 0)).any():
                said.append(
                    f"{rows.sum()} rows of split {name!r} are of {np.count_nonzero(rows)} of them: "
                    f"{_some_classes(np.flatnonzero(rows))}"
                )
        self._warn(f"{self.path}: {'; '.join(said)}")

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows; an empty list, which Lightning skips, if there is no such split."""
        return self._evaluation_loader(self._loaded()[self.val_split]) if self.val_split in self._loaded() else []

    def test_dataloader(self) -> DataLoader[Any]:
        """Test rows."""
        return self._evaluation_loader(self._existing("test_split"))

    def predict_dataloader(self) -> DataLoader[Any]:
        """The rows to predict; without any the test, validation or training rows."""
        if self._predicted is None:
            self._predicted = self._load_predicted()
        return self._evaluation_loader(self._predicted)

    def _load_predicted(self) -> _FileSplit:
        folders = [self.path / "predict", self.path]
        folder = next((f for f in folders if any((f / f"features.{kind}").is_file() for kind in ("npy", "pt"))), None)
        if folder is None:
            splits = self._loaded()
            for argument, usual in (("test_split", "test"), ("val_split", "val")):
                if (name := getattr(self, argument)) in splits or name != usual:
                    return self._existing(argument)
            return splits["train"]
        split = _FileSplit(folder, labelled=any((folder / f"labels.{kind}").is_file() for kind in ("npy", "pt")))
        width = self._of_checkpoint.get("num_features", split.features.shape[1])
        if split.features.shape[1] != width:
            raise InputError(f"{split.path} has {split.features.shape[1]} features, the training rows had {width}")
        return split

    def on_exception(self, exception: BaseException) -> None:
        """Give a file that has become shorter as the cause: a loader process that was reading it has died of that."""
        while exception.__cause__ is not None:
            exception = exception.__cause__
        if isinstance(exception, InputError):
            return
        try:
            for split in (self._splits or {}).values():
                split.check_files()
        except InputError as cut:
            exception.__cause__ = cut

    def _train_split(self) -> _FileSplit:
        return self._loaded()["train"]

    def _has_train_split(self) -> bool:
        return (self.path / "train").is_dir()

    def _summary(self) -> dict[str, str]:
        splits = self._loaded()
        said = {
            "data": str(self.path),
            "features": f"{self.num_features:,}, {splits['train'].features.dtype}",
            "classes": f"{self.num_classes:,}" + (" (num_classes)" if self._given_classes else ""),
            "training": rows_in_words(len(splits["train"])),
        }
        if self.val_split not in splits:
            return said | {"validation": f"none, as there is no folder {self.val_split!r}"}
        of_training = ", the training rows" if self.val_split == "train" else ""
        return said | {"validation": f"{rows_in_words(len(splits[self.val_split]))} of {self.val_split!r}{of_training}"}

    def _learn(self) -> dict[str, Any]:
        return {"num_features": self.num_features, "num_classes": self.num_classes}

    def _fingerprint(self, rows: int) -> str:
        split = self._train_split()
        return split.fingerprint(np.arange(rows), split.labels[:rows])

    def _forget(self) -> None:
        self._splits = self._predicted = None
        self._num_classes = self._given_classes or self._of_checkpoint.get("num_classes")

    def _missing(self, split: str) -> str:
        there = sorted(folder.name for folder in self.path.iterdir() if folder.is_dir())
        return f"{split!r}: missing split, there is no folder {self.path / split}; {self.path} has: " + (
            ", ".join(there) or "no folder at all"
        )

    def _existing(self, argument: str) -> _FileSplit:
        split = getattr(self, argument)
        if split not in self._loaded():
            raise InputError(f"{argument} {self._missing(split)}")
        return self._loaded()[split]

    def _loaded(self) -> dict[str, _FileSplit]:
        if self._splits is None:
            self._splits = self._load()
        return self._splits

    def _load(self) -> dict[str, _FileSplit]:
        if not self.path.is_dir():
            raise InputError(f"path {self.path} is not a folder; it must hold a folder for each split")
        if not (self._of_checkpoint or self._has_train_split()):
            raise InputError(f"path needs a split {self._missing('train')}")
        names = dict.fromkeys(("train", self.val_split, self.test_split))
        splits = {name: _FileSplit(self.path / name) for name in names if (self.path / name).is_dir()}
        if not splits:
            raise InputError(f"path {self.path} has no split")
        width = self._of_checkpoint.get("num_features") or splits["train"].features.shape[1]
        for name, split in splits.items():
            if split.features.shape[1] != width:
                raise InputError(
                    f"splits differ in the number of features: 'train' has {width}, {name!r} has "
                    f"{split.features.shape[1]}"
                )
        largest = max(split.check_labels(self._num_classes) for split in splits.values())
        if not self._of_checkpoint:
            check_batch_size(self.batch_size, len(splits["train"]))
        if self._num_classes is None:
            self._num_classes = largest + 1
        return splits


# Synthetic rows: a number is a hash of (seed, stream, row or class, position), so nothing is stored or drawn in order.

_CENTRES = 0
_STREAMS = {"train": (1, 2), "val": (3, 4)}  # labels, noise
_STEP = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = np.float32(1 - 2**-24)


def _mix(state: Array) -> Array:
    """SplitMix64's output function, in place; uint64 of any shape."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def _keys(seed: int, stream: int, counter: Array) -> Array:
    """64 random bits for each of ``counter``, shape (B,): element ``counter`` of SplitMix64 from a seed of its own."""
    start = _mix(np.array([seed % 2**64], dtype=np.uint64) + _STEP)
    start = _mix(start + np.array([stream + 1], dtype=np.uint64) * _STEP)
    return _mix(start + (counter.astype(np.uint64) + np.uint64(1)) * _STEP)


def _uniform(keys: Array) -> Array:
    """Uniform on [0, 1), float64, shape (B,)."""
    uniform: Array = (keys >> np.uint64(11)).astype(np.float64)
    uniform *= 2.0**-53
    return uniform


def _normal(keys: Array, count: int) -> Array:
    """Standard normal, float32, shape (B, count): Box–Muller on the halves of SplitMix64 from each key, shape (B,)."""
    pairs = (count + 1) // 2
    bits = _mix(keys[:, None] + np.arange(1, pairs + 1, dtype=np.uint64) * _STEP)
    radius = (bits >> np.uint64(32)).astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2**-32)
    np.minimum(radius, _BELOW_ONE, out=radius)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = bits.astype(np.uint32).astype(np.float32)
    angle *= np.float32(2 * math.pi * 2**-32)
    normal = np.empty((len(keys), count), dtype=np.float32)
    np.multiply(radius, np.cos(angle), out=normal[:, :pairs])
    np.multiply(radius[:, : count - pairs], np.sin(angle)[:, : count - pairs], out=normal[:, pairs:])
    return normal


class _SyntheticSplit(_Split):
    """Rows that are computed when they are fetched.

    Args:
        split: "train" or "val".
        rows: number of rows.
        num_classes: K.
        num_features: D.
        noise: standard deviation.
        cumulative: unnormalised cumulative probability of the classes, shape (K,), float64; None for equal ones.
        seed: of everything.
    """

    def __init__(
        self,
        split: str,
        rows: int,
        num_classes: int,
        num_features: int,
        noise: float,
        cumulative: Array | None,
        seed: int,
    ) -> None:
        self.rows = rows
        self.num_classes = num_classes
        self.num_features = num_features
        self.noise = noise
        self.cumulative = cumulative
        self.seed = seed
        self.label_stream, self.noise_stream = _STREAMS[split]

    def __len__(self) -> int:
        return self.rows

    def _fetch(self, index: Array) -> tuple[Array, Array]:
        uniform = _uniform(_keys(self.seed, self.label_stream, index))
        if self.cumulative is None:
            labels = (uniform * self.num_classes).astype(np.int64)
        else:
            labels = np.searchsorted(self.cumulative, uniform * self.cumulative[-1], side="right").astype(np.int64)
        features = self.centres(labels)
        if self.noise > 0:
            noise = _normal(_keys(self.seed, self.noise_stream, index), self.num_features)
            noise *= np.float32(self.noise)
            features += noise
        features /= np.sqrt(np.square(features).sum(axis=1, keepdims=True))
        return features, labels

    def centres(self, classes: Array) -> Array:
        """Centres of ``classes``, shape (B,): float32, shape (B, D)."""
        return _normal(_keys(self.seed, _CENTRES, classes), self.num_features)


class SyntheticFeatureDataModule(_FeatureDataModule):
    """Random features around a centre per class, never stored, as whole batches ``(features, labels, index)``.

    ``features`` is float32 of shape ``(B, D)``, ``labels`` int64 of shape ``(B,)``, ``index`` int64 of shape ``(B,)``:
    the row's position in its split. Training batches are shuffled anew every epoch.

    A row depends on ``seed``, its split and its index alone: not on its batch, the number of processes or of rows. The
    label is drawn with probability ∝ (label + 1)^−``zipf_exponent``. The features are centre + ``noise`` · ε, scaled to
    length 1, where all entries of the class's centre and of ε are independent standard normal numbers. Both splits have
    the same centres. Neither rows nor centres are in memory, so that data of any size costs no more than its batches,
    and 8 bytes a class if ``zipf_exponent`` is above 0. ``test`` and ``predict`` go over the validation rows.

    Args:
        num_classes: number of classes K.
        num_features: number of features D, at least 2.
        rows: number of training rows.
        val_rows: number of validation rows.
        noise: standard deviation of the noise, where an entry of a centre has 1.
        zipf_exponent: how much rarer each class is than the one before; 0 makes all equally frequent.
        batch_size: rows of a training batch, in each process.
        eval_batch_size: rows of a batch in validation, test and prediction.
        seed: of labels, centres and noise; the shuffle has the seed of ``seed_everything``.
        num_workers: loader processes; 0 loads in the training process.

    Raises:
        InputError: before training, in one sentence: too few rows or an argument out of range.

    Example:
        >>> data = SyntheticFeatureDataModule(num_classes=360_232, num_features=8, rows=17_091_657)
        >>> data.num_features, data.num_classes, data.num_anchors
        (8, 360232, 17091657)
        >>> features, labels, index = next(iter(data.val_dataloader()))
        >>> features.shape, labels.shape, index[:3]
        (torch.Size([512, 8]), torch.Size([512]), tensor([0, 1, 2]))
    """

    def __init__(
        self,
        num_classes: int = 1000,
        num_features: int = 64,
        rows: int = 10_000,
        val_rows: int = 2000,
        noise: float = 0.5,
        zipf_exponent: float = 0.0,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        _check_integer("num_classes", num_classes, 1)
        _check_integer("num_features", num_features, 2)
        _check_integer("rows", rows, 1)
        _check_integer("val_rows", val_rows, 1)
        _check_integer("seed", seed, 0)
        _check_number("noise", noise)
        _check_number("zipf_exponent", zipf_exponent)
        self.rows = rows
        self.val_rows = val_rows
        self.noise = noise
        self.zipf_exponent = zipf_exponent
        self.seed = seed
        self._num_classes = num_classes
        self._num_features = num_features
        self._splits: dict[str, _SyntheticSplit] | None = None

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return self._num_features

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self._num_classes

    def setup(self, stage: str) -> None:
        """Check the batch size."""
        self._loaded()

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation rows."""
        return self._evaluation_loader(self._loaded()["val"])

    def test_dataloader(self) -> DataLoader[Any]:
        """Validation rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """Validation rows."""
        return self.val_dataloader()

    def _train_split(self) -> _Split:
        return self._loaded()["train"]

    def _summary(self) -> dict[str, str]:
        return {
            "data": f"synthetic, seed {self.seed}",
            "features": f"{self.num_features:,}, noise {self.noise}",
            "classes": f"{self.num_classes:,}, Zipf exponent {self.zipf_exponent}",
            "training": rows_in_words(self.rows),
            "validation": rows_in_words(self.val_rows),
        }

    def _learn(self) -> dict[str, Any]:
        return {}

    def _fingerprint(self, rows: int) -> str:
        numbers = (self._num_classes, self._num_features, self.noise, self.zipf_exponent, self.seed)
        return fingerprint([repr(number) for number in numbers])

    def _forget(self) -> None:
        pass

    def _loaded(self) -> dict[str, _SyntheticSplit]:
        if self._splits is None:
            check_batch_size(self.batch_size, self.rows)
            cumulative = None
            if self.zipf_exponent > 0:
                cumulative = np.cumsum(np.arange(1, self._num_classes + 1, dtype=np.float64) ** -self.zipf_exponent)
            self._splits = {
                split: _SyntheticSplit(
                    split, rows, self._num_classes, self._num_features, self.noise, cumulative, self.seed
                )
                for split, rows in (("train", self.rows), ("val", self.val_rows))
            }
        return self._splits
