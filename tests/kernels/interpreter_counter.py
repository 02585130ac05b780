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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np


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
    call, begin = interpreter.GridExecutor.__call__, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store
    launches: list[Launch] = []
    programs: list[_Program] = []

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        programs.clear()
        call(self, *arguments, **options)
        launches.append(_sum_up(self.fn.__name__, programs))

    def next_program(self: Any, x: int, y: int, z: int) -> None:
        programs.append(([], []))
        begin(self, x, y, z)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        programs[-1][0].append(_bytes(pointers, mask))
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        programs[-1][1].append(_bytes(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    with ExitStack() as stack:
        for owner, name, instead in (
            (interpreter.GridExecutor, "__call__", launch),
            (builder, "set_grid_idx", next_program),
            (builder, "create_masked_load", masked_load),
            (builder, "create_masked_store", masked_store),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield launches
