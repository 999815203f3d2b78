"""Pairs of an image and a caption, each with its position in the source: a table, shards, or synthetic shapes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scent_lightning.data.augmentation import at_random
from scent_lightning.data.features import _check_integer, _FeatureDataModule, _Split
from scent_lightning.data.images import first_line
from scent_lightning.data.indexed import batch_loader, check_batch_size, place_in_run, shuffle_seed
from scent_lightning.data.pair_sources import (
    LOOKED_FOR,
    BadPairError,
    FilePairs,
    ShardPairs,
    TablePairs,
    elsewhere,
    leads_outside,
    shard_list,
    some_of,
)
from scent_lightning.data.shapes import CLASSES, NUM_CAPTIONS, Shapes
from scent_lightning.data.state import fingerprint
from scent_lightning.data.text_tables import column_names, content_suffix, text_rows
from scent_lightning.errors import InputError
from scent_lightning.optional import of_vision
from scent_lightning.summary import listed, rows_in_words

__all__ = ["ImageTextDataModule"]

Array = npt.NDArray[Any]
Tokenizer = Callable[[list[str]], Tensor]
Transform = Callable[[Tensor], Tensor]
Source = Literal["table", "webdataset", "shapes"]
_Classes = tuple[list[str], Array]  # what occurs, and which of it each row has, shape (n,)

# open_clip.OPENAI_DATASET_MEAN and open_clip.OPENAI_DATASET_STD
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
TOKENISED_AT_ONCE = 100_000  # captions: six seconds, and 31 MB at 77 tokens


# Splits: the rows of a source as batches


class _Normalise:
    """Bytes to float32, divided by 255, minus the mean, divided by the standard deviation.

    Args:
        mean: of each channel.
        std: of each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.scale = 1 / (255 * torch.tensor(std)).view(3, 1, 1)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(torch.float32).mul_(self.scale).add_(self.shift)


class _PairSplit(_Split):
    """What both kinds share.

    Args:
        name: of the split.
        rows: number of rows.
        image_size: height and width of the images.
        normalise: of a batch of images.
    """

    def __init__(self, name: str, rows: int, image_size: int, normalise: _Normalise) -> None:
        self.name = name
        self.rows = rows
        self.image_size = image_size
        self.normalise = normalise

    def __len__(self) -> int:
        return self.rows

    def skipped(self) -> int:
        """How many rows were skipped so far."""
        return 0

    def captions(self) -> list[str]:
        """Caption of each row, "" where there is none."""
        raise NotImplementedError

    def _batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        """Images (B', 3, S, S), uint8, tokens (B', L) and the rows (B',), int64, without those that are skipped."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        images, texts, position = self.__getitems__([index])
        if len(position) == 0:
            raise InputError(f"pair {index} of split {self.name!r} has no caption or no readable image")
        return images[0], texts[0], position[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        images, texts, rows = self._batch(self._rows_of(indices))
        return self.normalise(images), texts.to(torch.int64), rows


class _ShapesSplit(_PairSplit):
    """Synthetic pairs.

    Args:
        name: "train" or "val".
        rows: number of rows.
        seed: of everything.
        image_size: see :class:`_PairSplit`.
        tokens: of every caption there is, shape ``(NUM_CAPTIONS, L)``.
        normalise: see :class:`_PairSplit`.
    """

    def __init__(self, name: str, rows: int, seed: int, image_size: int, tokens: Tensor, normalise: _Normalise) -> None:
        super().__init__(name, rows, image_size, normalise)
        self.shapes = Shapes(name, seed, image_size)
        self.tokens = tokens

    def captions(self) -> list[str]:
        return [Shapes.caption(number) for number in self.shapes.numbers(np.arange(self.rows))]

    def classes(self, kind: str) -> _Classes:
        """What each row's caption says of ``kind``, one of CLASSES."""
        return list(CLASSES[kind]), Shapes.classes(self.shapes.numbers(np.arange(self.rows)), kind)

    def _batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        numbers = self.shapes.numbers(index)
        images = torch.from_numpy(self.shapes.draw(index, numbers))
        return images, self.tokens[torch.from_numpy(numbers)], torch.from_numpy(index)


