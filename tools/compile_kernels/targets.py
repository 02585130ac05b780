"""The GPUs that kernels are compiled for. Does not import Triton, so that the command's --help
works without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    backend: str  # these three as in Triton's GPUTarget
    arch: int | str
    lanes: int
    shared: int  # bytes that one program can have


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912),  # A100: 163 KiB
    "sm_90": Target("cuda", 90, 32, 232_448),  # H100, H200: 227 KiB
    "gfx942": Target("hip", "gfx942", 64, 65_536),  # MI300X: 64 KiB
}
