"""Triton, where it is installed; and which implementation of an operation runs.

Where it is not (a CPU build of torch brings none), the kernels are plain functions that nobody
calls.
"""

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from errors import UserError

# Triton's own switch; it looks once, when it is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=object)  # what the kernels' signatures name
    jit = lambda function: function  # noqa: E731

if INTERPRETED and triton is not None:
    import triton_interpreter

    triton_interpreter.mend()

LANES = 64 if torch.version.hip else 32  # threads of a warp
MAX_THREADS = 1024  # of a program, on every GPU


def use_triton(tensor: Tensor, mode: str) -> bool:
    """Whether `model.kernels=mode` means the Triton kernel for this tensor: `auto` means a
    GPU's."""
    return mode == "triton" or (mode == "auto" and tensor.is_cuda)


def why_not_triton(device_type: str) -> str | None:
    """Why Triton kernels cannot run on tensors of this device; None: they can."""
    if triton is None:
        return "Triton is not installed"
    return None if INTERPRETED or device_type == "cuda" else "there is no GPU"


def check_kernels(mode: str, device_type: str) -> None:
    """Raises UserError where a run on this device cannot have `model.kernels=mode`."""
    why = why_not_triton(device_type)
    if mode == "triton" and why is not None:
        how = "to see the kernels interpreted, slowly: TRITON_INTERPRET=1 before the command"
        raise UserError("model.kernels", mode, why, f"set model.kernels=auto; {how}")
    if mode == "auto" and device_type == "cuda" and why is not None:
        raise UserError("model.kernels", mode, why, "install Triton, or set model.kernels=torch")


def accumulator(dtype: torch.dtype) -> Any:
    """What kernels compute in: float32, and float64 for float64 tensors (proofs of parity)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def exact(dtype: torch.dtype) -> torch.dtype:
    """The same as a torch dtype, of statistics that are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


TILE = 4096  # elements that a program handles at once, where rows are narrower than that


def rows_at_once(block: int) -> int:
    """Rows of `block` elements (a power of two) in one program's tile."""
    return max(1, TILE // block)


def warps_for(block: int) -> int:
    """Warps for a program that handles `block` elements at once: 16 a thread, two 16-byte loads of
    bfloat16."""
    return max(1, min(block // 16, MAX_THREADS) // LANES)


@cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )


def resident_programs(tensor: Tensor, num_warps: int) -> int:
    """How many programs to launch where each works through many rows: about what the device runs at
    once, 32 warps on each of its multiprocessors, which is what 64 registers a thread leave room
    for."""
    return max(1, 32 // num_warps) * _multiprocessors(tensor.device)


def rows_of(x: Tensor) -> Tensor:
    """x [..., D] as rows [T, D] with contiguous elements: a view where its strides allow one, else
    a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
