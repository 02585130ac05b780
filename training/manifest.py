"""What a checkpoint consists of, so that nothing of it can be missing, exchanged or damaged unseen.

    manifest.json   format, version
                    files     every other file: its bytes and its sha256
                    tensors   every global tensor: its dtype and its shape
                    sha256    of all that, in this file

Files hold pieces of tensors, under the tensor's name with the piece's place in it. A reader that takes shapes from what it
finds would not miss a lost piece; here the pieces of a tensor must add up to its shape. Nothing is unpickled: tensors are in
the safetensors format, everything else is JSON, and names of files are names, never paths.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from training.progress import byte_bar

FORMAT, VERSION = "lattice-checkpoint", 2
MANIFEST = "manifest.json"
TENSORS = ".safetensors"
PLACES = "DCP_SHARDING_INFO"  # where DCP's safetensors writer keeps the places of a file's pieces, in the file's metadata
HASHED_AT_ONCE = 1 << 20


class Damaged(Exception):
    """A checkpoint that is not what was saved; says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    files: dict[str, tuple[int, str]]  # name → bytes, sha256
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name → safetensors dtype ("F32"), global shape

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def fingerprint(path: Path, advance: Callable[[int], object] = lambda size: None) -> tuple[int, str]:
    """A file's size in bytes and its sha256. `advance` is called with the bytes of each block that was read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
            advance(len(block))
        return file.tell(), digest.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Last of a checkpoint's files, durably."""
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content["files"] = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in sorted(manifest.files.items())}
    content["tensors"] = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in sorted(manifest.tensors.items())}
    content["sha256"] = _digest(content)
    write_durably(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Raises Damaged where it is missing, changed, of another format, or names something that is not a file of this folder."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        said = content.pop("sha256")
        format_and_version = content["format"], content["version"]
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        tensors = {name: (str(e["dtype"]), tuple(map(int, e["shape"]))) for name, e in content["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"no readable {MANIFEST}") from None
    if format_and_version != (FORMAT, VERSION):
        raise Damaged(f"saved as {format_and_version}, and this version reads {(FORMAT, VERSION)}")
    if said != _digest(content):
        raise Damaged(f"{MANIFEST} was changed (its sha256 differs)")
    for name in files:
        if Path(name).name != name or name in (".", ".."):
            raise Damaged(f"{MANIFEST} names {name!r}, which is no file of this folder")
    for name, (_, shape) in tensors.items():
        if any(n < 0 for n in shape):
            raise Damaged(f"{MANIFEST} gives {name} the shape {shape}")
    # The reader of tensors takes every such file that it finds.
    strangers = {path.name for path in folder.iterdir() if path.name.endswith(TENSORS)} - files.keys()
    if strangers:
        raise Damaged(f"{sorted(strangers)[0]} does not belong to it")
    return Manifest(files, tensors)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises Damaged where a file is missing or has another length. Cheap: reads no file."""
    for name, (size, _) in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise Damaged(f"its file {name} is missing or truncated")


def check_file(
    folder: Path, manifest: Manifest, name: str, advance: Callable[[int], object] = lambda size: None
) -> Counter[str]:
    """Read a file whole. Raises Damaged where it is not what was saved; else how many numbers of which tensors it holds.
    `advance` as for `fingerprint`."""
    try:
        found = fingerprint(folder / name, advance)
    except OSError as error:
        raise Damaged(f"its file {name} cannot be read ({error.strerror})") from None
    if found != manifest.files[name]:
        raise Damaged(f"its file {name} was changed (its sha256 differs)")
    return count_numbers(folder / name, manifest) if name.endswith(TENSORS) else Counter()


def count_numbers(path: Path, manifest: Manifest) -> Counter[str]:
    """How many numbers of which tensors a safetensors file holds, each piece inside its tensor; else Damaged."""
    counts: Counter[str] = Counter()
    try:
        with safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                piece = file.get_slice(name)
                dtype, shape = manifest.tensors[name]
                size = piece.get_shape()
                offsets = places[name]["saved_offsets"]
                inside = len(shape) == len(size) == len(offsets) and all(
                    0 <= offset <= offset + n <= whole for offset, n, whole in zip(offsets, size, shape, strict=True)
                )
                if not inside or piece.get_dtype() != dtype:
                    raise Damaged(f"its file {path.name} has a piece of {name} that does not fit it")
                counts[name] += math.prod(size)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its file {path.name} is no file of tensors of this checkpoint: {error}") from None
    return counts


def check_whole(manifest: Manifest, counts: Counter[str]) -> None:
    """Raises Damaged unless the pieces in all files make up every tensor."""
    for name, (_, shape) in manifest.tensors.items():
        if counts[name] != math.prod(shape):
            raise Damaged(f"{counts[name]:,} of {math.prod(shape):,} numbers of {name} are in its files")


def verify(folder: Path) -> Manifest:
    """Everything above, in one process. Raises Damaged."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    counts: Counter[str] = Counter()
    with byte_bar(f"checking {folder.name}", manifest.num_bytes) as bar:
        for name in manifest.files:
            counts += check_file(folder, manifest, name, bar.update)
    check_whole(manifest, counts)
    return manifest


def write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
