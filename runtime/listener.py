"""What a run does around its steps: a list of listeners, called in order by the loop of train.py.

| method        | called when                                       | order in the list        |
|---------------|---------------------------------------------------|--------------------------|
| `begins`      | the run begins                                    | first to last            |
| `before_step` | the batch has been read                           | first to last            |
| `after_step`  | the step is done, and `run.step` includes it      | first to last            |
| `went_back`   | a listener has sent the run back to `start`       | first to last            |
| `ends`        | the last step is done, or the run was ended early | last to first            |
| `closes`      | finally, for each that has begun; if the run      | last to first            |
|               | failed, with its exception                        |                          |

All ranks make the same calls in the same order, so a listener may communicate. In `after_step` a
listener may end the run after this step (`run.end`) or send it back to an earlier step
(`run.go_back`). If it sends the run back, the listeners after it are not called for this step, and
then `went_back` is called on all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.loader import BatchLoader
from runtime.log.run_log import RunLog
from runtime.stop import StopRequests
from runtime.trainer_state import Start
from runtime.watchdog import Watchdog
from settings.data_stages import DataStage
from training.step import StepResult, TrainStep


@dataclass(eq=False)
class Run:
    """How far a run is, what its listeners found out about the last step, and the services that
    they use: `log`, `watchdog` and `stop`."""

    data_stage: DataStage
    train: TrainStep
    loader: BatchLoader
    start: Start  # after a rollback: the checkpoint that was loaded
    log: RunLog
    watchdog: Watchdog
    stop: StopRequests
    batch: tuple[Tensor, Tensor] = field(init=False)  # of the last step
    result: StepResult = field(init=False)  # likewise; reading its tensors waits for the device
    end_reason: str = ""  # why the run ends before its last step; "": it does not
    following: Start | None = None  # at its end: the start of the next data stage
    waited_seconds: float = 0.0  # for the batch of this step
    step_seconds: float | None = None  # measured after a logged step; else None
    # consecutive steps whose update was skipped, up to the last logged step
    logged_bad_in_a_row: int = 0
    record: dict[str, Any] | None = None  # of this step, for metrics.jsonl
    noted: dict[str, Any] = field(default_factory=dict)  # added to each record from now on
    for_status: dict[str, Any] = field(default_factory=dict)  # added to status.json at the end

    def __post_init__(self) -> None:
        self.config = self.data_stage.config
        self.first_step = self.step = self.start.step  # steps done so far
        self.tokens = self.start.state.tokens  # trained on so far

    @property
    def goes_on(self) -> bool:
        return self.step < self.data_stage.steps.stop and not self.end_reason

    @property
    def is_last(self) -> bool:
        """Whether `step` is the last of the data stage."""
        return self.step == self.data_stage.steps.stop

    @property
    def changes_data_stage(self) -> bool:
        """Whether this process goes on with another data stage after this step."""
        return self.is_last and self.step < self.config.train.steps and not self.end_reason

    def is_due(self, interval: int) -> bool:
        """Whether `step` is a multiple of `interval` or the last; never if `interval` is 0."""
        return interval > 0 and (self.step % interval == 0 or self.is_last)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return this data-parallel rank's rows of the next global batch: tokens and targets,
        [rows, S] each."""
        began = time.perf_counter()
        self.batch = next(self.loader)
        self.waited_seconds = time.perf_counter() - began
        return self.batch

    @contextmanager
    def pause(self, cause: str) -> Iterator[None]:
        """Do something else than steps in the enclosed block: its time belongs to `cause`
        (log/ledger.py), and the watchdog rests. If the block fails, they stay so until the end."""
        if self.train.mesh.device == "cuda":
            torch.cuda.synchronize()  # work launched before belongs to the steps
        before = self.log.cause  # not of steps if this is within another pause
        self.log.busy(cause)
        with self.watchdog.resting():
            yield
        self.log.busy(before)

    def found(self, about: dict[str, Any]) -> None:
        """Add what was found after this step to its record."""
        self.record = {**(self.record or {"step": self.step}), **about}

    def end(self, reason: str) -> None:
        """Begin no further step."""
        self.end_reason = reason

    def count_step(self) -> None:
        train = self.config.train
        self.step += 1
        self.tokens += train.global_batch_size * train.seq_len
        self.log.step = self.step

    def go_back(self, start: Start) -> None:
        """Continue with the step after `start`, which has been loaded."""
        self.start = start
        self.step, self.tokens, self.logged_bad_in_a_row = start.step, start.state.tokens, 0
        self.log.step = self.step


class Listener:
    """Base class of listeners; a subclass overrides the methods that it needs."""

    def begins(self, run: Run) -> None:
        pass

    def before_step(self, run: Run) -> None:
        pass

    def after_step(self, run: Run) -> None:
        pass

    def went_back(self, run: Run, start: Start) -> None:
        pass

    def ends(self, run: Run) -> None:
        pass

    def closes(self, run: Run, error: BaseException | None) -> None:
        pass


class Listeners:
    """All listeners of a run."""

    def __init__(self, run: Run, listeners: Sequence[Listener]) -> None:
        self.run, self.each = run, listeners

    @contextmanager
    def begun(self) -> Iterator["Listeners"]:
        """A context that all have begun; at its end, those that have are closed."""
        with ExitStack() as stack:
            for listener in self.each:
                listener.begins(self.run)
                stack.push(self._closing(listener))
            yield self

    def _closing(self, listener: Listener) -> Callable[..., None]:
        return lambda kind, error, traceback: listener.closes(self.run, error)

    def before_step(self) -> None:
        for listener in self.each:
            listener.before_step(self.run)

    def after_step(self) -> None:
        self.run.count_step()
        made = self.run.step
        for listener in self.each:
            listener.after_step(self.run)
            if self.run.step != made:
                for each in self.each:
                    each.went_back(self.run, self.run.start)
                return

    def end(self) -> None:
        for listener in reversed(self.each):
            listener.ends(self.run)
