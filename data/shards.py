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
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from errors import UserError

FORMAT, VERSION = "lattice-tokens", 1  # written into the folder's index.json
HEADER_BYTES = 512 - 8  # of JSON, padded with spaces: the tensors start at byte 512
MAX_HEADER_BYTES = 1 << 20  # our headers are smaller; a damaged length must not cause allocation
DTYPES = {"uint16": "U16", "uint32": "U32", "int64": "I64"}  # numpy's name -> safetensors' name
REMEDY = "copy it again, or prepare the data again: `python -m tools.prepare`"


class ShardsWriter:
    """Writes shards STEM-00000.safetensors … of documents; `close` returns the index's entries for
    them. A shard ends with the document that brings it to `shard_tokens`."""

    def __init__(self, stem: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self._stem, self._dtype, self._shard_tokens = stem, np.dtype(dtype), shard_tokens
        self._entries: list[dict] = []
        self._file: BinaryIO | None = None

    def append(self, document: np.ndarray) -> None:
        """Adds the tokens of one document."""
        if self._file is None:
            path = Path(f"{self._stem}-{len(self._entries):05d}.safetensors")
            self._file, self._starts, self._tokens = path.open("w+b"), array("q"), 0
            # Space for the header, which contains the sizes and so is written last.
            self._file.write(bytes(8 + HEADER_BYTES))
        self._file.write(document.astype(self._dtype, copy=False).data)
        self._starts.append(self._tokens)
        self._tokens += len(document)
        if self._tokens >= self._shard_tokens:
            self._end_shard()

    def close(self) -> list[dict]:
        if self._file is not None:
            self._end_shard()
        return self._entries

    def _end_shard(self) -> None:
        starts = np.array(self._starts, dtype=np.int64)
        self._file.write(starts.astype("<i8").data)
        size = self._file.tell()
        header, begin = {}, 0
        for name, dtype, count in (
            ("tokens", self._dtype, self._tokens),
            ("document_starts", starts.dtype, len(starts)),
        ):
            end = begin + count * dtype.itemsize
            entry = {"dtype": DTYPES[dtype.name], "shape": [count], "data_offsets": [begin, end]}
            header[name], begin = entry, end
        self._file.seek(0)
        self._file.write(
            struct.pack("<Q", HEADER_BYTES) + json.dumps(header).encode().ljust(HEADER_BYTES)
        )
        self._file.seek(0)
        entry = {
            "file": Path(self._file.name).name,
            "tokens": self._tokens,
            "documents": len(starts),
            "bytes": size,
            "sha256": hashlib.file_digest(self._file, "sha256").hexdigest(),
        }
        self._file.close()
        self._entries.append(entry)
        self._file = None


def map_tokens(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """The tokens of the shard, mapped read-only. Raises UserError if the file is missing, or its
    header does not give exactly this dtype and shape [count], within the file."""
    dtype = np.dtype(dtype)
    expected = DTYPES[dtype.name], [count], count * dtype.itemsize
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entry = json.loads(file.read(min(length, MAX_HEADER_BYTES)))["tokens"]
        begin, end = entry["data_offsets"]
        found = entry["dtype"], entry["shape"], end - begin
        if found != expected or begin < 0:
            raise ValueError(f"'tokens' is {found} (dtype, shape, bytes), and not {expected}")
        if count == 0:
            return np.empty(0, dtype)  # an empty range cannot be mapped
        mapped = np.memmap(path, dtype.newbyteorder("<"), "r", 8 + length + begin, (count,))
    except OSError as error:
        if not isinstance(error, FileNotFoundError | PermissionError):  # a restart may read it
            raise OSError(error.errno, error.strerror, str(path)) from error
        why = f"the shard cannot be read ({error.strerror})"
        raise UserError("data.path", str(path), why, REMEDY) from error
    except (ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
        raise UserError("data.path", str(path), f"the shard is damaged: {error}", REMEDY) from error
    return mapped.view(np.ndarray)  # the same memory without memmap's slow slicing
