"""Reads one file, compressed or not: its unchanged text, or the rows of a table.

    .txt .md .py …      UTF-8, line ends unchanged; a byte order mark at the beginning is dropped
    .jsonl .ndjson      one object per line
    .json               the same, or one list of objects, or one object
    .csv .tsv           the first line names the columns; separated by commas, tabs or semicolons
    .parquet            read by pyarrow; only one column if it is known which
    .gz .bz2 .xz .zst   any of these except .parquet, compressed

contents.py recognizes compression and parquet by the content. A defect of a file raises a UserError
that names the file. A damaged row is yielded as an error in its place, with the number of the line
or the row, and reading continues. Nothing is repaired.
"""

import contextlib
import csv
import io
import itertools
import json
import re
import shlex
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.contents import Unreadable, new_name, open_binary, utf8_copy
from data.files import UnknownColumn
from errors import UserError

MAX_TEXT_CHARS = 1 << 20
UTF8_MARK = b"\xef\xbb\xbf"
ON_LINE = "correct or remove that line, or leave out all such lines: --skip damaged"
LEAVE_OUT = "or leave that file out (--skip damaged)"
Row = dict[str, Any] | UserError


def text_parts(file: Path) -> Iterator[str]:
    """The content of a text file, in parts of about MAX_TEXT_CHARS cut at the ends of lines (a
    longer line is cut within)."""
    with (
        reading(file),
        io.TextIOWrapper(open_binary(file), encoding="utf-8-sig", newline="") as stream,
    ):
        while text := stream.read(MAX_TEXT_CHARS):
            if not text.endswith("\n"):
                text += stream.readline(MAX_TEXT_CHARS)
            yield text


def rows(file: Path, form: str, column: str | None) -> Iterator[tuple[str, Row]]:
    """Yields (location, row) for every row of a table; the location is such as `line 3`.

    form: `.parquet`, `.jsonl`, …: contents.form
    column: the only column to read from a parquet file; None: `text` if it exists, else all.
    """
    with reading(file):
        match form:
            case ".parquet":
                yield from _parquet_rows(file, column)
            case ".csv" | ".tsv":
                yield from _csv_rows(file, form)
            case ".json":
                yield from _json_rows(file)
            case _:
                yield from _json_lines(file)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns any error of reading `file` into a UserError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _not_utf8(file, byte, _first_bad_line(file)) from error
    except (EOFError, zlib.error) as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if error.strerror is None:  # raised by a decompressor
            raise _damaged(file, error) from error
        remedy = "check that it exists and that you have permission to read it, or leave it out"
        why = f"it cannot be read ({error.strerror})"
        raise Unreadable("--source", str(error.filename or file), why, remedy) from error
    except ValueError as error:  # includes pyarrow.ArrowInvalid
        raise _damaged(file, error) from error
    except Exception as error:
        # Compared by name: these modules may be missing, or not yet imported.
        package = type(error).__module__.split(".")[0]
        if package not in ("_lzma", "pyarrow") or isinstance(error, MemoryError):
            raise
        raise _damaged(file, error) from error


def _json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(UTF8_MARK) if number == 1 else line
            if line.strip():
                where = f"line {number}"
                try:
                    yield where, _checked_row(file, where, _parsed(file, number, line), line)
                except UserError as error:
                    yield where, error


def _json_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Reads JSON lines if the first line is a complete object, else the file as one JSON value."""
    with open_binary(file) as stream:
        first = next((line for line in stream if line.strip()), b"")
    try:
        is_lines = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_lines = not first
    if is_lines:
        yield from _json_lines(file)
        return
    with open_binary(file) as stream:
        content = stream.read()
    whole = _parsed(file, None, content)
    whole = whole if isinstance(whole, list) else [whole]
    if whole and not any(isinstance(row, dict) for row in whole):
        why = 'it has no rows: a row must be an object such as {"text": …}'
        raise UnknownColumn("--source", str(file), why, "leave that file out")
    for number, row in enumerate(whole, 1):
        where = f"row {number}"
        try:
            yield where, _checked_row(file, where, row, content)
        except UserError as error:
            yield where, error


def _parsed(file: Path, number: int | None, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8" if number else "utf-8-sig"))
    except UnicodeDecodeError as error:
        if number is None:
            raise
        raise _not_utf8(file, error.object[error.start], number) from error
    except RecursionError as error:
        why = f"line {number or 1}: it is nested too deeply"
        raise UserError("--source", str(file), why, ON_LINE) from error
    except ValueError as error:
        line = number or getattr(error, "lineno", 1)
        why = f"{getattr(error, 'msg', error)}, at character {getattr(error, 'colno', 1)}"
        why = f"line {line}: it is not JSON: {why}"
        raise UserError("--source", str(file), why, ON_LINE) from error


def _checked_row(file: Path, where: str, row: Any, content: bytes) -> dict[str, Any]:
    if not isinstance(row, dict):
        why = (
            f'{where}: a row must be an object such as {{"text": …}}, '
            f"and this one is of type {type(row).__name__}"
        )
        raise UserError("--source", str(file), why, ON_LINE)
    if b"\\u" in content:  # JSON escapes can spell lone surrogates; UTF-8 cannot
        for name, value in row.items():
            if isinstance(value, str) and (bad := _lone_surrogate(value)):
                why = f"{where}: {name!r} contains a lone surrogate, \\u{bad:04x}: half of a "
                why += "character"
                raise UserError("--source", str(file), why, ON_LINE)
    return row


def _lone_surrogate(text: str) -> int | None:
    """The code of the first lone surrogate in a text, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ord(text[error.start])
    return None


