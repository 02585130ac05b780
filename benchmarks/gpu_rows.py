"""The rows of results that a GPU benchmark writes, and the frame that its programs share.

A program lists the names of its rows before it measures the first, and appends each row to a file
as soon as it has it, one JSON object a line. So a program that is killed loses nothing, and what it
did not reach is known:

    {"planned": ["copy", …]}       the names, most important first
    {"row": {"name": "copy", "status": "measured", …}}

A row's `status` is one of the texts in gpu_status.py. A row whose `right` is false is wrong: the
program then exits with status 1, as it does if one of our own rows failed.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_status import (
    FAILED,
    MEASURED,
    NEEDS,
    NO_TIME,
    NOT_INSTALLED,
    OUT_OF_MEMORY,
    why_wrong,
)
from benchmarks.gpu_timing import DEVICE, ON_GPU, free_memory
from model.kernels.backend import why_not_triton
from runtime.start.init_distributed import init_distributed
from tools.command import CommandParser

NO_MEASUREMENT = (
    "These are not measurements: tiny sizes, which prove that the program runs and that "
    "its checks pass."
)


class Cannot(Exception):
    """Raised by a measurement that this machine or this torch does not allow; says why."""


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
    except Cannot as error:
        return None, f"{NEEDS}: {error}"
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        status = f"{FAILED}: {type(error).__name__}: {said[0][:200]}"
    # outside the except clauses, where the error would still reference frames, and these tensors
    free_memory()
    return None, status


def milliseconds_or_why(row: dict) -> str:
    """A table cell: the time, or a short reason why there is none."""
    if row["status"] == MEASURED:
        return f"{row['milliseconds']['median']:.3f}"
    return {NO_TIME: "no time", OUT_OF_MEMORY: "no memory"}.get(
        row["status"], "failed" if row["status"].startswith(FAILED) else "-"
    )


class Report:
    """Appends rows to the file `arguments.out`, if one was given, and keeps them."""

    def __init__(self, arguments: argparse.Namespace, planned: Iterable[str]) -> None:
        self.path: Path | None = arguments.out
        self.rows: list[dict[str, Any]] = []
        if arguments.tiny:
            print(NO_MEASUREMENT, flush=True)
        self._append({"planned": list(planned)})

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row with `name` and `status`."""
        self.rows.append(row)
        self._append({"row": row})
        return row

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(strict(entry), allow_nan=False) + "\n")

    @property
    def wrong(self) -> list[str]:
        """The names of the rows that make the exit status 1."""
        return [row["name"] for row in self.rows if why_wrong(row)]


def strict(value: Any) -> Any:
    """Replaces non-finite numbers, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {key: strict(of_key) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [strict(of_list) for of_list in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- a program ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One row: its name, the seconds that it is expected to take, and what measures it. `measure`
    returns the row's numbers."""

    name: str
    seconds: float
    measure: Callable[[], dict[str, Any]]
    ours: bool = True  # whether its failure is a failure of the program


def options(description: str | None, budget_seconds: float) -> CommandParser:
    """The options that the programs share."""
    parser = CommandParser(description=description)
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
        "--out", type=Path, metavar="FILE", help="append the rows to this file, one a line"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parses `arguments`; `tiny` is set if there is no GPU."""
    parsed = parser.parse_args(arguments)
    parsed.tiny = parsed.tiny or not ON_GPU
    return parsed


def check_triton() -> None:
    """Ends the program with a message if Triton's kernels cannot run here."""
    why = why_not_triton(DEVICE)
    if why is not None:
        sys.exit(f"nothing to measure: {why}")


def run_all(
    measurements: Iterable[Measurement],
    parsed: argparse.Namespace,
    describe: Callable[[dict[str, Any]], str],
) -> Report:
    """Runs the measurements in order, and prints a line for each row as `describe` gives it."""
    chosen = [each for each in measurements if parsed.only in each.name]
    report, deadline = (
        Report(parsed, (each.name for each in chosen)),
        Deadline(parsed.budget_seconds),
    )
    for each in chosen:
        found, status = attempt(each.measure) if deadline.allows(each.seconds) else (None, NO_TIME)
        row = {"name": each.name, "ours": each.ours, "status": status, **(found or {})}
        report.add(row)
        said = describe(row) if status == MEASURED else f"{each.name:46} {status}"
        print(said + ("   WRONG" if row.get("right") is False else ""), flush=True)
        if found is not None:
            free_memory()
    return report


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A context with a process group of one process, which every mesh needs."""
    init_distributed()
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_training(
    measurements: Iterable[Measurement],
    parsed: argparse.Namespace,
    describe: Callable[[dict[str, Any]], str],
) -> Report:
    """`run_all` for rows that train: with Triton's kernels, or not at all, and on a mesh."""
    check_triton()
    with process_group():
        return run_all(measurements, parsed, describe)


def exit_status(report: Report) -> int:
    """Prints what was wrong, and returns the program's exit status."""
    for name in report.wrong:
        print(f"WRONG OR FAILED: {name}", flush=True)
    return 1 if report.wrong else 0
