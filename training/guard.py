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
FIRST_SCALE, GROWS_AFTER = 2.0**16, 2000  # those of torch.amp.GradScaler


class UpdateGuard:
    """Decides once per step, on every rank; all its state is on `device`.

    Args:
        spike_sigmas: see above; 0: no loss is too high.
        scales_loss: see `_change_scale`; else the scale is always 1.
    """

    def __init__(self, spike_sigmas: float, device: str, scales_loss: bool = False) -> None:
        self.spike_sigmas = spike_sigmas if spike_sigmas else math.inf
        # nan: not known, or not finite
        self.recent = torch.full((WINDOW,), math.nan, dtype=torch.float64, device=device)
        # number of consecutive bad steps, up to the last one
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.scales_loss = scales_loss
        first = FIRST_SCALE if scales_loss else 1.0
        self.loss_scale = torch.full((), first, dtype=torch.float32, device=device)
        # number of consecutive steps with a finite norm, since the scale was last changed
        self.finite_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

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
        overflows = ~norm.isfinite()
        bad = spikes | ~loss.isfinite() | overflows
        self.recent = torch.cat(
            [self.recent[1:], torch.where(loss.isfinite(), loss, math.nan).view(1)]
        )
        in_a_row = (self.bad_in_a_row + 1) * bad
        if self.scales_loss:
            excused = overflows & loss.isfinite() & (self.loss_scale > 1) & (self.bad_in_a_row == 0)
            in_a_row = in_a_row * ~excused
            self._change_scale(overflows)
        self.bad_in_a_row = in_a_row
        return torch.where(bad, math.inf, norm)

    def _change_scale(self, overflows: Tensor) -> None:
        """float16 has no numbers below 2⁻²⁴, where many gradients are. So with train.dtype=float16
        the loss is multiplied by a scale before backward, and the gradients are divided by it after
        they are reduced (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2):

            norm is not finite            the scale was too large: it is halved, no update is made
            GROWS_AFTER finite norms      the scale is doubled
            in a row

        A power of two changes no bit of what does not overflow or vanish. A step that overflows
        while its loss is finite is not bad, unless the scale is 1 already or the step before was
        bad.
        """
        finite = (self.finite_in_a_row + 1) * ~overflows
        grows = finite >= GROWS_AFTER
        halved = (self.loss_scale / 2).clamp(min=1)
        self.loss_scale = torch.where(overflows, halved, self.loss_scale * (1 + grows))
        self.finite_in_a_row = finite * ~grows

    def scale_state(self) -> tuple[float, int] | None:
        """The scale and `finite_in_a_row`, for a checkpoint; None: the loss is not scaled."""
        if not self.scales_loss:
            return None
        return self.loss_scale.item(), int(self.finite_in_a_row.item())

    def recent_losses(self) -> list[float | None]:
        """The recent losses for a checkpoint, so that a resumed run decides like one that was never
        stopped. JSON has no nan, so nan becomes None."""
        return [value if math.isfinite(value) else None for value in self.recent.tolist()]

    def restore(
        self,
        recent_losses: Sequence[float | None],
        bad_in_a_row: int,
        scale: tuple[float, int] | None = None,
    ) -> None:
        """Continue after the last WINDOW of these losses and `bad_in_a_row` bad steps, with the
        `scale_state` of a run that had one."""
        values = [math.nan] * WINDOW
        values += [math.nan if value is None else value for value in recent_losses]
        self.recent.copy_(torch.tensor(values[-WINDOW:], dtype=torch.float64))
        self.bad_in_a_row.fill_(bad_in_a_row)
        if self.scales_loss:
            first, finite = scale or (FIRST_SCALE, 0)
            self.loss_scale.fill_(first)
            self.finite_in_a_row.fill_(finite)
