"""What a file holds. Its name says so: text, JSON lines, CSV or a parquet table, compressed or not.
A file whose first bytes show something else is refused."""

import importlib
import io
import re
from pathlib import Path
from typing import BinaryIO

from errors import UserError

# suffix → module that decompresses
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}
HEAD = 512  # first bytes that are read
LEAVE_OUT = "or leave that file out (--skip damaged)"
# what a file only points to: beginning of the content → name, remedy
_POINTERS = {
    rb"version https://(?:git-lfs|hawser)\S*\s+(?:ext-\S+ \S+\s+)*oid ": (
        "a Git LFS pointer, not the file", "run `git lfs pull` in its folder"),
    rb"/annex/objects/\S+\s*$": (
        "a git-annex pointer, not the file", "run `git annex get` in its folder"),
}  # fmt: skip


class Refused(UserError):
    """A fault that is not to be skipped: the source cannot be read as it is."""


def _suffixes(path: Path) -> tuple[str, str]:
    """The file's type and its compression, from its name: (`.jsonl`, `.gz`) for `A.JSONL.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    return suffixes[-1] if suffixes else "", packed


def kind(path: Path) -> str:
    """The file's type, from its name: `.jsonl` for `a.jsonl` and `A.JSONL.gz`."""
    return _suffixes(path)[0]


def first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD)


def pointer(head: bytes) -> tuple[str, str] | None:
    """What a file that begins so is, and what to do, if it only points to another."""
    return next((found for start, found in _POINTERS.items() if re.match(start, head)), None)


def check_content(file: Path) -> None:
    """Raises UserError if the file's first bytes are not what its name says."""
    first = first_bytes(file)
    if found := pointer(first):
        raise Refused("--source", str(file), f"it is {found[0]}", found[1])
    with open_binary(file) as stream:
        head = stream.read(HEAD)
    is_parquet = kind(file) == ".parquet"
    if not first.startswith(b"PAR1") if is_parquet else b"\0" in head:
        why = f"neither UTF-8 text nor a parquet table: it begins with {head[:16]!r}"
        remedy = f"unpack or convert it, or copy it again if it is damaged, {LEAVE_OUT}"
        raise UserError("--source", str(file), why, remedy)


def open_binary(file: Path) -> BinaryIO:
    """Opens the file's content, decompressed if it is compressed."""
    packed = _suffixes(file)[1]
    if not packed:
        return file.open("rb")
    module = importlib.import_module(COMPRESSED[packed])
    if packed == ".zst":  # Python supports zstd only from 3.14 on; `datasets` requires pyarrow
        return io.BufferedReader(module.input_stream(str(file), compression="zstd"))
    stream = module.open(file, "rb")
    if packed != ".gz":
        # A file may hold several compressed streams. What follows one and begins no other is a
        # fault, which Python's reader would take for the end.
        stream._buffer.raw._trailing_error = ()
    return stream
