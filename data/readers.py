"""Reads one file, compressed or not: its unchanged text, or the rows of a table.

    .txt .md .py …      UTF-8, line ends unchanged; a byte order mark at the beginning is dropped
    .jsonl .ndjson      one object per line
    .json               the same, or one list of objects, or one object
    .csv .tsv           the first line names the columns; separated by commas, tabs or semicolons
    .parquet            read by pyarrow; only one column if it is known which
    .gz .bz2 .xz .zst   appended to any of these except .parquet

Any defect of a file raises a UserError that names the file, and the line or row where it is known.
Nothing is repaired and nothing is left out.
"""

import contextlib
import csv
import importlib
import io
import itertools
import json
import shlex
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from errors import UserError

MAX_TEXT_CHARS = 1 << 20
TABLES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_ENDINGS = (
    ".txt .text .md .markdown .rst .tex .html .py .pyi .c .h .cc .cpp .hpp .cu "
    ".go .java .js .ts .rs .rb .sh .sql .scala .kt .swift .lua .jl .r"
)
TEXTS = set(_ENDINGS.split())
ARCHIVES = {".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"}
UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
ROWS_WITHOUT = 1000  # a column missing from this many first rows is not in the table
ON_LINE = "correct or remove that line"


def kind(path: Path) -> str:
    """The file's type, from its name: `.jsonl` for `a.jsonl` and `A.JSONL.gz`, `.zip` for `a.zip`,
    `.tar` for `a.tar.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def text_parts(file: Path) -> Iterator[str]:
    """The content of a text file, in parts of about MAX_TEXT_CHARS cut at the ends of lines (a
    longer line is cut within)."""
    with (
        reading(file),
        io.TextIOWrapper(open_binary(file), encoding="utf-8-sig", newline="") as stream,
    ):
        while text := stream.read(MAX_TEXT_CHARS):
            yield text if text.endswith("\n") else text + stream.readline(MAX_TEXT_CHARS)


def rows(file: Path, column: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) for every row of a table; the location is such as `line 3`.

    column: the only column to read from a parquet file; None: `text` if it exists, else all.
    """
    with reading(file):
        match kind(file):
            case ".parquet":
                yield from _parquet_rows(file, column)
            case ".csv" | ".tsv":
                yield from _csv_rows(file)
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
        raise _not_utf8(file, error) from error
    except (EOFError, zlib.error) as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if error.strerror is None:  # raised by a decompressor
            raise _damaged(file, error) from error
        remedy = "check that it exists and that you have permission to read it, or leave it out"
        why = f"it cannot be read ({error.strerror})"
        raise UserError("--source", str(error.filename or file), why, remedy) from error
    except ValueError as error:  # includes pyarrow.ArrowInvalid
        raise _damaged(file, error) from error
    except Exception as error:
        # Compared by name: these modules may be missing, or not yet imported.
        if type(error).__module__.split(".")[0] not in ("_lzma", "pyarrow"):
            raise
        raise _damaged(file, error) from error


def open_binary(file: Path) -> BinaryIO:
    """Opens the file's decompressed content."""
    suffix = file.suffix.lower()
    # Python supports zstd only from 3.14 on; pyarrow, which `datasets` requires, always does.
    if suffix == ".zst":
        import pyarrow

        file.stat()  # raises the file system's own error, with its strerror
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))  # type: ignore[arg-type]
    if suffix not in COMPRESSED:
        return file.open("rb")
    name = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}[suffix]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        remedy = f"decompress it first, or use a Python that has the module {name}"
        why = f"this Python was built without {suffix[1:]} support"
        raise UserError("--source", str(file), why, remedy) from error
    return module.open(file, "rb")


def text_column(row: dict[str, Any], asked: str | None) -> str | None:
    """The name of the text's column: `asked` if given; else `text`; else the only column that holds
    text in this row. None if there is no such column."""
    if asked is not None or "text" in row:
        return asked or "text"
    texts = [
        name for name, value in row.items() if isinstance(value, str) and not _is_number(value)
    ]
    return texts[0] if len(texts) == 1 else None


