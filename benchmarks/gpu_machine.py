"""The machine on which a GPU benchmark runs: versions, driver; power and clock while it runs."""

import datetime
import platform
import subprocess
import threading
import time
from importlib import metadata
from typing import Any

EVERY_SECONDS = 5.0
QUERIED = ("power.draw", "clocks.sm", "temperature.gpu", "memory.used")
# Module → its distribution, where the names differ.
DISTRIBUTIONS = {"xdist": "pytest-xdist", "flash_attn_interface": "flash-attn-3"}


def about(packages: tuple[str, ...]) -> dict[str, Any]:
    """The device, and the versions of what was measured; None: not installed."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "driver": (ask_nvidia("driver_version") or [None])[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", *packages)},
    }


def version(module: str) -> str | None:
    try:
        return metadata.version(DISTRIBUTIONS.get(module, module))
    except metadata.PackageNotFoundError:
        return None


def ask_nvidia(*queried: str) -> list[str] | None:
    """What nvidia-smi says about the first GPU; None where there is no such program."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queried)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, "--id=0"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [part.strip() for part in done.stdout.strip().split(",")]


class Meter:
    """Records power, clock, temperature and memory every few seconds, in a thread of its own."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _record(self) -> None:
        while (found := ask_nvidia(*QUERIED)) is not None:
            seconds = round(time.monotonic() - self._began, 1)
            self.samples.append({"seconds": seconds, **dict(zip(QUERIED, found, strict=True))})
            if self._ended.wait(EVERY_SECONDS):
                return
