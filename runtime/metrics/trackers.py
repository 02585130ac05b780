"""Write a run's numbers to several places, each a small class with one interface, on rank 0.

    JsonLines      RUN/metrics.jsonl                   always
    Console        a line on standard output           always
    WandB          wandb's server, or RUN/wandb        run.wandb=online, offline
    TensorBoard    RUN/tensorboard                     run.tensorboard=true

A tracker never ends a run: one that raises is disabled, with one warning. Only JsonLines never
gives up, because the others could be rebuilt from its file: lines that it cannot write wait in
memory.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import secrets
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from errors import exists
from runtime.files import write_or_warn, write_whole
from runtime.log.log_lines import is_count, is_record, json_object, whole_lines
from runtime.output import log
from settings.config import Config
from settings.load import settings_of

WANDB_START_SECONDS = 30.0  # for wandb's server to respond; all ranks wait meanwhile
# for wandb's last uploads: a server that does not respond must not keep a job from being requeued
WANDB_FINISH_SECONDS = 60.0

# one logged step: "step" and the measurements; None for those that are not known
Record = dict[str, Any]


class Tracker:
    """Interface: `log` gets each logged step's record, in step order except after `went_back`."""

    name = ""

    def log(self, record: Record) -> None:
        raise NotImplementedError

    def went_back(self, step: int) -> None:
        """The run continues from `step`; the steps logged after it come again."""

    def close(self, failed: bool) -> None:
        """The process ends."""


class Trackers:
    """All trackers that `config.run` selects.

    Args:
        step: the step from which this start begins.
        system: the result of `describe_system` (metrics.py).
    """

    def __init__(self, config: Config, step: int, system: dict[str, Any]) -> None:
        folder = Path(config.run.dir)
        lines = JsonLines(folder, step)
        self.trackers: list[Tracker] = [lines, Console(config.train.steps)]
        add = self.trackers.append
        if config.run.wandb != "disabled":
            about = config, step, system, lines.begins_anew, lines.reached
            self._guarded("wandb", lambda: add(WandB(*about)))
        if config.run.tensorboard:
            self._guarded("TensorBoard", lambda: add(TensorBoard(folder, step)))

    def log(self, record: Record) -> None:
        self._each(lambda tracker: tracker.log(record))

    def went_back(self, step: int) -> None:
        self._each(lambda tracker: tracker.went_back(step))

    def close(self, failed: bool) -> None:
        self._each(lambda tracker: tracker.close(failed))

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            if not self._guarded(tracker.name, partial(action, tracker)):
                self.trackers.remove(tracker)

    def _guarded(self, name: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # no failure of a tracker may end the run
            why = f"{type(error).__name__}: {error}"
            log(f"warning: {name} failed and is disabled from now on: {why}")
            return False
        return True


class JsonLines(Tracker):
    """metrics.jsonl: one JSON object per line, in full precision; over all starts, no step twice.

    A start at step 0 renames the file of a previous run (metrics-1.jsonl, …). Any other start drops
    the lines after its step, left by a start that went beyond its last checkpoint.

    begins_anew: the file of a previous run was renamed. reached: the last step in the file before
        lines were dropped.
    """

    name = "metrics.jsonl"

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self.unwritten: list[str] = []
        self.stale_after = math.inf  # lines after this step are still to be dropped
        self.begins_anew, self.reached, self._warned = step == 0 and exists(self.path), step, False
        if self.begins_anew:
            names = (folder / f"metrics-{number}.jsonl" for number in itertools.count(1))
            self.path.rename(next(name for name in names if not exists(name)))
        elif exists(self.path):
            self.reached = self._drop_after(step)

    def log(self, record: Record) -> None:
        self.unwritten.append(json.dumps(record) + "\n")
        self._write()

    def went_back(self, step: int) -> None:
        self.unwritten = [line for line in self.unwritten if json.loads(line)["step"] <= step]
        self.stale_after = min(step, self.stale_after)
        self._write()

    def close(self, failed: bool) -> None:
        if self.unwritten:
            self._write()
        if self.unwritten:
            log(f"warning: the last {len(self.unwritten)} lines of {self.path} are lost")

    def _append(self) -> None:
        if self.stale_after < math.inf and exists(self.path):
            self._drop_after(int(self.stale_after))
        self.stale_after = math.inf
        lines = "".join(self.unwritten).encode()
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)  # leave no partial line
                raise
        self.unwritten = []

    def _drop_after(self, step: int) -> int:
        """Drop odd lines and those after `step`; return the last step before dropping."""
        records = whole_lines(self.path, self.path.read_bytes(), is_record)
        kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
        write_whole(self.path, "".join(kept))
        return max([step, *(record["step"] for record in records)])

    def _write(self) -> None:
        """Append the unwritten lines; if that fails (a full disk), warn once and keep them."""
        try:
            self._append()
            self._warned = False
        except OSError as error:
            if not self._warned:
                log(f"warning: {self.path} cannot be written; lines wait in memory: {error}")
            self._warned = True


