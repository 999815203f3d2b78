"""Where pairs of an image and a caption come from: files of a table, or shards. Row i is always the same pair."""

from __future__ import annotations

import glob
import io
import json
import os
import tarfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from scent_lightning.data.images import UnreadableImageError, decode_image, first_line
from scent_lightning.data.state import fingerprint, sampled
from scent_lightning.data.tar_members import sample_and_kind, tar_members
from scent_lightning.errors import InputError
from scent_lightning.optional import of_vision

Array = npt.NDArray[Any]

SHARD_IMAGES = ("jpg", "jpeg", "png", "webp")
NAMED = 5
LOOKED_FOR = 20


def some_of(values: Sequence[Any]) -> str:
    """The first few, and how many there are."""
    shown = ", ".join(str(value) for value in values[:NAMED])
    return shown if len(values) <= NAMED else f"{shown}, … ({len(values)} in all)"


def leads_outside(path: str) -> bool:
    """Whether a relative path leaves the folder it is relative to."""
    return not os.path.isabs(path) and os.path.normpath(path).split(os.sep)[0] == os.pardir


def elsewhere(path: str) -> str:
    """The path in the folder that the environment variable SCENT_LIGHTNING_DATA names."""
    return os.path.join(os.environ.get("SCENT_LIGHTNING_DATA") or "", path)


class _Strings:
    """A list of strings in two blocks of memory, which forked loader processes share.

    Args:
        strings: what it holds.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        self.ends = np.cumsum([0, *map(len, encoded)])
        self.bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, position: int) -> str:
        return self.bytes[self.ends[position] : self.ends[position + 1]].tobytes().decode("utf-8", "surrogatepass")

    def parts(self, count: int) -> tuple[Array, Array]:
        """The first ``count`` strings as two arrays."""
        return self.ends[: count + 1], self.bytes[: self.ends[count]]


def _size(path: str) -> int:
    """Size of a file in bytes; −1 where there is none."""
    return os.path.getsize(path) if os.path.isfile(path) else -1


class BadPairError(Exception):
    """A pair that has to be skipped; the message says which file, and why."""


def decode(file: str | io.BytesIO, name: str) -> Tensor:
    """The image in ``file`` as RGB: uint8, shape (3, H, W); raises BadPairError if there is none."""
    try:
        return decode_image(file)
    except FileNotFoundError as error:
        raise BadPairError(f"{name} does not exist") from error
    except UnreadableImageError as error:
        raise BadPairError(f"cannot read {name} as an image: {error}") from error


# Sources. Row i of a source is always the same pair, whatever becomes of the others.


class FilePairs:
    """Pairs in files.

    Args:
        split: its name.
        rows: number of rows.
    """

    def __init__(self, split: str, rows: int) -> None:
        self.split = split
        if rows == 0:
            raise InputError(f"split {split!r} has no rows")
        # In shared memory: loader processes write it too.
        self.skipped: Tensor = torch.zeros(rows, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.skipped)

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:
        """Caption, and image (uint8, shape (3, H, W)) if asked for; raises BadPairError."""
        raise NotImplementedError

    def caption(self, row: int) -> str:
        """Caption, "" where there is none."""
        try:
            return self.read(row, image=False)[0]
        except BadPairError:
            return ""

    def fingerprint(self, rows: int) -> str:
        """Hash of what the first ``rows`` pairs are, found without reading them all."""
        raise NotImplementedError

    def skip(self, row: int, reason: str) -> None:
        """Count the row, once, and say so of the first ones."""
        if self.skipped[row]:
            return
        self.skipped[row] = True
        count = int(self.skipped.sum())
        if count == len(self):
            raise InputError(f"split {self.split!r} has no pair that can be used, of {count}; the last one: {reason}")
        if count <= NAMED:
            more = "; no more are named" if count == NAMED else ""
            warnings.warn(f"pair {row} of split {self.split!r} is skipped: {reason}{more}", stacklevel=2)


class TablePairs(FilePairs):
    """Pairs of a table.

    Args:
        split: its name.
        path: of the table.
        names: path of each image, shape ``(n,)``; relative ones are in the table's folder.
        captions: shape ``(n,)``; "" where there is none.
        rows: of the table, counted from 0, shape ``(n,)``.
    """

    def __init__(self, split: str, path: Path, names: Iterable[str], captions: Iterable[str], rows: Array) -> None:
        super().__init__(split, len(rows))
        self.path = path
        self.names = _Strings(names)
        self.captions = _Strings(captions)
        self.rows = rows
        bare = np.flatnonzero(np.diff(self.captions.ends) == 0)
        if len(bare) == len(rows):
            raise InputError(f"split {split!r} has no caption in any of its {len(rows)} rows of {path}")
        if bare.size:
            self.skipped[torch.from_numpy(bare)] = True
            warnings.warn(
                f"split {split!r}: {len(bare)} of {len(rows)} pairs have no caption and are skipped: rows "
                f"{some_of(rows[bare].tolist())} (counted from 0) of {path}",
                stacklevel=2,
            )

    def image_path(self, row: int) -> str:
        """Path of a row's image."""
        return os.path.join(self.path.parent, self.names[row])

    def fingerprint(self, rows: int) -> str:  # noqa: D102
        sizes = [_size(self.image_path(row)) for row in sampled(rows).tolist()]
        return fingerprint([*self.names.parts(rows), *self.captions.parts(rows), np.array(sizes)])

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:  # noqa: D102
        caption = self.captions[row]
        if not caption:
            raise BadPairError(f"row {self.rows[row]} (counted from 0) of {self.path} has no caption")
        if not self.names[row]:
            raise BadPairError(f"row {self.rows[row]} (counted from 0) of {self.path} has no image path")
        return caption, decode(self.image_path(row), self.image_path(row)) if image else None


