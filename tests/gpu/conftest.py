"""Skips the tests that need a GPU where there is none."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.plugin import found, fresh, one_rank, record  # noqa: F401


@pytest.fixture
def world() -> Iterator[None]:
    """For one test: others in this process run benchmarks, or ranks, with their own group."""
    with one_rank():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With the plugin of the benchmarks, as `make bench-gpu` runs them, tests have tiny sizes."""
    tiny = item.config.pluginmanager.has_plugin("benchmarks.gpu.plugin")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available() and not tiny:
        pytest.skip("needs a CUDA device")
