"""Reads documents one at a time, in the same order on every machine, from sources of any size.

A source is named by a string:

    python-stdlib     the source code of the running Python's standard library, without its tests:
                      about 11 MB of real text that every machine has; a file is a document
    a file or a glob  of text (a file is a document) or of tables (a row is a document), compressed
                      or not: readers.py lists the extensions; all others are read as text
    a folder          containing such files, mixed or not, at any depth. Hidden files are left out,
                      and so are tables whose names show another split than --split
                      (`test.jsonl`); what is left out is reported (files.py)
    anything else     the name of a data set on the Hugging Face hub, streamed; NAME:CONFIG if it
                      has configurations

The text is exactly that of the file: line ends are not changed. A text file longer than
`MAX_TEXT_CHARS` is cut at the ends of lines into documents of about that length, so that a file of
any size is read in constant memory.
"""

import glob
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.files import Report, files_of_folder, files_of_glob
from data.readers import (
    ARCHIVES,
    COMPRESSED,
    MAX_TEXT_CHARS,
    TABLES,
    TEXTS,
    kind,
    reading,
    row_texts,
    rows,
    text_parts,
)
from errors import UserError

__all__ = ["MAX_TEXT_CHARS", "STDLIB", "Document", "documents"]

STDLIB = "python-stdlib"
_NAMES = "test tests idle_test site-packages dist-packages __pycache__ lib-dynload"
STDLIB_EXCLUDED = set(_NAMES.split())


class Document(NamedTuple):
    """One document. Its id decides whether it is held out: the path of a text file, relative to the
    source; or the text of a row, so that equal rows are always in the same split."""

    id: str
    text: str


def one_source(given: list[str]) -> str:
    """The value of --source. Raises UserError if the shell expanded a pattern to several values."""
    if len(given) > 1:
        why = (
            "it takes one source, and several were given; the shell may have expanded a pattern "
            "to the files it matches"
        )
        remedy = "put the pattern in quotes: 'corpus/*.jsonl'; or give the folder"
        raise UserError("--source", " ".join(given)[:200], why, remedy)
    return given[0]


def documents(
    source: str, text_field: str | None = None, split: str = "train", report: Report | None = None
) -> Iterator[Document]:
    """Yields the documents of `source`, in order.

    text_field: the column of a table that holds the text; None: `text`, else the only text column.
    split: the split to read of a folder of tables or of a hub data set; ignored for other sources.
    report: records which files were read and which were left out.

    Raises UserError, on the first `next`, for a source that does not exist, and later for a file
    that cannot be read completely.
    """
    path, report = Path(source), report or Report()
    with reading(path):
        files, folder = _files(source, path, split, report)
    if files is None:
        yield from _of_hub(source, text_field, split, report)
        return
    yield from _of_files(files, folder, text_field, report)
    if not report.files:
        what = (
            "the file is empty"
            if len(files) == 1 and files[0].stat().st_size == 0
            else "it contains no text"
        )
        raise UserError("--source", source, what, "give another source")


def _files(
    source: str, path: Path, split: str, report: Report
) -> tuple[list[Path] | None, Path | None]:
    """The files of a source, in order, and the folder to which their names are relative, if any.
    Returns (None, None) for a data set on the hub."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file
            for file in root.rglob("*.py")
            if not STDLIB_EXCLUDED & set(file.relative_to(root).parts[:-1])
        ]
        # _sysconfigdata* is generated when Python is built, and contains that machine's paths.
        files = [
            file for file in files if not file.name.startswith(("_sysconfigdata", "sitecustomize"))
        ]
        return sorted(files, key=lambda file: file.relative_to(root).as_posix()), root
    if path.is_dir():
        return files_of_folder(path, split, report), path
    if path.is_file():
        if (ending := kind(path)) in ARCHIVES:
            why = f"it is an archive ({ending})"
            raise UserError("--source", source, why, "unpack it and give the folder")
        return [path], None
    if glob.has_magic(source) and (files := files_of_glob(source, report)):
        return files, None
    looks_local = path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if (
        glob.has_magic(source)
        or looks_local
        or kind(path) in TABLES | TEXTS | ARCHIVES
        or path.suffix in COMPRESSED
    ):
        raise UserError("--source", source, "there is no such file or folder", "check the path")
    return None, None


def _of_files(
    files: list[Path], folder: Path | None, text_field: str | None, report: Report
) -> Iterator[Document]:
    for file in files:
        name = file.name if folder is None else file.relative_to(folder).as_posix()
        if kind(file) in TABLES:
            find = folder is None or kind(file) != ".json"  # in a folder, many .json are not tables
            found = _of_table(file, name, text_field, report, find)
        else:
            parts = enumerate(text_parts(file))
            found = (Document(f"{name}#{i}" if i else name, text) for i, text in parts)
        try:
            first = next(found, None)
        except UserError:
            if folder is None or kind(file) != ".json":
                raise
            report.leave_out(name, f"JSON, but has no rows with column {text_field or 'text'!r}")
            continue
        if first is None:
            report.leave_out(name, "empty")
            continue
        report.files += 1
        yield first
        yield from found


def _of_table(
    file: Path, name: str, text_field: str | None, report: Report, find: bool
) -> Iterator[Document]:
    for text, column in row_texts(rows(file, text_field), str(file), text_field, find):
        if column != "text" and text_field is None:
            report.columns.setdefault(column, name)
        yield Document(text, text)


def _of_hub(source: str, text_field: str | None, split: str, report: Report) -> Iterator[Document]:
    """Yields one document per row of `datasets.load_dataset(..., streaming=True)`."""
    # Imported here because it takes a second, and preparation workers, which import this module,
    # do not need it.
    import datasets

    name, _, configuration = source.partition(":")
    number = itertools.count()
    read = 0
    try:
        table = datasets.load_dataset(name, configuration or None, streaming=True, split=split)
        for text, column in row_texts(
            ((f"row {next(number)}", row) for row in table), source, text_field
        ):
            if column != "text" and text_field is None:
                report.columns.setdefault(column, source)
            read += 1
            yield Document(text, text)
    except (UserError, GeneratorExit):
        raise
    # `datasets` passes on any error of the layers below (HTTP, Arrow, fsspec, ValueError).
    except Exception as error:
        what = (
            f"after {read} rows: "
            if read
            else "it is not a local file or folder, and cannot be read as a hub data set: "
        )
        reason = f"{what}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "check the name, --split, the format and the network"
        raise UserError("--source", source, reason, remedy) from error