def _kind(extension: str) -> int | None:
    """0 for an image, 1 for a text, None for what is passed over."""
    return 0 if extension in SHARD_IMAGES else 1 if extension == "txt" else None


class Shard:
    """Where the members of each sample are in a tar file; nothing of them is read.

    Args:
        path: of the tar file.
    """

    def __init__(self, path: str) -> None:
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
                kind = _kind(extension)
                if kind is None:
                    continue
                there = span[kind, 0] >= 0
                if extension in of_sample[1] or (there and not any(_kind(other) == kind for other in of_sample[1])):
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
        self.keys = _Strings(spans)
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

    def fingerprint(self, rows: int) -> str:  # noqa: D102
        parts: list[str] = []
        for path, start, end in zip(self.paths, [0, *self.ends[:-1].tolist()], self.ends.tolist(), strict=True):
            if start >= rows:
                break
            # A shard that goes on after these rows may be longer than it was.
            size = _size(path) if end <= rows else None
            parts.append(f"{os.path.basename(path)} {min(end, rows) - start} {size}")
        return fingerprint(parts)

    def read(self, row: int, image: bool = True) -> tuple[str, Tensor | None]:  # noqa: D102
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


def shard_list(argument: str, path: str) -> tuple[list[str], list[int] | None]:
    """Paths of the shards that ``path`` names, and from a JSON index how many samples each has."""
    if "://" in path or path.startswith("pipe:"):
        raise InputError(f"{argument} must be local files, got {path!r}")
    if path.lower().endswith(".json"):
        return _json_index(argument, path)
    for place in (path, elsewhere(path)):
        if os.path.isdir(place):
            found = _tars_in(place)
        else:
            found = [file for pattern in _braces(argument, place) for file in _expand(pattern)]
        missing = [file for file in found if not os.path.isfile(file)]
        if found and len(missing) < len(found):
            if missing:
                raise InputError(f"{argument} {path} has shards that are not there: {some_of(missing)}")
            _check_once(argument, path, found)
            return found, None
    raise InputError(f"{argument} {path} names no tar file that is there")


def _tars_in(folder: str) -> list[str]:
    """Paths of the tar files in a folder, sorted, in whatever case they end; says how many other files there are."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    tars = [name for name in names if name.lower().endswith(".tar") and not name.startswith(".")]
    if tars and len(tars) < len(names):
        others = [name for name in names if name not in set(tars)]
        rank_zero_info(f"{len(tars):,} shards in {folder}; passed over, as they do not end in .tar: {some_of(others)}")
    return [os.path.join(folder, name) for name in tars]


def _check_once(argument: str, path: str, shards: list[str]) -> None:
    """Raise InputError for a shard that is listed more than once: its pairs would come twice."""
    seen: set[str] = set()
    for shard in shards:
        file = os.path.abspath(shard)
        if file in seen:
            raise InputError(f"{argument} {path} names the shard {shard} more than once")
        seen.add(file)


def _literal(path: str) -> str:
    """The leading folders of a path that are there by these very names, whatever characters they have; with a slash."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.path.join(folder, "") if folder else ""


def _braces(argument: str, pattern: str) -> list[str]:
    folder = _literal(pattern)
    rest = pattern[len(folder) :]
    if "{" not in rest or os.path.exists(pattern):
        return [pattern]
    braceexpand = of_vision("braceexpand", f"a pattern such as {pattern!r}").braceexpand
    try:
        return [folder + part for part in braceexpand(rest)]
    except ValueError as error:
        raise InputError(f"{argument} {pattern} has unbalanced braces") from error


def _expand(pattern: str) -> list[str]:
    folder = _literal(pattern)
    rest = pattern[len(folder) :]
    if os.path.exists(pattern) or not glob.has_magic(rest):
        return [pattern]
    return sorted(glob.glob(glob.escape(folder) + rest))


def _json_index(argument: str, path: str) -> tuple[list[str], list[int]]:
    file = next((place for place in (path, elsewhere(path)) if os.path.isfile(place)), None)
    if file is None:
        raise InputError(f"{argument} {path} is not a file")
    try:
        index = json.loads(Path(file).read_text(encoding="utf-8-sig"))
        listed = index["shardlist"] if isinstance(index, dict) else index
        urls, counts = [shard["url"] for shard in listed], [shard["nsamples"] for shard in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{argument} {path} must be JSON with a shardlist of url and nsamples each: {first_line(error)}"
        ) from error
    if not urls:
        raise InputError(f"{argument} {path} lists no shards")
    for url, count in zip(urls, counts, strict=True):
        if not isinstance(url, str) or "://" in url or url.startswith("pipe:") or leads_outside(url):
            raise InputError(f"{argument} {path} must list local files in its own folder or absolute, got {url!r}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"{argument} {path} must list nsamples of at least 0, got {count!r} for {url!r}")
    shards = [os.path.join(os.path.dirname(file), url) for url in urls]
    _check_once(argument, path, shards)
    return shards, counts
