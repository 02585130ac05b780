"""Runs the real step of one rank on the pretended device: FSDP2, the pipeline's runner, tensor
parallelism, the gradient norm, the optimizer, and the device's side of saving checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from costs.as_on_gpu import AsOnGpu
from costs.storages import watch_resizes
from hardware import Device as Hardware
from parallel.mesh import Mesh, to_device
from runtime.checkpoints.save import Saver
from tools.plan.layout import Layout
from tools.plan.time import StepTime
from tools.rehearse.fake_gpu import DEVICE, fake_gpu
from tools.rehearse.rank import build_without_data, routing_of, the_rank
from tools.rehearse.rank import rows as batch_of
from tools.rehearse.tape import GroupAxes
from tools.streams.device import Device, Stream
from tools.streams.findings import Findings
from tools.streams.memory import Memory
from tools.streams.nccl import Nccl
from tools.streams.overlap import Overlap, table
from tools.streams.seconds import seconds
from tools.streams.threads import watched_threads
from tools.streams.watch import HostMemory, InThisThread, Watch
from training.config import Config
from training.step import TrainStep

INDEX = 3  # of the pretended device in its machine: not 0, which every new thread has
_CUDA = ("Event", "Stream", "stream", "current_stream", "synchronize", "current_device",
         "set_device", "is_initialized")  # fmt: skip


@dataclass(frozen=True)
class Pretended:
    """A pretended device, and what is recorded on it."""

    device: Device
    findings: Findings
    memory: Memory
    overlap: Overlap
    watch: Watch


@contextmanager
def pretended_device(mesh: Mesh) -> Iterator[Pretended]:
    """A context in which code runs on a pretended device. `mesh`: names the collectives."""
    findings = Findings()
    device = Device(INDEX, findings)
    memory, overlap = Memory(findings), Overlap(device)
    nccl = Nccl(device, memory, overlap, GroupAxes(mesh))
    watch = Watch(device, memory, nccl, overlap)
    device.joined = overlap.joined

    def modes() -> list[AbstractContextManager[Any]]:
        return [AsOnGpu(), HostMemory(watch), InThisThread(watch)]

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        memory.record_stream(tensor, stream)

    with ExitStack() as stack:
        stack.enter_context(fake_gpu(device, lambda tensor, _: to_device(tensor, "cuda")))
        for name in _CUDA:
            stack.enter_context(patch.object(torch.cuda, name, getattr(device, name)))
        accelerator = patch.object(torch.accelerator, "current_stream", device.current_stream)
        stack.enter_context(accelerator)
        stack.enter_context(patch.object(Tensor, "record_stream", record_stream))
        stack.enter_context(nccl.in_place())
        stack.enter_context(watch_resizes(watch))
        stack.enter_context(watched_threads(device, modes))
        device.set_device(INDEX)
        for mode in modes():
            stack.enter_context(mode)
        yield Pretended(device, findings, memory, overlap, watch)


class SaverWithoutFiles(Saver):
    """The device's side of saving: the copies to the host, and the thread that waits for them and
    reads them."""

    def _write(
        self, step: int, trainer: dict[str, Any], copied: Callable[[], float], stall: float
    ) -> None:
        copied()
        self._require_finite()


def check(config: Config, world: int, rank: int, rates: Hardware | None = None) -> dict[str, Any]:
    """Run two steps of `rank` of `world`, with a save after each. Report what was found, and what
    can hide each collective of the second step, with `rates` also in seconds. A process can be only
    one rank of one world, so call this through `tools.rehearse.rank.alone`."""
    with (
        the_rank(config, world, rank, DEVICE) as mesh,
        pretended_device(mesh) as pretended,
        routing_of(config, mesh, imbalance=1.0),
    ):
        train = TrainStep(config, mesh, build_without_data(config, mesh), bos_id=0)
        with patch.object(dist, "new_group", lambda **_: None):
            saver = SaverWithoutFiles(train, Path(), None)  # type: ignore[arg-type]
        time = StepTime(Layout.of_rank(config, world, rank), rates) if rates else None
        train.record, tokens = pretended.overlap.record, batch_of(config, mesh)
        for step in range(2):
            pretended.overlap.clear()
            pretended.device.in_step = True
            train(step, *tokens)
            pretended.device.in_step = False
            overlap = table(pretended.overlap)
            times = seconds(pretended.overlap, time) if time else {}
            with patch.object(train, "mesh", replace(mesh, device="cuda")):
                saver.save(step + 1, 0, {})
        saver.wait()
        report = {
            "rank": rank,
            "world": world,
            "stages": sorted(train.stages),
            "findings": pretended.findings.lines(),
            "operators": pretended.watch.operators,
            "compared": pretended.memory.compared,
            "overlap": overlap,
            "seconds": times,
        }
        del train, saver
    return report
