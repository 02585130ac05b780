"""The measurements of a run: one record per logged step (written by trackers.py), and its end."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from costs.summary import flops_per_token
from costs.units import CannotRecord
from hardware import data_sheet_of
from model.transformer import num_parameters
from parallel.mesh import Mesh
from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.listener import Listener, Run
from runtime.log.events import append_event
from runtime.log.ledger import Ledger
from runtime.log.status import record_missing_end, write_status, write_whole
from runtime.messages import describe, log
from runtime.metrics.expert_load import LoadStatistics
from runtime.metrics.trackers import Trackers
from runtime.start.attention import describe_attention
from runtime.start.notices import notices
from runtime.start.topology import describe_nodes, describe_places, describe_stages
from runtime.trainer_state import Start
from settings.config import Config
from settings.data_stages import DataStage
from settings.load import dump_config
from training.step import StepResult

MEMORY_GROWTH = 1.01  # if any rank's peak grows by more than this factor, all are recorded again


class Metrics(Listener):
    """Collects the measurements of a run; every rank calls it, rank 0 writes.

    Args:
        whole: the configuration of the run.
        data_stage: the part of it that begins.
        mesh: the device mesh.
        start: where the run begins. Metrics lines after its step, left by an earlier start that
            went beyond its last checkpoint, are dropped.
        num_tokens: of the data's tokenizer.
    """

    def __init__(
        self, whole: Config, data_stage: DataStage, mesh: Mesh, start: Start, num_tokens: int
    ) -> None:
        self.config = config = data_stage.config
        self.device = mesh.device
        self.data_stage = data_stage.number
        self.step = start.step
        self.folder = Path(config.run.dir)
        self.writes = dist.get_rank() == 0
        self.mesh, self.peak_flops = mesh, _peak_flops(mesh.device)
        self.flops: float | None = None  # per token
        self.timed_steps, self.data_seconds, self.started = 0, 0.0, time.perf_counter()
        self.record: dict[str, Any] | None = None
        self.noted: dict[str, Any] = {}  # by other listeners, for the next record
        self.for_status: dict[str, Any] = {}  # by other listeners, for status.json
        # told what this process does besides steps, by a cause of ledger.py; "": steps again
        self.is_busy: Callable[[str], None] = lambda cause: None
        self.stop_reason = ""
        self.has_ended = False  # whether the end of this start is recorded
        self.next_data_stage: int | None = None  # with which this process goes on
        self.skipped_updates = start.step - start.state.updates
        self.load = LoadStatistics.of(config.model, mesh.device)
        self.noted_peaks = [0] * dist.get_world_size()  # bytes, by rank, as last in events.jsonl
        self.ledger: Ledger | None = None
        self.trackers: Trackers | None = None
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = record_missing_end(self.folder) if start.since is None else []
            about += notices(whole, start.path, mesh.device, num_tokens)
            stage = {} if start.since is None else {"data_stage": start.data_stage}
            self.ledger = Ledger(
                self.folder, start.step, dist.get_world_size(), start.since, **stage
            )
            write_whole(self.folder / "config.yaml", dump_config(whole))
            (self.folder / "status.json").unlink(missing_ok=True)
            system = describe_system(config, mesh)
            append_event(self.folder, "system", **system)
            self.trackers = Trackers(config, start.step, system)
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
            about += [f"{num_parameters(config.model):,} parameters on {mesh.describe()}"]
            about += self._describe_costs(ranks_per_node)
            about.append(describe_attention(config, mesh.device))
            about.append(
                f"starting from {start.path or 'initial weights'} at step {start.step}; "
                f"run folder {self.folder}"
            )
            log("\n".join(about), sys.stdout)
        self._count("start")

    def _mfu(self, tokens_per_second: float) -> float | None:
        """The MFU of one device; None if its peak or the model's operations are not known."""
        if self.flops is None or not self.peak_flops:
            return None
        return tokens_per_second * self.flops / self.peak_flops

    def _describe_costs(self, ranks_per_node: int) -> list[str]:
        """Describe the layout and its costs, for the log. If the costs of a layer cannot be
        recorded, the run trains without MFU."""
        config = self.config
        try:
            self.flops = flops_per_token(config.model, config.train.seq_len)
            lines = [describe_places(config, self.mesh, ranks_per_node)]
            return lines + ([describe_stages(config)] if config.parallel.num_stages > 1 else [])
        except CannotRecord as error:
            return [describe_nodes(self.mesh.sizes, ranks_per_node), f"warning: no MFU: {error}"]

    @contextmanager
    def spending(self, cause: str) -> Iterator[None]:
        """Attribute the time of the enclosed work, which is not part of a step, to `cause`
        (ledger.py)."""
        if self.device == "cuda":
            torch.cuda.synchronize()  # work launched before belongs to the steps
        self._count("steps")
        self.is_busy(cause)
        yield
        self.is_busy("")
        self._count(cause)

    def _count(self, cause: str) -> None:
        """Attribute the time since the last call to `cause`, and restart the clock of steps."""
        if self.ledger is not None:
            self.ledger.spent(cause, self.data_seconds)
        self.timed_steps, self.data_seconds, self.started = 0, 0.0, time.perf_counter()

    def after_step(self, run: Run) -> None:
        """Measure a step; waits for the device only every `run.log_interval` steps."""
        self.step = step = run.step
        run.step_seconds = None
        self.timed_steps += 1
        self.data_seconds += run.waited_seconds
        train, result = self.config.train, run.result
        if self.load is not None and result.loads is not None:
            self.load.add(result.loads)
        if not run.is_due(self.config.run.log_interval):
            return
        peak_memory = self._gather_peak_memory(step)
        made = result.updates.to(self.device)
        scalars = (result.loss, result.grad_norm, made, result.bad_in_a_row)
        measured = torch.stack([s.double() for s in scalars])
        # waits until the step is done
        (loss, grad_norm, updates, bad), of_experts = self._read(measured, result)
        self._say_skipped(step - int(updates), loss, grad_norm)
        run.logged_bad_in_a_row = int(bad)
        run.step_seconds = seconds = (time.perf_counter() - self.started) / self.timed_steps
        tokens_per_second = train.global_batch_size * train.seq_len / seconds
        per_device = tokens_per_second / dist.get_world_size()
        self.record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": result.lr,
            "tokens": run.tokens,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "mfu": self._mfu(per_device),
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self.timed_steps,
            "peak_memory_bytes": max(peak_memory),
            "skipped_updates": self.skipped_updates,
            **of_experts,
            **self.noted,
        }
        self._count("steps")

    def _read(self, measured: Tensor, result: StepResult) -> tuple[list[float], dict[str, Any]]:
        """Wait for the device once. Return `measured` as numbers, and the record's entries about
        experts."""
        if self.load is None or result.loads is None:
            return measured.tolist(), {}
        parts = (measured, result.loads.losses.double(), self.load.figures())
        numbers, (balance_loss, z_loss), figures = (
            part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])
        )
        (loads, warning), model = self.load.read(figures), self.config.model
        if self.writes and warning:
            log(f"{warning} (up to step {self.step})")
        # their sum, with `loss`, is what gradients are taken of
        losses = {"router_balance_loss": balance_loss} if model.router_aux_weight else {}
        losses |= {"router_z_loss": z_loss} if model.router_z_weight else {}
        return numbers, losses | loads.record()

    def _gather_peak_memory(self, step: int) -> list[int]:
        """Gather the peak memory of all ranks, in bytes. A record contains only the largest: with a
        thousand ranks, all of them would be most of metrics.jsonl. Peaks only grow, and after a few
        steps hardly at all, so all are written to events.jsonl whenever one has grown by more than
        1 %."""
        everyone = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self.device)
        everyone[dist.get_rank()] = _peak_memory_bytes(self.device)
        # [ranks], over the world: costs about as little as an all-reduce of only the maximum
        dist.all_reduce(everyone)
        peaks: list[int] = everyone.tolist()
        if self.writes and any(
            new > MEMORY_GROWTH * old for new, old in zip(peaks, self.noted_peaks, strict=True)
        ):
            self.noted_peaks = peaks
            append_event(self.folder, "memory", step=step, peak_bytes=peaks)
        return peaks

    def _say_skipped(self, skipped_updates: int, loss: float, grad_norm: float) -> None:
        more, self.skipped_updates = skipped_updates - self.skipped_updates, skipped_updates
        if more and self.writes:
            why = (
                "the loss or the gradient was not finite, or the loss spiked; "
                f"now loss {loss:.4f}, grad_norm {grad_norm:.3f}"
            )
            said = (
                f"warning: {more} of the updates up to step {self.step} were skipped because {why}"
            )
            log(said)
            about = {"skipped": more, "loss": loss, "grad_norm": grad_norm}
            append_event(self.folder, "spike", step=self.step, **about)

    def evaluated(self, step: int, found: dict[str, float]) -> None:
        """Add what an evaluation after update `step` has found to that step's record."""
        self.record = {**(self.record or {"step": step}), **found}

    def went_back(self, run: Run, start: Start) -> None:
        """Let the trackers drop the lines after `start`: those steps come again."""
        reached = self.step
        self.step = start.step
        self.skipped_updates = start.step - start.state.updates
        if self.load is not None:
            self.load.reset()
        if self.trackers is not None:
            self.trackers.went_back(start.step, reached)

    def flush(self) -> None:
        """Write the record of the current step, if it has one."""
        record, self.record = self.record, None
        if record is None or self.ledger is None or self.trackers is None:
            return
        self.ledger.write(self.step)
        self.trackers.log(record)

    def ends(self, run: Run) -> None:
        """Note why the run ends early; ignored later if this is also its last step."""
        self.stop_reason = run.end_reason
        if run.changes_data_stage:
            self.next_data_stage = self.data_stage + 1

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Record in status.json how the run ended. It is `finished` only when every rank is."""
        if error is None:
            dist.barrier()
        else:
            error.add_note(f"after step {self.step}")
        if self.ledger is None or self.trackers is None:
            return
        if error is not None:
            state, reason = "failed", describe(error)
        elif self.next_data_stage is not None:
            state, reason = "requeue", f"data stage {self.next_data_stage} begins"
        elif self.stop_reason and self.step < self.config.train.steps:
            state, reason = "requeue", self.stop_reason
            where = f"after step {self.step}/{self.config.train.steps}"
            log(
                f"stopped {where}: {reason}; restart it to continue; run folder {self.folder}",
                sys.stdout,
            )
        else:
            state, reason = "finished", "all steps done"
            said = f"finished after {self.step} steps{self._unsaved()}; run folder {self.folder}"
            log(said, sys.stdout)
        # after a failure, the time belongs to the step that failed
        self._count("end" if error is None else "steps")
        self.ledger.write(self.step)
        if (
            error is None and self.next_data_stage is not None
        ):  # the start goes on, so it has no status
            about = {"state": state, "step": self.step, "reason": reason}
            append_event(self.folder, "end", **about, data_stage=self.next_data_stage)
        else:
            if not (self.folder / "status.json").exists():  # else the watchdog has written it
                write_status(self.folder, state, self.step, reason, **self.for_status)
            self.has_ended = True
        self.trackers.close(failed=error is not None)  # last: wandb may wait for its server

    def _unsaved(self) -> str:
        """A warning if no checkpoint of the run folder has the state after the last step."""
        try:
            saved = complete_checkpoints(self.folder / "checkpoints")
        except OSError:  # a finished run has finished
            return ""
        if saved and step_of(saved[-1]) == self.step:
            return ""
        said = "; nothing was saved" + (f" after {saved[-1].name}" if saved else "")
        never = self.config.checkpoint.interval == "never"
        return said + (" (checkpoint.interval=never)" if never else "")


class RecordWriter(Listener):
    """Writes each step's record once the listeners before it have completed it."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def after_step(self, run: Run) -> None:
        self.metrics.flush()


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


def _peak_memory_bytes(device: str) -> int:
    """The peak memory of this process, in bytes: allocated on the GPU, or resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB on Linux


def _peak_flops(device: str) -> float | None:
    """Dense bfloat16 peak, in FLOP/s; None if no data sheet is known, and then mfu is null."""
    sheet = data_sheet_of(torch.cuda.get_device_name()) if device == "cuda" else None
    return sheet.peak_flops if sheet is not None else None