class _FileSplit(_PairSplit):
    """Pairs read from files when they are fetched.

    Args:
        files: the pairs.
        image_size: see :class:`_PairSplit`.
        tokenizer: of a list of captions.
        normalise: see :class:`_PairSplit`.
        transform: takes one image as it is in its file to S × S.
        seed: of the transform, if it is random; None if it is not.
        keep: keep decoded images: as they are where the transform is random, and else transformed.
    """

    def __init__(
        self,
        files: FilePairs,
        image_size: int,
        tokenizer: Tokenizer,
        normalise: _Normalise,
        transform: Transform,
        seed: int | None,
        keep: bool,
    ) -> None:
        super().__init__(files.split, len(files), image_size, normalise)
        self.files = files
        self.tokenizer = tokenizer
        self.transform = transform
        self.seed = seed
        self.keep = keep
        self._kept: dict[int, tuple[str, Tensor]] = {}
        self.width = tokenizer([""]).shape[1]
        self.tokens: Tensor | None = None
        if isinstance(files, TablePairs) and len(files) <= TOKENISED_AT_ONCE:
            self.tokens = tokenizer(self.captions()).to(torch.int32)

    def skipped(self) -> int:
        return int(self.files.skipped.sum())

    def captions(self) -> list[str]:
        return [self.files.caption(row) for row in range(self.rows)]

    def _read(self, row: int) -> tuple[str, Tensor] | None:
        """Caption and image (uint8, shape (3, S, S)), or None for a pair to skip."""
        kept = self._kept.get(row)
        if kept is not None:
            return kept if self.seed is None else (kept[0], self.transform(kept[1]))
        try:
            caption, image = self.files.read(row)
        except BadPairError as error:
            self.files.skip(row, str(error))
            return None
        assert image is not None
        transformed = self.transform(image)
        if self.keep:
            self._kept[row] = caption, transformed if self.seed is None else image.contiguous()
        return caption, transformed

    def _batch(self, index: Array) -> tuple[Tensor, Tensor, Tensor]:
        rows, captions, images = [], [], []
        numbers = index.tolist()
        pairs = map(self._read, numbers) if self.seed is None else at_random(numbers, self._read, self.seed, self.epoch)
        for row, pair in zip(numbers, pairs, strict=True):
            if pair is not None:
                rows.append(row)
                captions.append(pair[0])
                images.append(pair[1])
        kept = torch.tensor(rows, dtype=torch.int64)
        if not rows:
            empty = torch.empty(0, 3, self.image_size, self.image_size, dtype=torch.uint8)
            return empty, torch.empty(0, self.width, dtype=torch.int64), kept
        texts = self.tokenizer(captions) if self.tokens is None else self.tokens[kept]
        return torch.stack(images), texts, kept


def _texts(path: Path, separator: str, places: dict[str, int]) -> dict[str, list[str]]:
    """Columns of a table by name; a row that is short of one has "" there, which is said."""
    texts: dict[str, list[str]] = {name: [] for name in places}
    short: list[int] = []
    rows = text_rows(path, separator)
    width = len(next(rows)[1])
    for line, fields in rows:
        if len(fields) < width:
            short.append(line)
            fields += [""] * (width - len(fields))
        for name, place in places.items():
            texts[name].append(fields[place])
    if short:
        warnings.warn(
            f"{len(short)} rows of {path} have fewer fields than the header, which count as empty: lines "
            f"{some_of(short)}",
            stacklevel=2,
        )
    return texts


