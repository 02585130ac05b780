"""`run.profile=start:stop`: run some steps under torch's profiler, on `run.profile_ranks`.

    RUN/profile/step-00000010-rank-00000.json.gz  the trace; https://ui.perfetto.dev opens it

`python -m tools.profile RUN` reads the traces: compute, exposed communication by axis, idle.

The step before `start` is a warm-up, whose events are discarded. The trace also covers the time
between the recorded steps. Other steps have no overhead. All ranks wait until the traces are
written: in metrics.jsonl this is a part of the last profiled step.

A GPU trace contains the process group of each collective. With gloo, a trace contains neither that
nor the time spent waiting, so on a CPU every call of a collective and every wait for one is marked
while the trace is recorded.
"""

import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work
from torch.profiler import ProfilerActivity, record_function

from parallel.mesh import Mesh
from runtime.listener import Listener, Run
from runtime.output import log
from settings.config import Config

# The communicating methods of ProcessGroup. torch 2.11 has the old names, 2.13 has both.
_NAMES = (
    "allreduce allreduce_coalesced broadcast reduce barrier send recv recv_anysource gather "
    "scatter allgather _allgather_base all_gather_single reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single alltoall alltoall_base all_to_all_single"
)
COLLECTIVES = tuple(_NAMES.split())


class StepProfile(Listener):
    """Profiles the configured steps; every rank has one, also those that are not profiled."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.folder, self.mesh = Path(config.run.dir) / "profile", mesh
        self.steps = config.run.profiled_steps  # empty once they are written
        self.is_chosen = dist.get_rank() in config.run.profile_ranks
        self.profiler: torch.profiler.profile | None = None  # on chosen ranks, from the warm-up on
        self.since = 0  # the first recorded step; 0: recording is off
        self._marks = ExitStack()
        self._range: record_function | None = None  # of the current step

    def before_step(self, run: Run) -> None:
        number = run.step + 1
        if self.since and number not in self.steps:
            self._finish(run)  # the run was rolled back
        if not self.steps.start - 1 <= number < self.steps.stop:
            return
        if self.is_chosen and self.profiler is None:
            self._prepare()
        if not self.since and number >= self.steps.start:
            self._start(number)
        self._range = record_function(f"step {number}")
        self._range.__enter__()

    def after_step(self, run: Run) -> None:
        if self._range is None:
            return
        if run.step == self.steps[-1]:
            self._synchronize()  # include the work that the steps have launched
        self._range.__exit__(None, None, None)
        self._range = None
        if run.step == self.steps[-1]:
            self._finish(run)

    def ends(self, run: Run) -> None:
        if self.since:  # stopped before the last profiled step
            self._finish(run)

    def closes(self, run: Run, error: BaseException | None) -> None:
        self._marks.close()

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.mesh.device == "cuda" else []
        self.profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        about = {
            "rank": dist.get_rank(),
            "coordinates": self.mesh.coordinates(),
            "axes": axes_of_groups(self.mesh),
        }
        self.profiler.preset_metadata_json("lattice", json.dumps(about))
        self.profiler.prepare_trace()

    def _start(self, number: int) -> None:
        self.since = number
        if self.profiler is not None:
            self._synchronize()
            self.profiler.start_trace()
            if self.mesh.device != "cuda":
                self._marks.enter_context(marked_collectives(axes_of_groups(self.mesh)))

    def _finish(self, run: Run) -> None:
        """Write the trace. The other ranks wait, with the watchdog paused, so that the writing is
        not mistaken for a hang."""
        self._marks.close()
        with run.watchdog.resting():
            if self.profiler is not None:
                try:
                    self._write(self.profiler)
                # no failure here may end the run or keep the other ranks waiting below
                except Exception as error:
                    log(f"warning: the profile cannot be written: {type(error).__name__}: {error}")
            dist.barrier()
        self.steps, self.since, self.profiler = range(0), 0, None

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.stop_trace()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self.since:08d}-rank-{dist.get_rank():05d}.json.gz"
        path, partial = self.folder / name, self.folder / f"partial-{name}"
        try:
            profiler.export_chrome_trace(str(partial))  # half of one, the tool would refuse
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # it may have taken the last space
        reader = f"python -m tools.profile {self.folder.parent}"
        log(f"profiled from step {self.since} on: {path}; {reader} summarises it", sys.stdout)

    def _synchronize(self) -> None:
        if self.is_chosen and self.mesh.device == "cuda":
            torch.cuda.synchronize()


def axes_of_groups(mesh: Mesh) -> dict[str, str]:
    """Map the name of each process group to its view of the mesh, or to `world`. An axis as large
    as the world shares the world's group, which is then listed under the axis."""
    assert dist.group.WORLD is not None
    world = dist.group.WORLD.group_name
    axes: dict[str, str] = {}
    for axis, view in mesh.views.items():
        group = view.group.group_name
        if group != world or view.size > 1:  # in a world of one, all axes share its group
            axes.setdefault(group, axis)
    axes.setdefault(world, "world")
    return axes


@contextmanager
def marked_collectives(axes: dict[str, str]) -> Iterator[None]:
    """Mark every collective of this process, and every wait for one, in the trace, such as
    `tp: allreduce #17` and `tp: wait allreduce #17` (tools/profile.py reads the marks)."""
    numbers = itertools.count()
    # collective → the name that marks the wait for it
    waiting: weakref.WeakKeyDictionary[Work, str] = weakref.WeakKeyDictionary()

    def marked(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            axis, number = axes.get(group.group_name, "other"), next(numbers)
            with record_function(f"{axis}: {kind} #{number}"):
                work = call(group, *arguments, **options)
            if work is not None:
                waiting[work] = f"{axis}: wait {kind} #{number}"
            return work

        return method

    wait = Work.wait

    def marked_wait(work: Work, *arguments: Any, **options: Any) -> Any:
        with record_function(waiting.get(work) or f"other: wait work #{next(numbers)}"):
            return wait(work, *arguments, **options)

    changed: list[tuple[type, str, Callable[..., Any]]] = [(Work, "wait", marked_wait)]
    there = [name for name in COLLECTIVES if hasattr(ProcessGroup, name)]
    changed += [(ProcessGroup, name, marked(name, getattr(ProcessGroup, name))) for name in there]
    with ExitStack() as stack:
        for owner, name, method in changed:
            # vars, because getattr would return the bound or unwrapped attribute
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, method)
        yield
