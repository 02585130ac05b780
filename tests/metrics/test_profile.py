"""Profiles and traces: arithmetic of intervals, summaries of made-up traces, and a real run."""

import gzip
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work

from errors import UserError
from parallel.axes import AXES, MeshSizes
from parallel.mesh import build_mesh
from parallel.pipeline.actions import Action
from parallel.pipeline.schedules import build_schedule
from runtime.profiling.profile import StepProfile
from runtime.profiling.trace import clock_offset
from settings.checks import validate
from settings.load import dump_config, load_config
from tests.runs import LAYOUT_3D, names, train_run, write_config
from tools.plan.layout import Layout
from tools.plan.traffic import by_axis, collectives
from tools.profile import describe, length, main, read_trace, summarise
from tools.timeline.panels import from_chrome


def test_intervals_are_sets_of_points():
    """The unit cells that intervals between whole numbers cover are the specification."""
    draw = random.Random(0)
    for _ in range(500):
        a, b = (
            [(begin, begin + draw.randrange(8)) for begin in draw.choices(range(40), k=count)]
            for count in (draw.randrange(9), draw.randrange(9))
        )
        in_a, in_b = ({cell for interval in each for cell in range(*interval)} for each in (a, b))
        assert length(a) == len(in_a)
        assert length(a, b) == len(in_a - in_b)


