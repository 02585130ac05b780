"""The instrument of benchmarks/restart.py: runs train.py or tools/launch.py with a note of the time
at the beginning or end of the functions that make up a start, and one planned death.

It works on any version of the project, because it changes no file of it: the functions are wrapped
when their modules have been imported. It imports only the standard library, so that what it
measures as import is the program's own.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FIRST_LINE = time.time()

# module, without a folder of runtime/, as older versions have none → function or method → the marks
# when it is called and when it returns; None: no mark
FOLDERS = ("start", "checkpoints")
PLACES: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "runtime.init_distributed": {"init_distributed": ("imported", "joined")},
    "runtime.preconditions": {"open_train_and_heldout": ("mesh", "data")},
    "runtime.lease": {"Lease.__enter__": (None, "lease")},
    "runtime.checkpoint": {"find_start": (None, "checked"), "load": ("built", "loaded")},
    "runtime.listener": {
        "Listeners.before_step": ("listeners", None),
        "Listeners.after_step": ("step", None),
    },
}


def mark(name: str, **about: Any) -> None:
    """Add a line to the marks of this benchmark's run."""
    now = about.pop("at", None) or time.time()
    line = json.dumps({"mark": name, "time": now, "rank": _rank(), "pid": os.getpid(), **about})
    descriptor = os.open(os.environ["RESTART_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (line + "\n").encode())
    os.close(descriptor)


def _rank() -> int:
    return int(os.environ.get("RANK", -1))


def process_began() -> float:
    """When this process was created, in seconds since 1970 (Linux: in steps of 10 ms)."""
    with open("/proc/self/stat", encoding="ascii") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime", encoding="ascii") as file:
        uptime = float(file.read().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _places(module: str) -> dict[str, tuple[str | None, str | None]]:
    """What is marked in a module."""
    room, _, last = module.rpartition(".")
    if room in {f"runtime.{folder}" for folder in FOLDERS}:
        return PLACES.get(f"runtime.{last}", {})
    return PLACES.get(module, {})


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and wraps the functions of PLACES once a module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _places(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _wrap_all(module)

        loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _wrap_all(module: ModuleType) -> None:
    for place, marks in _places(module.__name__).items():
        _wrap(module, place, *marks)


def _wrap(module: ModuleType, place: str, called: str | None, returned: str | None) -> None:
    owner: Any = module
    *holders, last = place.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    honest: Callable[..., Any] = getattr(owner, last)

    @functools.wraps(honest)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if called == "step":
            _after_step(arguments[0].run.step + 1)  # `after_step` itself counts the step
        elif called is not None:
            mark(called)
        result = honest(*arguments, **options)
        if returned is not None:
            mark(returned)
        return result

    setattr(owner, last, wrapped)


def _after_step(step: int) -> None:
    mark("step", step=step)
    rank, death = map(int, os.environ["RESTART_DEATH"].split(":"))
    if rank == _rank() and step == death and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        mark("killed", step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def main(program: str, arguments: list[str]) -> None:
    mark("process", at=process_began())
    mark("first line", at=FIRST_LINE)
    sys.meta_path.insert(0, _Finder())
    for name in list(filter(_places, sys.modules)):  # in a process forked from one that has them
        _wrap_all(sys.modules[name])
    sys.path[0] = os.getcwd()
    sys.argv = [program, *arguments]
    if program == "train.py":
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