def _csv_rows(file: Path, form: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    # surrogateescape: a byte that is not UTF-8 becomes the last 8 bits of a lone surrogate, and its
    # line is known
    with io.TextIOWrapper(
        open_binary(file), encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as stream:
        head = stream.readline()
        if re.match(r"(?i)\s*<(!doctype|html|\?xml)", head):  # a server's page about an error
            raise _damaged(file, "it is HTML or XML, not a table")
        separator = next((mark for mark in ",\t;" if mark in head), ",") if form == ".csv" else "\t"
        reader = csv.reader(itertools.chain([head], stream), delimiter=separator, strict=True)
        line = 1
        try:
            columns = next(reader, [])
            if bad := _lone_surrogate("".join(columns)):
                raise _not_utf8(file, bad & 0xFF, 1)
            line = reader.line_num + 1
            for values in reader:
                where = f"line {line}"
                if bad := _lone_surrogate("".join(values)):
                    yield where, _not_utf8(file, bad & 0xFF, line)
                elif values and len(values) != len(columns):
                    why = (
                        f"{where}: it has {len(values)} fields, "
                        f"and the first line names {len(columns)} columns"
                    )
                    remedy = f"{ON_LINE}; a field that contains {separator!r} must be quoted"
                    yield where, UserError("--source", str(file), why, remedy)
                elif values:
                    yield where, dict(zip(columns, values, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            # quotes pair up differently from here on, so no later line can be trusted
            remedy = (
                f'correct that line, {LEAVE_OUT}; a quote in a quoted field is written twice: ""'
            )
            raise UserError("--source", str(file), f"line {line}: {error}", remedy) from error


def _parquet_rows(file: Path, column: str | None) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    with file.open("rb") as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        wanted = column or "text"
        columns = [wanted] if wanted in table.schema_arrow.names else None
        number = 0
        for batch in table.iter_batches(1024, columns=columns):
            try:
                found = batch.to_pylist()
            except UnicodeDecodeError:  # pyarrow does not check that strings are UTF-8
                found = [_arrow_row(file, number + i, batch.slice(i, 1)) for i in range(len(batch))]
            for row in found:
                yield f"row {number}", row
                number += 1


def _arrow_row(file: Path, number: int, batch: Any) -> Row:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        why = f"row {number}: it is not UTF-8 (byte 0x{error.object[error.start]:02x})"
        remedy = "correct or remove that row, or leave out all such rows: --skip damaged"
        return UserError("--source", str(file), why, remedy)


def _not_utf8(file: Path, byte: int, line: int) -> UserError:
    why = f"line {line}: it is not UTF-8 (byte 0x{byte:02x})"
    copy = f"if it is Latin-1, convert a copy and give that: {utf8_copy(file, 'LATIN1')}"
    return UserError("--source", str(file), why, f"{copy}; {LEAVE_OUT}")


def _first_bad_line(file: Path) -> int:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _damaged(file: Path, error: Exception | str) -> UserError:
    said = " ".join(str(error).split())[:300]
    if "too much memory for decoding" in said:  # zstd's words
        why = "it was compressed with a window above 128 MiB (zstd --long), which is not supported"
        old, new = shlex.quote(str(file)), shlex.quote(str(new_name(file)))
        remedy = f"decompress a copy, in up to 2 GiB of memory: `zstd -d --long=31 {old} -o {new}`"
        return Unreadable("--source", str(file), why, f"{remedy}, and give that")
    if isinstance(error, NotImplementedError):
        why = f"it has a form that pyarrow cannot read: {said}"
        return Unreadable("--source", str(file), why, "write it in another one, or leave it out")
    remedy = f"copy it again from its source, {LEAVE_OUT}"
    return UserError("--source", str(file), f"it is damaged or cut short: {said}", remedy)
