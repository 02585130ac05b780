"""The GPUs that kernels are compiled for. Does not import Triton, so that the command's --help
works without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the blocks on one multiprocessor (AMD: compute unit) share."""

    warps: int
    blocks: int
    registers: int  # 32 bits each
    register_unit: int  # registers are allocated to a warp in multiples of this number
    shared: int  # bytes
    shared_of_system: int  # bytes that each block takes in addition to its own
    parts: int = 4  # each with its own registers; a warp belongs to one


@dataclass(frozen=True)
class Target:
    backend: str  # these three as in Triton's GPUTarget
    arch: int | str
    lanes: int
    shared: int  # bytes that one program can have
    device: str  # in hardware.py
    limits: Limits
    latency: float | None  # seconds until a load from idle memory returns


# Sources:
# - CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability": for 8.0 and
#   9.0, 64 warps, 32 blocks and 65,536 registers per multiprocessor; 164 and 228 KiB of shared
#   memory, and 1 KiB less for one block.
# - cuda_occupancy.h of the CUDA toolkit: registers in units of 256, 4 parts, 1 KiB per block taken
#   by the system (also in the tuning guides for Ampere and Hopper).
# - LLVM's AMDGPU backend for gfx942: 4 SIMDs per compute unit, each with 512 registers per lane in
#   units of 8, and at most 8 wavefronts; 16 work-groups; 64 KiB.
# - Latency: Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture
#   (arXiv:2402.13499): 466.3 cycles on A100, at 1.41 GHz, and 478.8 on H100 PCIe, at 1.755 GHz.
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912, "a100",  # A100: 163 KiB
                    Limits(64, 32, 65_536, 256, 167_936, 1024), 466.3 / 1.41e9),
    "sm_90": Target("cuda", 90, 32, 232_448, "h100",  # H100, H200: 227 KiB
                    Limits(64, 32, 65_536, 256, 233_472, 1024), 478.8 / 1.755e9),
    "gfx942": Target("hip", "gfx942", 64, 65_536, "mi300x",  # MI300X: 64 KiB
                     Limits(32, 16, 131_072, 512, 65_536, 0), None),
}  # fmt: skip
