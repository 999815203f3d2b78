"""Pairs of an image and a caption, each with its position in the source: a table, shards, or synthetic shapes."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scent_lightning.data.base import IndexedDataModule
from scent_lightning.data.image_text.drawn import DrawnShapes
from scent_lightning.data.image_text.looks import Looks
from scent_lightning.data.image_text.rows import PairRows
from scent_lightning.data.image_text.shards import Shards
from scent_lightning.data.image_text.source import Options, PairSource
from scent_lightning.data.image_text.table import Tables
from scent_lightning.data.loading import batch_loader, check_batch_size, place_in_run
from scent_lightning.data.transforms import Transform
from scent_lightning.validation import checked_choice, checked_integer
from scent_lightning.words import listed, rows_in_words

__all__ = ["ImageTextDataModule"]

Source = Literal["table", "webdataset", "shapes"]
SOURCES: dict[str, type[PairSource]] = {"table": Tables, "webdataset": Shards, "shapes": DrawnShapes}


class ImageTextDataModule(IndexedDataModule):
    """Pairs of an image and a caption, as whole batches ``(images, texts, index)``.

    ``images`` is float32 of shape ``(B, 3, S, S)``, normalised; ``texts`` int64 of shape ``(B, L)``, token numbers;
    ``index`` int64 of shape ``(B,)``: the pair's position in its split of the source, which never depends on other
    pairs. Training batches are shuffled anew every epoch; the others keep the order of the source.

    Where the pairs come from, by ``source``:

    * "table": ``path`` is a CSV or TSV file with a header, and a column each of image paths (in the table's folder) and
      captions, in UTF-8; see :class:`~scent_lightning.data.image_text.table.Tables`.
    * "webdataset": ``path`` has tar files with consecutive members such as ``000.jpg`` and ``000.txt``: one file, a
      folder, a pattern or a JSON index; see :class:`~scent_lightning.data.image_text.shards.Shards`.
    * "shapes": synthetic pairs, ``rows`` for training and ``val_rows`` for validation, with captions such as "a large
      red circle at the top left"; see :class:`~scent_lightning.data.image_text.drawn.DrawnShapes`.

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
        source: where the pairs come from: "table", "webdataset" or "shapes", which are drawn.
        path: of the table or the shards; one that is not there is looked for in the folder that the environment
            variable SCENT_LIGHTNING_DATA names. None for "shapes".
        val_path: table or shards of validation; None: those of ``path``, by ``val_split``.
        image_column: the table's column with the files of the images.
        caption_column: the table's column with the captions.
        class_column: of the table, or for "shapes" one of size, shape, position and colour: the class of each row; a
            row without text there has none. None for no classes.
        separator: between the table's columns; None takes a comma for a file that ends in .csv (or .csv.gz and so on),
            and else a tab.
        split_column: of the table; says of which split each row is. None takes all rows of ``path`` for training.
        train_split: the training rows' value in ``split_column``.
        val_split: the validation rows' value in ``split_column``; None for no validation.
        image_size: height and width S, in pixels.
        mean: of each channel, in units of the brightest value; None takes open_clip's OPENAI_DATASET_MEAN.
        std: standard deviation of each channel, in units of the brightest value; None takes open_clip's
            OPENAI_DATASET_STD.
        augment: take a random part of each training image; False shows it whole.
        crop_scale: least and greatest area of the random part, as fractions of the image's.
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
        group_column: a column of the table; pairs of one text in it, as several captions of an image, are not compared
            with each other in training, and in recall any of them is right. Batches are then ``(images, texts, group,
            index)``. A row without text there is a group of its own. None for no groups.

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
        group_column: str | None = None,
    ) -> None:
        checked_choice("source", source, SOURCES)
        super().__init__(batch_size, eval_batch_size, num_workers)
        self._given_batch_size = batch_size
        self.options = Options(
            source,
            path,
            val_path,
            image_column,
            caption_column,
            class_column,
            separator,
            split_column,
            train_split,
            val_split,
            seed,
            rows,
            val_rows,
            group_column,
        )
        for name, least in (("seed", 0), ("rows", 1), ("val_rows", 0)):
            checked_integer(name, getattr(self.options, name), least=least)
        self._source = SOURCES[source](self.options)
        self.class_column = class_column
        self.looks = Looks(image_size, mean, std, crop_scale, tokenizer, context_length, in_memory)
        self.augment = augment
        self.drop_last = drop_last

    @property
    def skipped(self) -> dict[str, int]:
        """How many pairs of each split were skipped so far, by this process and its loader processes."""
        return {rows.name: rows.skipped() for rows in self._loaded_rows()}

    def captions(self, split: Literal["train", "val"]) -> list[str]:
        """Captions of a split in the order of the index; "" where there is none, ``[]`` without the split.

        Args:
            split: "train" or "val".
        """
        captions: list[str] = self.split(split).captions() if self._has(split) else []
        return captions

    @property
    def class_names(self) -> list[str]:
        """All classes of the training and validation rows, sorted; ``[]`` without ``class_column``.

        Those of the training run are among them where a checkpoint was loaded.
        """
        if self.class_column is None:
            return []
        found = set(self.restored.get("class_names", []))
        found |= {name for split in ("train", "val") for name in self._source.classes_or_none(split)[0]}
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
            return torch.full((len(self.split(split)),), -1)
        position = {name: number for number, name in enumerate(self.class_names)}
        names, which = self._source.classes(split)
        return torch.tensor([position.get(name, -1) for name in names])[torch.from_numpy(which)]

    def tokenize(self, texts: list[str]) -> Tensor:
        """Token numbers of n texts as the captions have them, shape ``(n, L)``, int64."""
        return self.looks.tokenizer(texts).to(torch.int64)

    @property
    def evaluation_transform(self) -> Transform:
        """What validation does with an image from a file: uint8 (3, H, W) to float32 (3, S, S), normalised."""
        from torchvision.transforms import v2

        transform: Transform = v2.Compose([self.looks.shown, self.looks.normalise])
        return transform

    def setup(self, stage: str) -> None:
        """Find and check what the stage needs: tables, headers of shards, captions; images are read when fetched."""
        if stage == "fit":
            check_batch_size(self.batch_size, self.num_anchors)
            if self.drop_last and self.trainer is not None:
                share = self.num_anchors // self.trainer.world_size
                check_batch_size(self.batch_size, share, "training rows in each process")
            self.split("val")
        elif stage != "predict":
            self.existing("val")

    def teardown(self, stage: str) -> None:
        """Warn of how many pairs were skipped."""
        for name, rows in {rows.name: rows for rows in self._loaded_rows()}.items():
            if rows.skipped():
                warnings.warn(f"split {name!r}: {rows.skipped()} of {len(rows)} pairs were skipped", stacklevel=2)

    def load(self, split: str) -> PairRows | None:
        """The pairs of a split; "test" is "val", and "predict" too, or else the training rows, not augmented."""
        if split == "train":
            return self._rows("train", self.augment)
        if self._source.has_validation:
            found: PairRows = self._rows("val", False) if split == "val" else self.split("val")
            return found
        return self._rows("train", False) if split == "predict" else None

    def _rows(self, split: str, augment: bool) -> PairRows:
        rows = self._source.rows(split, self.looks.look(augment))
        if (groups := self._source.groups(split)) is not None:
            rows.groups = torch.from_numpy(groups)
        return rows

    def missing(self, split: str) -> str:
        """Which arguments would say what the rows are."""
        return f"{self._source.says_validation} must say what the validation rows are, there are none"

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        rows = self.existing("train")
        replicas, rank, epoch = place_in_run(self.trainer)
        batch_size = self.batch_size
        if batch_size == self._given_batch_size:
            check_batch_size(batch_size, len(rows))
        else:  # changed since, as by BatchSizeFinder, which tries larger ones until all rows are in a batch
            batch_size = min(batch_size, len(rows) // replicas if self.drop_last else len(rows))
        return batch_loader(
            rows, batch_size, True, replicas, rank, self.num_workers, epoch=epoch, drop_last=self.drop_last
        )

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation rows."""
        return self.val_dataloader()

    def summary(self) -> dict[str, str]:
        """Where the pairs come from, how many of each split, and the classes."""
        options = self.options
        said = {"data": options.source + (f" {options.path}" if options.path else "")}
        for name, split in (("training", "train"), ("validation", "val")):
            rows = self.split(split)
            skipped = 0 if rows is None else rows.skipped()
            said[name] = "none" if rows is None else rows_in_words(len(rows))
            said[name] += f", {skipped:,} of them skipped" if skipped else ""
        if options.split_column is not None:
            said["training"] += f": {options.split_column} is {options.train_split!r}"
        if self.class_column is not None:
            said["classes"] = f"{len(self.class_names):,}, of column {self.class_column!r}: {listed(self.class_names)}"
        if (rows := self.existing("train")).groups is not None:
            said["groups"] = f"{len(rows.groups.unique()):,}, of column {options.group_column!r}"
        return said

    def learned(self) -> dict[str, Any]:
        """Names of the classes."""
        return {"class_names": self.class_names}

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` training pairs are, as their source tells them apart."""
        found: str = self.existing("train").fingerprint(rows)
        return found

    def forget(self) -> None:
        """Keep the pairs: nothing about them was learned."""

    def _has(self, split: str) -> bool:
        return checked_choice("split", split, ("train", "val")) == "train" or self._source.has_validation

    def _loaded_rows(self) -> list[PairRows]:
        return [rows for rows in self._loaded.values() if isinstance(rows, PairRows)]
