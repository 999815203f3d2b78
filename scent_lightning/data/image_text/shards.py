"""Pairs in tar files, of which nothing is read but the headers, and the members of a pair when it is asked for."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.image_text.pairs import BadPairError, FilePairs, decode, file_size
from scent_lightning.data.image_text.shard_paths import shard_list
from scent_lightning.data.image_text.source import FileSource
from scent_lightning.data.images import first_line
from scent_lightning.data.strings import Strings
from scent_lightning.data.tar_members import sample_and_kind, tar_members
from scent_lightning.errors import InputError

__all__ = ["Shard", "ShardPairs", "Shards"]

SHARD_IMAGES = ("jpg", "jpeg", "png", "webp")
Array = npt.NDArray[Any]


class Shard:
    """Where the members of each sample are in a tar file; nothing of them is read.

    Args:
        path: of the tar file.
        text: extension of what an image comes with.
    """

    def __init__(self, path: str, text: str = "txt") -> None:
        def kind_of(extension: str) -> int | None:  # 0 for an image, 1 for a text, None for what is passed over
            return 0 if extension in SHARD_IMAGES else 1 if extension == text else None

        spans: dict[str, Array] = {}
        of_sample: tuple[str, set[str]] = "", set()  # key of the sample at hand, and what there is of it
        try:
            for member in tar_members(path):
                if (name := sample_and_kind(member.name)) is None:
                    continue
                key, extension = name
                if key != of_sample[0]:
                    of_sample = key, set()
                span = spans.setdefault(key, np.full((2, 2), -1, dtype=np.int64))
                kind = kind_of(extension)
                if kind is None:
                    continue
                there = span[kind, 0] >= 0
                if extension in of_sample[1] or (there and not any(kind_of(other) == kind for other in of_sample[1])):
                    raise InputError(f"shard {path} has sample {key!r} twice: a second {extension} of it is there")
                of_sample[1].add(extension)
                if not there:
                    span[kind] = member.offset_data, member.size
        except InputError:
            raise
        except (OSError, tarfile.TarError, ValueError, EOFError) as error:
            raise InputError(
                f"shard {path} cannot be read as a whole, uncompressed tar file: {first_line(error)}"
            ) from error
        self.path = path
        self.keys = Strings(spans)
        # Offset and size in bytes of image and text, −1 where there is none.
        self.spans = np.stack(list(spans.values())) if spans else np.empty((0, 2, 2), dtype=np.int64)

    def member(self, sample: int, kind: int) -> bytes | None:
        """Bytes of the image (``kind`` 0) or the text (1)."""
        offset, size = self.spans[sample, kind].tolist()
        if offset < 0:
            return None
        with open(self.path, "rb") as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise InputError(f"shard {self.path} is shorter than when it was opened")
        return content


class ShardPairs(FilePairs):
    """Pairs in tar files; those of a sample are consecutive numbers in the order of the files.

    Args:
        split: its name.
        paths: of the tar files.
        counts: samples of each; None counts them, which reads all headers.
    """

    def __init__(self, split: str, paths: list[str], counts: list[int] | None) -> None:
        self.paths = paths
        self._opened: dict[int, Shard] = {}
        self._counts = counts
        if counts is None:
            counts = [len(self._shard(number).keys) for number in range(len(paths))]
        self.ends = np.cumsum(counts)
        super().__init__(split, int(self.ends[-1]))

    def _shard(self, number: int) -> Shard:
        if number not in self._opened:
            shard = Shard(self.paths[number])
            if self._counts is not None and len(shard.keys) != self._counts[number]:
                raise InputError(
                    f"shard {self.paths[number]} has {len(shard.keys)} samples, the index says {self._counts[number]}"
                )
            self._opened[number] = shard
        return self._opened[number]

    def fingerprint(self, rows: int) -> str:
        """Hash of the names of the shards, how many samples of each count, and the sizes of those that count whole."""
        parts: list[str] = []
        for path, start, end in zip(self.paths, [0, *self.ends[:-1].tolist()], self.ends.tolist(), strict=True):
            if start >= rows:
                break
            # A shard that goes on after these rows may be longer than it was.
            size = file_size(path) if end <= rows else None
            parts.append(f"{os.path.basename(path)} {min(end, rows) - start} {size}")
        return fingerprint(parts)

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:
        """Caption, and image (uint8, shape (3, H, W)) if asked for; raises BadPairError."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        shard = self._shard(number)
        sample = row - int(self.ends[number]) + len(shard.keys)
        name = f"sample {shard.keys[sample]!r} of {shard.path}"
        text = shard.member(sample, 1)
        if text is None:
            raise BadPairError(f"{name} has no .txt member")
        try:
            caption = text.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise BadPairError(f"the text of {name} is not UTF-8") from error
        if "\0" in caption:
            raise BadPairError(f"the text of {name} has a NUL byte")
        if not caption:
            raise BadPairError(f"{name} has no caption")
        if not image:
            return caption, None
        content = shard.member(sample, 0)
        if content is None:
            raise BadPairError(f"{name} has no image")
        return caption, decode(io.BytesIO(content), name)


class Shards(FileSource):
    """tar files with consecutive members such as ``000.jpg`` (or jpeg, png, webp) and ``000.txt``.

    That is how img2dataset writes them. ``path`` is one file, a folder of them, a pattern such as
    ``shards/{000..099}.tar`` or ``shards/*.tar``, or a JSON index as of ``wids``: ``{"shardlist": [{"url": "000.tar",
    "nsamples": 100}, …]}``, with paths in the index's folder. Index i is sample i over all files in their order.
    Without a JSON index the headers of all files are read first; no other member is ever read, and nothing unpickled.
    Files must be local and uncompressed.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "split_column": "is only for source 'table', got {value!r} with {source!r}",
        "class_column": "is not for source {source!r}, got {value!r}",
    }
    says_validation = "val_path"

    @property
    def has_validation(self) -> bool:
        """Whether there is ``val_path``."""
        return self.options.val_path is not None

    def open(self, split: str) -> ShardPairs:
        """The pairs of a split."""
        return ShardPairs(split, *shard_list(*self.path_of(split)))
