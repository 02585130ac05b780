"""Reads documents one at a time, in the same order on every machine, from sources of any size.

A source is named by a string; several are read in the order given:

    python-stdlib     the source code of the running Python's standard library, without its tests:
                      about 11 MB of real text that every machine has; a file is a document
    a file or a glob  of text (a file is a document) or of tables (a row is a document), compressed
                      or not: readers.py lists the extensions; all others are read as text.
                      A file that is something else by its first bytes is refused (contents.py)
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
import os
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.contents import COMPRESSED, Refused, check_content, kind
from data.files import TABLES, TEXTS, Report, files_of_folder, files_of_glob
from data.readers import Row, reading, rows, text_parts
from errors import UserError, is_file

STDLIB = "python-stdlib"
FIRST_ROWS = 1000
_NAMES = "test tests idle_test site-packages dist-packages __pycache__ lib-dynload"
STDLIB_EXCLUDED = set(_NAMES.split())


class Document(NamedTuple):
    """One document. Its id decides whether it is held out: the path of a text file, relative to the
    source (of a glob: to the folder before its first wildcard; of files listed one by one: to their
    common folder); or the text of a row, so that equal rows are always in the same split."""

    id: str
    text: str


def documents(
    source: str | Sequence[str],
    text_field: str = "text",
    split: str = "train",
    report: Report | None = None,
) -> Iterator[Document]:
    """Yields the documents of `source`, or of several sources, in order. A file that several of
    them name is read once. None is empty.

    text_field: the column of a table that holds the text.
    split: the split to read of a folder of tables or of a hub data set; ignored for other sources.
    report: records what was read and what was left out, and says what may be left out.

    Raises UserError for a source that does not exist, before one is read, and for the first file
    or row that cannot be read, unless it is to be skipped.
    """
    report = report or Report()
    sources = [source] if isinstance(source, str) else source
    some = False
    for document in _of_sources(sources, text_field, split, report):
        some = True
        yield document
    if not some:
        why = "; ".join(["it contains no text", *report.reasons()])
        raise UserError("--source", shown(sources), why, "give another source")


def shown(sources: Sequence[str]) -> str:
    """The sources as text: the only one as it is, or several as a shell would read them."""
    return sources[0] if len(sources) == 1 else shlex.join(sources)


def _of_sources(
    sources: Sequence[str], text_field: str, split: str, report: Report
) -> Iterator[Document]:
    streams: list[Iterator[Document]] = []
    seen: set[str] = set()

    def is_new(name: str, identity: str) -> bool:
        if identity in seen:
            report.leave_out(name, "given twice: read once")
            return False
        seen.add(identity)
        return True

    # A shell may have listed files for a glob: those of one name must not have one id.
    folders: list[str] = []
    for source in sources:
        with reading(Path(source)):
            if is_file(Path(source)):
                folders.append(os.path.dirname(os.path.abspath(source)))
    common = Path(os.path.commonpath(folders) if folders else "")
    for source in sources:  # all are found before one is read
        with reading(Path(source)):
            files, base = _files(source, Path(source), common, split, report)
        if files is not None:
            new = [file for file in files if is_new(str(file), os.path.realpath(file))]
            streams.append(_of_files(new, base, Path(source).is_dir(), text_field, report))
        elif is_new(source, source):
            streams.append(_of_hub(source, text_field, split, report))
    for stream in streams:
        yield from stream


def _files(
    source: str, path: Path, common: Path, split: str, report: Report
) -> tuple[list[Path] | None, Path]:
    """The files of a source, in order, and the folder to which their names are relative: of a file,
    `common`. Returns None for a data set on the hub."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file
            for file in root.rglob("*.py")
            if not STDLIB_EXCLUDED & set(file.relative_to(root).parts[:-1])
            # _sysconfigdata* is generated when Python is built, and contains that machine's paths
            and not file.name.startswith(("_sysconfigdata", "sitecustomize"))
        ]
        return sorted(files, key=lambda file: file.relative_to(root).as_posix()), root
    if path.is_dir():
        return files_of_folder(path, split, report), path
    if is_file(path):
        return [path], common
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1])
    base = Path(*fixed)  # below which the names of a glob's files differ
    is_glob = glob.has_magic(source)
    if is_glob and (files := files_of_glob(source, report)):
        return files, base
    looks_local = path.is_absolute() or source.startswith(".") or source.count("/") > 1
    named = kind(path) in TABLES | TEXTS or path.suffix in COMPRESSED
    if is_glob or looks_local or named:
        raise UserError("--source", source, "there is no such file or folder", "check the path")
    return None, base