def row_texts(
    table: Iterator[tuple[str, dict[str, Any]]], name: str, asked: str | None, find: bool = True
) -> Iterator[tuple[str, str]]:
    """Yields (text, column) for every row. The text is empty where it is null, or where only other
    rows have that column.

    find: whether a column other than `text` may be chosen if none was asked for.
    """
    column, seen, number, row = None, False, 0, {}
    for number, (where, row) in enumerate(table, 1):
        column = column or text_column(row, asked)
        if (
            column is None
            or not (find or column in (asked, "text"))
            or (number == ROWS_WITHOUT and not seen)
        ):
            raise no_column(name, row, asked)
        if column != "text" and asked is None and "text" in row:
            why = f"{where} has a column 'text', and the rows before it do not"
            remedy = f"choose one: --text-field {column}, or --text-field text"
            raise UserError("--source", name, why, remedy)
        seen = seen or column in row
        text = row.get(column)
        if text is not None and not isinstance(text, str):
            why = f"{where} of {name} holds {type(text).__name__}, not text"
            remedy = "name the column that holds the text, or correct that row"
            raise UserError("--text-field", column, why, remedy)
        yield text or "", column
    if number and not seen:
        raise no_column(name, row, asked)


def no_column(name: str, row: dict[str, Any], asked: str | None) -> UserError:
    columns = ", ".join(map(str, row))
    columns = columns if len(columns) < 300 else columns[:300] + "…"
    why = f"the rows of {name} have no such column"
    remedy = f"set --text-field to one of: {columns}; or leave that file out"
    return UserError("--text-field", asked or "text", why, remedy)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text.strip()
    return True


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith(UTF16_MARKS):
                line.decode()  # raises; `reading` then reports UTF-16
            line = line.removeprefix(UTF8_MARK) if number == 1 else line
            if line.strip():
                where = f"line {number}"
                yield where, _checked_row(file, where, _parsed(file, number, line), line)


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"row {number}", _checked_row(file, f"row {number}", row, content)


def _parsed(file: Path, number: int | None, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8" if number else "utf-8-sig"))
    except UnicodeDecodeError as error:
        if number is None:
            raise
        raise _not_utf8(file, error, number) from error
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
                why = f"{where}: {name!r} contains a lone surrogate, {bad}: half of a character"
                raise UserError("--source", str(file), why, ON_LINE)
    return row


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def _csv_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    with io.TextIOWrapper(open_binary(file), encoding="utf-8-sig", newline="") as stream:
        head = stream.readline()
        separator = (
            next((mark for mark in ",\t;" if mark in head), ",") if kind(file) == ".csv" else "\t"
        )
        reader = csv.reader(itertools.chain([head], stream), delimiter=separator, strict=True)
        line = 1
        try:
            columns = next(reader, [])
            line = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(columns):
                    why = (
                        f"line {line}: it has {len(values)} fields, "
                        f"and the first line names {len(columns)} columns"
                    )
                    remedy = f"{ON_LINE}; a field that contains {separator!r} must be quoted"
                    raise UserError("--source", str(file), why, remedy)
                if values:
                    yield f"line {line}", dict(zip(columns, values, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            remedy = f'{ON_LINE}; a quote inside a quoted field is written twice: ""'
            raise UserError("--source", str(file), f"line {line}: {error}", remedy) from error


def _parquet_rows(file: Path, column: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    with file.open("rb") as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        wanted = column or ("text" if "text" in names else None)
        if wanted is not None and wanted not in names:
            raise no_column(str(file), dict.fromkeys(names), column)
        number = 0
        for batch in table.iter_batches(1024, columns=None if wanted is None else [wanted]):
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1


def _not_utf8(file: Path, error: UnicodeDecodeError, line: int | None = None) -> UserError:
    with open_binary(file) as stream:
        start = stream.read(2)
    if start in UTF16_MARKS:
        encoding, why = "UTF-16", "it is UTF-16, not UTF-8"
    else:
        line = line or _first_bad_line(file)
        bad = f"{error.reason}: 0x{error.object[error.start]:02x}"
        encoding, why = "LATIN1", f"line {line}: it is not UTF-8 ({bad})"
    plain = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    old, new = shlex.quote(str(plain)), shlex.quote(f"{plain}.utf8")
    command = f"iconv -f {encoding} -t UTF-8 {old} > {new} && mv {new} {old}"
    unpack = "decompress it and " if plain != file else ""
    sure = "" if encoding == "UTF-16" else ", if it is Latin-1"
    remedy = f"{unpack}convert it{sure}: `{command}`; or leave that file out"
    return UserError("--source", str(file), why, remedy)


def _first_bad_line(file: Path) -> int:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _damaged(file: Path, error: Exception) -> UserError:
    why = f"it is damaged or cut short: {' '.join(str(error).split())[:300]}"
    remedy = "copy it again from its source, or leave that file out"
    return UserError("--source", str(file), why, remedy)
