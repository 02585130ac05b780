"""What a file is, by its first bytes.

They decide whether it is compressed, a parquet table, text, or something else, which is refused.
The name says how text is to be read (`.jsonl`, `.csv`, …). It also tells damage: a file named
`.parquet` must be a parquet table, and one named `.gz` must be compressed or UTF-8 text.
"""

import codecs
import functools
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import BinaryIO, TypeVar

from errors import UserError

# suffix → module that decompresses, beginning of the content, command
COMPRESSED = {
    ".gz": ("gzip", rb"\x1f\x8b", "gzip -dc"),
    ".bz2": ("bz2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "bzip2 -dc"),
    ".xz": ("lzma", rb"\xfd7zXZ\0", "xz -dc"),
    # the second form is a skippable frame, which pzstd writes first
    ".zst": ("pyarrow", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd -dc --long=31"),
}
ARCHIVES = {".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"}
HEAD = 512  # first bytes that are read; a tar's signature is at 257
PARQUET = b"PAR1"  # at both ends of a parquet table
_UNPACK = "unpack it and give the folder"
_DECOMPRESS = "decompress it"
_CONVERT = "convert it to parquet (pyarrow can), or export it as JSON lines"
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
    rb"\x1f\x9d": ("compressed by compress", _DECOMPRESS),
    rb"%PDF-\d": ("a PDF", "extract its text"),
    rb"SQLite format 3\0": ("an SQLite database", "export its text as JSON lines"),
    rb"ARROW1\0\0|(?s:FEA1.*\0)|\xff{4}": ("an Arrow or Feather table", _CONVERT),
}  # fmt: skip
# both ends of a table → what it is, and what to do where it cannot be read as it is
_TABLES = {
    PARQUET: ("a parquet table", _DECOMPRESS),
    b"PARE": ("an encrypted parquet table", "decrypt it"),
}
# UTF-32 is first, because its mark may begin with that of UTF-16
_ENCODINGS = {rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32", rb"\xff\xfe|\xfe\xff": "UTF-16"}
_PACKED = {start: suffix for suffix, (_, start, _) in COMPRESSED.items()}
# whether a file may be anything but text; one expression, because there are many files
_UNUSUAL = re.compile(b"|".join([*_TABLES, *_PACKED, *_OTHERS, *_ENCODINGS, rb"(?s:.*)\0"]))
T = TypeVar("T")


class Unreadable(UserError):
    """A file is not damaged, but cannot be read as it is. It is never skipped."""


def kind(path: Path) -> str:
    """The file's type, from its name: `.jsonl` for `a.jsonl` and `A.JSONL.gz`, `.zip` for `a.zip`,
    `.tar` for `a.tar.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD)


def _last_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(-4, io.SEEK_END)
        return stream.read()


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
    head, name, leave = first_bytes(file), kind(file), "or leave that file out (--skip damaged)"
    promises = name == ".parquet" or file.suffix.lower() in COMPRESSED
    if not promises and not _UNUSUAL.match(head):
        return name
    packed = compression(head)
    if packed:
        with open_binary(file) as stream:
            head = stream.read(HEAD)
    table = (
        head[:4] in _TABLES
        and (  # a text may begin so, too
            name == ".parquet" or (b"\0" in head if packed else _last_bytes(file) == head[:4])
        )
    )
    if table and not packed and head.startswith(PARQUET):
        return ".parquet"
    found = known(head)
    if packed and (again := compression(head)):
        found = f"compressed again, by {again[1:]}", _DECOMPRESS
    elif table:
        found = _TABLES[head[:4]]
    elif encoding := _first(_ENCODINGS, head):
        copy = f"convert a copy and give that: {utf8_copy(file, encoding)}"
        found = f"{encoding}, not UTF-8", copy
    if found:
        why = f"{'decompressed, ' if packed else ''}it is {found[0]}"
        if found in _POINTERS.values():
            raise Unreadable("--source", str(file), why, found[1])
        raise UserError("--source", str(file), why, f"{found[1]}, {leave}")
    why = None
    if name == ".parquet":
        why = f"it is not a parquet table: it begins with {head[:16]!r}"
    elif b"\0" in head:
        why = "it is not UTF-8 text: it has bytes of value 0"
    elif file.suffix.lower() in COMPRESSED and not packed and not _is_utf8(head):
        why = f"it is damaged: it is neither compressed as {file.suffix} nor UTF-8 text"
    if why:
        raise UserError("--source", str(file), why, f"copy it again from its source, {leave}")
    return name


def open_binary(file: Path) -> BinaryIO:
    """Opens the file's content, decompressed if it is compressed."""
    stream = file.open("rb")
    packed = compression(stream.peek(HEAD))
    if packed is None:
        return stream
    stream.close()
    name = COMPRESSED[packed][0]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        remedy = f"decompress it first, or use a Python that has the module {name}"
        why = f"this Python was built without {packed[1:]} support"
        raise Unreadable("--source", str(file), why, remedy) from error
    if packed == ".zst":  # Python supports zstd only from 3.14 on; `datasets` requires pyarrow
        return io.BufferedReader(module.input_stream(str(file), compression="zstd"))
    return module.open(file, "rb")


@functools.lru_cache(maxsize=1)  # of a file in which many lines are not UTF-8
def utf8_copy(file: Path, encoding: str) -> str:
    """The command that writes a UTF-8 copy of the file's content beside it, under a new name."""
    packed, old = compression(first_bytes(file)), shlex.quote(str(file))
    new = shlex.quote(str(new_name(file, ".utf8")))
    if packed:
        return f"`{COMPRESSED[packed][2]} {old} | iconv -f {encoding} -t UTF-8 > {new}`"
    return f"`iconv -f {encoding} -t UTF-8 {old} > {new}`"


def new_name(file: Path, mark: str = "") -> Path:
    """A path beside `file` at which there is no file: `a.utf8.txt` for `a.txt.gz`. No remedy may
    overwrite a file."""
    plain = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    name = plain.with_name(f"{plain.stem}{mark}{plain.suffix}")
    number = 2
    while name.exists():
        name = plain.with_name(f"{plain.stem}{mark}-{number}{plain.suffix}")
        number += 1
    return name


def _is_utf8(head: bytes) -> bool:
    """Whether this is the beginning of UTF-8; a character may be cut at its end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
