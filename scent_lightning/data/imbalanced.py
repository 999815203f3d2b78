"""Images or features of two groups of classes, of which some of the positive training rows may be removed."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from scent_lightning.data.augmentation import at_random
from scent_lightning.data.features import Batch, _check_integer, _FeatureDataModule, _FileSplit, _Split
from scent_lightning.data.image_folder import class_folders, images_in, images_of_classes, is_junk, passed_over
from scent_lightning.data.images import UnreadableImageError, decode_image, first_line
from scent_lightning.data.indexed import place_in_run, sampled_loader, shuffle_seed
from scent_lightning.data.state import fingerprint, sampled
from scent_lightning.data.stratified import StratifiedBatchSampler, check_class_size
from scent_lightning.errors import InputError
from scent_lightning.summary import listed, rows_in_words

__all__ = ["ImbalancedImageDataModule"]

Array = npt.NDArray[Any]
Transform = Callable[[Tensor], Tensor]
Name = Literal["cifar10", "cifar100", "folder", "features"]

NORMALISATION = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

NUMBER = re.compile(r"\s*[+-]?\d+\s*")
# Of two classes of these names, in whatever case, the first is positive without being told.
OBVIOUS_NAMES = (
    ("positive", "negative"),
    ("pos", "neg"),
    ("1", "0"),
    ("1", "-1"),
    ("true", "false"),
    ("yes", "no"),
    ("defect", "ok"),
)


# Where the rows of a split come from. Each source has all rows of the split, whatever their class.


class _ArrayImages:
    """Images in memory.

    Args:
        images: shape ``(N, 3, H, W)``, uint8.
        labels: class numbers, shape ``(N,)``, int64.
    """

    def __init__(self, images: Tensor, labels: Array) -> None:
        self.images = images
        self.labels = labels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.images.shape[2], self.images.shape[3]

    def fetch(self, rows: Array) -> Tensor:
        """Images of ``rows``, shape (B,): uint8 of shape (B, 3, H, W)."""
        return self.images[torch.from_numpy(rows)]


class _FileImages:
    """Images in files, decoded when they are fetched.

    Args:
        paths: of the images.
        labels: class numbers, shape ``(N,)``, int64.
        keep: keep what was decoded (and resized).
        resize: applied to each image, to bring all to one size; None demands that they have one.
    """

    def __init__(self, paths: list[str], labels: Array, keep: bool, resize: Transform | None) -> None:
        self.paths = np.array(paths)  # one block of memory, which forked loader processes share
        self.labels = labels
        self.keep = keep
        self.resize = resize
        self._size: tuple[int, int] | None = None
        self._kept: Tensor | None = None
        self._is_kept = np.zeros(len(paths), dtype=bool)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, of the first image."""
        if self._size is None:
            _, height, width = self._one(0).shape
            self._size = height, width
        return self._size

    def read(self, row: int) -> Tensor:
        """The image as it is in the file: uint8 of shape (3, H, W)."""
        path = str(self.paths[row])
        try:
            return decode_image(path)
        except (FileNotFoundError, UnreadableImageError) as error:
            raise InputError(f"cannot read {path} as an image: {first_line(error)}") from error

    def _one(self, row: int) -> Tensor:
        image = self.read(row)
        return image if self.resize is None else self.resize(image)

    def fetch(self, rows: Array) -> Tensor:
        """Images of ``rows``, shape (B,): uint8 of shape (B, 3, H, W)."""
        size = self.size
        if self.keep and self._kept is None:
            self._kept = torch.empty(len(self.paths), 3, *size, dtype=torch.uint8)
        images = torch.empty(len(rows), 3, *size, dtype=torch.uint8)
        for position, row in enumerate(rows.tolist()):
            if self._is_kept[row]:
                continue
            image = self._one(row)
            if image.shape[1:] != size:
                raise InputError(
                    f"image_size must be given where images differ in size: {self.paths[row]} is {image.shape[2]} × "
                    f"{image.shape[1]} pixels, {self.paths[0]} is {size[1]} × {size[0]}"
                )
            images[position] = image
            if self._kept is not None:
                self._kept[row] = image
                self._is_kept[row] = True
        return images if self._kept is None else self._kept[torch.from_numpy(rows)]


# Splits: the rows of a source that belong to one of the two groups


