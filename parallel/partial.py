"""Gradients of which each tp rank has only a partial sum; they are summed over tp once per step.

| weight, whole on every tp rank         | each rank's gradient covers                          |
|----------------------------------------|------------------------------------------------------|
| norm, router, with sequence parallel.  | its part of the sequence                             |
| norm of query or key heads, always     | the heads it has                                     |
| shared key/value heads (fewer than tp) | the query heads it has                               |
| norm, router, without it               | everything: equal on all ranks, so it is not summed  |

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


@torch.no_grad()
def sum_over_tp(weights: Iterable[NamedWeight], group: ProcessGroup) -> None:
    """Sum the partial gradients in place; call it after the last backward."""
    if group.size() == 1:
        return
    gradients = [w.gradient.to_local() for w in weights if w.spec.gradient_is_partial]
    if not any(gradient.numel() for gradient in gradients):
        return  # FSDP may have sharded a few short norms over more ranks than they have elements
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=group)  # 2 · D / dp_shard elements for the norms of each block
    parts = together.split([gradient.numel() for gradient in gradients])
    for gradient, summed in zip(gradients, parts, strict=True):
        gradient.copy_(summed.view_as(gradient))
