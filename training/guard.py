"""Decides which updates are made: those of steps whose loss and gradient are finite, and whose loss
is not far above recent losses.

    loss, norm ──► guard ──► norm      the optimizer updates with the clipped gradient
                        └──► inf       it drops the gradient: weights, moments and bias correction
                                       stay as they are

Loss and norm are the same on every rank, so the decision is too. (The loss is equal to the last
bit, unless a library sums in another order on another tp rank; runtime/health/replicas.py detects
this.) All of it stays on the device: the host reads the number of consecutive bad steps only when
it logs, and then runtime/checkpoint/rollback.py may go back. While steps are bad, checkpoints are
saved only on request and at the end: an update before the bad steps may have ruined the weights.

A spike is a loss more than `guard.spike_sigmas` standard deviations above the mean of the last 128
losses, of which 64 must be known (as in OLMo-core's SkipStepOptimizer,
https://github.com/allenai/OLMo-core). The loss of a skipped step counts among the last 128 too, so
the guard adapts if a new kind of text raises the loss permanently.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW = 128  # losses


class UpdateGuard:
    """Decides once per step, on every rank; all its state is on `device`.

    Args:
        spike_sigmas: see above; 0: no loss is too high.
    """

    def __init__(self, spike_sigmas: float, device: str) -> None:
        self.spike_sigmas = spike_sigmas if spike_sigmas else math.inf
        # nan: not known, or not finite
        self.recent = torch.full((WINDOW,), math.nan, dtype=torch.float64, device=device)
        # number of consecutive bad steps, up to the last one
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def __call__(self, loss: Tensor, norm: Tensor) -> Tensor:
        """The norm, or infinity if this step must not update. Both arguments are scalars; the
        result has the dtype of the norm."""
        loss = loss.double()
        known = self.recent.isfinite()
        count = known.sum()
        mean = self.recent.nansum() / count
        deviation = (self.recent - mean).square().nansum().div(count).sqrt()
        spikes = (count >= WINDOW // 2) & (loss > mean + self.spike_sigmas * deviation)
        bad = spikes | ~loss.isfinite() | ~norm.isfinite()
        self.recent = torch.cat(
            [self.recent[1:], torch.where(loss.isfinite(), loss, math.nan).view(1)]
        )
        self.bad_in_a_row = (self.bad_in_a_row + 1) * bad
        return torch.where(bad, math.inf, norm)

    def recent_losses(self) -> list[float | None]:
        """The recent losses for a checkpoint, so that a resumed run decides like one that was never
        stopped. JSON has no nan, so nan becomes None."""
        return [value if math.isfinite(value) else None for value in self.recent.tolist()]

    def restore(self, recent_losses: Sequence[float | None], bad_in_a_row: int) -> None:
        """Continue after the last WINDOW of these losses and `bad_in_a_row` bad steps."""
        values = [math.nan] * WINDOW
        values += [math.nan if value is None else value for value in recent_losses]
        self.recent.copy_(torch.tensor(values[-WINDOW:], dtype=torch.float64))
        self.bad_in_a_row.fill_(bad_in_a_row)
