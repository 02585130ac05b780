"""The loss on held-out text, every train.eval_interval steps and after the last."""

import sys

import torch
import torch.distributed as dist

from data.dataset import Mixture
from data.loader import heldout_batches
from runtime.listener import Listener, Run
from runtime.messages import log


class Evaluation(Listener):
    """Evaluates at the configured interval and adds the loss to the step's record.

    Args:
        heldout: the held-out split; None if there is no evaluation.
        unigram: loss, in nats per token, of a model that knows only token frequencies, if known.
    """

    def __init__(self, heldout: Mixture | None, unigram: float | None) -> None:
        self.heldout, self.unigram = heldout, unigram
        self.loss: float | None = None

    def after_step(self, run: Run) -> None:
        if run.is_due(run.config.train.eval_interval):
            with run.pause("evaluation"):
                loss = self._evaluate(run)
                if loss is not None:
                    self.loss = loss
                    run.found({"eval_loss": loss})

    def ends(self, run: Run) -> None:
        if self.loss is None or self.unigram is None or run.end_reason:
            return
        if dist.get_rank() == 0:
            log(compare_to_unigram(self.loss, self.unigram), sys.stdout)

    def _evaluate(self, run: Run) -> float | None:
        """Compute the mean loss in nats per target token over the first train.eval_samples held-out
        sequences, the same ones for every layout. None if a stop is agreed on before the end."""
        assert self.heldout is not None
        train, config, mesh = run.train, run.config.train, run.train.mesh
        size, samples, dp = config.micro_batch_size, config.eval_samples, mesh.dp_size
        microbatches = min(run.config.num_microbatches(dp), -(-samples // (dp * size)))
        # summed loss, number of target tokens
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for tokens, targets in heldout_batches(
            self.heldout,
            seq_len=config.seq_len,
            num_samples=samples,
            dp_rank=mesh.dp_rank,
            dp_size=dp,
            rows=size * microbatches,
        ):
            if run.stop.agree():
                return None
            run.watchdog.beat()  # a batch takes at most as long as a step
            total += torch.stack([value.double() for value in train.evaluate(tokens, targets)])
        return (total[0] / total[1]).item()


def compare_to_unigram(loss: float, unigram: float) -> str:
    """Compare a held-out loss with a unigram model's, in words. The loss is above it early in
    training, or if the held-out text is of another kind than the training text."""
    side, difference = "below" if loss <= unigram else "above", abs(unigram - loss)
    model = f"a unigram model's {unigram:.3f}"
    return f"held-out loss {loss:.3f} nats per token, {difference:.3f} {side} {model}"
