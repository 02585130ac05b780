"""Report what a process holds in memory, by category, when memory runs out and on request.

    RUN/memory/step-00000012-rank-00003.txt  the table, and torch's own account of the GPU
                                      .json  the same numbers; `python -m tools.plan
                                             RUN/config.yaml --beside FILE` adds the plan
                                    .pickle  GPUs: torch's snapshot, for
                                             https://pytorch.org/memory_viz

    on torch.OutOfMemoryError  each rank that raises it writes a report of the current step; then
                               the error ends the run as usual
    file SNAPSHOT in run.dir   the ranks of run.profile_ranks write a report, within a second and
                               two steps (stop.py)

Weights, gradients and moments are counted where the model, FSDP and the optimizer keep them.
Everything else that the allocator has given out, mostly activations, is reported as one number; on
a CPU, that is the rest of the process's memory, including the interpreter and libraries. The
snapshot is a pickle because torch's viewer reads nothing else; this program never reads it. With
run.memory_history it also has the last allocations, each with the source line that requested it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.data import fsdp_partial_sums
from parallel.layer import gradients_of
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from parallel.placement import local_part
from runtime.listener import Listener, Run
from runtime.metrics.metrics import peak_memory_bytes
from runtime.output import log
from training.step import TrainStep

RECORDED = 100_000  # allocations in the memory history
MB = 1e6


class MemoryReports(Listener):
    """Writes memory reports; every rank has one.

    Args:
        train: holds the tensors to be counted.
    """

    def __init__(self, train: TrainStep) -> None:
        self.train = train
        run = train.config.run
        self.folder = Path(run.dir) / "memory"
        self.records = run.memory_history and train.mesh.device == "cuda"
        self.answers = dist.get_rank() in run.profile_ranks

    def after_step(self, run: Run) -> None:
        if "SNAPSHOT" in run.stop.agreed_files:
            if self.answers:
                self.write(run.step, f"requested after step {run.step}")
            run.stop.done("SNAPSHOT")

    def begins(self, run: Run) -> None:
        if self.records:
            torch.cuda.memory._record_memory_history(max_entries=RECORDED, stacks="python")

    def closes(self, run: Run, error: BaseException | None) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            step = run.step + 1
            self.write(step, f"out of memory in step {step}: {str(error).strip()}")
        if self.records:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, step: int, why: str) -> None:
        """Write a report; a failure to do so is only logged, so that it neither ends the run nor
        hides the error that the report is about."""
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
            said = f"memory report: {path}"
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
            "offloaded_bytes": offloaded_bytes(self.train),
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
        if offloaded := report["offloaded_bytes"]:
            to_disk = self.train.config.parallel.offload == "disk"
            where = self.train.config.parallel.offload_dir if to_disk else "the host's memory"
            lines.append(f"Weights and optimizer states: {offloaded / MB:,.3f} MB in {where}")
        config = self.folder.parent / "config.yaml"
        lines += [
            "",
            f"To compare with the plan: python -m tools.plan {config} --beside FILE, "
            "where FILE is this file's name with .json",
        ]
        if report["device"] == "cuda":
            free, size = (number / MB for number in torch.cuda.mem_get_info())
            reserved = torch.cuda.memory_reserved() / MB
            lines.append(
                f"The device has {size:,.0f} MB, of which {free:,.0f} MB are free; "
                f"torch has reserved {reserved:,.0f} MB."
            )
            lines += ["", torch.cuda.memory_summary()]
        return "\n".join(lines) + "\n"


@torch.no_grad()
def held_bytes(train: TrainStep) -> dict[str, int]:
    """Count the bytes that the model, FSDP and the optimizer hold on the device, by category. What
    is in files of a disk is not counted."""
    device, seen = train.mesh.device, set[int]()
    in_files = (WEIGHTS, MOMENTS) if train.config.parallel.offload == "disk" else ()

    def count(tensors: list[Tensor]) -> int:
        """Bytes of the storages that were not counted yet."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()  # 0 if FSDP has freed it
        return total

    found = {category: count(tensors) for category, tensors in tensors_by_category(train).items()}
    return found | dict.fromkeys(in_files, 0)


def offloaded_bytes(train: TrainStep) -> int:
    """Bytes of weights and optimizer states that parallel.offload keeps elsewhere."""
    if train.config.parallel.offload == "none":
        return 0
    tensors = tensors_by_category(train)
    return sum(tensor.nbytes for category in (WEIGHTS, MOMENTS) for tensor in tensors[category])


def tensors_by_category(train: TrainStep) -> dict[str, list[Tensor]]:
    """List this rank's tensors in the model, FSDP and the optimizer, by category. A tensor may be
    in two categories; it is counted in the first."""
    sharded = [weight.parameter for weight in train.weights]
    stages = train.stages.values()
    # gathered or sharded, depending on the moment
    present = [parameter for stage in stages for parameter in stage.parameters()]
    # summed over micro-batches: whole gradients, possibly in a wider dtype, and those reduced over
    # dp_shard
    whole = [gradient.total for stage in stages for gradient in gradients_of(stage)]
    reduced = [gradient for stage in stages for gradient in fsdp_partial_sums(stage)]
    moments = [moment for moments in train.optimizer.states for moment in moments.values()]
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


def total_bytes(device: str) -> int:
    """Bytes allocated on a GPU; on a CPU, the resident memory of the process."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: use the peak instead
        return peak_memory_bytes(device)


def table(
    held: Mapping[str, int], total: int, planned: Mapping[str, int] | None = None
) -> list[str]:
    """Format lines with the memory held by category, the rest of `total`, and next to them the
    `planned` memory, whose other categories are part of the rest. All sizes are in bytes."""
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
