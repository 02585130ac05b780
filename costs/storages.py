"""Tracks every storage, from when an operator first returns it until it is freed, below autograd
and FSDP."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = 512  # bytes; CUDA's caching allocator allocates multiples of it


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def key_of(tensor: Tensor) -> int:
    """The key of the tensor's storage: the address of its C++ object, unique while that is
    alive."""
    return local(tensor).untyped_storage()._cdata


class StorageWatch(TorchDispatchMode):
    """Calls `born` and `freed` of a subclass, which here do nothing. Sizes are rounded up as by
    CUDA's caching allocator, so that sums agree with `torch.cuda.max_memory_allocated`. Memory that
    an operator allocates and frees internally is not tracked."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self._sizes: dict[int, int] = {}  # of the storages that are alive

    def born(self, key: int, size: int) -> None:
        """A storage was allocated."""

    def freed(self, key: int, size: int) -> None: ...

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; a subclass may override this."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs or {})
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor):
                self.saw(part)
        return result

    def saw(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
            self._add(storage._cdata, storage.nbytes())

    def _add(self, key: int, size: int) -> None:
        self._sizes[key] = size = -(-size // ROUNDING) * ROUNDING
        self.born(key, size)

    def _free(self, key: int) -> None:
        if key in self._sizes:
            self.freed(key, self._sizes.pop(key))

    def resized(self, storage: UntypedStorage) -> None:
        """A storage was resized, see `watch_resizes`."""
        key = storage._cdata
        if key in self._sizes:
            self.freed(key, self._sizes[key])
            self._add(key, storage.nbytes())


@contextmanager
def watch_resizes(watch: StorageWatch) -> Iterator[None]:
    """Tell `watch` of resized storages, which no operator reveals. FSDP frees and refills gathered
    weights so."""
    resize = UntypedStorage.resize_

    def resized(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        watch.resized(storage)
        return result

    with patch.object(UntypedStorage, "resize_", resized):
        yield
