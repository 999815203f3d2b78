"""Which tar files a path means: a file, a folder, a pattern, or a JSON index."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info

from scent_lightning.data.folders import elsewhere, leads_outside
from scent_lightning.data.images import first_line
from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed, named_twice

__all__ = ["shard_list"]

NAMED = 5  # files in a message


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
                raise InputError(f"{argument} {path} has shards that are not there: {listed(missing, NAMED)}")
            _check_once(argument, path, found)
            return found, None
    raise InputError(f"{argument} {path} names no tar file that is there")


def _tars_in(folder: str) -> list[str]:
    """Paths of the tar files in a folder, sorted, in whatever case they end; says how many other files there are."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    tars = [name for name in names if name.lower().endswith(".tar") and not name.startswith(".")]
    if tars and len(tars) < len(names):
        others = [name for name in names if name not in set(tars)]
        rank_zero_info(
            f"{len(tars):,} shards in {folder}; passed over, as they do not end in .tar: {listed(others, NAMED)}"
        )
    return [os.path.join(folder, name) for name in tars]


def _check_once(argument: str, path: str, shards: list[str]) -> None:
    """Raise InputError for a shard that is listed more than once: its pairs would come twice."""
    if (shard := named_twice([os.path.abspath(shard) for shard in shards])) is not None:
        raise InputError(f"{argument} {path} names the shard {shard} more than once")


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
    braceexpand = optional_module("braceexpand", f"a pattern such as {pattern!r}").braceexpand
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
        shards = index["shardlist"] if isinstance(index, dict) else index
        urls, counts = [shard["url"] for shard in shards], [shard["nsamples"] for shard in shards]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{argument} {path} must be JSON with a shardlist of url and nsamples each: {first_line(error)}"
        ) from error
    if not urls:
        raise InputError(f"{argument} {path} lists no shards")
    for url, count in zip(urls, counts, strict=True):
        if not isinstance(url, str) or "://" in url or url.startswith("pipe:") or leads_outside(url):
            raise InputError(f"{argument} {path} must list local files in its own folder or absolute, got {url!r}")
        checked_integer(f"nsamples in {argument} {path}", count, least=0, hint=f" for {url!r}")
    paths = [os.path.join(os.path.dirname(file), url) for url in urls]
    _check_once(argument, path, paths)
    return paths, counts
