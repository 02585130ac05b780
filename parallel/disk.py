"""Memory in a file on a local disk, for what the host's memory does not hold (parallel.offload:
disk).

The file is mapped, so its tensors are like all others: checkpoints, rollbacks and comparisons of
copies need to know nothing of it, and the kernel moves pages in and out as memory allows. For
optimizer states, training/update.py reads ahead and writes behind.

The file has no name: no other run and no later start can read it, and the kernel removes it when
the process ends, however that happens. Only a checkpoint is kept. The space is reserved before the
first step, so that a disk which others fill later takes nothing away (unless its file system copies
on each write, as btrfs and ZFS do).
"""

import ctypes
import errno
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from errors import UserError, raise_passing

ALIGNMENT = 512  # bytes, of a tensor in a file or a buffer: as on a GPU
LIBC = ctypes.CDLL(None, use_errno=True)
MADV_POPULATE_WRITE = 23  # Linux 5.14: reads the pages and makes them writable; or an error


class DiskMemory:
    """`size` bytes in a file of `folder`, all 0, from which tensors are taken.

    Raises:
        UserError: the folder is not writable, or the disk has too little space.
    """

    def __init__(self, folder: str, size: int) -> None:
        self.folder, self.size = folder, max(size, 1)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed when collected
            os.posix_fallocate(self._file.fileno(), 0, self.size)
        except OSError as error:
            raise_passing(error)
            why = f"{size / 1e9:,.3f} GB cannot be reserved there ({error.strerror})"
            remedy = "give a writable folder on a local disk with enough space"
            raise UserError("parallel.offload_dir", folder, why, remedy) from None
        self._map = mmap.mmap(self._file.fileno(), self.size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).numpy()
        self._taken = 0

    def new_zeros(
        self, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `like.new_zeros(shape, dtype=dtype)`: the next part of the file, with a storage of its
        own."""
        dtype = dtype or like.dtype
        size, begin = math.prod(shape) * dtype.itemsize, self._taken
        self._taken += aligned(size)
        assert self._taken <= self.size, "the file is too small"
        part = torch.from_numpy(self._bytes[begin : begin + size])
        return part.view(dtype).view(tuple(shape))

    @property
    def is_full(self) -> bool:
        return self._taken == self.size

    def read(self) -> None:
        """Bring all of it into memory, ready to be written. Raises OSError."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        # Unlike a page fault, it neither holds Python's lock nor kills the process if the disk
        # fails. (An older kernel refuses it: then pages come when they are used.)
        address = ctypes.c_void_p(self._bytes.ctypes.data)
        failed = LIBC.madvise(address, ctypes.c_size_t(self.size), MADV_POPULATE_WRITE)
        number = ctypes.get_errno() if failed else 0
        if number not in (0, errno.EINVAL):  # EFAULT: where a page fault would raise SIGBUS
            raise self._failed("cannot be read", errno.EIO if number == errno.EFAULT else number)

    def write(self) -> None:
        """Write what was changed, and take all of it out of memory. Raises OSError."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed("cannot be written", error.errno or 0) from error
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _failed(self, what: str, number: int) -> OSError:
        said = f"parallel.offload_dir = {self.folder!r}: a file there {what}"
        return OSError(number, f"{said} ({os.strerror(number)})")


def ranges_of_size(sizes: Sequence[float], most: float) -> Iterator[range]:
    """Divide what has these sizes, in order, into parts of at most `most` each, unless a single one
    is larger: the indices of each part."""
    begin, total = 0, 0.0
    for index, size in enumerate(sizes):
        if index > begin and total + size > most:
            yield range(begin, index)
            begin, total = index, 0.0
        total += size
    if sizes:
        yield range(begin, len(sizes))


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes of a file."""
    return -(-size // ALIGNMENT) * ALIGNMENT
