"""Shards in the format of webdataset as a source of images."""

from __future__ import annotations

import io
import re
import tarfile
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tqdm import tqdm

from scent_lightning.data.images import read_rgb
from scent_lightning.data.tar_members import sample_and_kind, tar_members
from scent_lightning.errors import InputError
from scent_lightning.extraction.sources import Source
from scent_lightning.extraction.words import digest, reason
from scent_lightning.optional import optional_module

__all__ = ["ShardSource"]

IMAGE_KEYS = ("jpg", "png", "webp", "jpeg")
LABEL_KEY = "cls"


class ShardSample(NamedTuple):
    """Where a sample lies in its shard."""

    key: str
    image: tuple[int, int]  # place and length in the shard
    label: tuple[int, int]


class ShardSource(Source):
    """Shards in the format of webdataset, read where the samples lie, so that any row can be the first.

    A shard's index is read when its first sample is; of those before only the numbers of samples are kept.

    Args:
        urls: paths of uncompressed tar files, with braces.
        rows: how many samples to take; None counts them in all shards.
    """

    def __init__(self, urls: str, rows: int | None) -> None:
        expand = optional_module("braceexpand", "--webdataset")
        try:
            self.shards = [Path(path) for part in urls.split("::") for path in expand.braceexpand(part)]
        except ValueError as error:
            raise InputError(f"--webdataset {urls!r} has unbalanced braces") from error
        missing = next((shard for shard in self.shards if not shard.is_file()), None)
        if missing is not None:
            remote = "; shards must be local files" if re.match(r"(\w+:/|pipe:)", str(missing)) else ""
            raise InputError(f"--webdataset: there is no file {missing}{remote}")
        if len(set(self.shards)) < len(self.shards):
            twice = next(shard for number, shard in enumerate(self.shards) if shard in self.shards[:number])
            raise InputError(f"--webdataset {urls!r} names {twice} more than once")
        self.ends: list[int] = []  # of the shards looked at, the number of samples up to there
        self.current = -1
        self.index: list[ShardSample] = []
        if rows is None:
            for number in tqdm(range(len(self.shards)), desc="counting", unit="shard", disable=len(self.shards) < 2):
                self._open(number)
            rows = self.ends[-1]
            if rows == 0:
                raise InputError(f"--webdataset {urls!r} has no images")
        self.rows = rows
        listing = digest(f"{shard.name}\t{shard.stat().st_size}\n".encode() for shard in self.shards)
        self.settings = {"source": f"web data set {urls}", "list of shards": listing}

    def __len__(self) -> int:
        return self.rows

    def _open(self, number: int) -> None:
        """Read the index of a shard."""
        shard = self.shards[number]
        found: dict[str, dict[str, tuple[int, int]]] = {}
        key = None
        try:
            for member in tar_members(shard):
                parts = sample_and_kind(member.name)
                if parts is None or re.match(r"__[^/]*__($|/)", member.name):
                    continue
                if parts[0] != key and parts[0] in found:
                    raise InputError(f"sample {parts[0]} of {shard} is there twice, or its files are not together")
                key, kind = parts
                files = found.setdefault(key, {})
                if kind in files:
                    raise InputError(f"sample {key} of {shard} has two files of the kind {kind}")
                files[kind] = (member.offset_data, member.size)
        except InputError:
            raise
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read {shard} as a whole, uncompressed tar file: {reason(error)}") from error
        self.index = []
        for key, files in found.items():
            image = next((files[name] for name in IMAGE_KEYS if name in files), None)
            if image is None:
                raise InputError(f"sample {key} of {shard} has no image ({', '.join(IMAGE_KEYS)})")
            if LABEL_KEY not in files:
                raise InputError(f"sample {key} of {shard} has no label ({LABEL_KEY})")
            self.index.append(ShardSample(key, image, files[LABEL_KEY]))
        self.current = number
        if number == len(self.ends):
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self.index))

    def _find(self, index: int) -> ShardSample:
        while not self.ends or index >= self.ends[-1]:
            if len(self.ends) == len(self.shards):
                raise InputError(f"--num-samples is {self.rows}, but the shards have only {self.ends[-1]} samples")
            self._open(len(self.ends))
        number = bisect_right(self.ends, index)
        if number != self.current:
            self._open(number)
        return self.index[index - (self.ends[number - 1] if number else 0)]

    def name(self, index: int) -> str:
        """What to call a sample in an error."""
        return f"sample {self._find(index).key} of {self.shards[self.current]}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Image and label."""
        sample = self._find(index)
        with self.shards[self.current].open("rb") as file:
            file.seek(sample.label[0])
            label = file.read(sample.label[1]).decode("utf-8-sig", errors="replace").strip()
            file.seek(sample.image[0])
            content = file.read(sample.image[1])
        if re.fullmatch(r"-?\d+", label) is None:
            raise InputError(f"{self.name(index)} has the label {label!r}, which is not an integer")
        return read_rgb(io.BytesIO(content)), int(label)
