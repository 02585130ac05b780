"""Comparisons of a kernel's results with float64, on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Check(NamedTuple):
    """The error of a result compared with float64, and its bound."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # false if the error is NaN


def against_exact(what: str, found: Tensor, exact: Tensor) -> Check:
    """Checks the largest error, with the bound of tests/test_kernels.py: in float32, 2e-6 of the
    largest value; in bfloat16, 1.1 times the largest error of the exact result when rounded."""
    assert found.shape == exact.shape, f"{what}: {tuple(found.shape)} is not {tuple(exact.shape)}"
    error = (found.double() - exact).abs().max().item()
    if found.dtype == torch.bfloat16:
        return Check(what, error, 1.1 * (exact.bfloat16().double() - exact).abs().max().item())
    return Check(what, error, 2e-6 * exact.abs().max().item())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills newly allocated memory with NaN, so that an output that a kernel does not write is
    found."""
    # PyTorch then fills the result of `torch.empty`
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
