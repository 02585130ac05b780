"""Patch Triton's CPU interpreter so that it computes bfloat16 as a GPU does.

The interpreter stores bfloat16 as uint16 in numpy arrays. It rounds float32 to bfloat16 by
truncation, where every GPU rounds to nearest even, and it passes the raw bits to `tl.dot` and to
arithmetic. (Triton's documentation lists bfloat16 as unsupported by the interpreter.) Our kernels
compute in float32 and round once at the end, so only the two conversions and `tl.dot` need
patching. For other arithmetic on bfloat16, the patched interpreter raises an error instead of
computing with the raw bits.

Only the interpreter is changed; compiled kernels are not affected.
"""

from typing import Any

import numpy as np


def to_float32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16, stored as uint16, to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16, stored as uint16, rounding to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def mend() -> None:
    """Patch the interpreter of this process, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "computes_bfloat16", False):
        return
    handle = interpreter.TensorHandle
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        was, becomes = source.dtype.scalar, target.scalar
        if was == becomes:
            return cast(self, source, target)
        if was == tl.bfloat16:
            source = handle(to_float32(source.data), tl.float32)
        if becomes == tl.bfloat16:
            return handle(to_bfloat16(source.data).reshape(source.data.shape), tl.bfloat16)
        is_done = (was, becomes) == (tl.bfloat16, tl.float32)
        return source if is_done else cast(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        a, b = (
            handle(to_float32(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
            for t in (a, b)
        )
        return dot(self, a, b, d, precision, imprecise)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if tl.bfloat16 in (left.dtype.scalar, right.dtype.scalar):
            raise TypeError(
                "arithmetic on bfloat16: convert to float32 after the load, and back at the store"
            )
        return binary(self, left, right, operation)

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor: Any, *others: Any) -> None:
        # Triton 3.6 (of torch 2.11) converts an array of one element by int(), which numpy 2.4
        # refuses.
        patch_tensor(tensor, *others)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = with_index
    builder.cast_impl, builder.create_dot, builder.binary_op = cast_impl, create_dot, binary_op
    builder.computes_bfloat16 = True
