"""Skips the tests that need a GPU where there is none."""

import pytest
import torch

from benchmarks.gpu.plugin import found, fresh, record, world  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With the plugin of the benchmarks, as `make bench-gpu` runs them, tests have tiny sizes."""
    tiny = item.config.pluginmanager.has_plugin("benchmarks.gpu.plugin")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available() and not tiny:
        pytest.skip("needs a CUDA device")
