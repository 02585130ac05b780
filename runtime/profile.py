"""`run.profile=start:stop`: some steps under torch's profiler, on the ranks of `run.profile_ranks`.

    RUN/profile/step-00000010-rank-00000.json.gz  the trace; https://ui.perfetto.dev opens it
    RUN/profile/summary-rank-00000.txt, .json     compute, exposed communication by axis, idle

The step before the first is a warm-up: the profiler is there, and what it sees is thrown away.
Between `start` and `stop` the trace also has what lies between steps. Other steps, and other ranks,
cost nothing.

A GPU's trace says what each collective's process group is. gloo's says neither that nor how long
anybody waited, so on a CPU, and only while the trace is recorded, every call of a collective and
every wait for one is marked.
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

from parallel.axes import AXES
from parallel.mesh import Mesh
from runtime.listener import Listener, Run
from runtime.messages import log
from runtime.profile_summary import describe, mark_name, read_trace, summarise
from runtime.watchdog import Watchdog
from training.config import Config

# ProcessGroup's methods that hand something over; 2.11 has the old names, 2.13 both.
_NAMES = (
    "allreduce allreduce_coalesced broadcast reduce barrier send recv recv_anysource gather "
    "scatter allgather _allgather_base all_gather_single reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single alltoall alltoall_base all_to_all_single"
)
COLLECTIVES = tuple(_NAMES.split())


class StepProfile(Listener):
    """Every rank has one."""

    def __init__(self, config: Config, mesh: Mesh, watchdog: Watchdog) -> None:
        self.folder, self.mesh, self.watchdog = Path(config.run.dir) / "profile", mesh, watchdog
        self.steps = config.run.profiled_steps
        # What is there to do: with the warm-up, while it lasts.
        self.window = (
            range(max(1, self.steps.start - 1), self.steps.stop) if self.steps else range(0)
        )
        self.is_chosen = bool(self.steps) and dist.get_rank() in config.run.profile_ranks
        self.profiler: torch.profiler.profile | None = None  # of a chosen rank, from the warm-up on
        self.since = 0  # the step from which on steps are recorded; 0: they are not
        self._marks = ExitStack()
        self._range: record_function | None = None  # of the step under way

    def before_step(self, run: Run) -> None:
        number = run.step + 1
        if number not in self.window:
            if self.since:
                self._finish()  # the run went back
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
            self._synchronize()  # what the steps launched belongs to them
        self._range.__exit__(None, None, None)
        self._range = None
        if run.step == self.steps[-1]:
            self._finish()

    def ends(self, run: Run) -> None:
        if self.since:  # a planned stop came first
            self._finish()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._marks.close()

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU] + (
            [ProfilerActivity.CUDA] if self.mesh.device == "cuda" else []
        )
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

    def _finish(self) -> None:
        """Write what was recorded. All ranks wait for those that do: so that nobody takes it for a
        step without end."""
        profiler, first = self.profiler, self.since
        self.window, self.since, self.profiler = range(0), 0, None
        self._marks.close()
        with self.watchdog.resting():
            if profiler is not None:
                try:
                    profiler.stop_trace()
                    log(self._write(profiler, first), sys.stdout)
                # whatever it is, the run is more important, and the others wait below
                except Exception as error:
                    log(f"warning: the profile cannot be written: {type(error).__name__}: {error}")
            dist.barrier()

    def _write(self, profiler: torch.profiler.profile, first: int) -> str:
        rank = dist.get_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{first:08d}-rank-{rank:05d}.json.gz"
        profiler.export_chrome_trace(str(path))
        summary = summarise(read_trace(path), str(path))
        table = self.folder / f"summary-rank-{rank:05d}.txt"
        table.write_text(describe(summary) + "\n", encoding="utf-8")
        table.with_suffix(".json").write_text(
            json.dumps(summary, indent=1) + "\n", encoding="utf-8"
        )
        return f"profiled {len(summary['steps'])} steps of rank {rank}: {table}, {path.name}"

    def _synchronize(self) -> None:
        if self.is_chosen and self.mesh.device == "cuda":
            torch.cuda.synchronize()


def axes_of_groups(mesh: Mesh) -> dict[str, str]:
    """Name of a process group → the axis it is of, `loss` (both data-parallel axes), or `world`. An
    axis as large as the world has the world's group, and gives it its name."""
    assert dist.group.WORLD is not None
    world = dist.group.WORLD.group_name
    axes: dict[str, str] = {}
    for axis, view in [(axis, mesh.root[axis]) for axis in reversed(AXES)] + [("loss", mesh.loss)]:
        group = view.get_group().group_name
        if group != world or view.size() > 1:  # one process's axes all have the world's
            axes.setdefault(group, axis)
    axes.setdefault(world, "world")
    return axes


@contextmanager
def marked_collectives(axes: dict[str, str]) -> Iterator[None]:
    """Inside, every collective of this process, and every wait for it, is named in the trace."""
    numbers = itertools.count()
    # → what its wait is called
    waiting: weakref.WeakKeyDictionary[Work, str] = weakref.WeakKeyDictionary()

    def marked(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            axis, number = axes.get(group.group_name, "other"), next(numbers)
            with record_function(mark_name(axis, kind, number, waiting=False)):
                work = call(group, *arguments, **options)
            if work is not None:
                waiting[work] = mark_name(axis, kind, number, waiting=True)
            return work

        return method

    wait = Work.wait

    def marked_wait(work: Work, *arguments: Any, **options: Any) -> Any:
        with record_function(
            waiting.get(work, mark_name("other", "work", next(numbers), waiting=True))
        ):
            return wait(work, *arguments, **options)

    changed: list[tuple[type, str, Callable[..., Any]]] = [(Work, "wait", marked_wait)]
    there = [name for name in COLLECTIVES if hasattr(ProcessGroup, name)]
    changed += [(ProcessGroup, name, marked(name, getattr(ProcessGroup, name))) for name in there]
    with ExitStack() as stack:
        for owner, name, method in changed:
            # getattr would give it without what binds it to an object
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, method)
        yield
