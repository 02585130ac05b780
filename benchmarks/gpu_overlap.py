"""Measures how much of a communication-like kernel hides behind matrix products on one GPU.

    python -m benchmarks.gpu_overlap               part of `make bench-gpu PART=open`

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
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_process import run_python
from benchmarks.gpu_rows import Measurement, check_triton, exit_status, options, parse, run_all
from benchmarks.gpu_timing import DEVICE, ON_GPU, Clock, Work
from model.kernels.backend import jit, tl
from tools.command import run_command

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
PROGRAMS, BLOCK = 24, 8192
PRIORITIES = {"high": -1, "normal": 0}
CONNECTIONS = (None, "1", "32")  # None: not set, which is 8
WIDTH, QUEUED, NUMBERS = 8192, 8, 1 << 28  # of a product, products in the queue, numbers copied


@jit
def _traffic(X, Y, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(Y + i, tl.load(X + i, mask=i < n), mask=i < n)


def measure_here(priority: str, tiny: bool) -> dict[str, float]:
    """Measures one row in this process."""
    width, queued, numbers = (64, 2, 1 << 14) if tiny else (WIDTH, QUEUED, NUMBERS)
    a, b = (torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(numbers, device=DEVICE)
    target = torch.empty_like(source)
    side = torch.cuda.Stream(priority=PRIORITIES[priority]) if ON_GPU else None
    inside: list[tuple[Any, Any]] = []  # the traffic's own events

    def products(_: Any) -> None:
        for _ in range(queued):
            torch.mm(a, b)

    def traffic(_: Any) -> None:
        _traffic[(PROGRAMS,)](source, target, numbers, PROGRAMS=PROGRAMS, BLOCK=BLOCK)

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

    def released(_: Any) -> None:
        """The side stream must not begin before the timed call does."""
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())

    clock = Clock(samples=2 if tiny else 15, warm_up=1, flush=False)
    found = {
        name: clock.milliseconds(Work(before, run))["median"]
        for name, before, run in (
            ("products", lambda: None, products),
            ("traffic", lambda: None, traffic),
            ("together", partial(released, None), together),
        )
    }
    assert torch.equal(source, target)
    times = [begin.elapsed_time(end) for begin, end in inside]
    if times:
        found["traffic_beside"] = statistics.median(times)
    saved = found["products"] + found["traffic"] - found["together"]
    moved = 2 * numbers * source.element_size() / found["traffic"] * 1e3
    return {
        **found,
        "hidden": saved / min(found["products"], found["traffic"]),
        "traffic_bytes_per_second": moved,
    }


def measure(connections: str | None, priority: str, tiny: bool) -> dict[str, Any]:
    """Measures one row in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    if connections is not None:
        environment[VARIABLE] = connections
    asked = ["--one", priority, *["--tiny"] * tiny]
    said = run_python("-m", "benchmarks.gpu_overlap", *asked, environment=environment)
    return {"connections": connections or "not set", "priority": priority,
            **json.loads(said.splitlines()[-1])}  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    parts = ("products", "traffic", "together", "traffic_beside")
    times = ", ".join(f"{part} {row[part]:.2f}" for part in parts if part in row)
    return f"{row['name']:46}hidden {row['hidden']:6.0%}   ({times} ms)"


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, budget_seconds=100)
    parser.add_argument("--one", choices=PRIORITIES, help="measure one row in this process")
    parsed = parse(parser, arguments)
    check_triton()
    if parsed.one:
        print(json.dumps(measure_here(parsed.one, parsed.tiny)))
        return 0
    rows = [
        Measurement(
            f"overlap, {connections or 'default'} connections, {priority} priority",
            12,
            partial(measure, connections, priority, parsed.tiny),
        )
        for connections in CONNECTIONS
        for priority in PRIORITIES
    ]
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
