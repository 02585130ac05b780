"""Gradients that each tp rank knows only in part: summed over tp, once per step.

| weight, whole on every tp rank           | each rank's gradient covers                             |
|------------------------------------------|---------------------------------------------------------|
| a norm's, with sequence parallelism      | its own part of the sequence                            |
| a norm's of q's or k's heads, always     | the heads it has                                        |
| shared key/value heads (fewer than tp)   | the query heads it has                                  |
| another norm's, without                  | everything: the same on all ranks, to be summed by none |

All but the last must be summed, and that one must not: both mistakes are silent. A module that holds such a weight says so
in its attribute `gradient_is_partial`.

The sum is taken after the data-parallel reduction, over what FSDP left of each gradient, in the optimizer's dtype, and all of
them travel together: one all-reduce per step (as Megatron-LM does after backward; Korthikanti et al. 2022, section 4.2.2).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


class PartialGradients:
    """The weights of this rank's stages whose gradients are partial sums over tp."""

    def __init__(self, stages: Iterable[nn.Module], group: ProcessGroup) -> None:
        modules = [module for stage in stages for module in stage.modules()]
        self.weights = [module.weight for module in modules if getattr(module, "gradient_is_partial", False)]
        self.group = group

    @torch.no_grad()
    def sum_over_tp(self) -> None:
        """After the last backward, in place."""
        if self.group.size() == 1 or not self.weights:
            return
        gradients = []
        for weight in self.weights:
            assert isinstance(weight, nn.Parameter)
            assert isinstance(weight.grad, DTensor)
            gradients.append(weight.grad.to_local())
        together = torch.cat([gradient.flatten() for gradient in gradients])
        if not together.numel():
            return  # FSDP has cut a few short norms over more ranks than they have numbers: all of this tp group have none
        dist.all_reduce(together, group=self.group)  # (2 L + 1) · D / dp_shard numbers, if norms, for L blocks in the stage
        for gradient, summed in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
