"""Where kernels are tested: on a GPU, or on the CPU in Triton's interpreter."""

import pytest
import torch

from model.kernels.backend import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason="needs Triton")
KERNELS = ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(DEVICE, dtype)
