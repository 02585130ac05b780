"""One token shard: a safetensors file (https://github.com/huggingface/safetensors), without pickle.

    tokens            uint16, or uint32 where the vocabulary needs it; concatenated documents
    document_starts   int64, the positions in `tokens` where the documents begin

A shard is in memory until it is written. It is read through a mapping, so that opening it reads
none of its tokens.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from errors import UserError

FORMAT, VERSION = "lattice-tokens", 1  # written into the folder's index.json
DTYPES = {"uint16": "U16", "uint32": "U32"}  # numpy's name -> safetensors' name
REMEDY = "copy it again, or prepare the data again: `python -m tools.prepare`"


def write_shard(path: Path, tokens: np.ndarray, starts: Sequence[int]) -> dict[str, Any]:
    """Writes a shard of documents that begin at `starts`; returns its entry in index.json."""
    with permissions_of_umask(path):
        save_file({"tokens": tokens, "document_starts": np.array(starts, np.int64)}, path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    entry = {"file": path.name, "tokens": len(tokens), "documents": len(starts)}
    return entry | {"bytes": size, "sha256": sha256}


@contextlib.contextmanager
def permissions_of_umask(path: Path) -> Iterator[None]:
    """Gives the file that safetensors writes at `path` the permissions that the umask allows: the
    library itself lets only its owner read it."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(mode)


def map_tokens(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """The tokens of the shard, mapped. Raises UserError if the file is missing or its header does
    not give exactly this dtype and shape [count], within the file."""
    expected = DTYPES[np.dtype(dtype).name], [count]
    try:
        path.open("rb").close()  # safe_open says of any error that there is no such file
    except (FileNotFoundError, PermissionError) as error:
        why = f"the shard cannot be read ({error.strerror})"
        raise UserError("data.path", str(path), why, REMEDY) from error
    try:  # any other error of the file system is no refusal: a restart may read it
        # "pt": its tensors are views of a mapping that holds no file descriptor. Those of "np" are
        # copies, made while no other thread can run Python, however slow the file system is.
        with safe_open(path, framework="pt") as file:
            tokens = file.get_slice("tokens")
            found = tokens.get_dtype(), tokens.get_shape()
            if found == expected:
                return file.get_tensor("tokens").numpy()
    except SafetensorError as error:
        raise UserError("data.path", str(path), f"the shard is damaged: {error}", REMEDY) from error
    why = f"the shard is damaged: 'tokens' is {found} (dtype, shape), and not {expected}"
    raise UserError("data.path", str(path), why, REMEDY)
