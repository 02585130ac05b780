"""Report what a process holds in memory, by category, when memory runs out and on request.

    RUN/memory/step-00000012-rank-00003.txt  the table, and torch's own account of the GPU
                                      .json  the same numbers
                                    .pickle  GPUs: torch's snapshot, for
                                             https://pytorch.org/memory_viz

    on torch.OutOfMemoryError  each rank that raises it writes a report of the current step; then
                               the error ends the run as usual
    file SNAPSHOT in run.dir   the ranks of run.profile_ranks write a report, within a second and
                               two steps (stop.py)

docs/profiling.md says what the rows are. The snapshot is a pickle because torch's viewer reads
nothing else; this program never reads it.
"""

import json
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
            path.write_text(as_text(report), encoding="utf-8")
            numbers = json.dumps(report, indent=1) + "\n"
            path.with_suffix(".json").write_text(numbers, encoding="utf-8")
            if self.train.mesh.device == "cuda":
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            said = f"memory report: {path}"
        except Exception as failure:
            said = f"{path} cannot be written: {type(failure).__name__}: {failure}"
        log(f"rank {rank}: {why.partition(chr(10))[0]}; {said}")

    def report(self, why: str) -> dict[str, Any]:
        mesh, on_gpu = self.train.mesh, self.train.mesh.device == "cuda"
        return {
            "why": why,
            "rank": dist.get_rank(),
            "world": mesh.root.size(),
            "coordinates": mesh.coordinates(),
            "stages": sorted(self.train.stages),
            "device": mesh.device,
            "held_bytes": held_bytes(self.train),
            "total_bytes": torch.cuda.memory_allocated() if on_gpu else peak_memory_bytes("cpu"),
        }


@torch.no_grad()
def held_bytes(train: TrainStep) -> dict[str, int]:
    """Count the bytes that the model, FSDP and the optimizer hold on the device, by category. A
    storage in two categories is counted in the first; what is in files of a disk is not counted."""
    sharded = [weight.parameter for weight in train.weights]
    stages = train.stages.values()
    # gathered or sharded, depending on the moment
    present = [parameter for stage in stages for parameter in stage.parameters()]
    # summed over micro-batches: whole gradients, possibly in a wider dtype, and those reduced over
    # dp_shard
    whole = [gradient.total for stage in stages for gradient in gradients_of(stage)]
    reduced = [gradient for stage in stages for gradient in fsdp_partial_sums(stage)]
    tensors: dict[str, list[Tensor | None]] = {
        WEIGHTS: [*sharded],
        GATHERED: [*present],
        MOMENTS: [moment for of_one in train.optimizer.states for moment in of_one.values()],
        SHARDED_GRADIENTS: [*(parameter.grad for parameter in sharded), *reduced],
        GRADIENTS: [*(parameter.grad for parameter in present), *whole],
    }
    found, seen = dict.fromkeys(tensors, 0), set[int]()
    for category, each in tensors.items():
        for tensor in (local_part(tensor) for tensor in each if tensor is not None):
            storage = tensor.untyped_storage()
            if tensor.device.type == train.mesh.device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[category] += storage.nbytes()  # 0 if FSDP has freed it
    in_files = (WEIGHTS, MOMENTS) if train.config.parallel.offload == "disk" else ()
    return found | dict.fromkeys(in_files, 0)


def as_text(report: dict[str, Any]) -> str:
    """The report, with a table of the memory held by category, and of the rest of the total."""
    about = ("why", "rank", "world", "coordinates", "stages")
    lines = [f"{name}: {report[name]}" for name in about]
    held, total = report["held_bytes"], report["total_bytes"]
    rows = {**held, "everything else": total - sum(held.values()), "together": total}
    lines += ["", f"{'':<28}{'held now':>18}"]
    lines += [f"{name:<28}{f'{size / MB:,.3f} MB':>18}" for name, size in rows.items()]
    if report["device"] == "cuda":
        free, size = (number / MB for number in torch.cuda.mem_get_info())
        lines.append(f"The device has {size:,.0f} MB, of which {free:,.0f} MB are free.\n")
        lines.append(torch.cuda.memory_summary())
    return "\n".join(lines) + "\n"
