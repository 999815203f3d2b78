"""Classify images by the names of their classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.utilities.distributed import gather_all_tensors

from scent_lightning.callbacks.evaluation import EvaluationCallback, Stage
from scent_lightning.callbacks.zero_shot import (
    check_validates,
    checked_data,
    checked_templates,
    encoded_images,
    zero_shot_classifier,
)
from scent_lightning.data.folders import elsewhere
from scent_lightning.data.image_folder import class_folders, images_in, images_of_classes, is_junk, passed_over
from scent_lightning.data.image_text.pairs import BadPairError, decode
from scent_lightning.data.images import first_line
from scent_lightning.errors import InputError
from scent_lightning.metrics import ZeroShotAccuracy
from scent_lightning.metrics.retrieval import first_of_each
from scent_lightning.optional import optional_module
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed

__all__ = ["ZeroShotClassification"]

SHOWN = 3  # classes in a message
_SPLITS = ("train", "val", "valid", "validation", "test")


class ZeroShotClassification(EvaluationCallback):
    """Zero-shot accuracy of a CLIP model at the end of every validation and test run.

    ``open_clip.build_zero_shot_classifier`` makes the classifier: the mean of a class's prompts, which are its name in
    every template. An image belongs to the class whose mean is the nearest. The images are

    * the validation rows of the data module, if ``path`` is None: ``labels("val")`` has their classes
      (``ImageTextDataModule`` with ``class_column``), and their embeddings are those that the step returned, a
      dictionary with "image", shape ``(B, D)``, normalised, and "index", shape ``(B,)``. Rows without a class (−1) are
      left out, and a row that several processes had counts once.
    * or those in ``path``, one folder per class (hidden ones are none), transformed as the data module's
      ``evaluation_transform`` does. Each process encodes its share of them, in the Trainer's precision.

    Logged are open_clip's ``val/{name}-zeroshot-val-top1`` and, for more than five classes, ``…-top5``: the fraction of
    all images; and ``…-mean_per_class_recall`` as in CLIP benchmark: the mean over the classes that have images. Where
    ``test`` runs, they begin with ``test/``. The sanity check logs nothing.

    The module needs an open_clip model as its ``model``, and the data module has to have ``tokenize``; both hold for
    ``CLIPTask`` with ``ImageTextDataModule``.

    Args:
        path: folder of images; one that is not there is looked for in the folder that the environment variable
            SCENT_LIGHTNING_DATA names. None takes the validation rows.
        class_names: what to call the classes, in their order: a list, a file with one name a line, or "imagenet" for
            open_clip's names of its 1,000 classes. None takes the names of the folders (with spaces for underscores) or
            the data module's ``class_names``.
        templates: texts with ``{}`` for the name, one or a list; "openai" or "simple" for open_clip's 80 or 7 templates
            of ImageNet.
        name: of what is logged; None takes "imagenet" with its names, else the folder's (that of its parent for a
            folder called val, test and the like), or the ``class_column``.
        every_n_epochs: during a fit, classify in every n-th epoch only.
        batch_size: images at a time, in each process.
        num_workers: processes that load the folder's images; 0 loads in the training process.

    Raises:
        InputError: an argument is not as above. Before a run: a folder, class or column that is missing, another number
            of names than of classes, or a module or data module that lacks something. At its first batch: a step that
            returns something else. At the end of the first epoch: an image of the folder that cannot be read.

    Example:
        >>> import lightning as L
        >>> callback = ZeroShotClassification("cifar10/test", templates=["a photo of a {}.", "a drawing of a {}."])
        >>> trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        path: str | None = None,
        class_names: list[str] | str | None = None,
        templates: list[str] | str = "a photo of a {}.",
        name: str | None = None,
        every_n_epochs: int = 1,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__(every_n_epochs)
        checked_integer("batch_size", batch_size)
        checked_integer("num_workers", num_workers, least=0)
        self.path = path
        self.class_names = class_names
        self.templates = templates if templates in ("openai", "simple") else checked_templates(templates)
        self.name = name
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._names: list[str] = []
        self._prefix = ""
        self._labels: Tensor | None = None
        self._folder: Any = None
        self._rows: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the images and the names of their classes."""
        if stage == "predict":
            return
        needed = ("tokenize",) if self.path is None else ("tokenize", "evaluation_transform")
        data = checked_data(self, trainer, pl_module, *needed)
        if self.path is None:
            classes = list(getattr(data, "class_names", []))
            if not classes:
                raise InputError(
                    "ZeroShotClassification needs images with classes: give it path, or the data module class_column"
                )
            labels: Tensor = data.labels("val")
            if not bool((labels >= 0).any()):
                raise InputError(f"ZeroShotClassification finds no class in any of {len(labels)} validation rows")
            self._labels = labels
        else:
            self._folder = _image_folder(self.path, data.evaluation_transform)
            classes = [folder.replace("_", " ") for folder in self._folder.classes]
        self._names = classes if self.class_names is None else _read_names(self.class_names)
        if len(self._names) != len(classes):
            raise InputError(
                f"class_names must be one for each of {len(classes)} classes, got {len(self._names)}: the classes are "
                f"{listed(classes, SHOWN)}, the names {listed(self._names, SHOWN)}"
            )
        if len(classes) < 2:
            raise InputError(f"ZeroShotClassification needs at least two classes, got {classes[0]!r} alone")
        self._prefix = f"{self.name or self._default_name(data)}-zeroshot-val"

    def _default_name(self, data: Any) -> str:
        if self.class_names == "imagenet":
            return "imagenet"
        if self.path is None:
            return getattr(data, "class_column", None) or "classes"
        folder = Path(self.path).resolve()
        return folder.parent.name if folder.name.lower() in _SPLITS else folder.name

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a run in which the images would never be looked at."""
        check_validates(self, trainer, "classifies")

    def start(self, pl_module: L.LightningModule) -> None:
        """Start with no rows."""
        self._rows = []

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Keep the embeddings of the batch's images, if those are what to classify."""
        if self._labels is not None and dataloader_idx == 0:
            image, index = self.tensors(step, outputs, "image", "index")
            self._rows.append((image.detach().float(), index))

    @torch.no_grad()
    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Classify and log."""
        rows, self._rows = self._rows, []
        classifier = zero_shot_classifier(trainer, pl_module, self._names, self.templates)
        if self._labels is None:
            parts = list(self._encoded(trainer, pl_module))
        else:
            parts = _unrepeated(rows, self._labels.to(pl_module.device), trainer)
        # Without an image a process still takes part, with no rows.
        nothing = classifier.new_empty(0, len(classifier)), torch.empty(0, dtype=torch.int64, device=classifier.device)
        images, labels = (torch.cat(column) for column in zip(nothing, *parts, strict=True))
        metric = ZeroShotAccuracy(classifier.shape[1]).to(classifier.device)
        for start in range(0, max(1, len(images)), self.batch_size):
            some = slice(start, start + self.batch_size)
            metric.update(images[some] @ classifier, labels[some])
        for result, value in metric.compute().items():
            pl_module.log(f"{stage}/{self._prefix}-{result}", value, sync_dist=True)

    def _encoded(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[tuple[Tensor, Tensor]]:
        """Embeddings and classes of this process's share of the folder, in batches."""
        share = Subset(self._folder, range(trainer.global_rank, len(self._folder), trainer.world_size))
        # A loader draws a seed: from a generator of its own, or training would continue with other random numbers.
        loader = DataLoader(share, self.batch_size, num_workers=self.num_workers, generator=torch.Generator())
        for images, labels in loader:
            yield encoded_images(trainer, pl_module, images), labels.to(pl_module.device)


