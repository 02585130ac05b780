"""The parts of a start, and when they end. (times.py writes them down.)

    part       ends when
    import     Python has imported the program
    join       all ranks have joined the world
    config     the configuration has been read and checked
    data       the data has been opened
    lease      the run folder belongs to this run
    verify     the checkpoint has been found and its checksums compared
    build      mesh, model and optimizer have been built
    load       the checkpoint has been loaded
    listeners  everything around the steps is ready
    step       the host has made the first step (on a GPU, launched it), compilation included

A part is the time since the one before ended, so waiting for slower ranks belongs to the part in
which rank 0 waits. The parts add up to the time from the process's first line; for a later stage,
from the end of the stage before, and everything before `load` is then in `build`. What a launcher
does before is not in it, but in `down` of the ledger. Functions of the start are marked where they
are defined, so that train.py need not know of this.
"""

import functools
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable)

# in order; the docstring says when each ends
PARTS = (
    "import", "join", "config", "data", "lease", "verify", "build", "load", "listeners", "step",
)  # fmt: skip
_ended: dict[str, float] = {}  # part → when it ended, by time.monotonic; of this process's start


def part_ends(part: str) -> None:
    """Note that a part has ended, the first time that it does."""
    assert part in PARTS
    _ended.setdefault(part, time.monotonic())


def parts(before: str = "", inside: str = "") -> Callable[[T], T]:
    """Decorate a function of the start: when it is called, the part `before` ends; when it returns,
    the part `inside` does."""

    def decorate(function: T) -> T:
        @functools.wraps(function)
        def timed(*arguments: object, **options: object) -> object:
            if before:
                part_ends(before)
            result = function(*arguments, **options)
            if inside:
                part_ends(inside)
            return result

        return timed  # type: ignore[return-value]

    return decorate


def seconds_by_part(since: float) -> dict[str, float]:
    """The seconds of each part so far; they are forgotten here. `since`: when the start began
    (time.monotonic)."""
    seconds, last = {}, since
    for part, when in _ended.items():
        seconds[part], last = when - last, when
    forget_parts()
    return seconds


def forget_parts() -> None:
    _ended.clear()