class Console(Tracker):
    """Prints one aligned line per record: `step  20/300  loss  5.1234  grad_norm   0.812 …`."""

    name = "the console"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def log(self, record: Record) -> None:
        parts = [f"step {record['step']:>{len(str(self.steps))}}/{self.steps}"]
        if "loss" in record:
            parts += [f"loss {record['loss']:7.4f}", f"grad_norm {record['grad_norm']:7.3f}"]
            parts += [f"lr {record['lr']:.2e}"]
            parts += [f"{record['tokens_per_second']:>9,.0f} tok/s"]
            parts += [f"{record['step_seconds'] * 1e3:7.1f} ms/step"]
            if record["mfu"] is not None:
                parts.append(f"mfu {record['mfu']:5.1%}")
            parts.append(f"{record['peak_memory_bytes'] / 2**30:.2f} GiB")
            if "largest_expert_share" in record:
                dead = record["dead_experts"]
                experts = f"experts up to {record['largest_expert_share']:.2f}x"
                parts.append(f"{experts}, {dead} dead" if dead else experts)
        if "eval_loss" in record:
            parts.append(f"held-out {record['eval_loss']:.4f}")
        parts += of_tasks(record)
        log("  ".join(parts), sys.stdout)


def of_tasks(record: Record) -> list[str]:
    """Each task's main measure: the accuracy per byte, or bits per byte if it has no choices."""
    parts = []
    for name, value in record.items():
        task, _, measure = name.removeprefix("task/").rpartition("/")
        if name.startswith("task/") and measure == "accuracy_per_byte":
            parts.append(f"{task} {value:.1%}")
        elif name.startswith("task/") and f"task/{task}/accuracy" not in record:
            parts.append(f"{task} {value:.4f} bits/byte")
    return parts


class TensorBoard(Tracker):
    """Writes a scalar for every number of a record. Steps that are made again after a failure or a
    rollback replace the old ones."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder / "tensorboard"
        self._open(step)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only if configured

        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1, flush_secs=10)

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            if name != "step":
                self.writer.add_scalar(name, value, record["step"])

    def went_back(self, step: int) -> None:
        self.writer.close()
        self._open(step)

    def close(self, failed: bool) -> None:
        self.writer.close()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that are known; those of each layer are in metrics.jsonl only."""
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


class WandB(Tracker):
    """Logs to one wandb run for all starts, whose id is kept in RUN/wandb-run.json. A run that
    begins anew gets a new id.

    wandb accepts only increasing steps, but after a failure or a rollback a run makes some steps
    again. So the step sent to wandb is our step plus `repeated`, the number of steps that were lost
    so far, each time counted up to the last logged one. The axis of every plot is our own step;
    repeated steps show as a second line, and none is missing. The step counts of an offline run's
    folders do not overlap, so that `wandb sync RUN/wandb/offline-run-*` merges them into one run.

    Args:
        step: the step from which this start begins.
        system: the result of `describe_system` (metrics.py).
        anew: the folder's earlier run, if any, is another one.
        reached: the last step that was logged before this start, or `step`.
    """

    name = "wandb"

    def __init__(
        self, config: Config, step: int, system: dict[str, Any], anew: bool, reached: int
    ) -> None:
        import wandb  # only if configured: the import takes a second

        self.wandb, self.folder = wandb, Path(config.run.dir).absolute()
        path = self.folder / "wandb-run.json"
        known = {} if anew or not exists(path) else json_object(path.read_bytes())
        self.id = str(known.get("id") or secrets.token_hex(4))
        repeated: Any = known.get("repeated")
        self.repeated, self.reached = repeated if is_count(repeated) else 0, reached
        self.went_back(step)
        self.start, self.restarted = partial(self._start, config, system), False
        self.run = self.start()

    def _start(self, config: Config, system: dict[str, Any]) -> Any:
        init = partial(
            self.wandb.init,
            project=config.run.wandb_project,
            name=self.folder.name,
            id=self.id,
            resume="allow",
            dir=str(self.folder),
            config={**settings_of(config), "system": system},
            allow_val_change=True,
            settings=self.wandb.Settings(
                silent=True,
                reinit="create_new",
                init_timeout=WANDB_START_SECONDS,
                finish_timeout=WANDB_FINISH_SECONDS,
                x_transaction_log_flush_interval=1.0,
            ),
        )
        try:
            run = init(mode=config.run.wandb)
        except self.wandb.Error as error:  # no key, a wrong one, no network
            if config.run.wandb == "offline":
                raise
            self.wandb.teardown()  # else its process holds this id, and refuses it a second time
            run = init(mode="offline")
            folders = shlex.quote(str(self.folder / "wandb")) + "/offline-run-*"
            log(f"warning: wandb cannot go online; to upload later: wandb sync {folders} ({error})")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def log(self, record: Record) -> None:
        known, self.reached = scalars(record), record["step"]
        step = self.reached + self.repeated
        try:
            self.run.log(known, step=step, commit=True)  # commit: without waiting for the next step
        # wandb's process is gone: stopping a job signals all of its processes
        except ConnectionError:
            if self.restarted:
                raise  # restart only once: it takes time, and the other ranks wait
            self.restarted = True
            with contextlib.suppress(Exception):
                self.wandb.teardown()
            self.run = self.start()
            self.run.log(known, step=step, commit=True)

    def went_back(self, step: int) -> None:
        self.repeated += max(0, self.reached - step)
        self.reached = step
        # if it cannot be written, the next start may not continue this wandb run
        about = {"id": self.id, "repeated": self.repeated}
        write_or_warn(self.folder / "wandb-run.json", json.dumps(about) + "\n")

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