def _unrepeated(rows: list[tuple[Tensor, Tensor]], labels: Tensor, trainer: L.Trainer) -> list[tuple[Tensor, Tensor]]:
    """Embeddings and classes of the rows that have one: each in one process only, and once there."""
    index = torch.cat([labels.new_empty(0), *(part[1].long() for part in rows)])
    everyone = gather_all_tensors(index) if trainer.world_size > 1 else [index]
    first = first_of_each(torch.cat(everyone))
    start = sum(len(part) for part in everyone[: trainer.global_rank])
    mine = first[(first >= start) & (first < start + len(index))] - start
    mine = mine[labels[index[mine]] >= 0]
    return [(torch.cat([part[0] for part in rows])[mine], labels[index[mine]])] if len(mine) else []


def _read_names(class_names: list[str] | str) -> list[str]:
    if not isinstance(class_names, str):
        return list(class_names)
    if class_names == "imagenet":
        return list(optional_module("open_clip", "ZeroShotClassification").IMAGENET_CLASSNAMES)
    file = next((place for place in (class_names, elsewhere(class_names)) if os.path.isfile(place)), None)
    if file is None:
        raise InputError(f"class_names must be a list, 'imagenet' or a file with one name a line, got {class_names!r}")
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"class_names {class_names} cannot be read: {first_line(error)}") from error
    return [line.strip() for line in lines if line.strip()]


class _ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images of a folder with one folder for each class, with the position of their class.

    Args:
        folder: has the classes' folders, at least one.
        transform: of an image, uint8, shape (3, H, W).
    """

    def __init__(self, folder: str, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform
        self.classes, others = class_folders(folder)
        if empty := [name for name in others if not is_junk(name)]:
            raise InputError(
                f"path {folder} must have one folder of images per class: {listed(empty, SHOWN)} has no image"
            )
        self.samples, counts = images_of_classes(folder, {name: label for label, name in enumerate(self.classes)})
        counts += images_in(folder)[1]
        if counts:
            rank_zero_info(f"{len(self.samples):,} images to classify in {folder}; passed over: {passed_over(counts)}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(_read_image(path)), label


def _image_folder(path: str, transform: Callable[[Tensor], Tensor]) -> _ImageFolder:
    """The data set of the folder's images."""
    folder = next((place for place in (path, elsewhere(path)) if os.path.isdir(place)), None)
    if folder is None:
        raise InputError(f"path {path} is not a folder; it must have one folder of images per class")
    found = _ImageFolder(folder, transform)
    if not found.classes:
        raise InputError(f"path {path} must have one folder of images per class: it has none")
    return found


def _read_image(path: str) -> Tensor:
    try:
        return decode(path, path)
    except BadPairError as error:
        raise InputError(str(error)) from error
