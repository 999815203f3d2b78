"""The members of a tar file that is read to its very end."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator

__all__ = ["sample_and_kind", "tar_members"]

_READ_AT_ONCE = 2**20  # bytes
_MEMBER = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")  # webdataset's rule: the key ends at the first dot of the name


def sample_and_kind(name: str) -> tuple[str, str] | None:
    """Key of the sample, and what of it a member is, in lower case: ("a/1", "png") of "a/1.PNG"; None if it is none."""
    found = _MEMBER.fullmatch(name)
    return None if found is None else (found[1], found[2].lower())


def tar_members(path: str | os.PathLike[str]) -> Iterator[tarfile.TarInfo]:
    """Regular members in their order, headers only: no content is read, and no list of all members is kept.

    Args:
        path: of an uncompressed tar file.

    Raises:
        tarfile.TarError, OSError, ValueError, EOFError: it is no such file, not the whole of one, or more than one.
            tarfile itself stops in silence at the end of a file that was cut between two members, at a bad header, and
            at the end of the first of several files.
    """
    with tarfile.open(path, "r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
            if member.size < 0:  # tarfile would go back and never end
                raise tarfile.ReadError("a member has a negative size")
            if member.isreg() and not member.issparse():
                yield member
        end = archive.offset  # type: ignore[attr-defined]
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it is cut short or has a bad header")
        while rest := file.read(_READ_AT_ONCE):
            if rest.count(0) < len(rest):
                raise tarfile.ReadError("more comes after its end, as where several tar files are joined into one")
