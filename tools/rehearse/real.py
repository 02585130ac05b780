"""Runs the step of one rank for real, on this machine's GPU or CPU, without the other ranks; and
predicts the whole job's step from the measured actions of its ranks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup

from costs.routing import Routing, parts
from costs.timeline import Timeline
from parallel.collectives import Pending, start_all_to_all
from parallel.parameter import Constant, weights_of
from parallel.pipeline.simulate import Event, simulate
from runtime.profiling.trace import ActionRecorder
from settings.config import Config
from tools.plan.hardware import Device
from tools.plan.layout import Layout
from tools.plan.time import EXPOSED, Part, StepTime, costs_of
from tools.rehearse.rank import routing_of, rows, the_rank
from training.build import build_stages
from training.step import TrainStep


@contextmanager
def told_by_others(found: Routing) -> Iterator[None]:
    """A context in which a dispatch on a real device receives these counts from other ranks."""

    def start(
        x: torch.Tensor, group: ProcessGroup, send: Sequence[int], receive: Sequence[int]
    ) -> Pending:
        if x.dtype == torch.int64 and group.size() > 1:
            of_rank = (parts(rows, len(x) // group.size()) for rows in found.receive)
            return Pending(x.new_tensor(list(chain.from_iterable(of_rank))))
        return start_all_to_all(x, group, send, receive)

    with patch("parallel.dispatch.all_to_all.start_all_to_all", start):
        yield


def rehearse_for_real(
    config: Config, world: int, rank: int, imbalance: float = 1.0
) -> dict[str, Any]:
    """Report the same from a run on a real device: memory as torch measures it (on a GPU only), and
    the seconds of each kind of action. Collectives are not reported."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        the_rank(config, world, rank, device) as mesh,
        told_by_others(routing_of(config, mesh, imbalance)),
    ):
        with patch("training.build.initialise", draw_on_device):
            train = TrainStep(config, mesh, build_stages(config, mesh), bos_id=0)
        batch = rows(config, mesh)
        train(0, *batch)  # warm-up: compiles kernels, allocates memory, selects algorithms
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


@torch.no_grad()
def draw_on_device(stage: torch.nn.Module, seed: int) -> None:
    """Draw weights with the usual standard deviation. The exact weights of a real run, which are
    the same in every layout, would take minutes."""
    for each in weights_of(stage):
        local, initial = each.sharded.to_local(), each.spec.initial
        local.fill_(initial.value) if isinstance(initial, Constant) else local.normal_(
            0.0, initial.std
        )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mean_seconds(events: list[Event]) -> dict[str, dict[str, float]]:
    """Return {stage: {letter of the action's kind: mean seconds}}."""
    durations: dict[tuple[int, str], list[float]] = {}
    for action, start, end in events:
        durations.setdefault((action.stage, action.kind.value), []).append((end - start) / 1e3)
    table: dict[str, dict[str, float]] = {}
    for (stage, kind), seconds in sorted(durations.items()):
        table.setdefault(str(stage), {})[kind] = sum(seconds) / len(seconds)
    return table


def predicted_step(
    config: Config,
    world: int,
    reports: list[dict[str, Any]],
    device: Device,
    imbalance: float = 1.0,
) -> dict[str, float]:
    """Predict the whole job's step from the measured actions of every stage.

    On a fake process group communication takes no time. So the exposed communication of each action
    over tp and the data-parallel axes, and the messages, are added from the planner's model of
    `device`'s links (plan/time.py), and the pipeline's simulator combines the actions.
    `computing_seconds` is the step without communication.
    """
    means: dict[str, dict[str, float]] = {}
    for report in reports:
        means |= report["action_seconds"]
    time = StepTime(Layout(config, world, 0, imbalance=imbalance), device)
    computing = [_part(means[str(s)]) for s in range(config.parallel.num_stages)]
    waiting = [
        sum((time.part(u, seconds=EXPOSED) for u in time.layout.units(s)), time.waits(s))
        for s in range(config.parallel.num_stages)
    ]
    schedule = time.layout.schedule
    alone = Timeline(simulate(schedule, costs_of(computing)))
    together = [mine + theirs for mine, theirs in zip(computing, waiting, strict=True)]
    planned = zip(time.costs.weights_at, time.costs.forward, together, strict=True)
    weights_at = [at - ours + part.forward if at > ours else 0.0 for at, ours, part in planned]
    costs = costs_of(together, time.message_seconds, weights_at)
    timeline = Timeline(simulate(schedule, costs))
    after = max(report["other_seconds"] for report in reports)
    reductions = max(0.0, max(time.reductions) - time.timeline.step_time)
    return {
        "step_seconds": timeline.step_time + after + reductions,
        "computing_seconds": alone.step_time + after,
        "communication_seconds": timeline.step_time + reductions - alone.step_time,
        "bubble_fraction": timeline.bubble_fraction,
    }


def _part(measured: dict[str, float]) -> Part:
    """The measured seconds of a stage's actions. A whole backward is split into two halves, which
    the simulator adds up again."""
    whole = measured.get("B", 0.0) / 2
    return Part(measured["F"], measured.get("I", whole), measured.get("W", whole))
