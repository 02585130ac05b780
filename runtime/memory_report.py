"""What a process holds in memory, by category: when memory runs out, and on request.

    RUN/memory/step-00000012-rank-00003.txt  the table, and torch's own account of the GPU
                                      .json  the same numbers; `python -m tools.plan
                                             RUN/config.yaml --beside FILE` puts the plan beside
                                    .pickle  GPUs: torch's snapshot, for
                                             https://pytorch.org/memory_viz

    at torch.OutOfMemoryError  each rank that meets it, in the step under way; then the error takes
                               its course
    file SNAPSHOT in run.dir   the ranks of run.profile_ranks, within a second and a step; touched
                               again, they write again

Weights, gradients and moments are counted where model, FSDP and optimizer keep them. The rest,
activations most of all, is what the allocator has given out besides; on a CPU, what else the
process has in memory, interpreter and libraries included. The snapshot is a pickle because torch's
viewer reads nothing else; nothing of ours reads it. With run.memory_history it also has the last
allocations, each with the place in the source that asked.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data import fsdp_modules
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from parallel.placement import local_part
from runtime.listener import Listener, Run
from runtime.messages import log
from runtime.stop import LOOK_SECONDS
from training.step import TrainStep

RECORDED = 100_000  # allocations
MB = 1e6


class MemoryReports(Listener):
    """Enter it around the loop, on every rank.

    Args:
        train: whose memory it is.
        step: steps made so far.
    """

    def __init__(self, train: TrainStep, step: int) -> None:
        self.train, self.step = train, step
        run = train.config.run
        self.folder, self.request = Path(run.dir) / "memory", Path(run.dir) / "SNAPSHOT"
        self.records = run.memory_history and train.mesh.device == "cuda"
        self.answers = dist.get_rank() in run.profile_ranks
        # one that is there already was not meant for this start
        self._answered = _touched(self.request)
        self._looks_next = 0.0

    def after_step(self, run: Run) -> None:
        self.step = step = run.step
        if self.answers and time.monotonic() >= self._looks_next:
            self._looks_next = time.monotonic() + LOOK_SECONDS
            asked = _touched(self.request)
            if asked not in (None, self._answered):
                self.write(step, f"asked for after step {step}")
            self._answered = asked

    def __enter__(self) -> "MemoryReports":
        if self.records:
            torch.cuda.memory._record_memory_history(max_entries=RECORDED, stacks="python")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self.write(
                self.step + 1, f"out of memory in step {self.step + 1}: {str(error).strip()}"
            )
        if self.records:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, step: int, why: str) -> None:
        """A report. Whatever goes wrong with it, the run, or the error it is about, comes first."""
        rank = dist.get_rank()
        path = self.folder / f"step-{step:08d}-rank-{rank:05d}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            report = self.report(why)
            path.write_text(self.as_text(report), encoding="utf-8")
            path.with_suffix(".json").write_text(
                json.dumps(report, indent=1) + "\n", encoding="utf-8"
            )
            if self.train.mesh.device == "cuda":
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            said = f"what it holds is in {path}"
        except Exception as failure:
            said = f"{path} cannot be written: {type(failure).__name__}: {failure}"
        log(f"rank {rank}: {why.partition(chr(10))[0]}; {said}")

    def report(self, why: str) -> dict[str, Any]:
        mesh = self.train.mesh
        return {
            "why": why,
            "rank": dist.get_rank(),
            "world": mesh.root.size(),
            "coordinates": mesh.coordinates(),
            "stages": sorted(self.train.stages),
            "device": mesh.device,
            "held_bytes": held_bytes(self.train),
            "total_bytes": total_bytes(mesh.device),
        }

    def as_text(self, report: dict[str, Any]) -> str:
        coordinates = ", ".join(f"{axis} {index}" for axis, index in report["coordinates"].items())
        stages = ", ".join(map(str, report["stages"]))
        lines = [
            f"rank {report['rank']} of {report['world']} ({coordinates}), stage {stages}",
            report["why"],
            "",
        ]
        lines += table(report["held_bytes"], report["total_bytes"])
        config = self.folder.parent / "config.yaml"
        lines += [
            "",
            f"What was planned for it: python -m tools.plan {config} --beside, "
            "and this file's name with .json",
        ]
        if report["device"] == "cuda":
            free, size = (number / MB for number in torch.cuda.mem_get_info())
            reserved = torch.cuda.memory_reserved() / MB
            lines.append(
                f"The device has {size:,.0f} MB: {free:,.0f} MB are free, "
                f"torch has reserved {reserved:,.0f} MB."
            )
            lines += ["", torch.cuda.memory_summary()]
        return "\n".join(lines) + "\n"


@torch.no_grad()
def held_bytes(train: TrainStep) -> dict[str, int]:
    """Bytes of what model, FSDP and optimizer hold on the device, by category."""
    device, seen = train.mesh.device, set[int]()

    def count(tensors: list[Tensor]) -> int:
        """Of storages that were not counted yet."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()  # 0 where FSDP has freed it
        return total

    return {category: count(tensors) for category, tensors in held_tensors(train).items()}


