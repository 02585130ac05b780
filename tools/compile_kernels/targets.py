"""The GPUs that kernels are compiled for. Does not import Triton, so that the command's --help
works without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    backend: str  # these three as in Triton's GPUTarget
    arch: int | str
    lanes: int
    shared: int  # bytes that one program can have


# Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; for
# AMD, LLVM's AMDGPU backend.
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),  # A100
    "sm_90": Target("cuda", 90, 32, 227 * 1024),  # H100, H200
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),  # MI300X
}
