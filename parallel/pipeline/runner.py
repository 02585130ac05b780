"""Execute a program: the forwards and backwards of a training step on this rank's stages.

A run without pipeline parallelism uses the same code, as a pipeline of one stage, in which 1F1B is
gradient accumulation.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel.data import DataParallel
from parallel.layer import gradients_of
from parallel.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    need_of,
    result_of,
)
from parallel.pipeline.lower import Exchange, Program
from parallel.pipeline.transfer import Transfers
from parallel.weight_gradient import Job, deferring, run_jobs

# its context is entered around an action, to time it (runtime/profiling/trace.py)
Recorder = Callable[[Action], AbstractContextManager[object]]


class PipelineRunner:
    """Runs programs on this rank's stages.

    Args:
        stages: this rank's modules by global stage index. They are called as `stage(hidden,
            batch)`, where hidden is None on stage 0, and return hidden states, or on the last stage
            the loss (a scalar).
        num_stages: the number of stages of the whole pipeline.
        transfers: passes tensors between stages.
        data: gathers weights, and reduces gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        transfers: Transfers,
        data: DataParallel,
    ) -> None:
        self.stages, self.num_stages = stages, num_stages
        self.transfers, self.data = transfers, data
        self.gradients = {s: gradients_of(stage) for s, stage in stages.items()}

    def run(
        self, program: Program, microbatches: Sequence[object], record: Recorder = nullcontext
    ) -> Tensor | None:
        """Run each micro-batch forward and backward; the parameters then have reduced gradients.
        Under `torch.no_grad`, run a program of forwards only.

        Args:
            program: this rank's program.
            microbatches: the inputs, passed to every stage.
            record: its context is entered around each action.

        Returns:
            The sum of the losses on the rank with the last stage, else None.
        """
        for stage in self.stages.values():
            self.data.begin(stage)
        # stage → number of micro-batches whose gradients are not complete
        self._backwards_left = Counter({s: len(microbatches) for s in self.stages})
        # (stage, micro-batch) → its input, and the end of its graph. The output itself is not kept,
        # because only the next stage needs it.
        self._kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        # (stage, micro-batch) → its jobs between the two halves of a split backward
        self._deferred: dict[tuple[int, int], list[Job]] = {}
        total: Tensor | None = None

        for item in program:
            if isinstance(item, Exchange):
                self.transfers.exchange(item)
                continue
            received, result = self._take(item), None
            with record(item):
                if item.kind is FORWARD:
                    result = self._forward(item, received, microbatches[item.microbatch])
                    if item.stage == self.num_stages - 1:
                        total = result.detach() if total is None else total + result.detach()
                elif item.kind is BACKWARD_WEIGHT:
                    self._weight_gradients(item)
                else:
                    result = self._backward(item, received)
            self._give(item, result)
            del received, result  # free them as soon as nothing else needs them
        self.transfers.finish()
        for stage in self.stages.values():
            self.data.end(stage)
        assert not self._kept, "the schedule left forwards without their backward"
        assert not self._deferred, "the schedule left backwards without their weight gradients"
        return total

    def _forward(self, action: Action, hidden: Tensor | None, microbatch: object) -> Tensor:
        trains = torch.is_grad_enabled()
        if hidden is not None:
            hidden.requires_grad_(trains)
        output: Tensor = self.stages[action.stage](hidden, microbatch)
        if trains:
            self._kept[action.stage, action.microbatch] = (hidden, get_gradient_edge(output))
        return output

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Run backward from the gradient of the output; returns that of the input, if any."""
        kind, s, m = action
        completes = kind is not BACKWARD_INPUT
        self._backwards_left[s] -= completes
        last = self._backwards_left[s] == 0
        self.data.before_backward(self.stages[s], last)
        hidden, end = self._kept.pop((s, m))
        if completes:
            torch.autograd.backward(end, gradient)
            self.data.after_backward(self.stages[s], last)
        else:
            with deferring(self.gradients[s]) as self._deferred[s, m]:
                torch.autograd.backward(end, gradient)
        return hidden.grad if hidden is not None else None

    def _weight_gradients(self, action: Action) -> None:
        _, s, m = action
        self._backwards_left[s] -= 1
        run_jobs(self._deferred.pop((s, m)))
        self.data.after_weight_gradients(self.stages[s], last=self._backwards_left[s] == 0)

    def _take(self, action: Action) -> Tensor | None:
        need = need_of(action, self.num_stages)
        return None if need is None else self.transfers.take(need)

    def _give(self, action: Action, result: Tensor | None) -> None:
        message = result_of(action, self.num_stages)
        if message is not None:
            assert result is not None
            self.transfers.give(message, result)
