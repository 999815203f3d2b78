"""Sets to evaluate a model of images and texts on without training, in the layout of CLIP benchmark."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from scent_lightning.data.folders import elsewhere
from scent_lightning.data.image_text.pairs import BadPairError, decode
from scent_lightning.data.image_text.shards import Shard
from scent_lightning.data.images import first_line
from scent_lightning.errors import InputError
from scent_lightning.words import listed, named_twice

__all__ = ["EvaluationRows", "EvaluationSet", "find_evaluation_sets"]

Kind = Literal["classification", "retrieval"]
KINDS = ("classification", "retrieval")
_NUMBER_OF_SHARDS = Path("test", "nshards.txt")
_TEMPLATES = "zeroshot_classification_templates.txt"
NAMED = 5  # sets in a message


class EvaluationSet:
    """A folder with ``test/nshards.txt`` and ``test/0.tar``, ``test/1.tar`` and so on, and what is said of it.

    ``dataset_type.txt`` says "classification" (also where it is missing) or "retrieval". A sample is an image (jpg,
    jpeg, png or webp) and a member ``cls``, the number of its class, or ``txt``, a caption a line. ``classnames.txt``
    has the names of the classes, one a line in their order, and ``zeroshot_classification_templates.txt`` the prompts,
    one a line, with ``{c}`` for the name.

    Args:
        folder: path of it.
        name: what it is called.

    Attributes:
        name: what it is called.
        kind: "classification" or "retrieval".
        class_names: names of the classes; empty for retrieval.
        templates: prompts with ``{}`` for the name of the class; empty where the folder has none.

    Raises:
        InputError: in one sentence, what is missing or cannot be read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.kind: Kind = _kind(folder)
        self.class_names: list[str] = []
        self.templates: list[str] = []
        if self.kind == "classification":
            self.class_names = _lines(folder / "classnames.txt")
            if len(self.class_names) < 2:
                raise InputError(
                    f"{folder / 'classnames.txt'} must name two classes or more, one a line, got {self.class_names}"
                )
            if (folder / _TEMPLATES).is_file():
                self.templates = [line.replace("{c}", "{}") for line in _lines(folder / _TEMPLATES)]
        self.shards = [str(folder / "test" / f"{number}.tar") for number in range(_number_of_shards(folder))]
        if missing := [shard for shard in self.shards if not os.path.isfile(shard)]:
            raise InputError(f"{folder / _NUMBER_OF_SHARDS} says {len(self.shards)}, and there is no {missing[0]}")

    def rows(self, transform: Callable[[Tensor], Tensor]) -> EvaluationRows:
        """The samples; the headers of the shards are read for it.

        Args:
            transform: of an image, uint8, shape (3, H, W).
        """
        return EvaluationRows(self, transform)


class EvaluationRows(Dataset[tuple[Tensor, "int | list[str]"]]):
    """Samples of a set in the order of its shards: the image, transformed, and its class or its captions.

    Args:
        of: the set.
        transform: of an image, uint8, shape (3, H, W).

    Raises:
        InputError: a shard that is no whole tar file, or no samples. When it is fetched: a sample without an image that
            can be read, a class of the set, or a caption.
    """

    def __init__(self, of: EvaluationSet, transform: Callable[[Tensor], Tensor]) -> None:
        self.of = of
        self.transform = transform
        self._text = "cls" if of.kind == "classification" else "txt"
        self._shards = [Shard(path, self._text) for path in of.shards]
        self._ends = np.cumsum([len(shard.keys) for shard in self._shards])
        if not len(self):
            raise InputError(f"evaluation set {of.name!r} has no samples in {of.folder / 'test'}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> tuple[Tensor, int | list[str]]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        shard = self._shards[number]
        sample = row - int(self._ends[number]) + len(shard.keys)
        name = f"sample {shard.keys[sample]!r} of {shard.path}"
        image, text = shard.member(sample, 0), shard.member(sample, 1)
        for content, what in ((image, "image"), (text, f".{self._text} member")):
            if content is None:
                raise InputError(f"{name} has no {what}")
        assert image is not None
        assert text is not None
        try:
            decoded = decode(io.BytesIO(image), name)
        except BadPairError as error:
            raise InputError(str(error)) from error
        target = self._class(text, name) if self._text == "cls" else _captions(text, name)
        return self.transform(decoded), target

    def _class(self, content: bytes, name: str) -> int:
        known = len(self.of.class_names)
        try:
            label = int(content)
        except ValueError:
            label = -1
        if not 0 <= label < known:
            raise InputError(f"the class of {name} must be a number from 0 to {known - 1}, got {content[:20]!r}")
        return label

    @staticmethod
    def batch(samples: list[tuple[Tensor, int | list[str]]]) -> tuple[Tensor, list[int | list[str]]]:
        """Images, shape ``(B, 3, S, S)``, and the list of classes or captions: for ``collate_fn`` of a loader."""
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), list(targets)