def _of_files(
    files: list[Path], base: Path, is_folder: bool, text_field: str, report: Report
) -> Iterator[Document]:
    for file in files:
        name, used = Path(os.path.relpath(file, base)).as_posix(), 0
        try:
            if is_folder and kind(file) == ".json" and not _begins_as_table(file, text_field):
                why = f"JSON, but its first lines have no text in column {text_field!r}"
                report.leave_out(name, why)
                continue
            for document in _of_file(file, name, text_field, report):
                report.files += not used
                used += 1
                yield document
            if not used:
                report.leave_out(name, "empty")
        except Refused:
            raise
        except UserError as error:
            report.fault("damaged_files", error)
            begins = f" (from document {used + 1} on)" if used else ""
            report.leave_out(name + begins, "damaged")


def _begins_as_table(file: Path, text_field: str) -> bool:
    """Whether one of the first rows of a .json file has text. Many of those in a folder are no
    tables."""
    try:
        with reading(file):
            check_content(file)
        first = itertools.islice(rows(file, text_field), FIRST_ROWS)
        found = (row.get(text_field, 0) for _, row in first if isinstance(row, dict))
        return any(isinstance(text, str | None) for text in found)
    except Refused:
        raise
    except UserError:
        return file.suffix.lower() in COMPRESSED  # it is damaged: whoever reads it says so


def _of_file(file: Path, name: str, text_field: str, report: Report) -> Iterator[Document]:
    with reading(file):
        check_content(file)
    if kind(file) in TABLES:
        yield from _of_rows(rows(file, text_field), str(file), text_field, report)
        return
    for i, text in enumerate(text_parts(file)):
        yield Document(f"{name}#{i}" if i else name, text)


def _of_rows(
    table: Iterator[tuple[str, Row]], name: str, text_field: str, report: Report
) -> Iterator[Document]:
    """Yields every row that has text, and counts the others in `report`."""
    for where, row in table:
        if isinstance(row, str):
            remedy = "correct or remove that row, or leave out all such rows: --skip damaged"
            report.fault("damaged_rows", UserError("--source", name, f"{where}: {row}", remedy))
        elif text_field not in row:
            why = f"{where} of {name} has no such column"
            remedy = f"give one of its columns ({', '.join(map(str, row))[:300]}), correct that "
            remedy += "row, or leave out all such rows: --skip missing"
            report.fault("missing_texts", UserError("--text-field", text_field, why, remedy))
        elif (text := row[text_field]) is None:
            report.counts["null_texts"] += 1
        elif not isinstance(text, str):
            why = f"{where} of {name} holds {type(text).__name__}, not text"
            remedy = "name the column that holds the text, correct that row, or leave out all such "
            remedy += "rows: --skip damaged"
            report.fault("damaged_rows", UserError("--text-field", text_field, why, remedy))
        elif text:
            yield Document(text, text)
        else:
            report.counts["empty_documents"] += 1


def _of_hub(source: str, text_field: str, split: str, report: Report) -> Iterator[Document]:
    """Yields one document per row of `datasets.load_dataset(..., streaming=True)`."""
    # Imported here because it takes a second, and preparation workers, which import this module,
    # do not need it.
    import datasets

    name, _, configuration = source.partition(":")
    read = 0
    try:
        table = datasets.load_dataset(name, configuration or None, streaming=True, split=split)
        numbered = ((f"row {number}", row) for number, row in enumerate(table))
        for document in _of_rows(numbered, source, text_field, report):
            read += 1
            yield document
    except UserError:
        raise
    # `datasets` passes on any error of the layers below (HTTP, Arrow, fsspec, ValueError).
    except Exception as error:
        what = f"after {read} rows: "
        if not read:
            what = "it is not a local file or folder, and cannot be read as a hub data set: "
        reason = f"{what}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "check the name, --split, the format and the network"
        raise UserError("--source", source, reason, remedy) from error
