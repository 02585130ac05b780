"""Imports Triton where it is installed, and chooses which implementation of an operation runs.

Without Triton (CPU builds of torch do not include it) the kernels are plain functions that are
never called.
"""

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from errors import UserError

INTERPRETED = False  # whether kernels run in Triton's interpreter

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
    INTERPRETED = triton.knobs.runtime.interpret  # as Triton reads TRITON_INTERPRET: also "true"
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=object)  # used in the kernels' signatures
    jit = lambda function: function  # noqa: E731

if INTERPRETED:
    from model.kernels import triton_interpreter

    triton_interpreter.mend()

LANES = 64 if torch.version.hip else 32  # threads per warp
MAX_THREADS = 1024  # per program, on every GPU


def use_triton(tensor: Tensor, mode: str) -> bool:
    """Whether `model.kernels=mode` selects the Triton kernel for this tensor: with `auto`, if the
    tensor is on a GPU."""
    return mode == "triton" or (mode == "auto" and tensor.is_cuda)


def on_nvidia(x: Tensor) -> bool:
    """Whether x is on an NVIDIA GPU, whose matrix products can sum in a wider dtype."""
    return x.is_cuda and torch.version.hip is None


def why_not_triton(device_type: str) -> str | None:
    """The reason why Triton kernels cannot run on this device, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    return None if INTERPRETED or device_type == "cuda" else "there is no GPU"


def check_kernels(mode: str, device_type: str) -> None:
    """Raise UserError if a run on this device cannot use `model.kernels=mode`."""
    why = why_not_triton(device_type)
    if mode == "triton" and why is not None:
        how = "or run the kernels in Triton's (slow) interpreter, with TRITON_INTERPRET=1"
        raise UserError("model.kernels", mode, why, f"set model.kernels=auto; {how}")
    if mode == "auto" and device_type == "cuda" and why is not None:
        raise UserError("model.kernels", mode, why, "install Triton, or set model.kernels=torch")
    if mode != "torch" and device_type == "cuda" and INTERPRETED:
        why = "Triton would interpret kernels on the CPU, a thousand times slower, and crash"
        value = os.environ.get("TRITON_INTERPRET")
        raise UserError("TRITON_INTERPRET", value, why, "unset TRITON_INTERPRET")


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton dtype in which kernels compute: float64 for float64 tensors (proofs of parity),
    else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def exact(dtype: torch.dtype) -> torch.dtype:
    """`accumulator` as a torch dtype, for statistics that kernels store."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


TILE = 4096  # elements that a program handles at once, if rows are narrower than that


def rows_at_once(block: int) -> int:
    """The number of rows of `block` elements (a power of two) in one program's tile."""
    return max(1, TILE // block)


def warps_for(block: int) -> int:
    """The number of warps for a program that handles `block` elements at once: 16 elements per
    thread, which are two 16-byte loads of bfloat16."""
    return max(1, min(block // 16, MAX_THREADS) // LANES)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_for(x: Tensor, rows: int, at_once: int, num_warps: int) -> tuple[int, int]:
    """How many programs to launch if each works through many rows, and through how many: about as
    many programs as the device runs at once, 32 warps per multiprocessor at 64 registers per
    thread."""
    resident = max(1, 32 // num_warps) * _multiprocessors(x.device)
    rows_each = max(1, cdiv(cdiv(rows, at_once), resident)) * at_once
    return cdiv(rows, rows_each), rows_each


def rows_of(x: Tensor) -> Tensor:
    """x [..., D] as rows [T, D] with contiguous elements: a view if the strides of x allow one,
    else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
