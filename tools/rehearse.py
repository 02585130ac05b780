"""Runs one rank of a job of any size alone, without a GPU; or on one, and then says how long the whole job's step is.

    python -m tools.rehearse configs/llama3_70b.yaml --rank 64                 one rank: its memory, its collectives
    python -m tools.rehearse configs/llama3_405b.yaml parallel.dp_shard=16 --stages
    python -m tools.rehearse configs/llama3_8b.yaml --rank 0 --real            on this machine's GPU or CPU: times too

What runs is the training code itself: the model, the pipeline's runner, FSDP2, the optimizer, one whole step. The other ranks
are fake: collectives return at once, and what should have arrived is whatever was in memory. Without --real nothing is computed
either; tensors have shapes alone (tools/fake_gpu.py), and the GPU whose memory is counted is one with Triton's kernels and
flash attention. The world is that of the configuration's first line (`# world: N`), of its axes, or --gpus.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from errors import UserError
from parallel.mesh import AXES, Mesh
from parallel.pipeline.simulate import Costs, Event, simulate
from parallel.pipeline.trace import ActionRecorder
from plan.check import check_can_be_planned
from plan.hardware import GB, Device, find_device
from plan.layout import Layout, world_of
from plan.time import Part, StepTime
from plan.traffic import by_axis
from tools.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.tape import Tape
from training.build import build_stages
from training.config import Config
from training.load_config import load_config
from training.step import TrainStep


def rehearse(config: Config, world: int, rank: int, steps: int = 1) -> dict[str, Any]:
    """Peak memory of `rank` of `world`, and the collectives of the last of `steps` steps. A process can be one rank of one
    world only: call it through `alone`."""
    began, cpu_began = time.perf_counter(), time.process_time()
    shape = config.parallel.mesh_shape(world)
    with one_rank(shape, rank, DEVICE) as mesh, fake_gpu(), Tape(mesh) as tape:
        with patch("training.build.initialise", lambda stage, seed: None):
            train = TrainStep(config, mesh, build_stages(config, mesh), bos_id=0)
        train.record = tape.record
        for step in range(steps):
            tape.collectives.clear()
            train(step, *rows(config, mesh))
        report = {
            "rank": rank,
            "world": world,
            "coordinates": dict(zip(AXES, (mesh.root.get_local_rank(axis) for axis in AXES), strict=True)),
            "stages": sorted(train.stages),
            "peak_memory_bytes": tape.peak,
            "peak_in": "after the last action" if tape.peak_action is None else str(tape.peak_action),
            "memory": tape.at_peak(),
            "collectives": by_axis(tape.collectives),
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - cpu_began, 2),
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        del train
    return report


def rehearse_for_real(config: Config, world: int, rank: int) -> dict[str, Any]:
    """The same on a device that is there: torch's own measure of memory (on a GPU), and how long each kind of action takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with one_rank(config.parallel.mesh_shape(world), rank, device) as mesh:
        with patch("training.build.initialise", draw_on_device):
            train = TrainStep(config, mesh, build_stages(config, mesh), bos_id=0)
        batch = rows(config, mesh)
        train(0, *batch)  # kernels are compiled, memory is allocated, the libraries choose
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        recorder = ActionRecorder(device)
        train.record = recorder
        began = _now(device)
        train(1, *batch)
        seconds = _now(device) - began
        events = recorder.events(0.0)
        return {
            "rank": rank,
            "world": world,
            "stages": sorted(train.stages),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "action_seconds": mean_seconds(events),
            "other_seconds": seconds - sum(event.end - event.start for event in events) / 1e3,
            "step_seconds": seconds,
        }


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls it in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def check_can_be_rehearsed(config: Config) -> None:
    """Raises UserError for what a fake GPU cannot show."""
    check_can_be_planned(config)
    if config.train.compile:
        why = "runs a compiler's code, which a fake GPU does not show"
        raise UserError("train.compile", True, why, "set train.compile=false, or give --real")


