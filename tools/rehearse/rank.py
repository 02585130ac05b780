"""Runs the step of one rank without the other ranks, on tensors without data."""

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from costs.routing import Routing
from costs.stage import routing
from errors import UserError
from hardware import Device
from model.transformer import Transformer, vocabulary
from parallel.mesh import Mesh, to_device
from parallel.parameter import weights_of
from runtime.checkpoints.save import Saver
from runtime.records.memory_report import held_tensors
from tools.plan.check import check_can_be_planned
from tools.plan.layout import Layout
from tools.plan.time import StepTime
from tools.plan.traffic import by_axis
from tools.rehearse.fake_gpu import DEVICE, copied, fake_gpu, one_rank
from tools.rehearse.tape import Tape
from training.build import build_stages
from training.config import Config
from training.step import TrainStep


def rehearse(
    config: Config,
    world: int,
    rank: int,
    steps: int = 1,
    imbalance: float = 1.0,
    races: bool = False,
    rates: Device | None = None,
) -> dict[str, Any]:
    """Run `steps` steps of `rank` of `world`. Its experts receive `imbalance` times their balanced
    share of rows. Report the peak memory, and the collectives of the last step.

    With `races`, report in place of memory what was found, and what can hide each collective of the
    last step, with `rates` also in seconds; a save follows each step.

    A process can be only one rank of one world, so call this through `alone`.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    overlap: dict[str, dict[str, float]] = {}
    with (
        the_rank(config, world, rank, DEVICE) as mesh,
        fake_gpu(from_pinned if races else copied) as device,
        routing_of(config, mesh, imbalance),
        ExitStack() as stack,
    ):
        tape = Tape(mesh, device if races else None)
        if races:  # the weights of a model that was just built may race too
            stack.enter_context(tape)
        stages = build_without_data(config, mesh)
        if not races:
            stack.enter_context(tape)
            tape.weights([each.sharded for s in stages.values() for each in weights_of(s)])
        train = TrainStep(config, mesh, stages, bos_id=0)
        tape.memory.held, train.record = partial(held_tensors, train), tape.record
        saver = SaverWithoutFiles(train) if races else None
        step_time = StepTime(Layout.of_rank(config, world, rank), rates) if rates else None
        for step in range(steps):
            tape.clear()
            batch = rows(config, mesh)
            device.in_step = True
            train(step, *batch)
            device.in_step = False
            if tape.races is not None and saver is not None:
                overlap = tape.races.overlap.table(step_time)
                saver.save(step + 1, 0, {})  # its thread works beside the next step
        if saver is not None:
            saver.wait()
        report = {
            "rank": rank,
            "world": world,
            "coordinates": mesh.coordinates(),
            "stages": sorted(train.stages),
            **(tape.memory.report() if tape.races is None else tape.races.report()),
            "collectives": by_axis(tape.collectives),
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - cpu_began, 2),
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if races:
            report["overlap"] = overlap
        del train, saver, tape.memory.held
    return report


def from_pinned(tensor: Tensor, _: str) -> Tensor:
    """Takes the place of parallel.mesh.to_device where the host is that of a GPU (host.py)."""
    return to_device(tensor, "cuda")


class SaverWithoutFiles(Saver):
    """The device's side of saving: the copies to the host, and the thread that waits for them and
    reads them."""

    def __init__(self, train: TrainStep) -> None:
        with patch.object(dist, "new_group", lambda **_: None):
            super().__init__(train, Path(), None)  # type: ignore[arg-type]

    def save(self, *state: Any) -> Any:
        with patch.object(self.train, "mesh", replace(self.train.mesh, device="cuda")):
            return super().save(*state)

    def _write(
        self, step: int, trainer: dict[str, Any], copied: Callable[[], float], stall: float
    ) -> None:
        copied()
        self._require_finite()


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
