"""Data parallelism over one rank, without FSDP. (Other tp ranks may have the same norms.)

FSDP2 over one rank computes the same numbers, but keeps a second copy of every weight and passes
every gradient through two buffers. Here

    master    is the parameter itself: what the optimizer, checkpoints and the gradient norm see
    compute   is a copy in the compute dtype, made once per step and freed after it; if the dtypes
              are equal, it is the master
    sum       has the gradients of all micro-batches, in the wider of reduce and master dtype; in
              the end it becomes the gradient that the optimizer reads, in the master dtype
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel.layer import Layer, layers_of
from parallel.placement import as_dtensor_like, local_part
from parallel.weight_gradient import Place, sum_dtype


class WholeWeight:
    """The weight of one layer."""

    def __init__(self, layer: Layer, compute: torch.dtype, reduce: torch.dtype) -> None:
        self.layer, self.master, self.compute = layer, layer.weight, compute
        dtype = sum_dtype(True, 0, compute, self.master.dtype, reduce)
        assert dtype is not None
        self.sum = Place()
        layer.gradient.sum_in(self.sum, dtype)
        # all dtypes are equal: forward uses the master itself, and there is no copy to make or free
        self.is_one = compute == self.master.dtype == dtype

    def begin(self) -> None:
        """Let forward see the weight in the compute dtype."""
        assert self.sum.total is None, "the step before has not ended"
        if self.is_one:
            return
        local = local_part(self.master.detach()).to(self.compute)
        parameter = nn.Parameter(as_dtensor_like(local, self.master))
        parameter.register_post_accumulate_grad_hook(self._absorb)
        self.layer.use_weight(parameter)

    def _absorb(self, parameter: Tensor) -> None:
        """Add a gradient that autograd has put into the parameter: that of compiled code. All other
        code has added it itself (weight_gradient.py)."""
        if parameter.grad is not None:
            assert self.layer.gradient.rows is None, "the gradient is of all rows"
            self.layer.gradient.add(local_part(parameter.grad))
            parameter.grad = None

    def end(self) -> None:
        """Free the copy, and make the sum the gradient of the master."""
        self.layer.use_weight(self.master)
        total, self.sum.total = self.sum.total, None
        if total is not None:
            # contiguous, as FSDP's: an all-reduce of two copies (pipeline/tied.py) ignores strides
            total = total.to(self.master.dtype).contiguous()
            self.master.grad = as_dtensor_like(total, self.master)


class WholeWeights:
    """The weights of a rank's stages. It is told when as `FSDPSwitches` is (data.py)."""

    def __init__(
        self, stages: Iterable[nn.Module], compute: torch.dtype, reduce: torch.dtype
    ) -> None:
        self._weights = {
            stage: [WholeWeight(layer, compute, reduce) for layer in layers_of(stage)]
            for stage in stages
        }

    def begin(self, stage: nn.Module) -> None:
        for weight in self._weights[stage]:
            weight.begin()

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        pass

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        if last:  # not at the end of the step: this frees copies
            self.end(stage)

    after_weight_gradients = after_backward

    def end(self, stage: nn.Module) -> None:
        for weight in self._weights[stage]:
            weight.end()
