"""Count the bytes that kernels read and write, in Triton's CPU interpreter.

    with counted() as launches:
        rms_norm(x, weight, 1e-5, "triton")
    launches[0].loaded + launches[0].stored     # the traffic if a launch fetches every byte once

The interpreter knows the address of every element that a program loads or stores (atomic operations
are not counted). A byte counts once per launch, however many programs access it: that is the memory
traffic if caches serve every repeated access. Bytes that one program loads again are counted
separately, so that a row read twice is still found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.planted import planted


@dataclass(frozen=True)
class Launch:
    """The traffic of one kernel launch, in bytes."""

    kernel: str
    programs: int
    loaded: int  # from different addresses
    stored: int
    loaded_again: int  # by the same program from the same address
    stored_again: int  # to the same address, by any program


# the addresses of the bytes that a program loads, and that it stores, access by access
_Program = tuple[list[np.ndarray], list[np.ndarray]]


def _distinct(pieces: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.uint64)


def _sum_up(kernel: str, programs: list[_Program]) -> Launch:
    loads = [_distinct(loads) for loads, _ in programs]
    stores = [piece for _, stores in programs for piece in stores]
    issued = sum(piece.size for loads, _ in programs for piece in loads)
    stored = _distinct(stores).size
    return Launch(
        kernel,
        len(programs),
        loaded=_distinct(loads).size,
        stored=stored,
        loaded_again=issued - sum(piece.size for piece in loads),
        stored_again=sum(piece.size for piece in stores) - stored,
    )


def _bytes(pointers: Any, mask: Any) -> np.ndarray:
    """The addresses of all bytes accessed."""
    accessed = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    first = pointers.data[accessed].astype(np.uint64)[:, None]
    return (first + np.arange(size, dtype=np.uint64)).ravel()


@contextmanager
def counted() -> Iterator[list[Launch]]:
    """Yield a list to which every launch in this block is appended when it ends."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    launches: list[Launch] = []
    programs: list[_Program] = []

    @planted(interpreter.GridExecutor, "__call__")
    def counting(launch, self, *arguments, **options):
        programs.clear()
        launch(self, *arguments, **options)
        launches.append(_sum_up(self.fn.__name__, programs))

    @planted(builder, "set_grid_idx")
    def next_program(begin, self, x, y, z):
        programs.append(([], []))
        begin(self, x, y, z)

    @planted(builder, "create_masked_load")
    def noting_loads(load, self, pointers, mask, *rest):
        programs[-1][0].append(_bytes(pointers, mask))
        return load(self, pointers, mask, *rest)

    @planted(builder, "create_masked_store")
    def noting_stores(store, self, pointers, value, mask, *rest):
        programs[-1][1].append(_bytes(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    with counting(), next_program(), noting_loads(), noting_stores():
        yield launches
