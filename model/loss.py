"""Cross-entropy over a vocabulary that is cut over tp: no rank ever holds the whole logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.collectives import all_reduce

IGNORE = -100  # a target that is no target: padding


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The *sum* over target tokens of −log softmax(logits)[target], logits cut over the vocabulary (Shoeybi et al., section 3).

    | pass     | computes                                | local shapes              | communication over tp       |
    |----------|-----------------------------------------|---------------------------|-----------------------------|
    | forward  | m = max z; s = Σ exp(z − m); t = z[y]−m | [T, V/tp] → scalar        | all-reduce max T, sum 2 · T |
    | backward | dz = (exp(z − m) / s − onehot(y)) · dl  | scalar → [T, V/tp]        | none                        |

    Every tp rank returns the same loss. Arithmetic is float32 (float64 for float64 logits); the exponentials are
    written over the logits, and the gradient over those: nobody else needs them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_row: int, group: ProcessGroup) -> Tensor:
        z = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        peak = all_reduce(z.amax(dim=-1), group, dist.ReduceOp.MAX)  # [T]
        z.sub_(peak.unsqueeze(-1))
        local = targets - first_row
        mine = (local >= 0) & (local < z.shape[-1])
        index = local.masked_fill(~mine, 0).unsqueeze(-1)
        target_logit = z.gather(-1, index).squeeze(-1).masked_fill(~mine, 0)
        exponentials = z.exp_()
        sums = all_reduce(torch.stack((exponentials.sum(dim=-1), target_logit)), group)  # [2, T]
        counted = targets != IGNORE
        losses = (sums[0].log() - sums[1]).masked_fill(~counted, 0)
        ctx.save_for_backward(exponentials, sums[0], index, mine, counted)
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, index, mine, counted = ctx.saved_tensors
        scale = torch.where(counted, dloss, 0)  # [T]
        gradient = exponentials.mul_((scale / total).unsqueeze(-1))
        at_target = gradient.gather(-1, index) - torch.where(mine, scale, 0).unsqueeze(-1)  # [T, 1]
        gradient.scatter_(-1, index, at_target)  # not scatter_add_, whose order of additions is free on a GPU
        return gradient.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, first_row: int, group: ProcessGroup) -> Tensor:
    """Sum of the losses of all target tokens, a scalar in float32 (float64).

    Args:
        logits: [..., V/tp], this tp rank's columns, of which the first is row `first_row` of the vocabulary. They are consumed:
            overwritten if float32 (float64).
        targets: [...] token ids of the whole vocabulary, or `IGNORE`.
        first_row: see above.
        group: the tp group.
    """
    return VocabParallelCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), first_row, group)
