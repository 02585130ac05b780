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
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.columns import row_texts
from data.contents import ARCHIVES, COMPRESSED, Unreadable, form, kind
from data.files import TABLES, TEXTS, Report, UnknownColumn, files_of_folder, files_of_glob
from data.readers import reading, rows, text_parts
from errors import UserError

STDLIB = "python-stdlib"
_NAMES = "test tests idle_test site-packages dist-packages __pycache__ lib-dynload"
STDLIB_EXCLUDED = set(_NAMES.split())


class Document(NamedTuple):
    """One document. Its id decides whether it is held out: the path of a text file, relative to the
    source (of a glob: to the folder before its first wildcard); or the text of a row, so that equal
    rows are always in the same split."""

    id: str
    text: str


def documents(
    source: str | Sequence[str],
    text_field: str | None = None,
    split: str = "train",
    report: Report | None = None,
) -> Iterator[Document]:
    """Yields the documents of `source`, or of several sources, in order. A file that several of
    them name is read once. None is empty.

    text_field: the column of a table that holds the text; None: `text`, else the only text column.
    split: the split to read of a folder of tables or of a hub data set; ignored for other sources.
    report: records what was read and what was left out, and says what may be left out.

    Raises UserError for a source that does not exist, and for all files and rows that cannot be
    read: it reads to the end to list them (a hub data set: to the first), but yields no document
    after the first.
    """
    report = report or Report()
    sources = [source] if isinstance(source, str) else source
    some = False
    for document in _of_sources(sources, text_field, split, report):
        some = True
        if not report.refused:
            yield document
    report.check("--source", shown(sources))
    if not some:
        why = ": ".join(["it contains no text", *filter(None, [", ".join(report.counted())])])
        raise UserError("--source", shown(sources), why, "give another source")


def shown(sources: Sequence[str]) -> str:
    """The sources as text: the only one as it is, or several as a shell would read them."""
    return sources[0] if len(sources) == 1 else shlex.join(sources)


def _of_sources(
    sources: Sequence[str], text_field: str | None, split: str, report: Report
) -> Iterator[Document]:
    streams: list[Iterator[Document]] = []
    seen: set[str | Path] = set()
    for source in sources:  # all are found before one is read
        try:
            with reading(Path(source)):
                files, folder = _files(source, Path(source), split, report)
        except UserError as error:
            report.fault("not found", error)
            continue
        new = []
        for thing in [source] if files is None else files:
            # within a folder, files_of_folder has seen to it
            once = thing if folder and len(sources) == 1 else Path(thing).resolve()
            if once in seen:
                report.leave_out(str(thing), "given twice: read once")
            else:
                seen.add(once)
                new.append(thing)
        if files is not None:
            base = folder or _fixed_part(source)
            streams.append(_of_files(new, base, folder is not None, text_field, report))
        elif new:
            streams.append(_of_hub(source, text_field, split, report))
    for stream in [] if report.refused else streams:
        try:
            yield from stream
        except UserError as error:
            report.fault("source", error)


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
            # _sysconfigdata* is generated when Python is built, and contains that machine's paths
            and not file.name.startswith(("_sysconfigdata", "sitecustomize"))
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


def _fixed_part(source: str) -> Path:
    """The folder below which the names of a file, or of a glob's files, differ."""
    parts = Path(source).parts[:-1]
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))


def _of_files(
    files: list[Path], base: Path, is_folder: bool, text_field: str | None, report: Report
) -> Iterator[Document]:
    for file in report.while_reading(files):
        name = file.relative_to(base).as_posix()
        in_folder = is_folder and kind(file) == ".json"  # many of those are not tables
        its = Report(report.skip) if in_folder else report  # so their faults may not count
        used, error = 0, None
        try:
            for document in _of_file(file, name, text_field, its, not in_folder):
                if in_folder:
                    report.take(its)
                report.files += not used
                used += 1
                yield document
        except UserError as raised:
            error = raised
        if in_folder and not used and not isinstance(error, Unreadable):
            if error and not isinstance(error, UnknownColumn):
                report.leave_out(f"{name} ({error.why})", "JSON, but cannot be read as a table")
                continue
            if error or its.counts["damaged_rows"] or its.counts["missing_texts"]:
                column = text_field or "text"
                report.leave_out(name, f"JSON, but has no rows with text in column {column!r}")
                continue
        if in_folder:
            report.take(its)
        if isinstance(error, UnknownColumn | Unreadable):
            report.fault("file", error)
        elif error:
            report.fault("damaged_files", error)
            if used:
                report.used_in_part.append(f"{name} (damaged from document {used + 1} on)")
            else:
                report.leave_out(name, "damaged")
        elif not used:
            report.leave_out(name, "empty")


def _of_file(
    file: Path, name: str, text_field: str | None, report: Report, find: bool
) -> Iterator[Document]:
    with reading(file):
        its_form = form(file)
    if its_form not in TABLES:
        for i, text in enumerate(text_parts(file)):
            yield Document(f"{name}#{i}" if i else name, text)
        return
    table = report.while_reading(rows(file, its_form, text_field))
    for text, column in row_texts(table, str(file), text_field, report, find):
        if column != "text" and text_field is None:
            report.columns.setdefault(column, name)
        yield Document(text, text)


def _of_hub(source: str, text_field: str | None, split: str, report: Report) -> Iterator[Document]:
    """Yields one document per row of `datasets.load_dataset(..., streaming=True)`."""
    # Imported here because it takes a second, and preparation workers, which import this module,
    # do not need it.
    import datasets

    name, _, configuration = source.partition(":")
    read = 0
    try:
        table = datasets.load_dataset(name, configuration or None, streaming=True, split=split)
        # only up to the first fault, since reading on would download all of it
        table = enumerate(itertools.takewhile(lambda _: not report.refused, table))
        numbered = ((f"row {number}", row) for number, row in table)
        for text, column in row_texts(numbered, source, text_field, report):
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
