"""Work with a device from the host's side, on pretended devices: a card is told from its
namesakes, and an examination is deterministic. (A thread works on its rank's device:
test_streams.py.)"""

import pytest
import torch

from hardware import DATA_SHEETS, data_sheet_of
from runtime.device import CUBLAS, deterministic

CARDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100 pcie",
    "NVIDIA H100 NVL": "h100 nvl",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "h200",
    "NVIDIA H200 NVL": "h200 nvl",
    "NVIDIA A100-SXM4-80GB": "a100",
}


def test_a_card_has_its_own_peak() -> None:
    """MFU divides by the peak: a PCIe card's is three quarters of the SXM card's."""
    for device, sheet in CARDS.items():
        assert data_sheet_of(device) is DATA_SHEETS[sheet]
    for other in ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA GB200"):
        assert data_sheet_of(other) is None


@pytest.mark.parametrize("before", [0, 1])  # torch's mode: 0 off, 1 warns, 2 raises
@pytest.mark.parametrize(("variable", "inside"), [(":4096:8", 2), (":0:0", 1)])
def test_an_examination_is_deterministic_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, before: int, variable: str, inside: int
) -> None:
    """And not only where it costs nothing: with "warn only", flash attention's backward does not
    repeat. But products raise unless the user's variable allows it."""
    monkeypatch.setenv(CUBLAS, variable)
    torch.set_deterministic_debug_mode(before)
    try:
        with deterministic("cuda"):
            assert torch.get_deterministic_debug_mode() == (before or inside)
        assert torch.get_deterministic_debug_mode() == before
        with deterministic("cpu"):
            assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.use_deterministic_algorithms(False)  # inductor's setting too
