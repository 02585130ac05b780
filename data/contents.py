"""What a file is, by its first bytes.

They decide whether it is compressed, a parquet table, text, or something else, which is refused.
The name says how text is to be read (`.jsonl`, `.csv`, …).
"""

import importlib
import io
import re
from pathlib import Path
from typing import BinaryIO, TypeVar

from errors import UserError

# suffix → module that decompresses, beginning of the content
COMPRESSED = {
    ".gz": ("gzip", rb"\x1f\x8b"),
    ".bz2": ("bz2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    ".xz": ("lzma", rb"\xfd7zXZ\0"),
    # the second form is a skippable frame, which pzstd writes first
    ".zst": ("pyarrow", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
HEAD = 512  # first bytes that are read; a tar's signature is at 257
PARQUET = b"PAR1"  # at both ends of a parquet table
LEAVE_OUT = "or leave that file out (--skip damaged)"
_UNPACK = "unpack it and give the folder"
_DECOMPRESS = "decompress it"
# what cannot be read: beginning of the content → name, remedy
_POINTERS = {
    rb"version https://(?:git-lfs|hawser)\S*\s+(?:ext-\S+ \S+\s+)*oid ": (
        "a Git LFS pointer, not the file", "run `git lfs pull` in its folder"),
    rb"/annex/objects/\S+\s*$": (
        "a git-annex pointer, not the file", "run `git annex get` in its folder"),
}  # fmt: skip
_OTHERS = {
    **_POINTERS,
    rb"PK(?:\x03\x04|\x05\x06)": ("a zip archive", _UNPACK),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    rb"(?s:(?=.*\0).{257}ustar)": ("a tar archive", _UNPACK),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", _DECOMPRESS),
    rb"%PDF-\d": ("a PDF", "extract its text"),
    rb"SQLite format 3\0": ("an SQLite database", "export its text as JSON lines"),
    rb"ARROW1\0\0|(?s:FEA1.*\0)|\xff{4}": (
        "an Arrow or Feather table", "convert it to parquet, or export it as JSON lines"),
}  # fmt: skip
# UTF-32 is first, because its mark may begin with that of UTF-16
_ENCODINGS = {rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32", rb"\xff\xfe|\xfe\xff": "UTF-16"}
_PACKED = {start: suffix for suffix, (_, start) in COMPRESSED.items()}
T = TypeVar("T")


class Unreadable(UserError):
    """A file is not damaged, but cannot be read as it is. It is never skipped."""


def kind(path: Path) -> str:
    """The file's type, from its name: `.jsonl` for `a.jsonl` and `A.JSONL.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD)


def known(head: bytes) -> tuple[str, str] | None:
    """What a file that begins so is, and what to do, if it is neither text nor parquet."""
    return _first(_OTHERS, head)


def compression(head: bytes) -> str | None:
    """The suffix of the compression (`.gz`) of a file that begins so."""
    return _first(_PACKED, head)


def _first(table: dict[bytes, T], head: bytes) -> T | None:
    """The value of the first expression of `table` that matches."""
    return next((found for start, found in table.items() if re.match(start, head)), None)


def form(file: Path) -> str:
    """How to read the file: `.parquet` by its content, else by the kind of text that its name says.
    Raises UserError if it is neither parquet nor text."""
    head, name = first_bytes(file), kind(file)
    # a text may begin like a table, and a table that is named as one may be cut short
    if head.startswith(PARQUET) and (name == ".parquet" or _last_bytes(file) == PARQUET):
        return ".parquet"
    packed = compression(head)
    if packed:
        with open_binary(file) as stream:
            head = stream.read(HEAD)
    found = known(head)
    if packed and (again := compression(head)):
        found = f"compressed again, by {again[1:]}", _DECOMPRESS
    elif packed and head.startswith(PARQUET) and b"\0" in head:
        found = "a parquet table", _DECOMPRESS
    elif encoding := _first(_ENCODINGS, head):
        found = f"{encoding}, not UTF-8", to_utf8(encoding)
    elif not found and (name == ".parquet" or b"\0" in head):
        found = f"neither text nor a parquet table: it begins with {head[:16]!r}", "copy it again"
    if found:
        why = f"{'decompressed, ' if packed else ''}it is {found[0]}"
        if found in _POINTERS.values():
            raise Unreadable("--source", str(file), why, found[1])
        raise UserError("--source", str(file), why, f"{found[1]}, {LEAVE_OUT}")
    return name


def _last_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(-len(PARQUET), io.SEEK_END)
        return stream.read()


def open_binary(file: Path) -> BinaryIO:
    """Opens the file's content, decompressed if it is compressed."""
    stream = file.open("rb")
    packed = compression(stream.peek(HEAD))
    if packed is None:
        return stream
    stream.close()
    module = importlib.import_module(COMPRESSED[packed][0])
    if packed == ".zst":  # Python supports zstd only from 3.14 on; `datasets` requires pyarrow
        return io.BufferedReader(module.input_stream(str(file), compression="zstd"))
    return module.open(file, "rb")


def to_utf8(encoding: str) -> str:
    return f"convert a copy (`iconv -f {encoding} -t UTF-8`) and give that"
