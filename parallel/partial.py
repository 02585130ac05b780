"""Gradients of which each tp rank has only a partial sum; they are summed over tp once per step.

| weight, whole on every tp rank         | each rank's gradient covers                          |
|----------------------------------------|------------------------------------------------------|
| norm, with sequence parallelism        | its part of the sequence                             |
| norm of query or key heads, always     | the heads it has                                     |
| shared key/value heads (fewer than tp) | the query heads it has                               |
| other norm, no sequence parallelism    | everything: equal on all ranks, so it is not summed  |

The gradients of the first three rows must be summed, that of the last must not, and neither mistake
raises an error. So every weight declares its case where it is created (`gradient_is_partial`,
parameter.py).

The sum is taken after the data-parallel reduction, on this rank's FSDP shard of each gradient, in
the optimizer's dtype. One all-reduce per step sums them all together (as Megatron-LM does after
backward; Korthikanti et al. 2022, section 4.2.2).
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
        """Sum the gradients in place; call it after the last backward."""
        if self.group.size() == 1 or not self.weights:
            return
        gradients = [each.gradient.to_local() for each in self.weights]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        if not together.numel():
            # FSDP has sharded a few short norms over more ranks than they have elements: no rank of
            # this tp group has any
            return
        # 2 · D / dp_shard elements for the norms of each block
        dist.all_reduce(together, group=self.group)
        for gradient, summed in zip(
            gradients, together.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))
