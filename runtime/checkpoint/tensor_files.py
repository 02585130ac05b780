"""The tensor files of a checkpoint: safetensors (https://github.com/huggingface/safetensors#format)
of pieces of tensors, in the form in which DCP writes and reads them: with where each piece begins.

DCP's own `save` is not called. In it rank 0 would plan what each rank writes (for 1,024 ranks, a
minute of Python beside its training), and safetensors would copy each file twice in memory, which
holds Python's lock: for a file of 1 GB, training could launch nothing for almost a second.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import raise_passing
from parallel.disk import ranges_of_size
from runtime.checkpoint.manifest import ODD_JSON, TENSORS, Damaged, Dtype, Manifest
from runtime.schema import load_json

FILE_BYTES = 1 << 30  # of a file, unless a single tensor has more: files are checked in parallel
# the metadata entry in which DCP's writer stores the offsets of a file's pieces
PLACES = "DCP_SHARDING_INFO"
# the names that safetensors uses
DTYPES: dict[Any, Dtype] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


class Piece(NamedTuple):
    """A part of a tensor that a file holds."""

    name: str  # of the tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def write_pieces(folder: Path, rank: int, pieces: Sequence[tuple[Piece, Tensor]]) -> Iterator[Path]:
    """Write a rank's pieces, which are on the host, to files of about FILE_BYTES each, straight
    from the tensors. Yields each file when it is written."""
    parts = [*ranges_of_size([tensor.nbytes for _, tensor in pieces], FILE_BYTES)]
    for number, part in enumerate(parts, start=1):
        name = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(parts):05d}{TENSORS}"
        with (folder / name).open("wb") as file:
            _write_file(file, pieces[part.start : part.stop])
        yield folder / name


def _write_file(file: Any, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
    # the widest first, so that each begins at a multiple of its width
    pieces = sorted(pieces, key=lambda each: -each[1].itemsize)
    about: dict[str, Any] = {}
    end = 0
    for piece, tensor in pieces:
        begin, end = end, end + tensor.nbytes
        dtype, shape = DTYPES[tensor.dtype], piece.sizes
        about[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    places = {piece.name: {"saved_offsets": piece.offsets} for piece, _ in pieces}
    header = json.dumps({"__metadata__": {PLACES: json.dumps(places)}, **about}).encode()
    header += b" " * (-len(header) % 8)  # the numbers begin at a multiple of 8
    file.write(len(header).to_bytes(8, "little") + header)
    for _, tensor in pieces:
        file.write(tensor.flatten().view(torch.uint8).numpy())


def read_pieces(path: Path, manifest: Manifest) -> list[Piece]:
    """Return the pieces in a safetensors file, reading only its header. Raises Damaged if a piece
    does not lie inside its tensor or has another dtype."""
    try:
        path.open("rb").close()  # safe_open says of any error that there is no such file
        with safe_open(path, framework="pt") as file:
            places = load_json((file.metadata() or {}).get(PLACES, "{}"))
            names = file.keys()
            pieces = []
            for name in names:
                piece = file.get_slice(name)
                dtype, shape = manifest.tensors[name]
                sizes, offsets = tuple(piece.get_shape()), places[name]["saved_offsets"]
                inside = len(shape) == len(sizes) == len(offsets) and all(
                    type(offset) is int and 0 <= offset <= offset + n <= whole
                    for offset, n, whole in zip(offsets, sizes, shape, strict=True)
                )
                if not inside or piece.get_dtype() != dtype:
                    raise Damaged(
                        f"its file {path.name!r} has a piece that does not fit the tensor {name!r}"
                    )
                pieces.append(Piece(name, tuple(offsets), sizes))
            return pieces
    except (SafetensorError, OSError, *ODD_JSON) as error:
        raise_passing(error)
        raise Damaged(
            f"its file {path.name!r} is not a tensor file of this checkpoint: {ascii(error)[:200]}"
        ) from None
