"""The manifest of a checkpoint, which detects missing, exchanged and damaged parts.

    manifest.json   format, version
                    files     every other file: its size in bytes and its sha256
                    tensors   every global tensor: its dtype and its shape
                    sha256    of all of the above

Files hold pieces of tensors, each under the tensor's name with the piece's offsets. A reader that
derives shapes from the pieces it finds would not notice a lost piece; here the pieces of a tensor
must tile its shape, with every number in exactly one piece (verify.py). Nothing is unpickled:
tensors are in the safetensors format, everything else is JSON that is validated against a schema
(schema.py), and file names must be plain names, never paths.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from errors import is_file, raise_passing
from runtime.checkpoint.folder import MANIFEST
from runtime.files import write_durably
from runtime.schema import MAX_JSON_BYTES, Name, Natural, Strict, first_problem, load_json

FORMAT, VERSION = "lattice-checkpoint", 2
TENSORS = ".safetensors"
MAX_DIMS = 8
MAX_NUMBERS = 1 << 63  # in a tensor, and so in each of its dimensions
# raised for JSON that is none, or of another form
ODD_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Damaged(Exception):
    """A checkpoint differs from what was saved; the message says how."""


Dtype = Literal["F64", "F32", "F16", "BF16"]  # as safetensors names them


class File(NamedTuple):
    bytes: Natural
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Stored(NamedTuple):
    """A global tensor."""

    dtype: Dtype
    shape: Annotated[tuple[Natural, ...], Field(strict=False, max_length=MAX_DIMS)]


class Manifest(Strict):
    files: dict[Name, File]
    tensors: dict[Name, Stored]

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def fingerprint(path: Path) -> File:
    """Return a file's size in bytes and its sha256."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably; it must be the last file of a checkpoint."""
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content["files"] = {name: each._asdict() for name, each in sorted(manifest.files.items())}
    content["tensors"] = {name: each._asdict() for name, each in sorted(manifest.tensors.items())}
    content["sha256"] = _digest(content)
    write_durably(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a checkpoint. Raises Damaged if it is missing, changed or
    of another format, if it names something that is not a file of this folder, or if the folder has
    other tensor files."""
    try:
        if (folder / MANIFEST).stat().st_size > MAX_JSON_BYTES:
            raise ValueError
        content = load_json((folder / MANIFEST).read_text(encoding="utf-8"))
        said = content.pop("sha256")
        digest = _digest(content)
        format_and_version = content.pop("format"), content.pop("version")
    except (OSError, *ODD_JSON) as error:
        raise_passing(error)
        raise Damaged(f"its {MANIFEST} is missing or unreadable") from None
    if format_and_version != (FORMAT, VERSION):
        raise Damaged(
            f"it was saved as {ascii(format_and_version)[:100]}, but this program reads only "
            f"{(FORMAT, VERSION)}"
        )
    if said != digest:
        raise Damaged(f"its {MANIFEST} was changed (its sha256 differs)")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise Damaged(f"its {MANIFEST} has invalid content ({first_problem(error)})") from None
    for name in manifest.files:
        if Path(name).name != name or name in (".", "..", MANIFEST):
            raise Damaged(f"its {MANIFEST} names {name!r}, which is not a file of this folder")
    for name, tensor in manifest.tensors.items():
        if math.prod(tensor.shape) >= MAX_NUMBERS:
            raise Damaged(f"its {MANIFEST} gives {name!r} the impossible shape {tensor.shape}")
    # The tensor reader would read every such file that it finds.
    for name in sorted(path.name for path in folder.iterdir()):  # unlike glob, this may raise
        if name.endswith(TENSORS) and name not in manifest.files:
            raise Damaged(f"the file {name!r} does not belong to it")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise Damaged if a file is missing or has another length. Cheap: reads no file."""
    for name, (size, _) in manifest.files.items():
        try:
            good = is_file(folder / name) and (folder / name).stat().st_size == size
        except OSError as error:  # for example, the name is too long
            raise_passing(error)
            good = False
        if not good:
            raise Damaged(f"its file {name!r} is missing or truncated")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
