"""Shows where the time of a profiled step went: `python -m tools.profile RUN`, after
run.profile=start:stop (docs/profiling.md).

Prints for each trace in RUN/profile, or for one trace file: compute time, communication by axis and
how much of it is exposed, idle time, and a GPU's kernels that took the most time. It reads
only the traces. Of a run's folder, it also writes the numbers to RUN/profile/summary-rank-….json.

Seconds per step:

    GPU   compute        time in which a kernel other than NCCL's runs
          communication  time in which an NCCL kernel runs; exposed: while no other kernel runs. A
                         kernel that waits for another rank counts as running, so the exposed part
                         of pp includes the pipeline bubble
          copies         to, from and inside the device, while no kernel runs
          idle           nothing runs: the host is too slow, waits for data, or writes a log line
    CPU   communication  from the start of a collective (the call to gloo) until the training thread
                         has waited for it; exposed: the part in which the thread is in that call or
                         in the wait
          compute        time in which that thread is in an operator, and not in such a wait
          idle           the rest: Python between operators, waiting for data, a log line

So compute + copies + exposed communication + idle = the step.

The axis of a collective: on a GPU, the kernel names its process group, and the trace file has the
axis of each group under `lattice`. Batched sends and receives name no group
(https://github.com/pytorch/pytorch/issues/194693), but only the pipeline uses them. On a CPU,
runtime/profiling/profile.py marks each collective with its axis.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

from errors import UserError
from runtime.files import write_or_warn
from tools.command import CommandParser, reports_errors, run_command, table

Interval = tuple[float, float]  # begin, end; empty if the end is not later
STEP = re.compile(r"step (\d+)")
MARK = re.compile(r"(\w+): (wait )?(\w+) #(\d+)")  # as runtime/profiling/profile.py writes it
TOP = 10  # rows in the table of kernels
# but those that contain other operators, or start a collective
OPERATOR = re.compile(r"(?!autograd::|torch::|c10d::|_c10d_functional::)\w+::")
MICROSECONDS = 1e6  # per second
REMEDY = "give the folder of a run that had run.profile set, or a file in its profile/ folder"


def length(intervals: Sequence[Interval], without: Sequence[Interval] = ()) -> float:
    """The total length that the intervals cover outside of those `without`; overlaps count once."""
    # not negative: the two sums are rounded
    return max(0.0, _covered([*intervals, *without]) - _covered(without))


def _covered(intervals: Sequence[Interval]) -> float:
    """The length of the union of the intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# --- a trace's events -----------------------------------------------------------------------------


class Event(NamedTuple):
    name: str
    category: str
    thread: Any  # a thread of the host, or a stream of the device
    begin: float  # microseconds
    end: float
    arguments: dict[str, Any]

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace file, compressed or not. Raises UserError if it is not a trace."""
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError("trace", str(path), f"cannot be read: {error}", REMEDY) from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise UserError("trace", str(path), "has no list traceEvents", REMEDY)
    return trace


def events_of(trace: dict[str, Any]) -> Iterator[Event]:
    """Yield the events that have a begin and a duration."""
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            thread, begin, arguments = (event["pid"], event["tid"]), event["ts"], event.get("args")
            end = begin + event["dur"]
            yield Event(event["name"], event.get("cat", ""), thread, begin, end, arguments or {})


# --- the summary ----------------------------------------------------------------------------------


def summarise(trace: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Summarise a trace as seconds per step, averaged over its steps, without torch.

    The keys are `steps` (their numbers), `step_seconds`, `compute`, `copies`, `exposed`, `idle`;
    `communication`: axis → `seconds`, `exposed`, `calls`; `top`: a GPU's kernels that took the most
    time, each with `name`, `seconds`, `calls`. Time in which two axes are exposed at once counts
    for both axes, but only once in `exposed`. `name`: what error messages call the trace.

    Raises:
        UserError: the trace contains no step.
    """
    about = trace.get("lattice", {})
    events = list(events_of(trace))
    steps = [e for e in events if e.category == "user_annotation" and STEP.fullmatch(e.name)]
    first = min((event.begin for event in steps), default=0.0)
    last = max((event.end for event in steps), default=0.0)
    if first == last:
        raise UserError("trace", name, f"none of its {len(events)} events is a step", REMEDY)
    events = [event for event in events if event.begin < last and event.end > first]

    on_device = any(event.category == "kernel" for event in events)
    if on_device:
        parts = _of_device(events, about.get("axes", {}))
    else:
        parts = _of_host(events, steps[0].thread)
    exposed = [interval for part in parts.exposed.values() for interval in part]
    # compute hides communication on a GPU; on a CPU, waiting is no compute
    hiding: Sequence[Interval] = parts.compute if on_device else ()
    waiting: Sequence[Interval] = () if on_device else exposed

    def seconds(intervals: Sequence[Interval], without: Sequence[Interval] = ()) -> float:
        given, hidden = (
            [(max(begin, first), min(end, last)) for begin, end in each]
            for each in (intervals, without)
        )
        return length(given, hidden) / MICROSECONDS / len(steps)

    communication = {
        axis: {
            "seconds": seconds(intervals),
            "exposed": seconds(parts.exposed[axis], hiding),
            "calls": parts.calls[axis] / len(steps),
        }
        for axis, intervals in parts.communication.items()
    }
    by_axis = sorted(communication.items(), key=lambda item: -item[1]["exposed"])
    by_name = sorted(parts.by_name.items(), key=lambda item: -sum(item[1]))
    working = [*parts.compute, *parts.copies, *exposed]
    return {
        "rank": about.get("rank"),
        "coordinates": about.get("coordinates"),
        "device": "cuda" if on_device else "cpu",
        "steps": sorted(int(event.name.split()[1]) for event in steps),
        "step_seconds": seconds([(first, last)]),
        "compute": seconds(parts.compute, waiting),
        "copies": seconds(parts.copies, [*parts.compute, *exposed]),
        "exposed": seconds(exposed, hiding),
        "idle": seconds([(first, last)], working),
        "communication": dict(by_axis),
        "top": [
            {
                "name": name,
                "seconds": sum(took) / MICROSECONDS / len(steps),
                "calls": len(took) / len(steps),
            }
            for name, took in by_name[:TOP]
        ],
    }