def held_tensors(train: TrainStep) -> dict[str, list[Tensor]]:
    """This rank's tensors that model, FSDP and optimizer hold, by category; what is of two is of
    the first."""
    sharded = [weight.parameter for weight in train.weights]
    # gathered or sharded
    present = [parameter for stage in train.stages.values() for parameter in stage.parameters()]
    whole, reduced = _summed(train.stages.values())
    moments = [moment for moments in train.optimizer.state.values() for moment in moments]
    found: dict[str, list[Tensor | None]] = {
        WEIGHTS: [*sharded],
        GATHERED: [*present],
        MOMENTS: [*moments],
        SHARDED_GRADIENTS: [*(parameter.grad for parameter in sharded), *reduced],
        GRADIENTS: [*(parameter.grad for parameter in present), *whole],
    }
    return {
        category: [local_part(tensor) for tensor in tensors if tensor is not None]
        for category, tensors in found.items()
    }


def _summed(stages: Iterable[nn.Module]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients that FSDP sums over micro-batches: whole, in a wider dtype; and reduced over
    dp_shard. Only its own books have them, in 2.11 as in 2.13."""
    states = [module._get_fsdp_state() for stage in stages for module in fsdp_modules(stage)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    whole = [weight.unsharded_accumulated_grad for group in groups for weight in group.fsdp_params]
    return whole, [group._partial_reduce_output for group in groups]


def total_bytes(device: str) -> int:
    """What the allocator has given out on a GPU; what the process has in memory on a CPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the most it ever had
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def table(
    held: Mapping[str, int], total: int, planned: Mapping[str, int] | None = None
) -> list[str]:
    """Lines: what is held, by category; the rest of `total`; and beside it what was `planned`,
    whose other categories are of the rest. All in bytes."""
    plan = planned or {}

    others = {name: size for name, size in plan.items() if name not in held and size}
    rows: list[tuple[str, int | None, int]] = [
        (name, size, plan.get(name, 0)) for name, size in held.items()
    ]
    rows.append(("everything else", total - sum(held.values()), sum(others.values())))
    rows += [
        (f"  {name}", None, size)
        for name, size in sorted(others.items(), key=lambda item: -item[1])
    ]
    rows.append(("together", total, sum(plan.values())))

    lines = [f"{'':<28}{'held now':>18}{'planned peak' if plan else '':>18}".rstrip()]
    for name, now, then in rows:
        held_now = "" if now is None else f"{now / MB:,.3f} MB"
        lines.append(
            f"{name:<28}{held_now:>18}{f'{then / MB:,.3f} MB' if plan else '':>18}".rstrip()
        )
    return lines


def _touched(path: Path) -> int | None:
    """When, in nanoseconds; None where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
