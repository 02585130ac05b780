"""A clock for work on a GPU.

Without a GPU, the same programs run in Triton's CPU interpreter, with sizes that take seconds. That
proves that they run; the times that they then print are not measurements.

Each sample is the time between two events on the device, around one call. A large buffer is read
before the first event. So the L2 cache has none of the inputs and no data that must still be
written; and the time excludes the host, which enqueues the call before that reading is complete.
(Not `triton.testing.do_bench`: it empties the cache by writing, inside the sample, and prepares
nothing outside the time.)
"""

import gc
import os
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hardware import data_sheet_of
from runtime.device import seconds_between, time_mark

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU and find_spec("triton") is not None:
    # must be set before Triton is imported, so this module is the first one that a program imports
    os.environ["TRITON_INTERPRET"] = "1"

# Reading it takes half a millisecond, longer than any call here takes to enqueue; it is many times
# the size of an L2 cache.
FLUSH_BYTES = 2 << 30
compiled = partial(torch.compile, dynamic=False, backend="inductor" if ON_GPU else "aot_eager")


class Work(NamedTuple):
    """Work to be timed: `run(prepare())`, without the time of `prepare`."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


class Clock:
    """Times work: some warm-up calls (which also compile), then `samples` timed calls; one of each
    without a GPU.

    flush: whether to empty the cache before each sample; not needed for a whole training step.
    """

    def __init__(self, samples: int, warm_up: int = 3, flush: bool = True) -> None:
        self.samples, self.warm_up = (samples, warm_up) if ON_GPU else (1, 1)
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device=DEVICE) if flush and ON_GPU else None

    def milliseconds(self, work: Work) -> dict[str, float]:
        """The median, minimum and maximum of all samples."""
        for _ in range(self.warm_up):
            work.run(work.prepare())
        marks = [self._sample(work) for _ in range(self.samples)]
        samples = [seconds_between(*each) * 1e3 for each in marks]
        return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}

    def _sample(self, work: Work) -> tuple[Any, Any]:
        state = work.prepare()
        if self.buffer is not None:
            # read, not filled, because dirty cache lines would be written during the sample
            self.buffer.sum()
        start = time_mark(DEVICE)
        work.run(state)
        return start, time_mark(DEVICE)


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


def rate(flops: float, milliseconds: dict[str, float]) -> dict[str, float | None]:
    """FLOP/s, and the fraction of the device's dense bfloat16 peak; None if it is not listed
    (hardware.py)."""
    per_second = flops / milliseconds["median"] * 1e3
    sheet = data_sheet_of(torch.cuda.get_device_name()) if ON_GPU else None
    fraction = per_second / sheet.peak_flops if sheet is not None else None
    return {"flops_per_second": per_second, "fraction_of_peak": fraction}


def free_memory() -> None:
    """Frees memory, and resets the compiler, which limits how often it compiles the same
    function."""
    torch.compiler.reset()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
