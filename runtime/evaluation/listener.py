"""Evaluates on train.tasks, every train.eval_interval steps and after the last."""

from pathlib import Path

from runtime.evaluation.rows import log_likelihoods, measures, open_tasks
from runtime.evaluation.scoring import PipelineScorer
from runtime.listener import Listener, Run
from settings.config import Config


class Tasks(Listener):
    """Evaluates at the configured interval and adds `task/NAME/MEASURE` to the step's record.

    tokenizer: the data's.
    """

    def __init__(self, config: Config, tokenizer: Path) -> None:
        self.tasks, self.seq_len = open_tasks(config, tokenizer), config.train.seq_len
        self.rows = [row for task in self.tasks for text in task.texts() for row in text.rows]

    def after_step(self, run: Run) -> None:
        if not self.tasks or not run.is_due(run.config.train.eval_interval):
            return

        def goes_on() -> bool:
            """Between groups of micro-batches: the time of each is limited, and a stop is agreed
            on."""
            run.watchdog.beat()
            return not run.stop.agree()

        with run.pause("evaluation"):
            of_rows = PipelineScorer(run.train, self.seq_len)(self.rows, goes_on)
            if of_rows is None:
                return
            found = log_likelihoods(self.tasks, of_rows)
            for task, values in zip(self.tasks, found, strict=True):
                named = measures(task, values).items()
                run.found({f"task/{task.task.name}/{name}": value for name, value in named})
