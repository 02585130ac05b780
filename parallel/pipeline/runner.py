"""Carries a schedule out: one training step's forwards and backwards on this rank's stages.

One rank without a pipeline runs the same code: a pipeline of one stage, where 1F1B is gradient accumulation.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from parallel.data import ZeroStage, reshard
from parallel.pipeline.schedule import Action, Kind
from parallel.pipeline.transfer import Transfers


class PipelineRunner:
    """Runs actions on stages.

    Args:
        stages: this rank's modules by global stage index; called as `stage(hidden, batch)`, where hidden is None on stage 0,
            and returning hidden states, or the loss (a scalar) on the last stage.
        num_stages: of the whole pipeline.
        transfers: the point-to-point layer.
        zero: when FSDP gathers, reduces and reshards.
    """

    def __init__(self, stages: dict[int, nn.Module], num_stages: int, transfers: Transfers, zero: ZeroStage) -> None:
        self.stages, self.num_stages, self.transfers, self.zero = stages, num_stages, transfers, zero

    def step(
        self, actions: Sequence[Action], microbatches: Sequence[object], scale_loss: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Forward and backward of every micro-batch. Gradients are left, reduced, in the parameters.

        Args:
            actions: this rank's part of the schedule.
            microbatches: the inputs, handed to every stage.
            scale_loss: from a micro-batch's summed loss to what is differentiated: the division by the global number of
                target tokens.

        Returns:
            The scaled losses' sum on the rank with the last stage, else None.
        """
        for stage in self.stages.values():
            self.zero.begin_step(stage)
        backwards_left = {s: len(microbatches) for s in self.stages}
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (stage, micro-batch) → its input and output
        total: Tensor | None = None

        received = self.transfers.exchange(None, None, actions[0])
        for action, upcoming in zip(actions, [*actions[1:], None], strict=True):
            s, m = action.stage, action.microbatch
            result: Tensor | None
            if action.kind is Kind.FORWARD:
                hidden = received.requires_grad_() if received is not None else None
                result = self.stages[s](hidden, microbatches[m])
                assert result is not None
                if s == self.num_stages - 1:
                    result = scale_loss(result)
                    total = result.detach() if total is None else total + result.detach()
                kept[s, m] = (hidden, result)
                result = result if s < self.num_stages - 1 else None  # the loss goes nowhere
            else:
                backwards_left[s] -= 1
                if backwards_left[s] == 0:
                    self.zero.begin_last_backward(self.stages[s])
                hidden, output = kept.pop((s, m))
                torch.autograd.backward(output, received)
                result = hidden.grad if hidden is not None else None
            received = self.transfers.exchange(action, result, upcoming)
        self.transfers.finish()
        assert not kept, "the schedule left forwards without their backward"
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[object]) -> Tensor | None:
        """Forward only, in order; the summed loss of all micro-batches on the rank with the last stage, else None."""
        actions = [Action(Kind.FORWARD, s, m) for m in range(len(microbatches)) for s in sorted(self.stages)]
        total: Tensor | None = None
        received = self.transfers.exchange(None, None, actions[0])
        for action, upcoming in zip(actions, [*actions[1:], None], strict=True):
            result = self.stages[action.stage](received, microbatches[action.microbatch])
            if action.stage == self.num_stages - 1:
                total = result if total is None else total + result
                result = None
            received = self.transfers.exchange(action, result, upcoming)
        self.transfers.finish()
        for stage in self.stages.values():
            reshard(stage)
        return total
