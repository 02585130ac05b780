"""Count the bytes that kernels read and write, in Triton's CPU interpreter.

    with counted() as launches:
        rms_norm(x, weight, 1e-5, "triton")
    launches[0].loaded + launches[0].stored     # the traffic if a launch fetches every byte once

The interpreter knows the address of every element that a program loads or stores. A byte counts
once per launch, however many programs access it: that is the memory traffic if caches serve every
repeated access. Bytes that one program loads again are counted separately, so that a row read twice
is still found.
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


@dataclass
class _Program:
    loads: list[np.ndarray]  # addresses of bytes
    stores: list[np.ndarray]


def _distinct(pieces: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.uint64)


def _sum_up(kernel: str, programs: list[_Program]) -> Launch:
    loads = [_distinct(program.loads) for program in programs]
    stores = [piece for program in programs for piece in program.stores]
    issued = sum(piece.size for program in programs for piece in program.loads)
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
    addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(
        np.uint64
    )
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    return (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel()


@contextmanager
def counted() -> Iterator[list[Launch]]:
    """Yield a list to which every launch in this block is appended when it ends."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    call, load, store, begin = (
        interpreter.GridExecutor.__call__, builder.create_masked_load,
        builder.create_masked_store, builder.set_grid_idx,
    )  # fmt: skip
    launches: list[Launch] = []
    programs: list[_Program] = []

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        programs.clear()
        call(self, *arguments, **options)
        launches.append(_sum_up(self.fn.__name__, programs))

    def next_program(self: Any, x: int, y: int, z: int) -> None:
        programs.append(_Program([], []))
        begin(self, x, y, z)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        programs[-1].loads.append(_bytes(pointers, mask))
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        programs[-1].stores.append(_bytes(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    def refuse(*arguments: Any) -> None:
        raise NotImplementedError("atomic operations are not counted")

    with ExitStack() as stack:
        for owner, name, instead in (
            (interpreter.GridExecutor, "__call__", launch),
            (builder, "set_grid_idx", next_program),
            (builder, "create_masked_load", masked_load),
            (builder, "create_masked_store", masked_store),
            (builder, "create_atomic_rmw", refuse),
            (builder, "create_atomic_cas", refuse),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield launches
