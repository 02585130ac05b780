"""Gradients that each tp rank knows only in part: summed over tp, once per step.

| weight, whole on every tp rank         | each rank's gradient covers                          |
|----------------------------------------|------------------------------------------------------|
| a norm's, with sequence parallelism    | its own part of the sequence                         |
| a norm's of q's or k's heads, always   | the heads it has                                     |
| shared key/value heads (fewer than tp) | the query heads it has                               |
| another norm's, without                | everything: the same on all ranks, and is not summed |

All but the last must be summed, and that one must not: both mistakes are silent. So every weight
says which it is where it is made (`gradient_is_partial`, parameter.py).

The sum is taken after the data-parallel reduction, over what FSDP left of each gradient, in the
optimizer's dtype, and all of them travel together: one all-reduce per step (as Megatron-LM does
after backward; Korthikanti et al. 2022, section 4.2.2).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel.parameter import NamedWeight


class PartialGradients:
    """The weights of this rank's stages whose gradients are partial sums over tp."""

    def __init__(self, weights: Iterable[NamedWeight], group: ProcessGroup) -> None:
        self.weights = [each for each in weights if each.spec.gradient_is_partial]
        self.group = group

    @torch.no_grad()
    def sum_over_tp(self) -> None:
        """After the last backward, in place."""
        if self.group.size() == 1 or not self.weights:
            return
        gradients = [each.gradient.to_local() for each in self.weights]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        if not together.numel():
            # FSDP has cut a few short norms over more ranks than they have numbers: all of this tp
            # group have none
            return
        # 2 · D / dp_shard numbers for each block's norms
        dist.all_reduce(together, group=self.group)
        for gradient, summed in zip(
            gradients, together.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))
