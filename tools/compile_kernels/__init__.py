"""Compiles Triton kernels for GPUs that need not be present: `python -m tools.compile_kernels`.

__main__.py      the command
compiler.py      compiles kernels and inspects the machine code
accesses.py      accesses to global memory in assembly
specimens.py     the calls whose kernels are compiled
"""

from typing import NamedTuple


class Target(NamedTuple):
    """A GPU to compile for."""

    gpu: tuple[str, int | str, int]  # the arguments of Triton's GPUTarget
    shared: int  # bytes that one program can have
    has_bfloat16: bool = True
    spills: int = 0  # bytes of a thread's stack, and accesses to it, that are no fault


# Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; for
# AMD, LLVM's AMDGPU backend.
TARGETS = {
    "sm_75": Target(("cuda", 75, 32), 64 * 1024, has_bfloat16=False),  # T4
    "sm_80": Target(("cuda", 80, 32), 163 * 1024),  # A100
    "sm_90": Target(("cuda", 90, 32), 227 * 1024),  # H100, H200
    # ptxas leaves two registers on the stack in the backward of norms that are 16,384 wide, and of
    # norm and rotation in float32
    "sm_100": Target(("cuda", 100, 32), 227 * 1024, spills=8),  # B200
    "gfx942": Target(("hip", "gfx942", 64), 64 * 1024),  # MI300X
}
