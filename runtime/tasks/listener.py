"""Evaluates on train.tasks, every train.eval_interval steps and after the last."""

from runtime.listener import Listener, Run
from runtime.metrics import Metrics
from runtime.stop import StopRequests
from runtime.tasks.rows import TaskRows, log_likelihoods, measures
from runtime.tasks.scoring import PipelineScorer
from runtime.watchdog import Watchdog


class Tasks(Listener):
    """Evaluates at the configured interval and adds `task/NAME/MEASURE` to the step's record."""

    def __init__(
        self,
        tasks: list[TaskRows],
        seq_len: int,
        metrics: Metrics,
        watchdog: Watchdog,
        stop: StopRequests,
    ) -> None:
        self.tasks, self.seq_len = tasks, seq_len
        self.rows = [row for task in tasks for text in task.texts() for row in text.rows]
        self.metrics, self.watchdog, self.stop = metrics, watchdog, stop
        self.scorer: PipelineScorer | None = None

    def after_step(self, run: Run) -> None:
        if not self.tasks or not run.is_due(run.config.train.eval_interval):
            return
        if self.scorer is None or self.scorer.train is not run.train:
            self.scorer = PipelineScorer(run.train, self.seq_len)
        with self.metrics.spending("evaluation"):
            of_rows = self.scorer(self.rows, self._goes_on)
            if of_rows is None:
                return
            found = log_likelihoods(self.tasks, of_rows)
            for task, values in zip(self.tasks, found, strict=True):
                named = measures(task, values).items()
                self.metrics.evaluated(
                    run.step, {f"task/{task.task.name}/{name}": value for name, value in named}
                )

    def _goes_on(self) -> bool:
        """Between groups of micro-batches: the time of each is limited, and a stop is agreed on."""
        self.watchdog.beat()
        return not self.stop.agree()
