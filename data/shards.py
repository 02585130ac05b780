"""One token shard: a safetensors file with two tensors.

    tokens            uint16, or uint32 where the vocabulary needs it; concatenated documents
    document_starts   int64, the positions in `tokens` where the documents begin

The format is eight bytes of header length, a JSON header, and the data
(https://github.com/huggingface/safetensors). A shard is written as a stream, so that memory does
not depend on its size, and is memory-mapped, so that opening it reads none of its tokens. The
`safetensors` library reads the same files (a test compares). No pickle is used.
"""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

from errors import UserError

FORMAT, VERSION = "lattice-tokens", 1  # written into the folder's index.json
HEADER_BYTES = 512 - 8  # of JSON, padded with spaces: the tensors start at byte 512
MAX_HEADER_BYTES = 1 << 20  # our headers are smaller; a damaged length must not cause allocation
DTYPES = {"uint16": "U16", "uint32": "U32", "int64": "I64"}  # numpy's name -> safetensors' name
REMEDY = (
    "copy the file again from where it was prepared, or prepare the data again (`python -m "
    "tools.prepare`)"
)


class ShardWriter:
    """Writes one shard document by document; `close` returns its entry for the index."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._file = path.open("wb")
        # Space for the header, which contains the sizes and so is written last.
        self._file.write(bytes(8 + HEADER_BYTES))
        self._starts: list[np.ndarray] = []
        self.tokens = 0
        self.documents = 0

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Adds documents. tokens: those of all documents, concatenated; lengths: int64, the number
        of tokens of each, with sum = len(tokens)."""
        self._file.write(tokens.astype(self._dtype, copy=False).data)
        self._starts.append(self.tokens + np.cumsum(lengths) - lengths)
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def close(self) -> dict:
        starts = np.concatenate([np.empty(0, np.int64), *self._starts])
        self._file.write(starts.astype("<i8").data)
        end = self.tokens * self._dtype.itemsize
        header = {
            "tokens": {
                "dtype": DTYPES[self._dtype.name],
                "shape": [self.tokens],
                "data_offsets": [0, end],
            },
            "document_starts": {
                "dtype": DTYPES["int64"],
                "shape": [self.documents],
                "data_offsets": [end, end + 8 * self.documents],
            },
        }
        self._file.seek(0)
        self._file.write(
            struct.pack("<Q", HEADER_BYTES) + json.dumps(header).encode().ljust(HEADER_BYTES)
        )
        self._file.close()
        return {
            "file": self._path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self._path.stat().st_size,
            "sha256": file_sha256(self._path),
        }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_header(path: Path) -> tuple[dict[str, dict], int]:
    """A safetensors file's entries by name, and the byte where its data begins, all checked.

    Raises UserError if the file is missing, is not a safetensors file, or does not contain all
    bytes of its tensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"its header length is {length} bytes, in a file of {size} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        data_start = 8 + length
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            numbers = [begin, end, *entry["shape"]]
            if (
                not all(type(number) is int and number >= 0 for number in numbers)
                or not begin <= end <= size - data_start
            ):
                raise ValueError(f"tensor {name!r} lies outside the file")
    except OSError as error:
        if not isinstance(error, FileNotFoundError | PermissionError):  # a restart may read it
            raise OSError(error.errno, error.strerror, str(path)) from error
        why = f"the shard cannot be read ({error.strerror})"
        raise UserError("data.path", str(path), why, REMEDY) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("data.path", str(path), f"the shard is damaged: {error}", REMEDY) from error
    return header, data_start


def map_tensor(path: Path, name: str, dtype: np.dtype, count: int) -> np.ndarray:
    """Tensor `name` of the shard, mapped read-only. Raises UserError unless the header gives
    exactly this dtype and shape [count]."""
    header, data_start = read_header(path)
    dtype = np.dtype(dtype)
    entry = header.get(name, {})
    begin, end = entry.get("data_offsets", (0, 0))
    promised = (entry.get("dtype"), entry.get("shape"), end - begin)
    if promised != (DTYPES[dtype.name], [count], count * dtype.itemsize):
        why = (
            f"the shard is damaged: {name!r} is {promised} (dtype, shape, bytes), "
            f"but the index lists {dtype.name}[{count}]"
        )
        raise UserError("data.path", str(path), why, REMEDY)
    if count == 0:
        return np.empty(0, dtype)  # an empty range cannot be mapped
    mapped = np.memmap(
        path, dtype=dtype.newbyteorder("<"), mode="r", offset=data_start + begin, shape=(count,)
    )
    return mapped.view(np.ndarray)  # the same memory without memmap's slow slicing