def told(
    name: str, category: str, begin: float, end: float, thread: int = 7, **arguments: Any
) -> dict[str, Any]:
    """A trace event, from `begin` to `end` in milliseconds."""
    where = {"pid": 0, "tid": thread, "ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return {"ph": "X", "name": name, "cat": category, **where, "args": arguments}


FIGURES = ("step_seconds", "compute", "copies", "exposed", "idle")


def figures(found: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """Those of the step; and of each axis: seconds, exposed seconds, calls."""
    by_axis = {axis: [*part.values()] for axis, part in found["communication"].items()}
    return [found[key] for key in FIGURES], by_axis


def about(*of_step: float, **by_axis: tuple[float, float, int]) -> Any:
    """What `figures` should be."""
    return pytest.approx([*of_step]), {axis: pytest.approx(by_axis[axis]) for axis in by_axis}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SENDRECV = "ncclDevKernel_SendRecv(…)"


def test_a_gpus_trace():
    """A GPU's trace is summarised right. It has two steps of 50 ms; each character is 5 ms:

    step      1111111111 2222222222
    matmul    ██··██···· ██··██····
    gather tp ·███······ ·███······     10 ms of 15 exposed
    pp        ····███··· ····███···     5 ms of 15 exposed
    shard     ······██·· ······██··     10 ms of 10 exposed; 5 ms of them while pp is exposed too
    copy      ████████·█ ████████·█     5 ms not overlapped with any of these
    """
    over_tp, over_dp = {"Process Group Name": "11"}, {"Process Group Name": "0"}
    events = [{"ph": "M", "name": "process_name"}, told("step 6", "gpu_user_annotation", 0, 500)]
    for i in range(2):
        at = 50.0 * i
        events += [
            told(f"step {i + 4}", "user_annotation", at, at + 50, thread=1),
            told("aten::mm", "cpu_op", at, at + 40, thread=1),
            told("matmul", "kernel", at, at + 10),
            told("matmul", "kernel", at + 20, at + 30),
            told(GATHER, "kernel", at + 5, at + 20, 20, **over_tp),
            told(SENDRECV, "kernel", at + 20, at + 35, 24),
            told(GATHER, "kernel", at + 30, at + 40, 28, **over_dp),
            told("Memcpy HtoD", "gpu_memcpy", at, at + 40, 32),
            told("Memset", "gpu_memset", at + 45, at + 50, 32),
        ]
    events.append(told("matmul", "kernel", 100, 120))  # after the last step
    rank = {"rank": 3, "coordinates": {"pp": 1, "tp": 0}, "axes": {"11": "tp", "0": "dp_shard"}}
    found = summarise({"traceEvents": events, "lattice": rank})
    assert found["steps"] == [4, 5]
    parts = {"tp": (0.015, 0.010, 1), "dp_shard": (0.010, 0.010, 1), "pp": (0.015, 0.005, 1)}
    assert figures(found) == about(0.050, 0.020, 0.005, 0.020, 0.005, **parts)
    top = [(row["name"], row["calls"]) for row in found["top"]]
    assert top == [(GATHER, 2), ("matmul", 2), (SENDRECV, 1)]
    text = describe(found)
    assert "rank 3 (pp 1, tp 0), on its cuda, mean of steps 4 to 5" in text
    assert "exposed communication  0.0200 s   40.0%" in text


def test_a_cpus_trace():
    """A CPU's trace is summarised right. In one step of 100 ms an all-reduce is started, overlaps
    with a product, and is waited for."""
    events = [
        told("step 2", "user_annotation", 0, 100),
        told("tp: allreduce #0", "user_annotation", 10, 12),
        told("c10d::allreduce_", "cpu_op", 10, 12),
        told("aten::clone", "cpu_op", 11, 12),  # gloo's own copy
        told("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 12, 60),
        told("aten::mm", "cpu_op", 20, 50),
        told("tp: wait allreduce #0", "user_annotation", 52, 58),
        told("pp: wait recv #1", "user_annotation", 70, 80),  # started before the trace began
        told("aten::mm", "cpu_op", 0, 100, thread=8),  # another thread
        told("gloo:all_reduce", "user_annotation", 12, 57, thread=9),
    ]
    parts = {"pp": (0.010, 0.010, 0), "tp": (0.048, 0.008, 1)}
    expected = about(0.100, 0.030, 0.0, 0.018, 0.052, **parts)
    assert figures(summarise({"traceEvents": events})) == expected


@pytest.mark.parametrize(
    "written",
    [b"", gzip.compress(b'{"traceEvents": [', mtime=0)[:-9], b"{}", b'{"traceEvents": []}',
     b"[" * 100_000, b'{"traceEvents": [1]}',
     gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, capsys, written):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(written)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: trace = {str(path)!r}: ")
    for nothing in (str(tmp_path), "x" * 300):
        assert main([nothing]) == 2
        assert capsys.readouterr().err.startswith("error: RUN = ")


@pytest.mark.parametrize(
    "overrides",
    ["run.profile=3", "run.profile=5:3", "run.profile=0:3", "run.profile=3:8",
     "run.profile_ranks=[2]", "run.profile_ranks=[] run.profile=3:5"],
)  # fmt: skip
def test_nonsense_is_refused(tmp_path, overrides):
    """In a run of 6 steps on 2 ranks. The first key is the one to blame."""
    file = write_config(tmp_path, Path("/data"))
    with pytest.raises(UserError) as caught:
        validate(load_config(file, overrides.split()), 2)
    assert caught.value.key == overrides.partition("=")[0]


def test_steps_are_counted_as_in_the_metrics(tmp_path):
    file = write_config(tmp_path, Path("/data"))
    assert not load_config(file, []).run.profiled_steps
    config = load_config(file, ["run.profile=5:7"])  # in YAML 1.1 the number 307
    assert list(config.run.profiled_steps) == [5, 6]
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "dumped.yaml"), []) == config


PROFILED = [0, 5]


def train_profiled(arguments: list[str]) -> tuple[str, bool]:
    """Train; return the message of a UserError, and whether the profiler has restored torch's
    collectives."""
    before = {**vars(ProcessGroup)}, {**vars(Work)}
    message = train_run(arguments)
    return message, before == ({**vars(ProcessGroup)}, {**vars(Work)})


@pytest.fixture(scope="module")
def profiled(ranks, data, tmp_path_factory):
    """The folder of a run on 8 ranks whose second step is profiled and whose third is traced."""
    folder = tmp_path_factory.mktemp("profiled")
    layout = LAYOUT_3D | {"schedule": "zb_v", "stages_per_rank": 2}
    told = {"profile": "2:3", "profile_ranks": PROFILED, "trace": True}
    arguments = [write_config(folder, data, parallel=layout, train={"steps": 3}, run=told)]
    assert ranks.run(train_profiled, 8, arguments) == [("", True)] * 8
    traces = [f"step-00000002-rank-{rank:05d}.json.gz" for rank in PROFILED]
    assert names(folder / "run" / "profile") == traces
    assert main([str(folder / "run")]) == 0  # writes the summaries
    return folder / "run"


@pytest.mark.parametrize("rank", PROFILED)
def test_the_summary_of_a_run(profiled, rank):
    """It has as many collectives per axis as the planner counts, whose dp_shard includes those of
    `loss` here, which has the same ranks."""
    found = json.loads((profiled / "profile" / f"summary-rank-{rank:05d}.json").read_text())
    assert (found["rank"], found["device"], found["steps"]) == (rank, "cpu", [2])
    place = {"pp": 1, "tp": 1} if rank == 5 else {}
    assert found["coordinates"] == dict.fromkeys(AXES, 0) | place
    parts = [found[key] for key in ("compute", "exposed", "idle")]
    assert sum(parts) == pytest.approx(found["step_seconds"])
    assert min(parts) > 0
    for part in found["communication"].values():
        assert 0 < part["exposed"] <= part["seconds"] <= found["step_seconds"]
    calls = {axis: part["calls"] for axis, part in found["communication"].items()}
    config = load_config(str(profiled / "config.yaml"), [])
    table = by_axis(collectives(Layout.of_rank(config, 8, rank)))
    assert calls.keys() == {"tp", "pp", "dp_shard", "dp_replicate", "loss", "world"}
    for axis in ("tp", "pp", "world"):
        assert calls[axis] == table[axis]["count"], axis
    assert calls["dp_shard"] + calls["loss"] == table["dp_shard"]["count"]


LOOPS = {  # the steps that a run visits → those that are profiled, of 2, 3 and 4
    "all": ([0, 1, 2, 3, 4], [2, 3, 4]),
    "stopped": ([0, 1, 2], [2, 3]),
    "went back": ([0, 1, 2, -1, 0, 1], [2, 3]),
    "began late": ([2, 3, 4], [3, 4]),
    "stopped before": ([0], None),
    "began after": ([4], None),
    "full disk": ([0, 1, 2, 3, 4], None),
}


def half(_: torch.profiler.profile, path: str) -> None:
    Path(path).write_bytes(gzip.compress(b"{}")[:-9])
    raise OSError(28, "No space left on device")


def profile_loops(config: str) -> None:
    """Run only the profiler's loop, each in a run folder of its own."""
    for name, (visited, _) in LOOPS.items():
        run: Any = SimpleNamespace(step=0, watchdog=SimpleNamespace(resting=nullcontext))
        where = f"run.dir={Path(config).parent / name}"
        profile = StepProfile(
            load_config(config, ["run.profile=2:5", where]), build_mesh(MeshSizes(), "cpu")
        )
        disk = patch.object(torch.profiler.profile, "export_chrome_trace", half)
        with disk if name == "full disk" else nullcontext():
            for step in visited:
                run.step = step
                profile.before_step(run)
                torch.ones(3) + 1
                run.step += 1
                profile.after_step(run)
            profile.ends(run)


def test_however_the_loop_goes(ranks, data, tmp_path):
    ranks.run(profile_loops, 1, write_config(tmp_path, data))
    for name, (_, steps) in LOOPS.items():
        found = [*(tmp_path / name / "profile").glob("*")]
        profiled = [summarise(read_trace(path))["steps"] for path in found]
        assert profiled == ([steps] if steps else []), name


def test_every_action_of_every_rank_is_there_in_order(profiled):
    """`run.trace=true` records every action of every rank in one real step, on a common clock."""
    trace = json.loads((profiled / "trace.json").read_text())
    # 8 sequences, two data-parallel ranks, micro-batches of 2
    schedule = build_schedule("zb_v", 2, 2, 2)
    lanes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert lanes == [f"dp_replicate 0 dp_shard {d} cp 0 tp {t}" for d in (0, 1) for t in (0, 1)]
    for pipeline in range(4):
        timeline = from_chrome(trace, pipeline=pipeline)
        assert [[event.action for event in lane] for lane in timeline.ranks] == schedule
        times = {event.action: event for lane in timeline.ranks for event in lane}
        for (kind, stage, m), event in times.items():
            if kind.value == "F" and stage:
                # In ms. All ranks have the same clock here, but on two cores some leave the barrier
                # that aligns the clocks late.
                assert times[Action(kind, stage - 1, m)].end <= event.start + 50.0


def offsets_of_skewed_clocks() -> float:
    """The clock offset of this rank, when each rank's clock is an hour ahead of the previous
    rank's."""
    honest = time.perf_counter
    with patch.object(time, "perf_counter", lambda: honest() + 3600.0 * dist.get_rank()):
        return clock_offset("cpu")


def test_clocks_are_aligned(ranks):
    for rank, offset in enumerate(ranks.run(offsets_of_skewed_clocks, 4)):
        assert abs(offset - 3600.0 * rank) < 1.0
