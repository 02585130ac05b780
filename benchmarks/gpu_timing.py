"""Code shared by the GPU benchmarks: a clock for work on a device, comparisons with float64, and
results that are kept if the program is killed.

Without a GPU, the same programs run in Triton's CPU interpreter, with sizes that take seconds. That
proves that they run; the times that they then print are not measurements, and no results are
written.

Each sample is the time between two events on the device, around one call. A large buffer is read
before the first event. So the L2 cache has none of the inputs and no data that must still be
written; and the time excludes the host, which enqueues the call before that reading is complete.
"""

import argparse
import datetime
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU and find_spec("triton") is not None:
    # must be set before Triton is imported, so this module is the first one that a program imports
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parent.parent
# Reading it takes half a millisecond, longer than any call here takes to enqueue; it is many times
# the size of an L2 cache.
FLUSH_BYTES = 2 << 30
MEASURED, OUT_OF_MEMORY, NO_TIME, NOT_INSTALLED = (
    "measured",
    "out of memory",
    "not measured (time)",
    "not installed",
)
NO_MEASUREMENT = (
    "These are not measurements: tiny sizes, which prove that the program runs and that "
    "its checks pass."
)
compiled = partial(torch.compile, dynamic=False, backend="inductor" if ON_GPU else "aot_eager")


class Work(NamedTuple):
    """Work to be timed: `run(prepare())`, without the time of `prepare`."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


class Clock:
    """Times work: some warm-up calls (which also compile), then `samples` timed calls.

    flush: whether to empty the cache before each sample; not needed for a whole training step.
    """

    def __init__(self, samples: int, warm_up: int = 3, flush: bool = True) -> None:
        self.samples, self.warm_up = samples, warm_up
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device=DEVICE) if flush and ON_GPU else None

    def milliseconds(self, work: Work) -> dict[str, float]:
        """The median, minimum and maximum of all samples."""
        for _ in range(self.warm_up):
            work.run(work.prepare())
        samples = self._on_gpu(work) if ON_GPU else self._on_cpu(work)
        return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}

    def _on_gpu(self, work: Work) -> list[float]:
        pairs = []
        for _ in range(self.samples):
            state = work.prepare()
            if self.buffer is not None:
                # read, not filled, because dirty cache lines would be written during the sample
                self.buffer.sum()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work.run(state)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def _on_cpu(self, work: Work) -> list[float]:
        samples = []
        for _ in range(self.samples):
            state = work.prepare()
            start = time.perf_counter()
            work.run(state)
            samples.append((time.perf_counter() - start) * 1e3)
        return samples


def peak_bytes(work: Work) -> int | None:
    """The peak memory allocated in `run`, including its result, minus that allocated before; None
    on a CPU."""
    if not ON_GPU:
        return None
    state = work.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.run(state)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(clock: Clock, size: int) -> tuple[dict[str, float], float]:
    """Times a device-to-device copy of `size` bytes: returns milliseconds, and bytes per second,
    counting bytes read and written."""
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    times = clock.milliseconds(Work(lambda: None, lambda _: target.copy_(source)))
    return times, 2 * size / times["median"] * 1e3


# --- correctness ----------------------------------------------------------------------------------


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


# --- one row of results ---------------------------------------------------------------------------


class Deadline:
    """A time limit, in seconds from now, after which no further row begins."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.end


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Returns (the result of `action`, MEASURED), or (None, the reason for its failure), so that
    one row's failure does not affect the next."""
    try:
        return action(), MEASURED
    except torch.OutOfMemoryError:
        status = OUT_OF_MEMORY
    except ModuleNotFoundError as error:
        return None, f"{NOT_INSTALLED}: {error.name}"
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        status = f"failed: {type(error).__name__}: {said[0][:200]}"
    # outside the except clauses, where the error would still reference frames, and these tensors
    free_memory()
    return None, status


def free_memory() -> None:
    """Frees memory, and resets the compiler, which limits how often it compiles the same
    function."""
    torch.compiler.reset()
    if ON_GPU:
        gc.collect()
        torch.cuda.empty_cache()


def milliseconds_or_why(row: dict) -> str:
    """A table cell: the time, or a short reason why there is none."""
    if row["status"] == MEASURED:
        return f"{row['milliseconds']['median']:.3f}"
    return {NO_TIME: "no time", OUT_OF_MEMORY: "no memory"}.get(
        row["status"], "-" if NOT_INSTALLED in row["status"] else "failed"
    )


# --- the program's frame --------------------------------------------------------------------------


def parse(
    description: str | None, arguments: list[str] | None, budget_seconds: float
) -> argparse.Namespace:
    """Parses the options that both programs share; `tiny` is set if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="use small sizes that only prove that the program runs; always set without a GPU",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only rows whose name contains TEXT"
    )
    when = "time after which no further row begins (default: %(default)s)"
    parser.add_argument("--budget-seconds", type=float, default=budget_seconds, help=when)
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results; tiny runs write results only if it is given",
    )
    parsed = parser.parse_args(arguments)
    parsed.tiny = parsed.tiny or not ON_GPU
    if parsed.out is None and not parsed.tiny:
        parsed.out = ROOT / "benchmarks/results"
    return parsed


class Report:
    """Results as one JSON object, rewritten with every row, so that a killed program's results are
    kept."""

    def __init__(self, name: str, arguments: argparse.Namespace, settings: dict) -> None:
        self.path = arguments.out / f"{name}.json" if arguments.out else None
        self.results: dict[str, Any] = {
            "date": str(datetime.date.today()),
            "measurement": not arguments.tiny,
            "device": torch.cuda.get_device_name()
            if ON_GPU
            else platform.processor() or platform.machine(),
            "driver": _driver(),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{
                name: _version(name) for name in ("torch", "triton", "transformers", "liger_kernel")
            },
            "settings": settings,
            "rows": [],
        }
        print(
            f"{self.results['device']}, torch {self.results['torch']}, "
            f"triton {self.results['triton']}"
        )
        if arguments.tiny:
            print(NO_MEASUREMENT)

    def add(self, row: dict) -> dict:
        self.results["rows"].append(row)
        self.write()
        return row

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(
                json.dumps(_strict(self.results), indent=1, allow_nan=False) + "\n"
            )


def _strict(value: Any) -> Any:
    """Replaces non-finite numbers, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {key: _strict(of_key) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(of_list) for of_list in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
