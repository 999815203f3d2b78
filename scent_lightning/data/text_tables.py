"""Tables in text files, read strictly: no row that does not fit the header is cut, joined or shifted in silence."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from scent_lightning.errors import InputError

__all__ = ["column_names", "content_suffix", "text_rows"]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LOOKED_AT = 65536  # bytes, for the kind of the line ends
_LINES_OF_A_FIELD = 100
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
# A quoted field that goes on over lines: it holds no tab, which every row of the table does.
_OVER_LINES = re.compile(r'"((?:[^"\t]|"")*)"(?:\t(.*))?\Z', re.DOTALL)
_QUOTED_OR_NOT = re.compile(r'(?:"((?:[^"]|"")*)"|([^\t]*))(?:\t|\Z)', re.DOTALL)


def content_suffix(path: Path) -> str:
    """The ending that says what is in the file, in lower case: ".csv" of ``a.csv`` and of ``a.CSV.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _OPENERS else suffix


def text_rows(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table, the header first; empty lines are none.

    Fields are quoted as in RFC 4180, over several lines if need be. Where a tab separates them, a quotation mark is an
    ordinary character unless it encloses the whole field. No row has more fields than the header; it may have fewer.

    Args:
        path: UTF-8 text, with or without a byte-order mark; may be compressed as .gz, .bz2 or .xz. Lines end in a line
            feed, both, or a carriage return.
        separator: one character.

    Yields:
        Number of the row's first line, from 1, and its fields.

    Raises:
        InputError: the file cannot be read as such a table; the message says in which line.
    """
    try:
        with _opened(path, "rb") as binary:
            start = binary.read(_LOOKED_AT)
        ends = "\r" if b"\r" in start and b"\n" not in start else "\n"
        with _opened(path, "rt", encoding="utf-8-sig", newline=ends) as file:
            width = None
            lines = _lines(path, file)
            for line, fields in _rows_of_tabs(lines) if separator == "\t" else _rows_of_quotes(lines, separator):
                width = width or len(fields)
                if len(fields) > width:
                    raise _unreadable(
                        path,
                        f"line {line} has {len(fields)} fields where the header has {width}: a text with the "
                        f"separator {separator!r} in it must be in quotation marks",
                    )
                yield line, fields
    except UnicodeDecodeError as error:
        raise _unreadable(path, _what_is_not_utf8(path)) from error
    except _RowError as error:
        raise _unreadable(path, str(error)) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise _unreadable(path, str(error)) from error


def column_names(path: Path, separator: str) -> list[str]:
    """Names in the header, without surrounding spaces.

    Raises:
        InputError: as :func:`text_rows`; or the file is empty.
    """
    header = next(text_rows(path, separator), None)
    if header is None:
        raise _unreadable(path, "it is empty")
    return [name.strip() for name in header[1]]


class _RowError(Exception):
    """What is wrong with a row."""


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(f"cannot read {path} as a table: {reason}")


def _opened(path: Path, mode: str, **arguments: Any) -> IO[Any]:
    file: IO[Any] = _OPENERS.get(path.suffix.lower(), open)(path, mode, **arguments)
    return file


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise _unreadable(path, f"line {number} has a NUL byte, so it is no text in UTF-8")
        yield line


def _what_is_not_utf8(path: Path) -> str:
    with _opened(path, "rb") as binary:
        for number, line in enumerate(binary, 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return "it is UTF-16: save it as UTF-8"
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8: save it as UTF-8"
    return "it is not UTF-8: save it as UTF-8"


def _rows_of_quotes(lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise _RowError(
                f"the row from line {line} on has a quotation mark that is not closed or not doubled, or a line end "
                f"that is not quoted ({str(error).split(' - ')[0]})"
            ) from error
        if fields is None:
            return
        if fields and not (len(fields) == 1 and not fields[0].strip()):
            yield line, fields


def _rows_of_tabs(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    source = _Peekable(line.rstrip("\r\n") for line in lines)
    width = 0
    while (line := source.take()) is not None:
        number = source.taken
        if not line.strip(" "):
            continue
        fields = line.split("\t")
        if '"' in line:
            fields = _over_lines(fields, source, width) or _within_line(line, fields, width)
        width = width or len(fields)
        yield number, fields


class _Peekable:
    """Lines of which the next ones can be looked at."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines = lines
        self.ahead: list[str] = []
        self.taken = 0

    def take(self) -> str | None:
        self.taken += 1
        return self.ahead.pop(0) if self.ahead else next(self.lines, None)

    def peek(self, number: int) -> str | None:
        """The line that comes ``number`` lines after the next one."""
        while len(self.ahead) <= number and (line := next(self.lines, None)) is not None:
            self.ahead.append(line)
        return self.ahead[number] if number < len(self.ahead) else None


def _over_lines(fields: list[str], source: _Peekable, width: int) -> list[str] | None:
    """The fields of a row whose last one goes on in the next lines; None if it does not."""
    text = fields[-1]
    if not text.startswith('"') or _QUOTED.fullmatch(text):
        return None
    for number in range(_LINES_OF_A_FIELD):
        line = source.peek(number)
        if line is None:
            return None
        text += "\n" + line
        if found := _OVER_LINES.fullmatch(text):
            rest = [] if found[2] is None else found[2].split("\t")
            joined = [*map(_bare, fields[:-1]), found[1].replace('""', '"'), *map(_bare, rest)]
            if width not in (0, len(joined)):
                return None
            for _ in range(number + 1):
                source.take()
            return joined
        if "\t" in line:
            return None
    return None


def _within_line(line: str, fields: list[str], width: int) -> list[str]:
    """The fields of a line with quotation marks: tabs within them do not separate if the number of fields says so."""
    if len(fields) > width > 0:
        quoted = [
            bare if enclosed is None else enclosed.replace('""', '"')
            for enclosed, bare in (found.group(1, 2) for found in _QUOTED_OR_NOT.finditer(line))
        ]
        if not line.endswith("\t"):
            quoted = quoted[:-1]  # the empty match at the end
        if len(quoted) == width:
            return quoted
    return [_bare(field) for field in fields]


def _bare(field: str) -> str:
    found = _QUOTED.fullmatch(field)
    return found[1].replace('""', '"') if found else field
