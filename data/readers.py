"""Reads one file, compressed or not: its unchanged text, or the rows of a table.

    .txt .md .py …        UTF-8, line ends unchanged; a byte order mark at the beginning is dropped
    .jsonl .ndjson .json  one object per line
    .csv .tsv             the first line names the columns; separated by commas, tabs or semicolons
    .parquet              read by pyarrow; only one column if it is known which
    .gz .bz2 .xz .zst     any of these except .parquet, compressed

A defect of a file raises a UserError that names the file. In place of a damaged row, what is wrong
with it is yielded, and reading continues. Nothing is repaired.
"""

import contextlib
import csv
import io
import itertools
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.contents import LEAVE_OUT, Refused, kind, open_binary
from errors import UserError

MAX_TEXT_CHARS = 1 << 20
UTF8_MARK = b"\xef\xbb\xbf"
Row = dict[str, Any] | str  # or what is wrong with it


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


def rows(file: Path, column: str) -> Iterator[tuple[str, Row]]:
    """Yields (location, row) for every row of a table; the location is such as `line 3`.

    column: the only column to read from a parquet file, if it exists.
    """
    with reading(file):
        match kind(file):
            case ".parquet":
                yield from _parquet_rows(file, column)
            case ".csv" | ".tsv":
                yield from _csv_rows(file)
            case _:
                yield from _json_lines(file)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns any error of reading `file` into a UserError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], _first_bad_line(file)
        why = f"line {line}: it is not UTF-8 (byte 0x{byte:02x})"
        remedy = "convert a copy, if it is Latin-1 by `iconv -f LATIN1 -t UTF-8`, and give that, "
        remedy += LEAVE_OUT
        raise UserError("--source", str(file), why, remedy) from error
    except (OSError, ImportError) as error:
        said = getattr(error, "strerror", None)
        if said is None and isinstance(error, OSError):  # raised by a decompressor
            raise _damaged(file, error) from error
        remedy = "check that it exists and that you have permission to read it, or leave it out"
        if said is None:  # a Python may lack bz2 or lzma
            said, remedy = f"{error}", "decompress it first"
        why, name = f"it cannot be read ({said})", getattr(error, "filename", None) or file
        raise Refused("--source", str(name), why, remedy) from error
    except (EOFError, zlib.error, ValueError) as error:  # includes pyarrow.ArrowInvalid
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
                yield f"line {number}", _json_row(line)


def _json_row(line: bytes) -> Row:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte 0x{line[error.start]:02x})"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {getattr(error, 'msg', error)}"
    if not isinstance(row, dict):
        return f'a row must be an object such as {{"text": …}}, and this is a {type(row).__name__}'
    for name, value in row.items():
        if isinstance(value, str) and (bad := _lone_surrogate(value)):  # JSON escapes can spell one
            return f"{name!r} contains a lone surrogate, \\u{bad:04x}: half of a character"
    return row


def _lone_surrogate(text: str) -> int | None:
    """The code of the first lone surrogate in a text, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ord(text[error.start])
    return None


def _csv_rows(file: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    # surrogateescape: a byte that is not UTF-8 becomes the last 8 bits of a lone surrogate, and its
    # row is known
    with io.TextIOWrapper(open_binary(file), "utf-8-sig", "surrogateescape", newline="") as stream:
        head = stream.readline()
        marks = "\t" if kind(file) == ".tsv" else ",\t;"
        separator = next((mark for mark in marks if mark in head), marks[0])
        reader = csv.reader(itertools.chain([head], stream), delimiter=separator, strict=True)
        line = 1
        try:
            columns = next(reader, [])
            separator.join(columns).encode(errors="surrogateescape").decode()  # must be UTF-8
            line = reader.line_num + 1
            for values in reader:
                row: Row = dict(zip(columns, values, strict=False))
                if bad := _lone_surrogate("".join(values)):
                    row = f"it is not UTF-8 (byte 0x{bad & 0xFF:02x})"
                elif len(values) != len(columns):
                    row = f"it has {len(values)} fields, and the first line names {len(columns)} "
                    row += f"columns; a field that contains {separator!r} must be quoted"
                if values:
                    yield f"line {line}", row
                line = reader.line_num + 1
        except csv.Error as error:
            # quotes pair up differently from here on, so no later line can be trusted
            remedy = f'correct it, {LEAVE_OUT}; a quote in a quoted field is written twice: ""'
            raise UserError("--source", str(file), f"line {line}: {error}", remedy) from error


def _parquet_rows(file: Path, column: str) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    with file.open("rb") as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        columns = [column] if column in table.schema_arrow.names else None
        number = itertools.count()
        for batch in table.iter_batches(1024, columns=columns):
            for row in _arrow_rows(batch):
                yield f"row {next(number)}", row


def _arrow_rows(batch: Any) -> list[Row]:
    try:
        rows: list[Row] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:  # pyarrow does not check that strings are UTF-8
        if len(batch) == 1:
            return [f"it is not UTF-8 (byte 0x{error.object[error.start]:02x})"]
        return [row for i in range(len(batch)) for row in _arrow_rows(batch.slice(i, 1))]


def _first_bad_line(file: Path) -> int:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _damaged(file: Path, error: Exception) -> UserError:
    said = " ".join(str(error).split())[:300]
    why = f"it is damaged or cut short, or has an unusual form: {said}"
    return UserError("--source", str(file), why, f"copy it again from its source, {LEAVE_OUT}")
