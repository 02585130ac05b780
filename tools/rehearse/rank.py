"""Runs the step of one rank without the other ranks: on tensors without data, or for real on this
machine's device."""

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup

from costs.routing import Routing
from costs.stage import routing
from errors import UserError
from model.transformer import Transformer, vocabulary
from parallel.collectives import Pending, ranks_in, start_all_to_all
from parallel.mesh import Mesh
from parallel.parameter import Constant, weights_of
from parallel.pipeline.simulate import Event
from runtime.profiling.trace import ActionRecorder
from runtime.records.memory_report import held_tensors
from tools.plan.check import check_can_be_planned
from tools.plan.traffic import by_axis
from tools.rehearse.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.rehearse.tape import Tape
from training.build import build_stages
from training.config import Config
from training.step import TrainStep


def rehearse(
    config: Config, world: int, rank: int, steps: int = 1, imbalance: float = 1.0
) -> dict[str, Any]:
    """Report the peak memory of `rank` of `world`, and the collectives of the last of `steps`
    steps. Its experts receive `imbalance` times their balanced share of rows. A process can be only
    one rank of one world, so call this through `alone`."""
    began, cpu_began = time.perf_counter(), time.process_time()
    with (
        the_rank(config, world, rank, DEVICE) as mesh,
        fake_gpu(),
        routing_of(config, mesh, imbalance),
    ):
        stages = build_without_data(config, mesh)
        with Tape(mesh) as tape:
            tape.weights([each.sharded for s in stages.values() for each in weights_of(s)])
            train = TrainStep(config, mesh, stages, bos_id=0)
            tape.held, train.record = partial(held_tensors, train), tape.record
            for step in range(steps):
                tape.collectives.clear()
                train(step, *rows(config, mesh))
        report = {
            "rank": rank,
            "world": world,
            "coordinates": mesh.coordinates(),
            "stages": sorted(train.stages),
            "peak_memory_bytes": tape.peak,
            "peak_in": "after the last action"
            if tape.peak_action is None
            else str(tape.peak_action),
            "memory": tape.at_peak(),
            "collectives": by_axis(tape.collectives),
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - cpu_began, 2),
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        del train, tape.held
    return report


def build_without_data(config: Config, mesh: Mesh) -> dict[int, Transformer]:
    """The stages of a rank on the fake GPU, where there is no weight to draw."""
    with patch("training.build.initialise", lambda stage, seed: None):
        return build_stages(config, mesh)


def the_rank(config: Config, world: int, rank: int, device: str) -> AbstractContextManager[Mesh]:
    """The mesh of `rank` of `world`; all other ranks are fake."""
    return one_rank(config.parallel.mesh_sizes(world), rank, device, config.model.has_experts)


def routing_of(config: Config, mesh: Mesh, imbalance: float) -> Routing:
    """The numbers of rows that this rank's experts receive."""
    ep_rank = mesh.ep.get_local_rank() if config.model.has_experts else 0
    return routing(replace(config.setting(), ep_rank=ep_rank, imbalance=imbalance))


@contextmanager
def told_by_others(found: Routing) -> Iterator[None]:
    """A context in which routers, on a real device, receive these counts from the other ranks."""

    def start(
        x: torch.Tensor, group: ProcessGroup | None, send: Sequence[int], receive: Sequence[int]
    ) -> Pending:
        if x.dtype == torch.int64 and ranks_in(group) > 1:
            return Pending(x.new_tensor(found.receive).flatten())
        return start_all_to_all(x, group, send, receive)

    with patch("parallel.expert.start_all_to_all", start):
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


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call `function` in a separate process."""
    # The new process must not collect garbage that it inherits: a process group in it waits, when
    # it is destroyed, for threads that only the old process has.
    gc.disable()
    try:
        with multiprocessing.get_context("fork").Pool(1, initializer=_keep_inherited) as pool:
            return pool.apply(function, arguments)
    finally:
        gc.enable()


def _keep_inherited() -> None:
    gc.freeze()
    gc.enable()


def check_can_be_rehearsed(config: Config) -> None:
    """Raise UserError if the configuration uses what a fake GPU cannot show."""
    check_can_be_planned(config)
    if config.train.compile:
        why = "runs compiled code, which a fake GPU cannot show"
        raise UserError("train.compile", True, why, "set train.compile=false, or give --real")


def rows(config: Config, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of one data-parallel rank."""
    rows = config.num_microbatches(mesh.dp_size) * config.train.micro_batch_size
    shape = (rows, config.train.seq_len)
    tokens = torch.randint(
        0, vocabulary(config.model).count, shape, generator=torch.Generator().manual_seed(0)
    )
    return tokens, tokens.roll(-1, 1)


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
