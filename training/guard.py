"""Which updates are made: those of steps whose loss and gradient are finite, and whose loss is not
far above the recent ones.

    loss, norm ──► guard ──► norm      the optimizer updates with the clipped gradient
                        └──► inf       it drops the gradient: weights, moments and bias correction
                                       stay as they are

Loss and norm are the same on every rank (the loss to the last bit, unless a library sums in another
order for another tp rank; replicas.py would tell), so is the verdict, and all of it stays on the
device: the host reads how many steps were bad in a row when it logs, and what it does then is in
rollback.py. While steps are bad nothing is saved but on request and at the end: it may be an update
before them that ruined the weights.

A spike is a loss more than `guard.spike_sigmas` standard deviations above the mean of the last 128,
of which 64 must be known (as OLMo-core's SkipStepOptimizer decides,
https://github.com/allenai/OLMo-core). A skipped step's loss counts among the last 128 too: where a
new kind of text lifts the loss for good, the guard gets used to it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from errors import RunFailed

WINDOW = 128  # losses


class UpdateGuard:
    """Called once a step, on every rank; all state is on `device`.

    Args:
        spike_sigmas: see above; 0: no loss is too high.
    """

    def __init__(self, spike_sigmas: float, device: str) -> None:
        self.spike_sigmas = spike_sigmas if spike_sigmas else math.inf
        # nan: not known, or not finite
        self.recent = torch.full((WINDOW,), math.nan, dtype=torch.float64, device=device)
        # steps, up to the last one
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def __call__(self, loss: Tensor, norm: Tensor) -> Tensor:
        """The norm, or infinity where this step must not update. Both scalars; the result has the
        norm's dtype."""
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
        """What a checkpoint keeps, so that a resumed run decides as one that never stopped. JSON
        has no nan: None."""
        return [value if math.isfinite(value) else None for value in self.recent.tolist()]

    def restore(self, recent_losses: Sequence[float | None], bad_in_a_row: int) -> None:
        """Go on after the last WINDOW of these losses, and so many bad steps."""
        values = [math.nan] * WINDOW
        values += [math.nan if value is None else value for value in recent_losses]
        self.recent.copy_(torch.tensor(values[-WINDOW:], dtype=torch.float64))
        self.bad_in_a_row.fill_(bad_in_a_row)


def check_not_in_vain(last_step: int, made: int, bad_in_a_row: int) -> None:
    """A run that reaches its last step has failed, and is not finished, if of the steps `made`
    since this start the last ones, more than half, were without an update: what diverged must not
    pass for trained. Nothing more is saved.

    Raises RunFailed on every rank.
    """
    if 2 * bad_in_a_row > made:
        since = f"after step {last_step - bad_in_a_row} " if bad_in_a_row < made else ""
        why = "loss or gradient were not finite, or the loss a spike"
        said = f"no update was made {since}up to the last step, {last_step}: {why}"
        raise RunFailed(f"{said}; try another optimizer.lr")
