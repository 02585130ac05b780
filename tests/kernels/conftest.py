"""A fixture for the files that run kernels on a GPU too."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.device import DEVICE


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tests create their tensors on the device on which the kernels run."""
    with torch.device(DEVICE):
        yield
