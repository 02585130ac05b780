"""Runs the step of one rank without the other ranks, on tensors without data."""

import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from costs.setting import routing
from errors import UserError
from model.transformer import vocabulary
from parallel.mesh import Mesh
from runtime.metrics.metrics import peak_memory_bytes
from runtime.signals import end_with_parent
from settings.config import Config
from tools.plan.traffic import by_axis
from tools.rehearse.device import Device
from tools.rehearse.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.rehearse.tape import Tape, measuring
from training.build import build_stages
from training.step import TrainStep


def rehearse(
    config: Config,
    world: int,
    rank: int,
    steps: int = 1,
    watching: Callable[[Mesh, Device], AbstractContextManager[Tape]] = measuring,
) -> dict[str, Any]:
    """Run `steps` steps of `rank` of `world` and report what the tape of `watching` has recorded,
    and the collectives of the last step.

    A process can be only one rank of one world, so call this through `alone`.
    """
    began = time.perf_counter()
    if config.parallel.offload == "disk":  # for the GPU it is the same, and no space is needed
        on_host = replace(config.parallel, offload="host", offload_dir="")
        config = replace(config, parallel=on_host)
    sizes = config.parallel.mesh_sizes(world)
    with (
        one_rank(sizes, rank, DEVICE, config.model.has_experts) as mesh,
        fake_gpu() as device,
        patch("training.build.initialise", lambda stage, seed: None),  # there is no weight to draw
        routing(replace(config.setting(), ep_rank=mesh.ep.rank)) as experts,
        watching(mesh, device) as tape,
    ):
        experts.reads = tape.numbers_read
        stages = build_stages(config, mesh)
        tape.built(stages.values())
        train = TrainStep(config, mesh, stages, bos_id=0)
        train.record = tape.record
        for step in range(steps):
            tape.clear()
            batch = rows(config, mesh)
            device.here.in_step = True
            _result = train(step, *batch)  # kept: a caller would read it
            device.here.in_step = False
            tape.after_step(train, step)
        return {
            "rank": rank,
            "world": world,
            "stages": sorted(train.stages),
            **tape.report(),
            "collectives": by_axis(tape.collectives),
            "seconds": round(time.perf_counter() - began, 2),
            "host_bytes": peak_memory_bytes("cpu"),
        }


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a separate process."""
    # The new process must not collect garbage that it inherits: a process group in it waits, when
    # it is destroyed, for threads that only the old process has.
    gc.disable()
    try:
        with ProcessPoolExecutor(1, get_context("fork"), _prepare, (os.getpid(),)) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        why = "its process was killed, as the kernel does when memory runs out"
        raise UserError("rehearsal", function.__name__, why, "give it more memory") from None
    finally:
        gc.enable()


def _prepare(parent: int) -> None:
    gc.freeze()
    gc.enable()
    # an executor's process would otherwise wait for work forever if its parent was killed
    end_with_parent(parent, signal.SIGKILL)


def check_can_be_rehearsed(config: Config, races: bool) -> None:
    """Raise UserError if the configuration uses what a fake GPU, or its races, cannot show."""
    if races and config.parallel.offload != "none":
        why = "--races does not see weights on the host, for which the host waits"
        remedy = "set parallel.offload=none, or leave --races out"
        raise UserError("parallel.offload", config.parallel.offload, why, remedy)
    if config.train.compile:
        why = "runs compiled code, which a fake GPU cannot show"
        raise UserError("train.compile", True, why, "set train.compile=false")


def rows(config: Config, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of one data-parallel rank."""
    rows = config.num_microbatches(mesh.batch.size) * config.train.micro_batch_size
    shape = (rows, config.train.seq_len)
    tokens = torch.randint(
        0, vocabulary(config.model).count, shape, generator=torch.Generator().manual_seed(0)
    )
    return tokens, tokens.roll(-1, 1)


def title(report: dict[str, Any]) -> str:
    stages = ", ".join(map(str, report["stages"]))
    return f"rank {report['rank']} of {report['world']}, stage {stages}"
