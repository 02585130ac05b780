"""The measurements of a run: one record per logged step (written by trackers.py)."""

import platform
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from costs.parameters import num_parameters
from costs.summary import flops_per_token
from costs.units import CannotRecord
from hardware import data_sheet_of
from model.documents import mean_length
from model.experts import Experts
from parallel.mesh import Mesh
from runtime.listener import Listener, Run
from runtime.metrics.expert_load import LoadStatistics
from runtime.metrics.trackers import Trackers
from runtime.output import log
from runtime.trainer_state import Start
from settings.config import Config
from training.step import StepResult


class Metrics(Listener):
    """Measures the steps of a run; every rank has one, rank 0 writes.

    start: where the run begins. Metrics lines after its step, left by an earlier start that went
        beyond its last checkpoint, are dropped.
    """

    def __init__(self, config: Config, mesh: Mesh, start: Start) -> None:
        self.config, self.mesh, self.device = config, mesh, mesh.device
        self.peak_flops: float | None = None  # of a device; None: not known, and mfu is null
        if self.device == "cuda" and dist.get_rank() == 0:  # it writes
            self.peak_flops = _peak_flops(config)
        # with data.document_mask: of this rank's rows (`mean_length`), of each step since the log
        self.documents: list[float] = []
        self.skipped_updates = start.step - start.state.updates
        model = config.model
        self.load = LoadStatistics(model, mesh.device) if model.has_experts else None
        self.largest_logit: Tensor | None = None  # as last measured
        self.trackers: Trackers | None = None  # on rank 0

    def begins(self, run: Run) -> None:
        if dist.get_rank() == 0:
            system = describe_system(self.config, self.mesh)
            run.log.event("system", **system)
            self.trackers = Trackers(self.config, run.step, system)
        run.log.busy("")

    def after_step(self, run: Run) -> None:
        """Measure a step; waits for the device only every `run.log_interval` steps."""
        step, ledger = run.step, run.log.ledger
        run.step_seconds = None
        ledger.step_done(run.waited_seconds)
        train, result = self.config.train, run.result
        if run.train.bos_id is not None:
            self.documents.append(mean_length(run.batch[0], run.train.bos_id))
        if self.load is not None and result.loads is not None:
            self.load.add(result.loads)
        if result.largest_logit is not None:
            self.largest_logit = result.largest_logit
        if not run.is_due(self.config.run.log_interval):
            return
        ranks = dist.get_world_size()
        own = peak_memory_bytes(self.device) * ranks + dist.get_rank()
        peak = torch.full((), own, device=self.device)  # int64
        dist.all_reduce(peak, dist.ReduceOp.MAX)  # [], over the world: with the rank that has it
        made = result.updates.to(self.device)
        scalars = [result.loss, result.grad_norm, made, result.bad_in_a_row, result.loss_scale]
        scalars += [peak // ranks, peak % ranks]  # each is exact in float64
        if self.documents:
            mean = sum(self.documents) / len(self.documents) / ranks
            lengths = torch.full((), mean, dtype=torch.float64, device=self.device)
            dist.all_reduce(lengths)  # [], over the world: the mean over all rows
            scalars.append(lengths)
        if self.largest_logit is not None:
            scalars.append(self.largest_logit)
        measured = torch.stack([s.double() for s in scalars])
        # waits until the step is done
        numbers, of_experts = self._read(measured, result)
        loss, grad_norm, updates, bad, scale, peak_memory, peak_rank, *more = numbers
        document = more.pop(0) if self.documents else None
        self.documents.clear()
        self._say_skipped(run, step - int(updates), loss, grad_norm)
        run.logged_bad_in_a_row = int(bad)
        seconds, data_seconds = ledger.step_seconds()
        run.step_seconds = seconds
        tokens_per_second = train.global_batch_size * train.seq_len / seconds
        per_device = tokens_per_second / ranks
        run.record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": result.lr,
            "tokens": run.tokens,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "mfu": self._mfu(per_device, document),
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "peak_memory_bytes": int(peak_memory),
            "peak_memory_rank": int(peak_rank),  # the last of those that have it
            "skipped_updates": self.skipped_updates,
            **({"loss_scale": scale} if train.dtype == "float16" else {}),
            **({"largest_logit": more[0]} if more else {}),
            **of_experts,
            **run.noted,
        }
        ledger.spent("steps")

    def _read(self, measured: Tensor, result: StepResult) -> tuple[list[float], dict[str, Any]]:
        """Wait for the device once. Return `measured` as numbers, and the record's entries about
        experts."""
        if self.load is None or result.loads is None:
            return measured.tolist(), {}
        parts = (measured, result.loads.losses.double(), self.load.take())
        numbers, (balance_loss, z_loss), figures = (
            part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])
        )
        experts = self.config.model.of(Experts)
        # their sum, with `loss`, is what gradients are taken of
        losses = {"router_balance_loss": balance_loss} if experts.router_aux_weight else {}
        losses |= {"router_z_loss": z_loss} if experts.router_z_weight else {}
        return numbers, losses | self.load.record(figures)

    def _mfu(self, tokens_per_second: float, document: float | None) -> float | None:
        """Of a device. `document`: the mean length of a token's document, with the mask."""
        if self.peak_flops is None:
            return None
        model, seq_len = self.config.model, self.config.train.seq_len
        flops = flops_per_token(model, seq_len, document=document)
        return tokens_per_second * flops / self.peak_flops

    def _say_skipped(self, run: Run, skipped: int, loss: float, grad_norm: float) -> None:
        more, self.skipped_updates = skipped - self.skipped_updates, skipped
        if not more:
            return
        run.log.event("spike", step=run.step, skipped=more, loss=loss, grad_norm=grad_norm)
        if dist.get_rank() == 0:
            log(
                f"warning: {more} of the updates up to step {run.step} were skipped because the "
                "loss or the gradient was not finite, or the loss spiked; "
                f"now loss {loss:.4f}, grad_norm {grad_norm:.3f}"
            )

    def went_back(self, run: Run, start: Start) -> None:
        """Let the trackers drop the lines after `start`: those steps come again."""
        self.skipped_updates = start.step - start.state.updates
        self.largest_logit = None
        self.documents.clear()
        if self.load is not None:
            self.load.take()  # and forget: those steps come again
        if self.trackers is not None:
            self.trackers.went_back(start.step)

    def closes(self, run: Run, error: BaseException | None) -> None:
        if self.trackers is not None:
            self.trackers.close(error is not None)


class RecordWriter(Listener):
    """Writes each step's record, if it has one, once the listeners before it have completed it."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def after_step(self, run: Run) -> None:
        record, run.record = run.record, None
        trackers = self.metrics.trackers
        if record is None or trackers is None:
            return
        run.log.write_spent()
        trackers.log(record)
        run.log.record(record, run.watchdog.usual_step)


def describe_system(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Describe the hardware, versions and layout for events.jsonl and wandb, as seen by rank 0; the
    other ranks are assumed to be alike."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if mesh.device == "cuda"
        else f"CPU ({platform.machine()})",
        "world_size": dist.get_world_size(),
        "layout": mesh.describe(),
        "parameters": num_parameters(config.model),
    }


def peak_memory_bytes(device: str) -> int:
    """The peak memory of this process, in bytes: allocated on the GPU, or resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB on Linux


def _peak_flops(config: Config) -> float | None:
    """This GPU's peak of dense bfloat16; None if no data sheet of it is known, or the costs of a
    layer cannot be recorded."""
    sheet = data_sheet_of(torch.cuda.get_device_name())
    if sheet is None:
        return None
    try:
        flops_per_token(config.model, config.train.seq_len)
    except CannotRecord:
        return None
    return sheet.peak_flops
