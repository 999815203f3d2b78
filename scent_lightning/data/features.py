"""Precomputed features with a class label, from memory-mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.feature_files import FeatureFiles, has_array
from scent_lightning.data.folders import missing_split
from scent_lightning.data.loading import check_batch_size
from scent_lightning.data.synthetic import SyntheticFeatureDataModule
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed

__all__ = ["FeatureDataModule", "SyntheticFeatureDataModule"]

NAMED = 5  # classes in a warning


class FeatureDataModule(IndexedDataModule):
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
        checked_integer("num_classes", num_classes, or_none=True)
        self.path = Path(path)
        self.val_split = val_split
        self.test_split = test_split
        self._num_classes = self._given_classes = num_classes
        self._files: dict[str, FeatureFiles] | None = None
        self._class_counts: npt.NDArray[np.int64] | None = None

    @property
    def num_features(self) -> int:
        """Number of features D."""
        return int(self.restored.get("num_features") or self._all_files()["train"].features.shape[1])

    @property
    def num_classes(self) -> int:
        """Number of classes K: as given, or the largest label of all splits, plus 1."""
        if self._num_classes is None:
            self._all_files()
        assert self._num_classes is not None
        return self._num_classes

    @property
    def class_counts(self) -> npt.NDArray[np.int64]:
        """Training rows of each class, shape ``(K,)``: a loss over the classes of a batch may have to know them."""
        if self._class_counts is None:
            self._class_counts = self._all_files()["train"].class_counts(self.num_classes)
        return self._class_counts

    def setup(self, stage: str) -> None:
        """Map the files and check them, once; and that the split to evaluate on is there."""
        if stage != "fit" and not (self.restored or (self.path / "train").is_dir()):
            return  # a checkpoint that is still to be loaded says what the features and classes are
        super().setup(stage)
        if stage == "fit":
            self._name_dead_classes(self._all_files())
            if self.val_split != "val":
                self.existing("val")

    def _name_dead_classes(self, files: dict[str, FeatureFiles]) -> None:
        """Warn of classes without a training row, of which nothing can be learned, and where other splits have them."""
        dead = self.class_counts == 0
        if not dead.any():
            return
        which = np.flatnonzero(dead).tolist()
        said = [f"{len(which)} of {self.num_classes} classes have no training row: {listed(which, NAMED)}"]
        if dead[0] and len(which) == 1:
            said.append("do the labels start at 1? Then subtract 1 from them")
        for name, split in files.items():
            if name != "train" and (rows := np.where(dead, split.class_counts(self.num_classes), 0)).any():
                of = np.flatnonzero(rows).tolist()
                said.append(f"{rows.sum()} rows of split {name!r} are of {len(of)} of them: {listed(of, NAMED)}")
        self.warn(f"{self.path}: {'; '.join(said)}")

    def load(self, split: str) -> FeatureFiles | None:
        """The files of a split; of "predict" those in a folder of this name or in ``path`` itself."""
        if split == "predict":
            return self._rows_to_predict()
        folder = self._folder_of(split)
        if self.restored and not (self.path / folder).is_dir():
            return None
        return self._all_files().get(folder)

    def _folder_of(self, split: str) -> str:
        return {"val": self.val_split, "test": self.test_split}.get(split, split)

    def missing(self, split: str) -> str:
        """What to say of a split whose folder is not there."""
        argument = "path needs a split" if split == "train" else f"{split}_split"
        return f"{argument} {missing_split(self.path, self._folder_of(split))}"

    def _rows_to_predict(self) -> FeatureFiles | None:
        folder = next((folder for folder in (self.path / "predict", self.path) if has_array(folder, "features")), None)
        if folder is None:
            for split in ("test", "val"):  # one of another name was asked for, and perhaps misspelt
                if self._folder_of(split) != split and self.split(split) is None:
                    raise InputError(self.missing(split))
                if self.split(split) is not None:
                    break
            return None
        files = FeatureFiles(folder, labelled=has_array(folder, "labels"))
        if "num_features" in self.restored:
            files.check_width(self.restored["num_features"])
        return files

    def on_exception(self, exception: BaseException) -> None:
        """Give a file that has become shorter as the cause: a loader process that was reading it has died of that."""
        while exception.__cause__ is not None:
            exception = exception.__cause__
        if isinstance(exception, InputError):
            return
        try:
            for split in (self._files or {}).values():
                split.check_files()
        except InputError as cut:
            exception.__cause__ = cut

    def summary(self) -> dict[str, str]:
        """Folder, sizes, and which rows are validated on."""
        files = self._all_files()
        said = {
            "data": str(self.path),
            "features": f"{self.num_features:,}, {files['train'].features.dtype}",
            "classes": f"{self.num_classes:,}" + (" (num_classes)" if self._given_classes else ""),
            **super().summary(),
        }
        if self.val_split not in files:
            said["validation"] += f", as there is no folder {self.val_split!r}"
        else:
            of_training = ", the training rows" if self.val_split == "train" else ""
            said["validation"] += f" of {self.val_split!r}{of_training}"
        return said

    def learned(self) -> dict[str, Any]:
        """D and K."""
        return {"num_features": self.num_features, "num_classes": self.num_classes}

    def fingerprint(self, rows: int) -> str:
        """Hash of all labels of the first ``rows`` training rows, and the features of some."""
        files = self._all_files()["train"]
        return files.fingerprint(np.arange(rows), files.labels[:rows])

    def forget(self) -> None:
        """Have the files opened anew."""
        super().forget()
        self._files = self._class_counts = None
        self._num_classes = self._given_classes or self.restored.get("num_classes")

    def _all_files(self) -> dict[str, FeatureFiles]:
        """The files of every folder that is there of those that the splits are in."""
        if self._files is None:
            self._files = self._open_files()
        return self._files

    def _open_files(self) -> dict[str, FeatureFiles]:
        if not self.path.is_dir():
            raise InputError(f"path {self.path} is not a folder; it must hold a folder for each split")
        if not (self.restored or (self.path / "train").is_dir()):
            raise InputError(self.missing("train"))
        names = dict.fromkeys(("train", self.val_split, self.test_split))
        files = {name: FeatureFiles(self.path / name) for name in names if (self.path / name).is_dir()}
        if not files:
            raise InputError(f"path {self.path} has no split")
        width = self.restored.get("num_features") or files["train"].features.shape[1]
        for name, split in files.items():
            if split.features.shape[1] != width:
                raise InputError(
                    f"splits differ in the number of features: 'train' has {width}, {name!r} has "
                    f"{split.features.shape[1]}"
                )
        largest = max(split.check_labels(self._num_classes) for split in files.values())
        if not self.restored:
            check_batch_size(self.batch_size, len(files["train"]))
        if self._num_classes is None:
            self._num_classes = largest + 1
        return files
