"""What a run does beside its steps: a list of listeners, which hear of each step in turn.

    run = Run(config, train, loader, start)
    with Listeners(run, [...]) as listeners:
        while run.goes_on:
            tokens, targets = run.next_batch()
            listeners.before_step()
            run.result = train(run.step, tokens, targets)
            listeners.after_step()  # counts the step, and tells the listeners
        listeners.end()

| called        | when                                              | in the order of the list |
|---------------|---------------------------------------------------|--------------------------|
| `__enter__`   | the run begins                                    | first to last            |
| `begins`      | all have entered                                  | first to last            |
| `before_step` | the batch is there                                | first to last            |
| `after_step`  | the step is made: `run.step` counts it            | first to last            |
| `went_back`   | a listener has sent the run back to `start`       | first to last            |
| `ends`        | the last step is made, or an end was asked for    | last to first            |
| `__exit__`    | at last, whatever happened: with the exception of | last to first            |
|               | a failure, which stays one                        |                          |

All ranks make the same calls in the same order, so a listener may communicate. In `after_step` a
listener may end the run after this step (`run.end`), or send it back to an earlier one
(`run.go_back`): then the listeners after it do not hear of this step, and all hear `went_back`.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from data.loader import BatchLoader
from runtime.checkpoint import Start
from training.config import Config
from training.step import StepResult, TrainStep


class Run:
    """Where a run is, and what listeners know of its last step from those before them."""

    result: StepResult  # of the last step; reading it waits for the device

    def __init__(self, config: Config, train: TrainStep, loader: BatchLoader, start: Start) -> None:
        self.config, self.train, self.loader = config, train, loader
        self.start = start  # or, if it was sent back, what it was sent back to
        self.first_step = self.step = start.step  # steps made
        self.tokens = start.tokens  # that were trained on
        self.end_reason = ""  # why it ends before its last step; "": it does not
        self.waited_seconds = 0.0  # for the batch of this step
        self.step_seconds: float | None = None  # of a step, where this one was measured
        self.logged_bad_in_a_row = 0  # steps without an update, up to the last that was logged

    @property
    def goes_on(self) -> bool:
        return self.step < self.config.train.steps and not self.end_reason

    @property
    def is_last(self) -> bool:
        return self.step == self.config.train.steps

    def is_due(self, interval: int) -> bool:
        """After every `interval` steps and after the last one; never if `interval` is 0."""
        return interval > 0 and (self.step % interval == 0 or self.is_last)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This data-parallel rank's rows of the next global batch: tokens and targets [rows, S]."""
        began = time.perf_counter()
        batch = next(self.loader)
        self.waited_seconds = time.perf_counter() - began
        return batch

    def end(self, reason: str) -> None:
        """No other step is begun."""
        self.end_reason = reason

    def count_step(self) -> None:
        train = self.config.train
        self.step += 1
        self.tokens += train.global_batch_size * train.seq_len

    def go_back(self, start: Start) -> None:
        """The next step is the one after `start`, which has been loaded."""
        self.start = start
        self.step, self.tokens, self.logged_bad_in_a_row = start.step, start.tokens, 0


class Listener:
    """Hears of what it overrides."""

    def __enter__(self) -> "Listener":
        return self

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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass


class Listeners:
    """All of a run's."""

    def __init__(self, run: Run, listeners: Sequence[Listener]) -> None:
        self.run, self.each = run, listeners
        self._stack = ExitStack()

    def __enter__(self) -> "Listeners":
        with ExitStack() as stack:
            for listener in self.each:
                stack.enter_context(listener)
            for listener in self.each:
                listener.begins(self.run)
            self._stack = stack.pop_all()
        return self

    def before_step(self) -> None:
        for listener in self.each:
            listener.before_step(self.run)

    def after_step(self) -> None:
        self.run.count_step()
        made = self.run.step
        for listener in self.each:
            listener.after_step(self.run)
            if self.run.step != made:
                return self._go_back()

    def _go_back(self) -> None:
        for listener in self.each:
            listener.went_back(self.run, self.run.start)

    def end(self) -> None:
        for listener in reversed(self.each):
            listener.ends(self.run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        self._stack.__exit__(kind, error, traceback)  # type: ignore[arg-type]