class Parts:
    """The intervals of one device or one thread, by category."""

    def __init__(self) -> None:
        self.compute: list[Interval] = []
        self.copies: list[Interval] = []
        self.communication: defaultdict[str, list[Interval]] = defaultdict(list)  # by axis
        # by axis; on a GPU, where compute does not hide it
        self.exposed: dict[str, list[Interval]] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        # microseconds of each call of a kernel
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)


def _of_device(events: list[Event], axes: dict[str, str]) -> Parts:
    """axes: name of a process group → axis."""
    parts = Parts()
    for event in events:
        if event.category in ("gpu_memcpy", "gpu_memset"):
            parts.copies.append(event.interval)
        elif event.category == "kernel":
            parts.by_name[event.name].append(event.end - event.begin)
            if event.name.lower().startswith("nccl"):
                group = event.arguments.get("Process Group Name")
                is_pp = group is None and "SendRecv" in event.name
                axis = "pp" if is_pp else axes.get(group, "other")
                parts.communication[axis].append(event.interval)
                parts.calls[axis] += 1
            else:
                parts.compute.append(event.interval)
    parts.exposed = parts.communication
    return parts


def _of_host(events: list[Event], thread: Any) -> Parts:
    parts = Parts()
    called: dict[str, Event] = {}  # by the collective's number
    parts.exposed = at_work = defaultdict[str, list[Interval]](list)
    for event in sorted((e for e in events if e.thread == thread), key=lambda e: e.begin):
        mark = MARK.fullmatch(event.name) if event.category == "user_annotation" else None
        if mark is not None:
            axis, waiting, _, number = mark.groups()
            at_work[axis].append(event.interval)
            began = called.get(number, event) if waiting else event
            parts.communication[axis].append((began.begin, event.end))
            if not waiting:
                called[number] = event
                parts.calls[axis] += 1
        elif event.category == "cpu_op" and OPERATOR.match(event.name):
            parts.compute.append(event.interval)
    return parts


def describe(summary: dict[str, Any]) -> str:
    """Format the summary as tables."""
    whole, steps = summary["step_seconds"], summary["steps"]

    def cells(seconds: float) -> tuple[str, str]:
        return f"{seconds:.4f} s", f"{seconds / whole:.1%}"

    on_gpu, place = summary["device"] == "cuda", (summary["coordinates"] or {}).items()
    coordinates = ", ".join(f"{axis} {index}" for axis, index in place)
    which = f"step {steps[0]}" if len(steps) == 1 else f"mean of steps {steps[0]} to {steps[-1]}"
    rows = [("step", whole), ("compute", summary["compute"])]
    rows += [("copies", summary["copies"])] if on_gpu else []
    rows += [("exposed communication", summary["exposed"]), ("idle", summary["idle"])]
    by_axis = [("communication", "under way", "exposed", "of the step", "calls")]
    for axis, part in summary["communication"].items():
        took, calls = f"{part['seconds']:.4f} s", f"{part['calls']:,.0f}"
        by_axis.append((axis, took, *cells(part["exposed"]), calls))
    top = [
        (*cells(row["seconds"]), f"{row['calls']:,.0f} ×", row["name"][:72])
        for row in summary["top"]
    ]
    return "\n\n".join(
        [
            f"rank {summary['rank']} ({coordinates}), on its {summary['device']}, {which}",
            table([(name, *cells(seconds)) for name, seconds in rows]),
            *([table(by_axis)] if summary["communication"] else []),
            *([f"kernels, by time\n{table(top, left=(3,))}"] if on_gpu else []),
        ]
    )


# --- the command ----------------------------------------------------------------------------------


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.profile", description=__doc__)
    parser.option("run", Path, "RUN", "a run folder, or a trace file")
    run = parser.parse_args(arguments).run
    names = sorted(glob(os.path.join(escape(str(run)), "profile", "step-*.json.gz")))
    traces = [run] if os.path.isfile(run) else [Path(name) for name in names]
    if not traces:
        raise UserError("RUN", str(run), "has no profile/step-….json.gz", REMEDY)
    for path in traces:
        summary = summarise(read_trace(path), str(path))
        print(describe(summary), end="\n\n")
        if path != run:
            rank = path.name.removesuffix(".json.gz").partition("-rank-")[2]
            # in place of the summary of the rank's earlier steps
            file = path.with_name(f"summary-rank-{rank}.json")
            write_or_warn(file, json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
