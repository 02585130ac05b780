"""Evaluates every train.eval_interval steps and after the last: on held-out text, and on tasks."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from data.dataset import Mixture
from data.loader import heldout_batches
from runtime.evaluation.rows import Task, results
from runtime.evaluation.scoring import score_on_mesh
from runtime.listener import Listener, Run
from runtime.output import log
from training.step import TrainStep


class Evaluation(Listener):
    """Evaluates at the configured interval and adds `eval_loss` and `task/NAME/MEASURE` to the
    step's record. A stop that is agreed on ends an evaluation; what it has not found is left out.

    Args:
        heldout: the held-out split; None if there is no evaluation.
        unigram: loss, in nats per token, of a model that knows only token frequencies, if known.
        tasks: in tokens; it may be empty.
    """

    def __init__(self, heldout: Mixture | None, unigram: float | None, tasks: list[Task]) -> None:
        self.heldout, self.unigram, self.tasks = heldout, unigram, tasks
        self.loss: float | None = None
        self.rows = [row for task in tasks for row in task.rows]

    def after_step(self, run: Run) -> None:
        if self.heldout is None or not run.is_due(run.config.train.eval_interval):
            return

        def goes_on() -> bool:
            """Between batches: the time of each is limited, and a stop is agreed on."""
            run.watchdog.beat()
            return not run.stop.agree()

        with run.pause("evaluation"):
            loss = heldout_loss(run.train, self.heldout, goes_on)
            if loss is not None:
                self.loss = loss
                run.found({"eval_loss": loss})
            if not self.rows:
                return
            of_rows = score_on_mesh(run.train, self.rows, run.config.train.seq_len, goes_on)
            if of_rows is None:
                return
            for task, (measures, _) in results(self.tasks, of_rows).items():
                run.found({f"task/{task}/{name}": value for name, value in measures.items()})

    def ends(self, run: Run) -> None:
        if self.loss is None or self.unigram is None or run.end_reason:
            return
        if dist.get_rank() == 0:
            log(compare_to_unigram(self.loss, self.unigram), sys.stdout)


def heldout_loss(train: TrainStep, heldout: Mixture, goes_on: Callable[[], bool]) -> float | None:
    """Compute the mean loss in nats per target token over the first train.eval_samples held-out
    sequences, the same ones for every layout. `goes_on` is called before each batch; None: it
    returned False, on every rank."""
    config, mesh = train.config.train, train.mesh
    size, samples, dp = config.micro_batch_size, config.eval_samples, mesh.batch.size
    microbatches = min(train.config.num_microbatches(dp), -(-samples // (dp * size)))
    # summed loss, number of target tokens
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for tokens, targets in heldout_batches(
        heldout,
        seq_len=config.seq_len,
        num_samples=samples,
        dp_rank=mesh.batch.rank,
        dp_size=dp,
        rows=size * microbatches,
    ):
        if not goes_on():
            return None
        total += torch.stack([value.double() for value in train.evaluate(tokens, targets)])
    return (total[0] / total[1]).item()


def compare_to_unigram(loss: float, unigram: float) -> str:
    """Compare a held-out loss with a unigram model's, in words. The loss is above it early in
    training, or if the held-out text is of another kind than the training text."""
    side, difference = "below" if loss <= unigram else "above", abs(unigram - loss)
    model = f"a unigram model's {unigram:.3f}"
    return f"held-out loss {loss:.3f} nats per token, {difference:.3f} {side} {model}"