def rows(config: Config, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of one data-parallel rank."""
    shape = (config.num_microbatches(mesh.dp_size) * config.train.micro_batch_size, config.train.seq_len)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


@torch.no_grad()
def draw_on_device(stage: torch.nn.Module, seed: int) -> None:
    """Weights of the usual size. Those of a real run, the same on every layout, would take minutes to draw."""
    for parameter in stage.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        local.fill_(1.0) if parameter.ndim == 1 else local.normal_(0.0, 0.02)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mean_seconds(events: list[Event]) -> dict[str, dict[str, float]]:
    """{stage: {letter of the kind: mean seconds}}"""
    durations: dict[tuple[int, str], list[float]] = {}
    for action, start, end in events:
        durations.setdefault((action.stage, action.kind.value), []).append((end - start) / 1e3)
    table: dict[str, dict[str, float]] = {}
    for (stage, kind), seconds in sorted(durations.items()):
        table.setdefault(str(stage), {})[kind] = sum(seconds) / len(seconds)
    return table


def predicted_step(config: Config, world: int, reports: list[dict[str, Any]], device: Device) -> dict[str, float]:
    """The whole job's step from the measured actions of every stage. On a fake process group communication takes no time: what
    an action waits for over tp and the data-parallel axes, and messages, are added from the planner's model of `device`'s links
    (plan/time.py), and all goes through the pipeline's simulator. `computing_seconds` is the same with nothing added."""
    means: dict[str, dict[str, float]] = {}
    for report in reports:
        means |= report["action_seconds"]
    time = StepTime(Layout(config, world, 0), device)
    computing = [_part(means[str(s)]) for s in range(config.parallel.num_stages)]
    waiting = [
        sum((time.unit(unit).exposed for unit in time.layout.units(s)), time.waits(s))
        for s in range(config.parallel.num_stages)
    ]
    schedule = time.layout.schedule
    alone = simulate(schedule, _costs(computing, 0.0))
    late = [gathered - time.costs.forward[s] for s, gathered in enumerate(time.costs.weights_at)]
    together = [mine + theirs for mine, theirs in zip(computing, waiting, strict=True)]
    weights_at = [max(0.0, seconds + together[s].forward) if seconds > 0 else 0.0 for s, seconds in enumerate(late)]
    timeline = simulate(schedule, _costs(together, time.message_seconds, weights_at))
    after = max(report["other_seconds"] for report in reports)
    reductions = max(0.0, time.reductions_end - time.timeline.step_time)
    return {
        "step_seconds": timeline.step_time + after + reductions,
        "computing_seconds": alone.step_time + after,
        "communication_seconds": timeline.step_time + reductions - alone.step_time,
        "bubble_fraction": timeline.bubble_fraction,
    }


def _part(measured: dict[str, float]) -> Part:
    """Of a stage's actions. A whole backward is split in halves; the simulator adds them again."""
    whole = measured.get("B", 0.0) / 2
    return Part(measured["F"], measured.get("I", whole), measured.get("W", whole))


def _costs(parts: list[Part], message: float, weights_at: Sequence[float] = ()) -> Costs:
    return Costs([p.forward for p in parts], [p.input_grad for p in parts], [p.weight_grad for p in parts], message, weights_at)


def ranks_asked_for(config: Config, world: int, rank: int | None) -> list[int]:
    """`rank`, or the first rank of every pipeline position."""
    if rank is None:
        return [i * (world // config.parallel.pp) for i in range(config.parallel.pp)]
    if not 0 <= rank < world:
        raise UserError("--rank", rank, f"the world has ranks 0 to {world - 1}", "choose one of them")
    return [rank]


def describe(report: dict[str, Any]) -> str:
    stages = ", ".join(map(str, report["stages"]))
    peak = report["peak_memory_bytes"]
    lines = [f"rank {report['rank']} of {report['world']}, stage {stages}" + (f": {peak / GB:.2f} GB" if peak else "")]
    lines += [f"  {size / GB:9.3f} GB  {name}" for name, size in report.get("memory", {}).items() if size >= 1e6]
    for axis, row in report.get("collectives", {}).items():
        kinds = ", ".join(f"{kind} {part['count']:,}" for kind, part in row["kinds"].items())
        lines.append(f"  {row['bytes'] / GB:9.3f} GB  over {axis} in {row['count']:,} collectives: {kinds}")
    for stage, kinds in report.get("action_seconds", {}).items():
        times = ", ".join(f"{kind} {seconds * 1e3:.3f} ms" for kind, seconds in kinds.items())
        lines.append(f"  stage {stage}: {times}")
    if "seconds" in report:
        host = f"{report['cpu_seconds']:.1f} s of computing, {report['host_bytes'] / 2**30:.2f} GiB"
        lines.append(f"  rehearsed in {report['seconds']:.1f} s, with {host} of the host")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.rehearse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="a configuration file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as train.py takes them")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="this rank of the world (default: 0)")
    which.add_argument("--stages", action="store_true", help="the first rank of every pipeline position, one after the other")
    parser.add_argument("--gpus", type=int, metavar="N", help="size of the world")
    parser.add_argument("--real", action="store_true", help="compute, on this machine's GPU, or on its CPU where it has none")
    parser.add_argument("--device", default="h100", metavar="NAME", help="with --real --stages: whose links carry what is sent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        world = world_of(options.config, config, options.gpus)
        config.validate(world)
        device = find_device(options.device)
        if options.json is not None and not options.json.absolute().parent.is_dir():  # before minutes of work
            raise UserError("--json", str(options.json), "its folder is not there", "make the folder, or choose another")
        ranks = ranks_asked_for(config, world, None if options.stages else options.rank or 0)
        if not options.real:
            check_can_be_rehearsed(config)
        reports = []
        for rank in ranks:
            report = alone(rehearse_for_real if options.real else rehearse, config, world, rank)
            print(describe(report), flush=True)
            reports.append(report)
        result: dict[str, Any] = {"ranks": reports} if options.stages else reports[0]
        if options.real and options.stages:
            step = result["step"] = predicted_step(config, world, reports, device)
            print(
                f"a step of the whole job: {step['step_seconds'] * 1e3:.3f} ms = computing, measured, "
                f"{step['computing_seconds'] * 1e3:.3f} ms + communication, by the planner, "
                f"{step['communication_seconds'] * 1e3:.3f} ms"
            )
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
