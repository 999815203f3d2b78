"""Images or features of two groups of classes, of which some of the positive training rows may be removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scent_lightning.data.base import EVALUATED, IndexedDataModule
from scent_lightning.data.imbalanced.cifar import Cifar
from scent_lightning.data.imbalanced.features import FeatureFolder
from scent_lightning.data.imbalanced.image_folder import ImageFolder
from scent_lightning.data.imbalanced.rows import GroupedRows
from scent_lightning.data.imbalanced.source import Options, Source
from scent_lightning.data.imbalanced.splits import GroupedSplits
from scent_lightning.data.loading import place_in_run, sampled_loader, shuffle_seed
from scent_lightning.data.stratified import StratifiedBatchSampler, check_class_size
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["ImbalancedImageDataModule"]

Name = Literal["cifar10", "cifar100", "folder", "features"]
SOURCES: dict[str, type[Source]] = {
    "cifar10": Cifar,
    "cifar100": Cifar,
    "folder": ImageFolder,
    "features": FeatureFolder,
}


class ImbalancedImageDataModule(IndexedDataModule):
    """Images of two groups of classes, positive and negative, as whole batches ``(inputs, labels, index)``.

    ``inputs`` is float32, images of shape ``(B, 3, H, W)`` or features of shape ``(B, D)``; ``labels`` int64 of shape
    ``(B,)``, 1 for the positive group; ``index`` int64 of shape ``(B,)``: the row's position in its split, after the
    removal. A training batch has ``positives_per_batch`` positive rows, then the negative ones; see
    :class:`~scent_lightning.data.StratifiedBatchSampler`. The other batches keep the order of the data.

    ``positive_classes`` says which classes are positive. It may be left out for two classes whose names say so, in
    whatever case: positive and negative, pos and neg, 1 and 0, 1 and −1, true and false, yes and no, defect and ok;
    and for CIFAR, where the second half of the classes by number is positive, as published.

    The fraction ``removed_positives`` of the positive training rows is left out, at random; validation and test rows
    stay as they are. 0.8 on CIFAR gives the data of "When AUC meets DRO" (Zhu et al., 2022).

    What is in ``path``, by ``dataset``:

    * "cifar10", "cifar100": the archive as torchvision unpacks it. The official test set is ``val`` and ``test``.
    * "folder": ``train/<class>/<image>``, and ``val`` and ``test`` like it. Folders that are hidden, a system's own or
      without an image are no classes. Files that do not end like an image are passed over and counted.
    * "features": ``train/features.npy`` and ``train/labels.npy``, and ``val`` and ``test`` like it, as in
      :class:`~scent_lightning.data.FeatureDataModule`.

    Without ``val``, ``test`` is validated on. For another kind of data see
    :class:`~scent_lightning.data.imbalanced.source.Source`.

    Images are converted to RGB of 8 bits (16-bit grey is scaled), divided by 255 and normalised. Training images are
    augmented: a crop of the image padded with black by an eighth of its size, and a flip; with ``image_size``, a part
    of random size and shape, resized, and a flip. Evaluation with ``image_size`` resizes the short side to 8/7 of it
    and takes the centre.

    ``fit`` without a validation split trains without validation. ``predict`` goes over the folder ``predict``, or the
    images or features in ``path`` itself, or else the test split, the validation split or the training rows. It needs
    no labels (for a "folder" no folders of classes), which are None in the batches where there are none.

    With what a checkpoint holds of the training run (the Trainer's ``ckpt_path``, or :meth:`load_state_dict`), only
    ``fit`` needs the training split; the classes and their groups are those of the training run.

    Args:
        path: the folder with the data; one that is not there is looked for in the folder that the environment variable
            SCENT_LIGHTNING_DATA names.
        dataset: what is in ``path``: "cifar10", "cifar100", "folder" (of images) or "features".
        batch_size: rows of a training batch, in each process.
        positives_per_batch: positive rows of a training batch, in each process; None takes half of ``batch_size``.
        positive_classes: names of the positive classes, or their positions in the order of the names, counted from 0.
            A name goes before a position; where a class is called by a number, only names count. Of "features" the
            labels. None takes with ``negative_classes`` all others, and else what is said above.
        negative_classes: the negative classes, like ``positive_classes``; None takes all that are not positive. With
            both given, rows of other classes are left out.
        removed_positives: fraction of the positive training rows that is removed, in [0, 1); 0 keeps all.
        augment: augment training images.
        image_size: height and width of the images of a "folder" after resizing, in pixels; None takes them as they are,
            all of one size.
        mean: of each channel, in units of the brightest value; None takes that of the data set, for "folder" of
            ImageNet.
        std: standard deviation of each channel, in units of the brightest value; None: that belonging to ``mean``.
        eval_batch_size: rows of a batch in validation, test and prediction.
        num_workers: loader processes; 0 loads in the training process.
        in_memory: keep images once they are decoded, 3 · H · W bytes each, in each loader process. Training images
            that are augmented to ``image_size`` are always read again.
        seed: of the removal, at least 0; the shuffle has the seed of ``seed_everything``.
        val_split: the validation split's folder in ``path``; one of another name than "val" must be there.
        test_split: the test split's folder in ``path``; one of another name than "test" must be there to be used.
        download: download CIFAR where it is not in ``path``.
        batches_per_epoch: training batches of an epoch; None takes as many rows as there are.

    Raises:
        InputError: before training, in one sentence: an unknown data set or class, no word on which classes are
            positive, a class in both groups, a group without rows (in which split) or with fewer than a batch needs,
            data that are not there or do not match, or an argument out of range. When a batch is fetched: an image that
            cannot be read or has another size than the first, or a feature that is NaN or infinite (which).

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "train").mkdir()
        >>> np.save(folder / "train" / "features.npy", np.ones((40, 4), dtype=np.float32))
        >>> np.save(folder / "train" / "labels.npy", np.arange(40) % 4)
        >>> data = ImbalancedImageDataModule(
        ...     str(folder), "features", batch_size=8, positives_per_batch=2, positive_classes=[3],
        ...     removed_positives=0.5,
        ... )
        >>> data.num_positives, data.num_negatives, data.num_anchors
        (5, 30, 35)
        >>> inputs, labels, index = next(iter(data.train_dataloader()))
        >>> inputs.shape, inputs.dtype, index.dtype
        (torch.Size([8, 4]), torch.float32, torch.int64)
        >>> labels
        tensor([1, 1, 0, 0, 0, 0, 0, 0])
    """

    def __init__(
        self,
        path: str,
        dataset: Name = "folder",
        batch_size: int = 64,
        positives_per_batch: int | None = None,
        positive_classes: list[str | int] | None = None,
        negative_classes: list[str | int] | None = None,
        removed_positives: float = 0.0,
        augment: bool = True,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        eval_batch_size: int = 512,
        num_workers: int = 0,
        in_memory: bool = True,
        seed: int = 0,
        val_split: str = "val",
        test_split: str = "test",
        download: bool = False,
        batches_per_epoch: int | None = None,
    ) -> None:
        checked_choice("dataset", dataset, SOURCES)
        checked_integer("batch_size", batch_size, least=2)
        super().__init__(batch_size, eval_batch_size, num_workers)
        with_batch = f" with batch_size {batch_size}"
        checked_integer("positives_per_batch", positives_per_batch, most=batch_size - 1, or_none=True, hint=with_batch)
        positives_per_batch = batch_size // 2 if positives_per_batch is None else positives_per_batch
        self.path = Path(path)
        self.dataset = dataset
        self.positives_per_batch = positives_per_batch
        self._given_sizes = batch_size, positives_per_batch
        self.positive_classes = positive_classes
        self.negative_classes = negative_classes
        self.removed_positives = checked_number("removed_positives", removed_positives, least=0, below=1)
        self.augment = augment
        self.seed: int = checked_integer("seed", seed, least=0)
        self.batches_per_epoch: int | None = checked_integer("batches_per_epoch", batches_per_epoch, or_none=True)
        self.options = Options(dataset, self.path, val_split, test_split, image_size, mean, std, in_memory, download)
        SOURCES[dataset].check(self.options)
        self.forget()

    @property
    def num_features(self) -> int | None:
        """Number of features D; None for images."""
        return self._source.num_features

    @property
    def num_positives(self) -> int:
        """Number of positive training rows, after the removal."""
        return int(self._train_split().labels.sum())

    @property
    def num_negatives(self) -> int:
        """Number of negative training rows."""
        return self.num_anchors - self.num_positives

    @property
    def train_labels(self) -> Tensor:
        """Label of each training row, shape ``(n,)``, int64."""
        return torch.from_numpy(self._train_split().labels)

    def prepare_data(self) -> None:
        """Download CIFAR, if asked to and it is not there."""
        self._source.prepare()

    def setup(self, stage: str) -> None:
        """Find and check what the stage needs: classes, labels, files; images are read when they are fetched."""
        if stage == "fit":
            self._sampler()
            self.split("val")
        elif not self.restored and not (self._source.has_training_rows() and self._groups.says_groups):
            return  # a checkpoint that is still to be loaded says what the classes and their groups are
        elif stage == "predict":
            self.predict_dataloader()
        else:
            self.existing(EVALUATED[stage])

    # Splits

    def load(self, split: str) -> GroupedRows | None:
        """The rows of a split; "predict" are those without labels, and "train_eval" the training rows as they are."""
        if self.trainer is None:
            self.prepare_data()  # which it does else
        if split == "predict":
            return self._source.to_predict()
        if split in ("train", "train_eval"):
            if self.restored and not self._source.has_training_rows():
                return None
            return self._groups.of("train", augment=self.augment and split == "train")
        name = self._source.evaluated("test" if split == "test" else "val")
        return None if name is None else self._groups.of(name)

    def missing(self, split: str) -> str:
        """What to say of a split that is not there."""
        if split in ("val", "test"):
            return f"{split}_split {self._source.missing(getattr(self.options, f'{split}_split'))}"
        return f"path needs a split {self._source.missing('train')}"

    def forget(self) -> None:
        """Have the source looked at anew."""
        super().forget()
        self._source = SOURCES[self.dataset](self.options, self.note, self.restored)
        classes = self.positive_classes, self.negative_classes
        self._groups = GroupedSplits(self._source, *classes, self.removed_positives, self.seed)

    def _train_split(self) -> GroupedRows:
        rows: GroupedRows = self.existing("train")
        return rows

    # Loaders

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches with a fixed number of positive rows."""
        return sampled_loader(self._train_split(), self._sampler(), self.num_workers)

    def train_eval_dataloader(self) -> DataLoader[Any]:
        """The training rows in order, without augmentation: to evaluate the objective of training exactly."""
        return self.evaluation_loader(self.existing("train_eval"))

    def predict_dataloader(self) -> DataLoader[Any]:
        """The rows to predict; without any the test, validation or training rows."""
        splits = (split for split in ("predict", "test", "val") if self.split(split) is not None)
        return self.evaluation_loader(self.existing(next(splits, "train_eval")))

    def _sampler(self) -> StratifiedBatchSampler:
        replicas, rank, epoch = place_in_run(self.trainer)
        positives, negatives = self._class_sizes(replicas)
        check_class_size("positives_per_batch", positives, replicas, self.num_positives, "positive")
        check_class_size("batch_size − positives_per_batch", negatives, replicas, self.num_negatives, "negative")
        sampler = StratifiedBatchSampler(
            self.train_labels, positives, negatives, self.batches_per_epoch, shuffle_seed(), replicas, rank
        )
        sampler.set_epoch(epoch)
        return sampler

    def _class_sizes(self, replicas: int) -> tuple[int, int]:
        """Positive and negative rows of a batch.

        A batch size that was changed since, as by BatchSizeFinder, keeps their shares as far as there are rows.
        """
        positives = self.positives_per_batch
        given, given_positives = self._given_sizes
        if self.batch_size == given:
            return positives, self.batch_size - positives
        if positives == given_positives:
            positives = min(max(1, round(self.batch_size * positives / given)), self.batch_size - 1)
        negatives = self.batch_size - positives
        return min(positives, self.num_positives // replicas), min(negatives, self.num_negatives // replicas)

    # Summary, and what a checkpoint holds

    def summary(self) -> dict[str, str]:
        """Where the data are, the groups, and how many rows there are of each."""
        said = {"data": f"{self.dataset} in {self._source.folder}"}
        if self.num_features is not None:
            said["features"] = f"{self.num_features:,}"
        said |= self._groups.summary()
        if (name := self._source.evaluated("val")) is not None:
            return said | {"validation": f"{self.existing('val').in_words()}; {self._source.of_split(name)}"}
        folders = f"{self.options.val_split!r} nor {self.options.test_split!r}"
        return said | {"validation": f"none, as there is neither a folder {folders}"}

    def learned(self) -> dict[str, Any]:
        """All classes, and which group each is in."""
        classes, groups = self._groups.grouping
        return {"classes": list(classes), "groups": torch.from_numpy(groups), "num_features": self.num_features}

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` training rows are, as their source tells them apart."""
        return self._groups.fingerprint(rows)
