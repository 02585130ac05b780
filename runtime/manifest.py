"""What a checkpoint consists of, so that nothing of it can be missing, exchanged or damaged unseen.

    manifest.json   format, version
                    files     every other file: its bytes and its sha256
                    tensors   every global tensor: its dtype and its shape
                    sha256    of all that, in this file

Files hold pieces of tensors, under the tensor's name with the piece's place in it. A reader that
takes shapes from what it finds would not miss a lost piece; here the pieces of a tensor must tile
its shape, each number in exactly one (tiling.py). Nothing is unpickled: tensors are in the
safetensors format, everything else is JSON that must fit a schema (schema.py), and names of files
are names, never paths.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from runtime.progress import byte_bar
from runtime.schema import MAX_JSON_BYTES, Count, Name, Strict, first_problem, load_json
from runtime.tiling import FIELD, MAX_DIMS, MAX_NUMBERS, Point, random_point, value_at

FORMAT, VERSION = "lattice-checkpoint", 2
MANIFEST = "manifest.json"
TENSORS = ".safetensors"
# where DCP's safetensors writer keeps the places of a file's pieces, in the file's metadata
PLACES = "DCP_SHARDING_INFO"
HASHED_AT_ONCE = 1 << 20


class Damaged(Exception):
    """A checkpoint that is not what was saved; says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    files: dict[str, tuple[int, str]]  # name → bytes, sha256
    # name → safetensors dtype ("F32"), global shape
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def fingerprint(
    path: Path, advance: Callable[[int], object] = lambda size: None
) -> tuple[int, str]:
    """A file's size in bytes and its sha256. `advance` gets the bytes of each block read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
            advance(len(block))
        return file.tell(), digest.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Last of a checkpoint's files, durably."""
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content["files"] = {
        name: {"bytes": size, "sha256": sha} for name, (size, sha) in sorted(manifest.files.items())
    }
    content["tensors"] = {
        name: {"dtype": dtype, "shape": shape}
        for name, (dtype, shape) in sorted(manifest.tensors.items())
    }
    content["sha256"] = _digest(content)
    write_durably(folder / MANIFEST, json.dumps(content, indent=1))


class _File(Strict):
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Tensor(Strict):
    dtype: Literal["F64", "F32", "F16", "BF16"]
    shape: Annotated[list[Count], Field(max_length=MAX_DIMS)]


class _Content(Strict):
    format: str
    version: int
    files: dict[Name, _File]
    tensors: dict[Name, _Tensor]


def read_manifest(folder: Path) -> Manifest:
    """Raises Damaged where it is missing, changed, of another format, or names something that is
    not a file of this folder."""
    try:
        if (folder / MANIFEST).stat().st_size > MAX_JSON_BYTES:
            raise ValueError
        content = load_json((folder / MANIFEST).read_text(encoding="utf-8"))
        said = content.pop("sha256")
        format_and_version = content["format"], content["version"]
        digest = _digest(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"no readable {MANIFEST}") from None
    if format_and_version != (FORMAT, VERSION):
        raise Damaged(
            f"saved as {ascii(format_and_version)[:100]}, and this version reads "
            f"{(FORMAT, VERSION)}"
        )
    if said != digest:
        raise Damaged(f"{MANIFEST} was changed (its sha256 differs)")
    try:
        checked = _Content.model_validate(content)
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} does not say what it should ({first_problem(error)})") from None
    for name in checked.files:
        if Path(name).name != name or name in (".", "..", MANIFEST):
            raise Damaged(f"{MANIFEST} names {name!r}, which is no file of this folder")
    for name, tensor in checked.tensors.items():
        if math.prod(tensor.shape) >= MAX_NUMBERS:
            raise Damaged(f"{MANIFEST} gives {name!r} the shape {tensor.shape}")
    # The reader of tensors takes every such file that it finds.
    strangers = {
        path.name for path in folder.iterdir() if path.name.endswith(TENSORS)
    } - checked.files.keys()
    if strangers:
        raise Damaged(f"{sorted(strangers)[0]!r} does not belong to it")
    files = {name: (file.bytes, file.sha256) for name, file in checked.files.items()}
    return Manifest(
        files,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in checked.tensors.items()},
    )


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises Damaged where a file is missing or has another length. Cheap: reads no file."""
    for name, (size, _) in manifest.files.items():
        file = folder / name
        try:
            good = file.is_file() and file.stat().st_size == size
        except OSError:  # a name too long, a disk that cannot be read
            good = False
        if not good:
            raise Damaged(f"its file {name!r} is missing or truncated")


def check_file(
    folder: Path,
    manifest: Manifest,
    name: str,
    point: Point,
    advance: Callable[[int], object] = lambda size: None,
) -> Counter[str]:
    """Read a file whole. Raises Damaged where it is not what was saved; else what it holds of which
    tensors. `advance` as for `fingerprint`."""
    try:
        found = fingerprint(folder / name, advance)
    except OSError as error:
        raise Damaged(f"its file {name!r} cannot be read ({error.strerror})") from None
    if found != manifest.files[name]:
        raise Damaged(f"its file {name!r} was changed (its sha256 differs)")
    return cover(folder / name, manifest, point) if name.endswith(TENSORS) else Counter()


class Piece(NamedTuple):
    """A part of a tensor, in some file."""

    name: str  # of the tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def read_pieces(path: Path, manifest: Manifest) -> list[Piece]:
    """What a safetensors file holds, each piece inside its tensor; else Damaged. Header only."""
    try:
        with safe_open(path, framework="pt") as file:
            places = load_json((file.metadata() or {}).get(PLACES, "{}"))
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            pieces = []
            for name, piece in slices.items():
                dtype, shape = manifest.tensors[name]
                sizes, offsets = tuple(piece.get_shape()), places[name]["saved_offsets"]
                inside = len(shape) == len(sizes) == len(offsets) and all(
                    type(offset) is int and 0 <= offset <= offset + n <= whole
                    for offset, n, whole in zip(offsets, sizes, shape, strict=True)
                )
                if not inside or piece.get_dtype() != dtype:
                    raise Damaged(
                        f"its file {path.name!r} has a piece of {name!r} that does not fit it"
                    )
                pieces.append(Piece(name, tuple(offsets), sizes))
            return pieces
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Damaged(
            f"its file {path.name!r} is no file of tensors of this checkpoint: {ascii(error)[:200]}"
        ) from None


def cover(path: Path, manifest: Manifest, point: Point) -> Counter[str]:
    """Tensor → the sum of its pieces' polynomials at `point` (tiling.py), for a safetensors file;
    Damaged as `read_pieces`. What several files cover is the sum of what each does."""
    covered: Counter[str] = Counter()
    for piece in read_pieces(path, manifest):
        covered[piece.name] += value_at(point, piece.offsets, piece.sizes)
    return covered


def check_whole(manifest: Manifest, covered: Counter[str], point: Point) -> None:
    """Raises Damaged unless the pieces in all files tile every tensor."""
    for name, (_, shape) in manifest.tensors.items():
        if (covered[name] - value_at(point, [0] * len(shape), shape)) % FIELD:
            raise Damaged(
                f"the pieces of {name!r} in its files do not make up its shape {shape}: "
                "some overlap, or are missing"
            )


def verify(folder: Path) -> Manifest:
    """Everything above, in one process. Raises Damaged."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    covered: Counter[str] = Counter()
    point = random_point()
    with byte_bar(f"checking {folder.name}", manifest.num_bytes) as bar:
        for name in manifest.files:
            covered.update(check_file(folder, manifest, name, point, bar.update))
    check_whole(manifest, covered, point)
    return manifest


def write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
