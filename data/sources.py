"""Where documents come from: one at a time, in the same order everywhere, from sources larger than memory.

A source is named by a string:

    python-stdlib       the source code of the running Python's standard library, without its tests: about 11 MB of real
                        text that every machine has; a file is a document
    a file or a glob    of text (a file is a document) or of tables (a row is a document): .jsonl, .json, .csv, .parquet,
                        also compressed (.jsonl.gz, .jsonl.zst)
    a folder            of text files, at any depth; or of tables, read as a Hugging Face data set with its splits
    anything else       the name of a data set on the Hugging Face hub, streamed; NAME:CONFIG where it has configurations

Tables are read by `datasets` in streaming mode. Text files are not: its text reader turns \\r\\n into \\n, and
what we train on is what is in the file. A text file longer than `MAX_TEXT_CHARS` is cut at the ends of lines into
documents of about that length, so that one file of any size is read in constant memory.
"""

import glob
import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from errors import UserError

MAX_TEXT_CHARS = 1 << 20
STDLIB = "python-stdlib"
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # suffix -> reader of `datasets`
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
TEXTS = {
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go"),
    *(".java", ".js", ".ts", ".rs", ".rb", ".sh", ".sql", ".scala", ".kt", ".swift", ".lua", ".jl", ".r"),
}


class Document(NamedTuple):
    """id: what decides its split: the path of a text file (relative to the source), the text itself of a row, so that
    equal rows are never on both sides."""

    id: str
    text: str


def held_out(document_id: str, fraction: float) -> bool:
    """Whether the document belongs to the held-out split: a pure function of its id, true for `fraction` of all ids."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def documents(source: str, text_field: str = "text", split: str = "train") -> Iterator[Document]:
    """The documents of `source`, in order.

    text_field: the column of a table that holds the text.
    split: which split of a Hugging Face data set (a folder of tables or a hub name); files have none.

    Raises UserError, on the first `next`, for a source that does not exist or cannot be read.
    """
    path = Path(source)
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if not STDLIB_EXCLUDED & set(file.relative_to(root).parts[:-1])]
        # _sysconfigdata* is generated when Python is built and full of that machine's paths.
        files = [file for file in files if not file.name.startswith(("_sysconfigdata", "sitecustomize"))]
        yield from _text_documents(_in_order(files, root), root)
    elif path.is_dir():
        suffixes = {_suffix(file) for file in path.rglob("*") if file.is_file()}
        if suffixes & {".parquet", ".jsonl"}:
            yield from _rows(source, text_field, path=source, split=split)
        else:
            files = [file for file in path.rglob("*") if _suffix(file) in TEXTS and file.is_file()]
            yield from _text_documents(_in_order(files, path), path)
    elif path.is_file() or any(map(Path.is_file, map(Path, glob.iglob(source, recursive=True)))):
        files = [path] if path.is_file() else [Path(name) for name in glob.glob(source, recursive=True)]
        files = _in_order([file for file in files if file.is_file()], Path())
        # A glob may mix the two; neighbours of one kind are read together.
        for reader, group in itertools.groupby(files, key=lambda file: TABLES.get(_suffix(file))):
            if reader is None:
                yield from _text_documents(list(group), Path())
            else:
                yield from _rows(source, text_field, path=reader, data_files=[str(f) for f in group], split="train")
    elif glob.has_magic(source) or path.is_absolute() or source.startswith(".") or source.count("/") > 1 or _suffix(path):
        raise UserError("--source", source, "there is no such file or folder", "check the path")
    else:
        name, _, configuration = source.partition(":")
        yield from _rows(source, text_field, path=name, name=configuration or None, split=split)


def _suffix(path: Path) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`; empty when it names no kind of file known here."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSED
    kinds = suffixes[:-1] if compressed else suffixes
    if kinds and (kinds[-1] in TABLES or (kinds[-1] in TEXTS and not compressed)):
        return kinds[-1]
    return ""


def _in_order(files: list[Path], root: Path) -> list[Path]:
    """Sorted by relative path as text: the same on every file system."""
    return sorted(files, key=lambda file: file.relative_to(root).as_posix() if root != Path() else file.as_posix())


def _text_documents(files: list[Path], root: Path) -> Iterator[Document]:
    for file in files:
        name = file.relative_to(root).as_posix() if root != Path() else file.name
        try:
            with file.open(encoding="utf-8", newline="") as stream:  # newline="": line ends as they are
                for part in itertools.count():
                    text = stream.read(MAX_TEXT_CHARS)
                    if not text:
                        break
                    text += "" if text.endswith("\n") else stream.readline(MAX_TEXT_CHARS)
                    yield Document(f"{name}#{part}" if part else name, text)
        except UnicodeDecodeError as error:
            why = f"it is not UTF-8 text (byte {error.start} of a block: {error.reason})"
            raise UserError("--source", str(file), why, "convert the file to UTF-8, or leave it out") from error
        except OSError as error:
            raise UserError("--source", str(file), f"cannot be read ({error.strerror})", "check the file") from error


def _rows(source: str, text_field: str, **load_arguments) -> Iterator[Document]:
    """One document per row of what `datasets.load_dataset(..., streaming=True)` gives. A null is an empty text."""
    import datasets  # takes a second, and a preparation worker, which imports this module, needs none of it

    rows_read = 0
    try:
        for row in datasets.load_dataset(**load_arguments, streaming=True):
            if text_field not in row:
                why = f"the rows of {source} have no such column"
                raise UserError("--text-field", text_field, why, f"one of: {', '.join(row)}")
            text = row[text_field]
            if text is not None and not isinstance(text, str):
                why = f"row {rows_read} of {source} holds {type(text).__name__}, not text"
                raise UserError("--text-field", text_field, why, "name the column that holds the text")
            rows_read += 1
            yield Document(text or "", text or "")
    except (UserError, GeneratorExit):
        raise
    # `datasets` raises whatever the layer below did (HTTP, Arrow, fsspec, ValueError): all say that the source is bad.
    except Exception as error:
        what = f"after {rows_read} rows: " if rows_read else "neither a file or folder here, nor readable as a data set: "
        reason = f"{what}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError("--source", source, reason, "check the name, --split, the format and the network") from error