def find_evaluation_sets(path: str, names: list[str] | None = None) -> list[EvaluationSet]:
    """All sets of a folder, or the folder itself as one, by name; those of other kinds are passed over with a warning.

    A set is called as its folder, without ``wds_`` before and ``_test`` after it, which is how DataComp stores CLIP
    benchmark's; one within other folders has their names before it, with a hyphen between.

    Args:
        path: folder of the sets; one that is not there is looked for in the folder that the environment variable
            SCENT_LIGHTNING_DATA names.
        names: which sets; None takes all.

    Raises:
        InputError: no such folder, no set in it, or not those that are named; or a set lacks something.
    """
    root = next((Path(place) for place in (path, elsewhere(path)) if os.path.isdir(place)), None)
    if root is None:
        raise InputError(f"path {path} is not a folder; it must have evaluation sets in CLIP benchmark's layout")
    found = sorted(file.parent.parent for file in root.glob(f"**/{_NUMBER_OF_SHARDS}"))
    if not found:
        raise InputError(f"path {path} has no evaluation set: no folder in it has {_NUMBER_OF_SHARDS}")
    called = [_name(root, folder) for folder in found]
    if (twice := named_twice(called)) is not None:
        raise InputError(f"path {path} has more than one evaluation set of the name {twice!r}")
    folders = dict(zip(called, found, strict=True))
    if names is not None:
        if unknown := [name for name in names if name not in folders]:
            raise InputError(f"sets must be some of {listed(sorted(folders))}, got {listed(unknown, NAMED)}")
        if not names or named_twice(names) is not None:
            raise InputError(f"sets must name each set once, and one at least, got {names}")
        return [EvaluationSet(folders[name], name) for name in names]
    kinds = {name: _kind(folder, others=True) for name, folder in folders.items()}
    if others := [f"{name} ({kind})" for name, kind in sorted(kinds.items()) if kind not in KINDS]:
        rank_zero_warn(f"evaluation sets of other kinds than {' and '.join(KINDS)} are passed over: {listed(others)}")
    return [EvaluationSet(folders[name], name) for name, kind in sorted(kinds.items()) if kind in KINDS]


def _name(root: Path, folder: Path) -> str:
    parts = folder.relative_to(root).parts or (folder.resolve().name,)
    return "-".join(part.removeprefix("wds_").removesuffix("_test") for part in parts)


def _kind(folder: Path, others: bool = False) -> Kind:
    file = folder / "dataset_type.txt"
    kind = _read(file).strip().lower() if file.is_file() else "classification"
    if kind not in KINDS and not others:
        raise InputError(f"{file} must say one of {', '.join(KINDS)}, got {kind!r}")
    return kind  # type: ignore[return-value]


def _number_of_shards(folder: Path) -> int:
    text = _read(folder / _NUMBER_OF_SHARDS).strip()
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{folder / _NUMBER_OF_SHARDS} must be a number of at least 1, got {text[:20]!r}")
    return int(text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"evaluation set {file.parent} has no {file.name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {first_line(error)}") from error


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in _read(file).rstrip().splitlines()]


def _captions(content: bytes, name: str) -> list[str]:
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"the captions of {name} are not UTF-8") from error
    if not (captions := [line.strip() for line in lines if line.strip()]):
        raise InputError(f"{name} has no caption")
    return captions
