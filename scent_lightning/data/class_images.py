"""Images in a folder for each class, for a classifier of any number of classes with a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.folders import elsewhere, missing_split
from scent_lightning.data.fractions import divided_rows
from scent_lightning.data.image_folder import class_folders, images_in, images_of_classes, images_under, passed_over
from scent_lightning.data.imbalanced.images import FileImages
from scent_lightning.data.imbalanced.rows import ImageRows
from scent_lightning.data.imbalanced.source import NORMALISATION
from scent_lightning.data.loading import shuffle_seed
from scent_lightning.data.transforms import ResizedPart, Transform, check_channels, normalise, shown_part
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer, checked_number
from scent_lightning.words import listed, rows_in_words

__all__ = ["ImageFolderDataModule"]

Array = npt.NDArray[Any]
NAMED = 5  # classes in a message


class _Given:
    """A transform of one's own, checked: it has to bring all images to one size.

    Args:
        transform: of an image, uint8, shape (3, H, W).
        size: height and width that come out.
    """

    def __init__(self, transform: nn.Module, size: int) -> None:
        self.transform = transform
        self.size = size

    def __call__(self, height: int, width: int) -> Transform:
        """The transform, which is the same for images of all sizes."""
        return self._checked

    def _checked(self, image: Tensor) -> Tensor:
        made: Tensor = self.transform(image)
        if made.shape != (3, self.size, self.size) or made.dtype != torch.uint8:
            raise InputError(
                f"augmentation must give images of uint8 and shape (3, {self.size}, {self.size}), as image_size says, "
                f"got {made.dtype} of shape {tuple(made.shape)}"
            )
        return made


class ImageFolderDataModule(IndexedDataModule):
    """Images in a folder for each class, as whole batches ``(images, labels, index)``.

    ``images`` is float32 of shape ``(B, 3, S, S)``, ``labels`` int64 of shape ``(B,)``, the class's place in the order
    of the training folders' names, and ``index`` int64 of shape ``(B,)``: the row's position in its split. It is for
    :class:`~scent_lightning.tasks.ExtremeClassificationTask` with a ``backbone``.

    ``path`` has ``train/<class>/<image>``, and ``val`` and ``test`` like it, whose classes may be fewer. Without a
    folder ``val`` a fraction of the training images is validated on, if ``val_fraction`` says so. Folders that are
    hidden, a system's own or without an image are no classes; files that do not end like an image are passed over and
    counted. ``predict`` goes over the images in the folder ``predict``, or else the test, validation or training rows;
    labels are None where there are none.

    Images are converted to RGB of 8 bits, divided by 255 and normalised. Training images are augmented: a part of
    random size and shape, resized, and a flip (torchvision's RandomResizedCrop and RandomHorizontalFlip), drawn from
    the seed, the epoch and the row alone. Evaluation resizes the short side to 8/7 of ``image_size`` and takes the
    centre.

    A checkpoint holds the classes of the training run, so that labels mean the same on other folders.

    Args:
        path: the folder with the splits; one that is not there is looked for in the folder that the environment
            variable SCENT_LIGHTNING_DATA names.
        batch_size: rows of a training batch, in each process.
        image_size: height and width S of the images, in pixels.
        augment: augment training images; False shows them as in evaluation.
        augmentation: a transform of one's own, such as torchvision's ``v2`` modules; None: the usual one. It takes an
            image as it is in the file, uint8 of shape ``(3, H, W)``, and gives one of shape ``(3, S, S)``.
        mean: of each channel, in units of the brightest value; None: of ImageNet.
        std: standard deviation of each channel, in units of the brightest value; None: of ImageNet.
        val_fraction: fraction of the training images for validation, in [0, 1), where there is no folder ``val``.
        split_seed: which images go into validation.
        eval_batch_size: rows of a batch in validation, test and prediction.
        num_workers: loader processes; 0 loads in the training process.
        in_memory: keep decoded images that are shown as in evaluation, 3 · S² bytes each, in each loader process.

    Raises:
        InputError: before training, in one sentence: a missing folder, no image, a class that the training rows do not
            have (which), too few rows, or an argument out of range. When a batch is fetched: an image that cannot be
            read (which), or an augmentation of another size.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("ant", "bee", "cat"):
        ...     (folder / "train" / name).mkdir(parents=True)
        ...     for number in range(2):
        ...         Image.new("RGB", (40, 30)).save(folder / "train" / name / f"{number}.png")
        >>> data = ImageFolderDataModule(str(folder), batch_size=4, image_size=16)
        >>> data.num_classes, data.num_anchors
        (3, 6)
        >>> images, labels, index = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([4, 3, 16, 16]), torch.int64)
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 128,
        image_size: int = 224,
        augment: bool = True,
        augmentation: nn.Module | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        val_fraction: float = 0.0,
        split_seed: int = 0,
        eval_batch_size: int = 512,
        num_workers: int = 0,
        in_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        self.path = Path(path)
        self.image_size: int = checked_integer("image_size", image_size)
        self.augment = augment
        self.augmentation = augmentation
        check_channels(mean, std)
        usual_mean, usual_std = NORMALISATION["folder"]
        self._normalise = normalise(mean or usual_mean, std or usual_std)
        self.val_fraction = checked_number("val_fraction", val_fraction, least=0, below=1)
        self.split_seed: int = checked_integer("split_seed", split_seed, least=0)
        self.in_memory = in_memory
        self._classes: list[str] = []
        self._found: dict[str, tuple[list[str], Array]] = {}

    @property
    def folder(self) -> Path:
        """The path, or where it is in the folder that the environment variable SCENT_LIGHTNING_DATA names."""
        other = Path(elsewhere(str(self.path)))
        return other if not self.path.is_dir() and other.is_dir() else self.path

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of their numbers."""
        if self.restored:
            return list(self.restored["classes"])
        if not self._classes:
            self.existing("train")
        return self._classes

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.classes)

    @property
    def class_counts(self) -> Array:
        """Training rows of each class, shape ``(K,)``: a loss over the classes of a batch may have to know them."""
        counts: Array = np.bincount(self.existing("train").labels, minlength=self.num_classes)
        return counts

    # Splits

    def load(self, split: str) -> ImageRows | None:
        """The images of a split; of "predict" those in its folder, without labels."""
        if split == "predict":
            return self._to_predict()
        divided = split in ("train", "val") and self._is_divided()
        folder = "train" if divided else split
        if not (self.folder / folder).is_dir():
            return None
        paths, labels = self._images_of(folder)
        chosen = self._share(split, len(paths)) if divided else np.arange(len(paths))
        return self._rows(paths, labels, chosen, augment=split == "train" and self.augment)

    def _is_divided(self) -> bool:
        """Whether the folder "train" has the validation rows, too."""
        if self.val_fraction and (self.folder / "val").is_dir():
            raise InputError(
                f"val_fraction must be 0 where there is a folder {self.folder / 'val'}, got {self.val_fraction}"
            )
        return self.val_fraction > 0

    def _share(self, split: str, rows: int) -> Array:
        parts = divided_rows(rows, self.split_seed, self.val_fraction)
        if not len(parts["val"]) or not len(parts["train"]):
            raise InputError(f"val_fraction {self.val_fraction} of {rows} images leaves none to train or validate on")
        return parts[split]

    def _images_of(self, split: str) -> tuple[list[str], Array]:
        """Paths and class numbers of all images of a folder with classes."""
        if split in self._found:
            return self._found[split]
        folder = self.folder / split
        found, others = class_folders(folder)
        if not found:
            raise InputError(f"split {split!r} has no image: {folder} needs a folder of images for each class")
        if split == "train" and not self.restored:
            self._classes = found
        classes = self.classes
        if unknown := sorted({*found} - {*classes}):
            raise InputError(
                f"split {split!r} has classes that the training rows do not have: {listed(unknown, NAMED)}"
            )
        there = {*found}
        samples, counts = images_of_classes(folder, {name: i for i, name in enumerate(classes) if name in there})
        stray, more = images_in(folder)
        counts += more
        counts.update({"in no folder of a class": len(stray)} if stray else {})
        if counts:
            self.note(f"in {split!r} {passed_over(counts)}")
        if others:
            self.note(f"in {split!r} folders that are hidden or without an image ({listed(others)})")
        labels = np.array([label for _, label in samples], dtype=np.int64)
        self._found[split] = [path for path, _ in samples], labels
        return self._found[split]

    def _rows(self, paths: list[str], labels: Array | None, chosen: Array, augment: bool = False) -> ImageRows:
        shown = shown_part(self.image_size)
        known = np.empty(0, dtype=np.int64) if labels is None else labels
        images = FileImages(paths, known, self.in_memory and not augment, shown)
        change = None
        if augment:
            given = self.augmentation
            change = ResizedPart(self.image_size) if given is None else _Given(given, self.image_size)
        of_rows = None if labels is None else labels[chosen]
        return ImageRows(images, chosen, of_rows, self._normalise, change, True, shuffle_seed())

    def _to_predict(self) -> ImageRows | None:
        folder = self.folder / "predict"
        if not folder.is_dir():
            return None
        paths, others = images_under(folder)
        if not paths:
            said = f"; passed over: {passed_over(others)}" if others else ""
            raise InputError(f"{folder} has no image{said}")
        return self._rows(paths, None, np.arange(len(paths)))

    def missing(self, split: str) -> str:
        """What to say of a split whose folder is not there."""
        if not self.folder.is_dir():
            return f"path {self.path} is not a folder; it must hold a folder for each split"
        return f"path needs a split {missing_split(self.folder, split)}"

    def forget(self) -> None:
        """Have the folders looked at anew."""
        super().forget()
        self._classes, self._found = [], {}

    # Summary, and what a checkpoint holds

    def summary(self) -> dict[str, str]:
        """Folder, classes, and how many images each split has."""
        rows = self.split("val")
        validation = "none" if rows is None else rows_in_words(len(rows))
        return {
            "data": str(self.folder),
            "classes": f"{self.num_classes:,}: {listed(self.classes, NAMED)}",
            "training": f"{rows_in_words(self.num_anchors)}; {self._of_each()}",
            "validation": validation + (" of 'train'" if self.val_fraction else ""),
        }

    def _of_each(self) -> str:
        """Images of each class in training; warns of classes without any, which a split may leave."""
        counts = self.class_counts
        if (dead := np.flatnonzero(counts == 0).tolist()) and self.val_fraction:
            names = listed([self.classes[label] for label in dead], NAMED)
            self.warn(f"{self.folder}: {len(dead)} of {self.num_classes} classes are in validation alone: {names}")
        return f"{counts.min():,} to {counts.max():,} of each class"

    def learned(self) -> dict[str, Any]:
        """Names of the classes."""
        return {"classes": list(self.classes)}

    def fingerprint(self, rows: int) -> str:
        """Hash of labels, names and sizes of the files of the first ``rows`` training rows."""
        train = self.existing("train")
        assert isinstance(train.images, FileImages)
        paths = [train.images.paths[row] for row in train.rows[:rows].tolist()]
        names = [os.path.relpath(path, self.folder) for path in paths]
        return fingerprint([train.labels[:rows], *names, np.array([os.path.getsize(path) for path in paths])])
