"""Measures how much of a communication-like kernel hides behind matrix products on one GPU: part of
`make bench-gpu PART=open`.

One GPU has nothing to communicate with. So a copy stands for communication: a Triton kernel of 24
programs, about as many as NCCL uses for a large collective, each on one multiprocessor, that reads
and writes memory as fast as these few can. It runs on a second stream, of high or normal priority,
beside a queue of large matrix products, which fill every multiprocessor. What it cannot show: the
link, the wait for other ranks, and NCCL's own kernel.

CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues, is read when a process first uses the
GPU, so each row is measured by its own process. Numbers of a row, in milliseconds:

    products, traffic   while nothing else runs
    together            from the start of the first to the end of the last, both at once
    traffic_beside      the traffic's own time while products run
    hidden              (products + traffic − together) / the shorter of the two: 1 is perfect
"""

import json
import os
import statistics
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.gpu.timing import DEVICE, ON_GPU, Clock, Work
from model.kernels.backend import jit, tl

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
PROGRAMS, BLOCK = 24, 8192
PRIORITIES = {"high": -1, "normal": 0}
CONNECTIONS = ("default", "1", "32")  # default: not set, which is 8
# Of a product, products in the queue, numbers copied.
WIDTH, QUEUED, NUMBERS = (8192, 8, 1 << 28) if ON_GPU else (64, 2, 1 << 14)

pytestmark = pytest.mark.usefixtures("world")


@jit
def _traffic(X, Y, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(Y + i, tl.load(X + i, mask=i < n), mask=i < n)


def measure_here(priority: str) -> dict[str, float]:
    """Measures one row in this process."""
    a, b = (torch.randn(WIDTH, WIDTH, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(NUMBERS, device=DEVICE)
    target = torch.empty_like(source)
    side = torch.cuda.Stream(priority=PRIORITIES[priority]) if ON_GPU else None
    inside: list[tuple[Any, Any]] = []  # the traffic's own events

    def products(_: Any) -> None:
        for _ in range(QUEUED):
            torch.mm(a, b)

    def traffic(_: Any) -> None:
        _traffic[(PROGRAMS,)](source, target, NUMBERS, PROGRAMS=PROGRAMS, BLOCK=BLOCK)

    def together(_: Any) -> None:
        products(None)
        if side is None:
            traffic(None)
            return
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            events[0].record()
            traffic(None)
            events[1].record()
        torch.cuda.current_stream().wait_stream(side)
        inside.append(events)

    # the side stream must not begin before the timed call does
    released = lambda: side and side.wait_stream(torch.cuda.current_stream())  # noqa: E731

    clock = Clock(samples=15, warm_up=1, flush=False)
    found = {
        run.__name__: clock.milliseconds(Work(released, run))["median"]
        for run in (products, traffic, together)
    }
    assert torch.equal(source, target)
    if inside:
        times = [begin.elapsed_time(end) for begin, end in inside]
        found["traffic_beside"] = statistics.median(times)
    saved = found["products"] + found["traffic"] - found["together"]
    moved = 2 * NUMBERS * source.element_size() / found["traffic"] * 1e3
    hidden = saved / min(found["products"], found["traffic"])
    return {**found, "hidden": hidden, "traffic_bytes_per_second": moved}


@pytest.mark.parametrize(
    ("connections", "priority"),
    [
        pytest.param(*each, id="overlap, {} connections, {} priority".format(*each))
        for each in product(CONNECTIONS, PRIORITIES)
    ],
)
def bench_overlap(connections: str, priority: str, record: Any) -> None:
    """Measures one row in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    if connections != "default":
        environment[VARIABLE] = connections
    code = f"import json; from {__name__} import *; print(json.dumps(measure_here({priority!r})))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record(json.loads(done.stdout.splitlines()[-1]))
