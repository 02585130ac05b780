"""What the host must take care of when it works with a device: in threads, to measure time, and to
get results that repeat bit for bit."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from errors import UserError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPEATS = (":4096:8", ":16:8")  # the values with which torch allows deterministic cuBLAS


def device_thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """Make a daemon thread that runs `target(*args)` on the caller's current device.

    The current device belongs to a thread: a new one has device 0. What touches a device there
    would create a context on device 0 from every rank of the machine, about 0.5 GB each, and would
    wait for the training stream of the rank that owns it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def check_gpu(dtype: str, device: str) -> None:
    """Raise UserError if this GPU does not compute in `dtype`, that of train.dtype."""
    if device == "cuda" and dtype == "bfloat16" and torch.version.hip is None:
        (major, minor), name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        if major < 8:
            why = f"{name} does not compute in it: its compute capability is {major}.{minor}, not 8"
            raise UserError("train.dtype", dtype, why, "set train.dtype=float16")


def prepare_determinism(device: str, deterministic: bool) -> None:
    """Call it before the first matrix product, at which cuBLAS reads the variable.
    `deterministic`: train.deterministic."""
    if device == "cuda":
        value = os.environ.setdefault(CUBLAS, CUBLAS_REPEATS[0])  # an examination needs it too
        if deterministic and value not in CUBLAS_REPEATS:
            why = "with this value cuBLAS is not deterministic, and train.deterministic is true"
            raise UserError(CUBLAS, value, why, f"unset it, or set it to {CUBLAS_REPEATS[0]}")
    torch.use_deterministic_algorithms(deterministic)


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """On a GPU, run torch's operations as with train.deterministic. To do so and only warn of those
    that cannot would not be enough: flash attention's backward then does not repeat
    (attention_backward.cu in torch)."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if device == "cuda" and not before:
        wrong = os.environ.get(CUBLAS) not in CUBLAS_REPEATS  # the user's value: products raise
        torch.use_deterministic_algorithms(True, warn_only=wrong)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def time_mark(device: str) -> Any:
    """When the work launched so far is done: on a GPU an event in the current stream, for which
    nobody waits; on a CPU, seconds by the clock."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two marks. On a GPU, wait for the work before the second."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