class ImageTextDataModule(_FeatureDataModule):
    """Pairs of an image and a caption, as whole batches ``(images, texts, index)``.

    ``images`` is float32 of shape ``(B, 3, S, S)``, normalised; ``texts`` int64 of shape ``(B, L)``, token numbers;
    ``index`` int64 of shape ``(B,)``: the pair's position in its split of the source, which never depends on other
    pairs. Training batches are shuffled anew every epoch; the others keep the order of the source.

    Where the pairs come from, by ``source``:

    * "table": ``path`` is a CSV or TSV file with a header, and a column each of image paths and captions, in UTF-8; it
      may be compressed as .gz, .bz2 or .xz. A text with the separator in it is in quotation marks; between tabs, a
      quotation mark that does not enclose the whole text belongs to it. Relative image paths are in the table's folder;
      to lead out of it, a path has to be absolute. Validation has a table of its own, ``val_path``, or rows of this
      one: with ``split_column``, index i is the i-th row of the split.
    * "webdataset": ``path`` has tar files with consecutive members such as ``000.jpg`` (or jpeg, png, webp) and
      ``000.txt``, as img2dataset writes them. It is one file, a folder of them, a pattern such as
      ``shards/{000..099}.tar`` or ``shards/*.tar``, or a JSON index as of ``wids``: ``{"shardlist": [{"url":
      "000.tar", "nsamples": 100}, …]}``, with paths in the index's folder. Index i is sample i over all files in their
      order. Without a JSON index the headers of all files are read first; no other member is ever read, and nothing
      unpickled. Files must be local and uncompressed.
    * "shapes": synthetic pairs of 4,032 different captions, such as "a large red circle at the top left on a blue
      background" (at most 15 of CLIP's tokens), ``rows`` for training and ``val_rows`` for validation. A pair depends
      on ``seed``, its split and its index alone. Every 4,032 rows in turn have each caption once, so that no two
      validation rows share one, up to that number. Pictures differ within what the caption says: validation rows have
      captions that were trained on, with other pictures.

    A pair without a caption or with an image that cannot be decoded is skipped, and its batch is smaller; a batch may
    be empty, of shapes (0, …). Of each split the first ones are named in a warning, and ``skipped`` has their number.

    Images become RGB of 8 bits (dropping transparency, and scaling 16-bit grey) and are transformed as by
    ``open_clip.image_transform``: for training a random part, resized, and else the short side resized and the centre
    taken; those of "shapes" stay as they are.

    A pair may have a class, which the batches leave out: ``labels("val")`` has it by index, ``class_names`` what it is
    called. ``class_column`` says where it is; see the callback ``ZeroShotClassification``.

    ``fit`` without validation rows trains without validation. ``test`` goes over the validation rows, and ``predict``
    over these, or else over the training rows.

    Args:
        source: where the pairs come from; see above.
        path: of the table or the shards; one that is not there is looked for in the folder that the environment
            variable SCENT_LIGHTNING_DATA names. Not for "shapes".
        val_path: like ``path``, for validation.
        image_column: of the table.
        caption_column: of the table.
        class_column: of the table, or for "shapes" one of size, shape, position and colour: the class of each row; a
            row without text there has none. None for no classes.
        separator: between the table's columns; None takes a comma for a file that ends in .csv (or .csv.gz and so on),
            and else a tab.
        split_column: of the table; says of which split each row is. None takes all rows of ``path`` for training.
        train_split: the training rows' value in ``split_column``.
        val_split: the validation rows' value in ``split_column``; None for no validation.
        image_size: height and width S, in pixels.
        mean: of each channel, in units of the brightest value; None takes open_clip's OPENAI_DATASET_MEAN.
        std: standard deviation of each channel, like ``mean``; None takes open_clip's OPENAI_DATASET_STD.
        augment: take a random part of training images.
        crop_scale: least and greatest area of that part, as fractions of the image's.
        tokenizer: a model's name for ``open_clip.get_tokenizer``, or a function of a list of n captions that returns
            their token numbers, shape ``(n, L)``.
        context_length: tokens of a caption L; None takes that of the tokenizer.
        batch_size: pairs of a training batch, in each process.
        eval_batch_size: pairs of a batch in validation, test and prediction.
        drop_last: leave out an epoch's last training batch where it is not full.
        num_workers: loader processes; 0 loads in the training process.
        in_memory: keep images once they are decoded, in each loader process: 3 · S² bytes each; training images that
            are augmented at the size they have in their files.
        seed: of the shapes, at least 0; the shuffle has the seed of ``seed_everything``.
        rows: number of training rows of "shapes".
        val_rows: number of validation rows of "shapes"; 0 for no validation.

    Raises:
        InputError: before training, in one sentence: a file or column that is missing or cannot be read, a table
            without rows or text, a row with more fields than the header (in which line), a path that leads outside the
            table's folder, a shard that is cut short or has a sample twice, a tokenizer that cannot be had, too few
            rows, or an argument out of range. When a batch is fetched: a shard that a JSON index describes wrongly.

    Example:
        >>> def letters(captions):
        ...     return torch.tensor([[ord(letter) for letter in caption[:8].ljust(8)] for caption in captions])
        >>> data = ImageTextDataModule(source="shapes", image_size=32, tokenizer=letters, batch_size=16, rows=100)
        >>> data.num_anchors, data.captions("val")[0]
        (100, 'a small green square at the bottom right on a yellow background')
        >>> images, texts, index = next(iter(data.train_dataloader()))
        >>> images.shape, images.dtype, texts.shape, texts.dtype, index.shape, index.dtype
        (torch.Size([16, 3, 32, 32]), torch.float32, torch.Size([16, 8]), torch.int64, torch.Size([16]), torch.int64)
    """

    def __init__(
        self,
        source: Source = "table",
        path: str | None = None,
        val_path: str | None = None,
        image_column: str = "filepath",
        caption_column: str = "title",
        class_column: str | None = None,
        separator: str | None = None,
        split_column: str | None = None,
        train_split: str = "train",
        val_split: str | None = "val",
        image_size: int = 224,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: bool = True,
        crop_scale: tuple[float, float] = (0.9, 1.0),
        tokenizer: Any = "ViT-B-32",
        context_length: int | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        drop_last: bool = True,
        num_workers: int = 0,
        in_memory: bool = False,
        seed: int = 0,
        rows: int = 20_000,
        val_rows: int = 500,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        self._given_batch_size = batch_size
        if source not in get_args(Source):
            raise InputError(f"source must be one of {', '.join(get_args(Source))}, got {source!r}")
        if source == "shapes":
            for name, value in (("path", path), ("val_path", val_path)):
                if value is not None:
                    raise InputError(f"{name} is not for source 'shapes', got {value!r}")
        elif not path:
            raise InputError(f"path must be given for source {source!r}, got {path!r}")
        if class_column is not None:
            if source == "webdataset":
                raise InputError(f"class_column is not for source 'webdataset', got {class_column!r}")
            if source == "shapes" and class_column not in CLASSES:
                raise InputError(
                    f"class_column of source 'shapes' must be one of {', '.join(CLASSES)}, got {class_column!r}"
                )
        if split_column is not None:
            if source != "table":
                raise InputError(f"split_column is only for source 'table', got {split_column!r} with {source!r}")
            if val_path is not None:
                raise InputError(
                    f"split_column and val_path must not both be given, got {split_column!r}, {val_path!r}"
                )
            if train_split == val_split:
                raise InputError(f"train_split and val_split must differ, got {train_split!r} for both")
        if separator is not None and len(separator) != 1:
            raise InputError(f"separator must be one character, got {separator!r}")
        _check_integer("image_size", image_size, 1)
        _check_integer("batch_size", batch_size, 1)
        _check_integer("rows", rows, 1)
        if context_length is not None:
            _check_integer("context_length", context_length, 3)
            if callable(tokenizer):
                raise InputError(f"context_length is for a tokenizer given by its name, got {context_length}")
        _check_integer("seed", seed, 0)
        _check_integer("val_rows", val_rows, 0)
        for name, channels, least in (("mean", mean, -math.inf), ("std", std, 0.0)):
            if channels is not None and (len(channels) != 3 or not all(least < value < math.inf for value in channels)):
                above = " above 0" if name == "std" else ""
                raise InputError(f"{name} must be 3 finite numbers{above}, got {channels!r}")
        if len(crop_scale) != 2 or not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise InputError(f"crop_scale must be two ascending numbers in (0, 1], got {crop_scale!r}")
        self.source = source
        self.path = path
        self.val_path = val_path
        self.image_column = image_column
        self.caption_column = caption_column
        self.class_column = class_column
        self.separator = separator
        self.split_column = split_column
        self.train_split = train_split
        self.val_split = val_split
        self.image_size = image_size
        self.mean = mean
        self.std = std
        self.augment = augment
        self.crop_scale = crop_scale
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.drop_last = drop_last
        self.in_memory = in_memory
        self.seed = seed
        self.rows = rows
        self.val_rows = val_rows
        self._tokenizer: Tokenizer | None = None
        self._frames: tuple[Path, pd.DataFrame] | None = None
        self._splits: dict[str, _PairSplit] = {}
        self._classes_of_table: dict[str, _Classes] = {}

    @property
    def skipped(self) -> dict[str, int]:
        """How many pairs of each split were skipped so far, by this process and its loader processes."""
        return {split.name: split.skipped() for split in self._splits.values()}

    def captions(self, split: Literal["train", "val"]) -> list[str]:
        """Captions of a split in the order of the index; "" where there is none, ``[]`` without the split.

        Args:
            split: "train" or "val".
        """
        return self._split(split).captions() if self._has(split) else []

    @property
    def class_names(self) -> list[str]:
        """All classes of the training and validation rows, sorted; ``[]`` without ``class_column``.

        Those of the training run are among them where a checkpoint was loaded.
        """
        if self.class_column is None:
            return []
        found = set(self._of_checkpoint.get("class_names", []))
        found |= {name for split in ("train", "val") for name in self._classes(split)[0]}
        return sorted(found - {""})

    def labels(self, split: Literal["train", "val"]) -> Tensor:
        """Class of each row of a split in the order of the index, shape ``(n,)``, int64; shape ``(0,)`` without it.

        Args:
            split: "train" or "val".

        Returns:
            Position in ``class_names``, the same for both splits; −1 where there is none.
        """
        if not self._has(split):
            return torch.empty(0, dtype=torch.int64)
        if self.class_column is None:
            return torch.full((len(self._split(split)),), -1)
        position = {name: number for number, name in enumerate(self.class_names)}
        names, which = self._classes(split)
        return torch.tensor([position.get(name, -1) for name in names])[torch.from_numpy(which)]

    def tokenize(self, texts: list[str]) -> Tensor:
        """Token numbers of n texts as the captions have them, shape ``(n, L)``, int64."""
        return self._loaded_tokenizer()(texts).to(torch.int64)

    @property
    def evaluation_transform(self) -> Transform:
        """What validation does with an image from a file: uint8 (3, H, W) to float32 (3, S, S), normalised."""
        from torchvision.transforms import v2

        transform: Transform = v2.Compose([self._transform(augment=False), self._normalise()])
        return transform

    def setup(self, stage: str) -> None:
        """Find and check what the stage needs: tables, headers of shards, captions; images are read when fetched."""
        if stage == "fit":
            check_batch_size(self.batch_size, len(self._train_split()))
            if self.drop_last and self.trainer is not None:
                share = self.num_anchors // self.trainer.world_size
                check_batch_size(self.batch_size, share, "training rows in each process")
        if self._has_validation and stage in ("fit", "validate", "test", "predict"):
            self._split("val")
        elif stage in ("validate", "test"):
            missing = {"table": "val_path or split_column", "webdataset": "val_path", "shapes": "val_rows"}[self.source]
            raise InputError(f"{missing} must say what the validation rows are, there are none")

    def teardown(self, stage: str) -> None:
        """Warn of how many pairs were skipped."""
        for name, split in {split.name: split for split in self._splits.values()}.items():
            if split.skipped():
                warnings.warn(f"split {name!r}: {split.skipped()} of {len(split)} pairs were skipped", stacklevel=2)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        split = self._train_split()
        replicas, rank, epoch = place_in_run(self.trainer)
        batch_size = self.batch_size
        if batch_size == self._given_batch_size:
            check_batch_size(batch_size, len(split))
        else:  # changed since, as by BatchSizeFinder, which tries larger ones until all rows are in a batch
            batch_size = min(batch_size, len(split) // replicas if self.drop_last else len(split))
        return batch_loader(
            split, batch_size, True, replicas, rank, self.num_workers, epoch=epoch, drop_last=self.drop_last
        )

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows; an empty list, which Lightning skips, if there are none."""
        return self._evaluation_loader(self._split("val")) if self._has_validation else []

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """Validation rows; if there are none, the training rows, not augmented."""
        return self._evaluation_loader(self._split("val" if self._has_validation else "predict"))

    # Splits

    @property
    def _has_validation(self) -> bool:
        if self.source == "shapes":
            return self.val_rows > 0
        return self.val_path is not None or (self.split_column is not None and self.val_split is not None)

    def _has(self, split: str) -> bool:
        if split not in ("train", "val"):
            raise InputError(f"split must be 'train' or 'val', got {split!r}")
        return split == "train" or self._has_validation

    def _classes(self, name: str) -> _Classes:
        """Classes of the rows of "train" or "val", "" where there is none; nothing of what there is not."""
        if self.class_column is None or not self._has(name):
            return [], np.empty(0, dtype=np.int64)
        split = self._split(name)
        return split.classes(self.class_column) if isinstance(split, _ShapesSplit) else self._classes_of_table[name]

    def _normalise(self) -> _Normalise:
        return _Normalise(self.mean or MEAN, self.std or STD)

    def _train_split(self) -> _Split:
        return self._split("train")

    def _summary(self) -> dict[str, str]:
        said = {"data": f"{self.source}" + (f" {self.path}" if self.path else "")}
        for name, split in (("training", "train"), ("validation", "val")):
            if not self._has(split):
                said[name] = "none"
                continue
            pairs = self._split(split)
            skipped = pairs.skipped()
            said[name] = rows_in_words(len(pairs)) + (f", {skipped:,} of them skipped" if skipped else "")
        if self.split_column is not None:
            said["training"] += f": {self.split_column} is {self.train_split!r}"
        if self.class_column is not None:
            said["classes"] = f"{len(self.class_names):,}, of column {self.class_column!r}: {listed(self.class_names)}"
        return said

    # What a checkpoint holds

    def _learn(self) -> dict[str, Any]:
        return {"class_names": self.class_names}

    def _fingerprint(self, rows: int) -> str:
        split = self._split("train")
        if isinstance(split, _FileSplit):
            return split.files.fingerprint(rows)
        return fingerprint(["shapes", repr(self.seed)])

    def _forget(self) -> None:
        pass

    def _split(self, name: str) -> _PairSplit:
        """The split "train", "val", or "predict": the training rows, not augmented."""
        if name not in self._splits:
            normalise = self._normalise()
            if self.source == "shapes":
                self._splits[name] = self._shapes(name, normalise)
            else:
                train = self._splits.get("train" if name == "predict" else "predict" if name == "train" else "")
                files = train.files if isinstance(train, _FileSplit) else self._files(name)
                augment = self.augment and name == "train"
                self._splits[name] = _FileSplit(
                    files,
                    self.image_size,
                    self._loaded_tokenizer(),
                    normalise,
                    self._transform(augment),
                    shuffle_seed() if augment else None,
                    self.in_memory,
                )
        return self._splits[name]

    def _shapes(self, name: str, normalise: _Normalise) -> _ShapesSplit:
        other = next(iter(self._splits.values()), None)
        if isinstance(other, _ShapesSplit):
            tokens = other.tokens
        else:
            captions = [Shapes.caption(number) for number in range(NUM_CAPTIONS)]
            tokens = self._loaded_tokenizer()(captions).to(torch.int32)
        rows = self.val_rows if name == "val" else self.rows
        split = "val" if name == "val" else "train"
        return _ShapesSplit(split, rows, self.seed, self.image_size, tokens, normalise)

    def _transform(self, augment: bool) -> Transform:
        from torchvision.transforms import InterpolationMode, v2

        bicubic = InterpolationMode.BICUBIC
        transform: Transform
        if augment:
            transform = v2.RandomResizedCrop(self.image_size, scale=self.crop_scale, interpolation=bicubic)
        else:
            transform = v2.Compose([v2.Resize(self.image_size, interpolation=bicubic), v2.CenterCrop(self.image_size)])
        return transform

    def _loaded_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            tokenizer = self.tokenizer if callable(self.tokenizer) else self._named_tokenizer()
            tokens = tokenizer(["", "a"])
            integers = isinstance(tokens, Tensor) and not (tokens.is_floating_point() or tokens.is_complex())
            if not integers or tokens.ndim != 2 or len(tokens) != 2:
                raise InputError(
                    "tokenizer must give integers of shape (n, L) for n captions, for 2 it gave "
                    f"{tuple(tokens.shape) if isinstance(tokens, Tensor) else tokens!r}"
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    def _named_tokenizer(self) -> Tokenizer:
        open_clip = of_vision("open_clip", f"tokenizer {self.tokenizer!r}")
        if not isinstance(self.tokenizer, str):
            raise InputError(f"tokenizer must be a name or a function, got {self.tokenizer!r}")
        if ":" not in self.tokenizer and self.tokenizer not in open_clip.list_models():
            raise InputError(
                f"tokenizer {self.tokenizer!r} is not a model of open_clip; known are: "
                f"{some_of(open_clip.list_models())}"
            )
        try:
            tokenizer: Tokenizer = open_clip.get_tokenizer(self.tokenizer, context_length=self.context_length)
        except Exception as error:  # of whichever library the model takes its tokenizer from
            raise InputError(f"tokenizer {self.tokenizer!r} cannot be loaded: {first_line(error)}") from error
        return tokenizer

    # Files

    def _files(self, name: str) -> FilePairs:
        split = "val" if name == "val" else "train"
        argument, path = ("val_path", self.val_path) if name == "val" and self.val_path else ("path", self.path)
        assert path is not None
        if self.source == "webdataset":
            return ShardPairs(split, *shard_list(argument, path))
        file = next((Path(place) for place in (path, elsewhere(path)) if os.path.isfile(place)), None)
        if file is None:
            raise InputError(f"{argument} {path} is not a file; it must be a table of image paths and captions")
        if self.split_column is None:
            return self._table(split, file, self._read(file), None)
        if self._frames is None:
            self._frames = file, self._read(file)
        return self._table(split, *self._frames, self.val_split if name == "val" else self.train_split)

    def _read(self, path: Path) -> pd.DataFrame:
        """The columns needed, as text, "" where there is none."""
        separator = self.separator or ("," if content_suffix(path) == ".csv" else "\t")
        columns = {"image_column": self.image_column, "caption_column": self.caption_column}
        for argument in ("class_column", "split_column"):
            if (column := getattr(self, argument)) is not None:
                columns[argument] = column
        there = column_names(path, separator)
        for argument, column in columns.items():
            if there.count(column) != 1:
                how = "more than once" if column in there else "not"
                raise InputError(f"{argument} {column!r} is {how} in {path}; it has: {', '.join(there)}")
        # As text: else "12", "None" and "nan" would be no captions.
        frame: pd.DataFrame = pd.DataFrame(
            _texts(path, separator, {name: there.index(name) for name in columns.values()}), dtype=str
        )
        if len(frame) == 0:
            raise InputError(f"{path} has no rows")
        captions = frame[self.caption_column]
        written = captions[captions != ""]
        if len(written) and pd.to_numeric(written, errors="coerce").notna().all():
            raise InputError(
                f"caption_column {self.caption_column!r} of {path} must hold text, got nothing but numbers such as "
                f"{written.iloc[0]}"
            )
        return frame

    def _table(self, split: str, path: Path, frame: pd.DataFrame, value: str | None) -> TablePairs:
        if value is not None:
            splits = frame[self.split_column].str.strip()
            frame = frame[splits == value]
            if len(frame) == 0:
                raise InputError(
                    f"split_column {self.split_column!r} of {path} has no {value!r}; it has: "
                    f"{some_of(splits.unique().tolist())}"
                )
        if self.class_column is not None:
            which, names = pd.factorize(frame[self.class_column].str.strip())
            self._classes_of_table[split] = names.tolist(), which
        images = frame[self.image_column]
        for row, image in images[images.str.contains("..", regex=False)].items():
            if leads_outside(image):
                raise InputError(
                    f"image path {image!r} in row {row} (counted from 0) of {path} leads outside the table's folder; "
                    f"only an absolute path may"
                )
        table = TablePairs(split, path, images, frame[self.caption_column].str.strip(), frame.index.to_numpy())
        looked_for = np.unique(np.linspace(0, len(table) - 1, LOOKED_FOR).astype(np.int64)).tolist()
        if not any(os.path.isfile(table.image_path(row)) for row in looked_for):
            raise InputError(
                f"image_column {self.image_column!r} of {path} names no file: of {len(looked_for)} looked for, none "
                f"is there, such as {table.image_path(looked_for[0])}"
            )
        return table
