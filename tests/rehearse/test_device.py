"""Work with a device from the host's side, on pretended devices: threads use their rank's device,
saving does not touch a stream, and a card is told from its namesakes."""

import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter, filesystem

from hardware import DATA_SHEETS, data_sheet_of
from proofs.ranks import RankError, Ranks
from runtime.checkpoint.save import Saver
from runtime.device import CUBLAS, deterministic, device_thread
from tests import ROOT
from tests.runs import train_run, write_config


class Devices(threading.local):
    """torch.cuda's current device: each thread has its own, at first device 0."""

    current = 0


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(found, "current", device))
    return found


@pytest.mark.parametrize("make", [device_thread, None], ids=["device_thread", "control"])
def test_a_thread_works_on_its_rank_s_device(devices: Devices, make: Any) -> None:
    """Control: a plain thread works on device 0."""
    torch.cuda.set_device(3)
    seen: list[int] = []
    target = lambda: seen.append(torch.cuda.current_device())  # noqa: E731
    thread = make(target, "name") if make else threading.Thread(target=target)
    thread.start()
    thread.join()
    assert seen == [3 if make else 0]


def test_every_thread_that_may_touch_a_device_is_made_so() -> None:
    """The others are listed here: they work on the host only, and so know nothing of devices."""
    folders = ("data", "model", "parallel", "runtime", "settings", "training")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    plain = [file for file in files if "threading.Thread(" in file.read_text(encoding="utf-8")]
    # runtime/monitor/ is another process, which knows no device at all
    alerts = {file for file in plain if file.is_relative_to(ROOT / "runtime" / "monitor")}
    for file in alerts:
        assert not re.search(r"^ *(import|from) torch", file.read_text(encoding="utf-8"), re.M)
    plain = [file for file in plain if file not in alerts]
    named = {file.relative_to(ROOT).as_posix() for file in plain}
    on_the_host = {"data/loader.py", "data/prepare.py", "runtime/checkpoint/lease.py",
                   "runtime/signals.py", "runtime/start/elastic.py",
                   "runtime/torchrun.py"}  # fmt: skip
    assert named == {*on_the_host, "runtime/device.py"}
    assert not [name for name in on_the_host if "cuda" in (ROOT / name).read_text(encoding="utf-8")]


class CopyAhead(HuggingFaceStorageWriter):
    """Copies ahead, as DCP does if it is not told otherwise."""

    per_thread_copy_ahead = property(lambda self: 10_000_000, lambda self, value: None)


def save_as_on_a_gpu(arguments: list[str], writer: Any = HuggingFaceStorageWriter) -> str:
    """A run whose saves find a GPU. DCP's loader for GPUs, which works with streams, is refused."""
    write = Saver._write_partial

    def on_a_gpu(self: Saver, *rest: Any) -> Any:
        with patch.object(torch.cuda, "is_available", lambda: True):
            return write(self, *rest)

    refused = AssertionError("a stream is used in the thread that saves")
    with (
        patch.object(Saver, "_write_partial", on_a_gpu),
        patch("runtime.checkpoint.save.HuggingFaceStorageWriter", writer),
        patch.object(filesystem, "_OverlappingCpuLoader", side_effect=refused),
    ):
        return train_run(arguments)


def test_saving_uses_no_stream(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, train={"steps": 1}, checkpoint={"interval": 1})
    assert ranks.run(save_as_on_a_gpu, 2, [config]) == [""] * 2


def test_a_stream_in_a_save_would_be_found(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Control: DCP's default."""
    config = write_config(tmp_path, data, train={"steps": 1}, checkpoint={"interval": 1})
    with pytest.raises(RankError, match="a stream is used"):
        ranks.run(save_as_on_a_gpu, 2, [config], CopyAhead)


@pytest.mark.parametrize(
    ("device", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 NVL", "h100 nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200 nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_a_card_has_its_own_peak(device: str, sheet: str) -> None:
    """MFU divides by the peak: a PCIe card's is three quarters of the SXM card's."""
    assert data_sheet_of(device) is DATA_SHEETS[sheet]
    assert data_sheet_of("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("variable", "warns"), [(":4096:8", False), (":0:0", True)])
def test_an_examination_is_deterministic_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, before: tuple[bool, bool], variable: str, warns: bool
) -> None:
    """And not only where it costs nothing: with "warn only", flash attention's backward does not
    repeat. But products raise unless the user's variable allows it."""

    def flags() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    monkeypatch.setenv(CUBLAS, variable)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with deterministic("cuda"):
            assert flags() == ((True, warns) if not before[0] else before)
        assert flags() == before
        with deterministic("cpu"):
            assert flags() == before
    finally:
        torch.use_deterministic_algorithms(False)