class _BinarySplit(_Split):
    """Rows of two groups of classes; item ``i`` is row ``rows[i]`` of the source.

    Args:
        rows: shape ``(n,)``, int64.
        labels: 0 or 1, shape ``(n,)``, int64; None where the rows to predict have none.
    """

    def __init__(self, rows: Array, labels: Array | None) -> None:
        self.rows = rows
        self._labels = labels

    @property
    def labels(self) -> Array:
        """Labels of the rows, shape (n,); there must be some."""
        assert self._labels is not None
        return self._labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | Sequence[int]) -> Batch:
        return super().__getitem__(index) if isinstance(index, int) else self.__getitems__(index)

    def _inputs(self, rows: Array) -> Array:
        """Inputs of the source's rows ``rows``, shape (B,): float32, shape (B, …)."""
        raise NotImplementedError

    def _fetch(self, index: Array) -> tuple[Array, Array | None]:
        return self._inputs(self.rows[index]), None if self._labels is None else self._labels[index]


class _FeatureSplit(_BinarySplit):
    def __init__(self, source: _FileSplit, rows: Array, labels: Array | None) -> None:
        super().__init__(rows, labels)
        self.source = source

    def _inputs(self, rows: Array) -> Array:
        return self.source._fetch(rows)[0]


class _ImageSplit(_BinarySplit):
    """Images, each augmented on its own as bytes, and normalised as a batch.

    Args:
        source: the images.
        rows: see :class:`_BinarySplit`.
        labels: see :class:`_BinarySplit`.
        normalise: takes uint8 of shape (B, 3, H, W) to float32.
        augment: gives the random transform of one image for a height and width; None for none.
        whole: augment the images as they are in the files, and not those brought to one size.
        seed: of the random transforms.
    """

    def __init__(
        self,
        source: _ArrayImages | _FileImages,
        rows: Array,
        labels: Array | None,
        normalise: Transform,
        augment: Callable[[int, int], Transform] | None = None,
        whole: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(rows, labels)
        self.source = source
        self.normalise = normalise
        self.augment = augment
        self.whole = whole
        self.seed = seed
        self._transform: Transform | None = None

    def _inputs(self, rows: Array) -> Array:
        if len(rows) == 0:
            return np.empty((0, 3, *self.source.size), dtype=np.float32)
        images: Tensor
        if self.augment is None:
            images = self.source.fetch(rows)
        elif self.whole:
            assert isinstance(self.source, _FileImages)
            transform, read = self.augment(0, 0), self.source.read
            made = at_random(rows.tolist(), lambda row: transform(read(row)), self.seed, self.epoch)
            images = torch.stack(list(made))
        else:
            if self._transform is None:
                self._transform = self.augment(*self.source.size)
            change, fetched = self._transform, iter(self.source.fetch(rows))
            made = at_random(rows.tolist(), lambda _: change(next(fetched)), self.seed, self.epoch)
            images = torch.stack(list(made))
        inputs: Array = self.normalise(images).numpy()
        return inputs


class _Crop:
    """Random crop of the zero-padded image, and flip."""

    def __call__(self, height: int, width: int) -> Transform:
        from torchvision.transforms import v2

        crop = v2.RandomCrop((height, width), padding=[width // 8, height // 8])
        transform: Transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
        return transform


class _ResizedCrop:
    """Random part of the image, resized to ``size`` × ``size``, and flip."""

    def __init__(self, size: int) -> None:
        from torchvision.transforms import v2

        self.transform: Transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])

    def __call__(self, height: int, width: int) -> Transform:
        return self.transform


def _entries(classes: list[str | int], names: Container[Any]) -> list[str | int]:
    """Classes one by one: of ``[yes, no]`` YAML makes no texts, and the command line hands on the whole as one."""
    found: list[str | int] = []
    for entry in classes:
        if isinstance(entry, str) and entry not in names and len(entry) > 2 and entry[0] + entry[-1] == "[]":
            found += [part.strip().strip("'\"") for part in entry[1:-1].split(",")]
        else:
            found.append(entry)
    return found


class ImbalancedImageDataModule(_FeatureDataModule):
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
    * "folder": ``train/<class>/<image>``, and ``val`` and ``test`` like it. Without ``val``, ``test`` is validated on.
      A folder that is hidden, a system's own (such as ``__MACOSX``) or without an image is no class. Images are files
      that end in jpg, jpeg, jfif, jpe, png, apng, webp, gif, bmp, tif, tiff, ppm, pgm, pbm or pnm, in whatever case;
      others, and those that begin with a dot, are passed over and counted.
    * "features": ``train/features.npy`` and ``train/labels.npy``, and ``val`` and ``test`` like it, as in
      :class:`~scent_lightning.data.FeatureDataModule`. Without ``val``, ``test`` is validated on.

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
        dataset: what is in ``path``; see above.
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
        std: standard deviation of each channel, like ``mean``.
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
        super().__init__(batch_size, eval_batch_size, num_workers)
        if dataset not in get_args(Name):
            raise InputError(f"dataset must be one of {', '.join(get_args(Name))}, got {dataset!r}")
        _check_integer("batch_size", batch_size, 2)
        if positives_per_batch is None:
            positives_per_batch = batch_size // 2
        _check_integer("positives_per_batch", positives_per_batch, 1)
        if positives_per_batch >= batch_size:
            raise InputError(
                f"positives_per_batch must be from 1 to batch_size − 1 = {batch_size - 1}, got {positives_per_batch}"
            )
        number = isinstance(removed_positives, (int, float)) and not isinstance(removed_positives, bool)
        if not number or not 0 <= removed_positives < 1:
            raise InputError(f"removed_positives must be in [0, 1), got {removed_positives!r}")
        _check_integer("seed", seed, 0)
        if batches_per_epoch is not None:
            _check_integer("batches_per_epoch", batches_per_epoch, 1)
        if image_size is not None:
            if dataset != "folder":
                raise InputError(f"image_size is only for dataset 'folder', got {image_size!r} with {dataset!r}")
            _check_integer("image_size", image_size, 1)
        for name, channels, least in (("mean", mean, -math.inf), ("std", std, 0.0)):
            if channels is None:
                continue
            if dataset == "features":
                raise InputError(f"{name} is only for images, got {channels!r} with dataset 'features'")
            if len(channels) != 3 or not all(least < value < math.inf for value in channels):
                above = " above 0" if name == "std" else ""
                raise InputError(f"{name} must be 3 finite numbers{above}, got {channels!r}")
        if dataset in ("cifar10", "cifar100"):
            for name, split, usual in (("val_split", val_split, "val"), ("test_split", test_split, "test")):
                if split != usual:
                    raise InputError(f"{name} is not for dataset {dataset!r}, which has one test set, got {split!r}")
        for name, classes in (("positive_classes", positive_classes), ("negative_classes", negative_classes)):
            if classes is not None and len(classes) == 0:
                raise InputError(f"{name} must name at least one class, got an empty list")
        self.path = Path(path)
        self.dataset = dataset
        self.positives_per_batch = positives_per_batch
        self._given_sizes = batch_size, positives_per_batch
        self.positive_classes = positive_classes
        self.negative_classes = negative_classes
        self.removed_positives = removed_positives
        self.augment = augment
        self.image_size = image_size
        self.mean = mean
        self.std = std
        self.in_memory = in_memory
        self.seed = seed
        self.val_split = val_split
        self.test_split = test_split
        self.download = download
        self.batches_per_epoch = batches_per_epoch
        self._groups: tuple[list[Any], Array] | None = None
        self._sources: dict[str, _ArrayImages | _FileImages | _FileSplit] = {}
        self._splits: dict[str, _BinarySplit] = {}
        self._removed_rows = 0  # of the positive training rows

    @property
    def num_features(self) -> int | None:
        """Number of features D; None for images."""
        if "num_features" in self._of_checkpoint:
            return cast(int | None, self._of_checkpoint["num_features"])
        source = self._source("train")
        return int(source.features.shape[1]) if isinstance(source, _FileSplit) else None

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
        if self.download and self.dataset in ("cifar10", "cifar100"):
            self._cifar(True, download=True)

    def setup(self, stage: str) -> None:
        """Find and check what the stage needs: classes, labels, files; images are read when they are fetched."""
        if stage == "fit":
            self._sampler()
        elif not self._of_checkpoint and not (self._has_train_split() and self._says_groups()):
            return  # a checkpoint that is still to be loaded says what the classes and their groups are
        if stage in ("fit", "validate"):
            name = self._evaluated("val")
            if name is not None:
                self._split(name)
            elif stage == "validate":
                raise InputError(f"val_split {self._missing(self.val_split)}")
        elif stage == "test":
            self._test_split()
        elif stage == "predict":
            self.predict_dataloader()

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches with a fixed number of positive rows."""
        return sampled_loader(self._train_split(), self._sampler(), self.num_workers)

    def train_eval_dataloader(self) -> DataLoader[Any]:
        """The training rows in order, without augmentation: to evaluate the objective of training exactly."""
        return self._evaluation_loader(self._split("train", augment=False))

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows; an empty list, which Lightning skips, if there is no such split."""
        name = self._evaluated("val")
        return [] if name is None else self._evaluation_loader(self._split(name))

    def test_dataloader(self) -> DataLoader[Any]:
        """Test rows."""
        return self._evaluation_loader(self._test_split())

    def predict_dataloader(self) -> DataLoader[Any]:
        """The rows to predict; without any the test, validation or training rows."""
        folder = self._predicted_folder()
        if folder is not None:
            return self._evaluation_loader(self._predicted(folder))
        name = self._evaluated("test") or self._evaluated("val")
        return self._evaluation_loader(self._split("train", augment=False) if name is None else self._split(name))

    def _predicted_folder(self) -> Path | None:
        """Where rows to predict are, if there are any but those of the splits."""
        if self.dataset not in ("folder", "features"):
            return None
        path = self._folder()
        if (path / "predict").is_dir():
            return path / "predict"
        if self.dataset == "features":
            return path if any((path / f"features.{kind}").is_file() for kind in ("npy", "pt")) else None
        return path if path.is_dir() and images_in(path)[0] else None

    def _predicted(self, folder: Path) -> _BinarySplit:
        """All rows of a folder, without labels."""
        if self.dataset == "features":
            source = _FileSplit(folder, labelled=False)
            width = self.num_features if self._of_checkpoint else source.features.shape[1]
            if source.features.shape[1] != width:
                raise InputError(
                    f"{source.path} has {source.features.shape[1]} features, the training rows had {width}"
                )
            return _FeatureSplit(source, np.arange(len(source)), None)
        paths, others = images_in(folder)
        if not paths:
            inside = [images_in(place) for place in folder.iterdir() if place.is_dir() and not is_junk(place.name)]
            paths = sorted(path for found, _ in inside for path in found)
            others += sum((counts for _, counts in inside), Counter())
        said = f"; passed over: {passed_over(others)}" if others else ""
        if not paths:
            raise InputError(f"{folder} has no image{said}")
        if others:
            rank_zero_info(f"{len(paths):,} images to predict in {folder}{said}")
        images = _FileImages(paths, np.empty(0, dtype=np.int64), self.in_memory, self._resize())
        return _ImageSplit(images, np.arange(len(paths)), None, self._normalise())

    def _train_split(self) -> _BinarySplit:
        return self._split("train", augment=self.augment)

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

    def _has_train_split(self) -> bool:
        return self.dataset in ("cifar10", "cifar100") or (self._folder() / "train").is_dir()

    def _says_groups(self) -> bool:
        """Whether the arguments say which classes are positive, whatever the classes are called."""
        given = self.positive_classes is not None or self.negative_classes is not None
        return given or self.dataset in ("cifar10", "cifar100")

    def _summary(self) -> dict[str, str]:
        classes, groups = self._grouping()
        counts = self._sizes("train")
        removed = self._removed_rows
        said = {"data": f"{self.dataset} in {self._folder()}"}
        if self.num_features is not None:
            said["features"] = f"{self.num_features:,}"
        for kind, group in (("positive", 1), ("negative", 0), ("left out", -1)):
            named = [name for name, of in zip(classes, groups, strict=True) if of == group]
            if named:
                said[f"{kind} classes"] = listed(named)
        said["training"] = counts
        if removed:
            said["removed"] = (
                f"{rows_in_words(removed)} of {removed + self.num_positives:,} positive training rows at random"
            )
        said["validation"] = self._validation_in_words()
        return said

    def _sizes(self, split: str) -> str:
        labels = self._split(split, self.augment and split == "train").labels
        positives = int(labels.sum())
        return f"{rows_in_words(len(labels))}: {positives:,} positive, {len(labels) - positives:,} negative"

    def _validation_in_words(self) -> str:
        name = self._evaluated("val")
        if name is None:
            return f"none, as there is neither a folder {self.val_split!r} nor {self.test_split!r}"
        counts = self._sizes(name)
        if self.dataset in ("cifar10", "cifar100"):
            return f"{counts}; the official test set"
        if name != self.val_split:
            return f"{counts}; of {name!r}, as there is no folder {self.val_split!r}"
        return f"{counts}; of {name!r}" + (", the training rows" if name == "train" else "")

    # What a checkpoint holds

    def _learn(self) -> dict[str, Any]:
        classes, groups = self._grouping()
        return {"classes": list(classes), "groups": torch.from_numpy(groups), "num_features": self.num_features}

    def _fingerprint(self, rows: int) -> str:
        split, source = self._train_split(), self._source("train")
        chosen, labels = split.rows[:rows], split.labels[:rows]
        if isinstance(source, _FileSplit):
            return source.fingerprint(chosen, labels)
        if isinstance(source, _ArrayImages):
            return fingerprint([labels, chosen, source.images[torch.from_numpy(chosen[sampled(len(chosen))])].numpy()])
        paths = source.paths[chosen].tolist()
        names = [os.path.relpath(path, self._folder()) for path in paths]
        return fingerprint([labels, *names, np.array([os.path.getsize(path) for path in paths])])

    def _forget(self) -> None:
        self._groups = None
        self._sources = {}
        self._splits = {}

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

    # Which splits there are

    def _folder(self) -> Path:
        if not self.path.exists() and not self.path.is_absolute() and os.environ.get("SCENT_LIGHTNING_DATA"):
            elsewhere = Path(os.environ["SCENT_LIGHTNING_DATA"]) / self.path
            if elsewhere.is_dir():
                return elsewhere
        return self.path

    def _evaluated(self, kind: Literal["val", "test"]) -> str | None:
        """Name of the split to evaluate on; None if there is none."""
        if self.dataset in ("cifar10", "cifar100"):
            return "test"
        for argument, usual in (("val_split", "val"), ("test_split", "test")):
            name: str = getattr(self, argument)
            if kind == "test" and argument == "val_split":
                continue
            if (self._folder() / name).is_dir():
                return name
            if name != usual:  # asked for, perhaps misspelt: another split would be evaluated in its place
                raise InputError(f"{argument} {self._missing(name)}")
        return None

    def _test_split(self) -> _BinarySplit:
        name = self._evaluated("test")
        if name is None:
            raise InputError(f"test_split {self._missing(self.test_split)}")
        return self._split(name)

    def _missing(self, split: str) -> str:
        path = self._folder()
        there = sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
        return f"{split!r}: missing split, there is no folder {path / split}; {path} has: " + (
            listed(there) or "no folder at all"
        )

    # Rows of each split

    def _source(self, split: str) -> _ArrayImages | _FileImages | _FileSplit:
        if split not in self._sources:
            if self.dataset in ("cifar10", "cifar100"):
                archive = self._cifar(split == "train", self.download and self.trainer is None)
                images = torch.from_numpy(archive.data).permute(0, 3, 1, 2).contiguous()
                self._sources[split] = _ArrayImages(images, np.array(archive.targets, dtype=np.int64))
            elif not self._folder().is_dir():
                raise InputError(f"path {self._folder()} is not a folder; it must hold a folder for each split")
            elif not (self._folder() / split).is_dir():
                raise InputError(f"path needs a split {self._missing(split)}")
            elif self.dataset == "features":
                self._sources[split] = self._features(split)
            else:
                self._sources[split] = self._images(split)
        return self._sources[split]

    def _cifar(self, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        kind = datasets.CIFAR10 if self.dataset == "cifar10" else datasets.CIFAR100
        try:
            return kind(str(self._folder()), train=train, download=download)
        except (RuntimeError, OSError) as error:
            hint = "" if self.download else "set download to true, or "
            raise InputError(
                f"path {self._folder()} has no whole {self.dataset}: {str(error).splitlines()[0].split('. ')[0]}; "
                f"{hint}unpack the archive so that {self._folder() / kind.base_folder} is there"
            ) from error

    def _features(self, split: str) -> _FileSplit:
        source = _FileSplit(self._folder() / split)
        if split != "train" and self.num_features != source.features.shape[1]:
            raise InputError(
                f"splits differ in the number of features: 'train' has {self.num_features}, {split!r} has "
                f"{source.features.shape[1]}"
            )
        return source

    def _images(self, split: str) -> _FileImages:
        folder, classes = self._folder() / split, self._classes()
        found, others = class_folders(folder)
        if not found and not others:
            raise InputError(f"split {split!r} has no class: {folder} needs a folder of images for each class")
        absent = [name for name in classes if name not in {*found, *others} and not is_junk(name)]
        differing = sorted({*found} - {*classes} | {*absent})
        if differing:
            raise InputError(f"classes of the splits differ: 'train' and {split!r} do not share {listed(differing)}")
        samples, counts = images_of_classes(folder, {name: i for i, name in enumerate(classes) if name in found})
        stray, more = images_in(folder)
        counts += more
        counts.update({"in no folder of a class": len(stray)} if stray else {})
        if not samples:
            raise InputError(f"split {split!r} has no image: {folder} needs a folder of images for each class")
        if counts:
            self._note(f"in {split!r} {passed_over(counts)}")
        if others:
            self._note(f"in {split!r} folders that are hidden or without an image ({listed(others)})")
        labels = np.array([label for _, label in samples], dtype=np.int64)
        return _FileImages([path for path, _ in samples], labels, self.in_memory, self._resize())

    def _resize(self) -> Transform | None:
        """Brings an image to evaluate to ``image_size``, if that is given."""
        if self.image_size is None:
            return None
        from torchvision.transforms import v2

        size = round(self.image_size * 8 / 7)
        resize: Transform = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(self.image_size)])
        return resize

    def _folder_classes(self) -> list[str]:
        folder = self._folder() / "train"
        classes, others = class_folders(folder)
        if not classes:
            lacks = "image" if others else "class"
            raise InputError(f"split 'train' has no {lacks}: {folder} needs a folder of images for each class")
        return classes

    # Which classes are positive

    def _classes(self) -> list[Any]:
        """All classes in order of their number: names, or for features the labels themselves."""
        return self._grouping()[0]

    def _grouping(self) -> tuple[list[Any], Array]:
        """All classes, and for each of them 1 (positive), 0 (negative) or −1 (left out)."""
        if self._groups is None:
            classes: list[Any]
            saved = self._of_checkpoint
            if "classes" in saved:
                self._groups = list(saved["classes"]), saved["groups"].numpy()
                return self._groups
            if self.dataset == "folder":
                if not (self._folder() / "train").is_dir():
                    self._source("train")  # says what is missing
                classes = self._folder_classes()
            elif self.dataset == "features":
                source = self._source("train")
                classes = np.unique(source.labels).tolist()
            else:
                classes = list(self._cifar(False, self.download and self.trainer is None).classes)
            self._groups = classes, self._group(classes)
        return self._groups

    def _group(self, classes: list[Any]) -> Array:
        positive = self._numbers("positive_classes", classes)
        negative = self._numbers("negative_classes", classes)
        both = sorted(set(positive or ()) & set(negative or ()))
        if both:
            raise InputError(
                f"positive_classes and negative_classes must not share a class, both have "
                f"{listed([classes[number] for number in both])}"
            )
        groups = np.full(len(classes), -1, dtype=np.int64)
        if positive is None and negative is None:
            positive = self._obvious_positives(classes)
        if positive is None:
            groups[:] = 1
        elif negative is None:
            groups[:] = 0
        groups[positive or []] = 1
        groups[negative or []] = 0
        return groups

    def _obvious_positives(self, classes: list[Any]) -> list[int]:
        """Positions in ``classes`` of the positive ones where no argument says so."""
        if self.dataset in ("cifar10", "cifar100"):
            return list(range(len(classes) // 2, len(classes)))
        names = [str(name).casefold() for name in classes]
        for positive, negative in OBVIOUS_NAMES:
            if sorted(names) == sorted((positive, negative)):
                return [names.index(positive)]
        pairs = ", ".join(f"{positive} and {negative}" for positive, negative in OBVIOUS_NAMES)
        raise InputError(
            f"positive_classes must say which classes of {self._folder()} are positive: {listed(classes)} (only two "
            f"classes called {pairs} need no word)"
        )

    def _numbers(self, argument: str, classes: list[Any]) -> list[int] | None:
        """Positions in ``classes`` of those that ``argument`` names."""
        chosen: list[str | int] | None = getattr(self, argument)
        if chosen is None:
            return None
        numbers = []
        names = {name: number for number, name in enumerate(classes)}
        by_position = self.dataset != "features" and not any(NUMBER.fullmatch(str(name)) for name in classes)
        for entry in _entries(chosen, names):
            # From the command line a number may come as text, and a name as a number.
            value = int(entry) if isinstance(entry, str) and entry.isascii() and entry.isdigit() else entry
            number = None
            if not isinstance(entry, bool):
                named = [names[name] for name in (entry, str(entry), value) if name in names]
                number = named[0] if named else None
                if number is None and by_position and isinstance(value, int) and 0 <= value < len(classes):
                    number = value
            if number is None:
                raise InputError(
                    f"{argument} has an unknown class {entry!r}; {self._known_classes(classes, by_position)}"
                )
            numbers.append(number)
        return numbers

    def _known_classes(self, classes: list[Any], by_position: bool) -> str:
        if self.dataset == "features":
            return f"known are numbers: {listed(classes)}"
        if by_position:
            known = f"known are numbers 0 to {len(classes) - 1}, or names: {listed(classes)}"
        else:
            known = (
                "as classes are called by numbers here, they must be named, in quotes where a name begins with 0: "
                f"{listed(classes)}"
            )
        others = class_folders(self._folder() / "train")[1] if self.dataset == "folder" else []
        return f"{known} (no classes, as they are hidden or without an image: {listed(others)})" if others else known

    def _binary(self, split: str) -> tuple[Array, Array]:
        """Rows of the split's source, shape (n,), ascending, and their labels 0 or 1, shape (n,)."""
        classes, groups = self._grouping()
        numbers: Array = self._source(split).labels
        if self.dataset == "features":
            values = np.array(classes)
            positions = np.minimum(np.searchsorted(values, numbers), len(values) - 1)
            unknown = values[positions] != numbers
            if unknown.any() and (self.positive_classes is None or self.negative_classes is None):
                row = int(unknown.argmax())
                raise InputError(
                    f"labels of split {split!r} must be among those of 'train', which say what is positive: got "
                    f"{numbers[row]} in row {row} (counted from 0), known are: {listed(classes)}"
                )
            labels = np.where(unknown, -1, groups[positions])
        else:
            labels = groups[numbers]
        rows = np.flatnonzero(labels >= 0)
        labels = labels[rows]
        for label, kind in ((1, "positive"), (0, "negative")):
            if not (labels == label).any():
                named = [name for name, group in zip(classes, groups, strict=True) if group == label]
                raise InputError(f"split {split!r} has no {kind} row; {kind} classes: {listed(named) or 'none'}")
        if split == "train":
            positive = np.flatnonzero(labels == 1)
            count = round(self.removed_positives * len(positive))
            if count == len(positive):
                raise InputError(
                    f"removed_positives {self.removed_positives} leaves split 'train' none of its {count} positive rows"
                )
            kept = np.ones(len(rows), dtype=bool)
            kept[np.random.default_rng(self.seed).permutation(positive)[:count]] = False
            rows, labels = rows[kept], labels[kept]
            self._removed_rows = count
        return rows, labels

    def _split(self, name: str, augment: bool = False) -> _BinarySplit:
        augment = augment and self.dataset != "features"
        key = f"{name} augmented" if augment else name
        if key not in self._splits:
            other = self._splits.get(name if augment else f"{name} augmented")
            rows, labels = self._binary(name) if other is None else (other.rows, other.labels)
            source = self._source(name)
            split: _BinarySplit
            if isinstance(source, _FileSplit):
                split = _FeatureSplit(source, rows, labels)
            else:
                change: Callable[[int, int], Transform] | None = None
                if augment:
                    change = _Crop() if self.image_size is None else _ResizedCrop(self.image_size)
                split = _ImageSplit(
                    source, rows, labels, self._normalise(), change, self.image_size is not None, shuffle_seed()
                )
            self._splits[key] = split
        return self._splits[key]

    def _normalise(self) -> Transform:
        from torchvision.transforms import v2

        mean, std = NORMALISATION[self.dataset]
        transform: Transform = v2.Compose(
            [
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(list(self.mean or mean), list(self.std or std), inplace=True),
            ]
        )
        return transform
