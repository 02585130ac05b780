"""The largest logit of each head in a step, for QK-clip (training/qk_clip.py).

None of torch's operators for attention returns it. (cuDNN can, through Transformer Engine's
`return_max_logit`.) Flash attention returns the logarithm of the sum of a row's exponentials, which
lies above the row's largest logit by up to log S. So it takes a pass of its own: queries times keys
once more (`measure`), rounded to the dtype of activations as all products are.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from model.mask import Mask, scores_bias
from parallel.context import Attend, SplitAttention

LOGITS_BYTES = 256 * 2**20  # at once, in `measure`


class LargestLogits:
    """Those of one attention layer: `found` [H/tp], over this rank's queries since `begin`."""

    def __init__(self, heads: int, device: str, exact: torch.dtype) -> None:
        self.found = torch.full((heads,), -torch.inf, dtype=exact, device=device)
        self.wanted = False  # whether the forwards with gradients that follow note logits
        self.noted = False  # whether `watch` was called in one of them

    def begin(self, wanted: bool) -> None:
        self.found.fill_(-torch.inf)
        self.wanted, self.noted = wanted, False

    def watch(self, attend: Attend) -> Attend:
        """`attend` for the next forward, in which logits are noted if they are wanted."""
        if not self.wanted or not torch.is_grad_enabled():
            return attend
        assert isinstance(attend, SplitAttention)
        self.noted = True
        noting = [_Noting(self.found, each) for each in attend.of_chunks]
        return replace(attend, of_chunks=noting)


class _Noting:
    """Attention with a mask, which notes the largest logits in its first forward. (Others are
    recomputations.) Heads come in pieces, in their order."""

    def __init__(self, found: Tensor, attend: Attend) -> None:
        assert isinstance(attend, Mask)
        self.unseen, self.mask = found, attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.unseen):
            found, self.unseen = self.unseen[: q.shape[2]], self.unseen[q.shape[2] :]
            with torch.no_grad():
                found.copy_(found.maximum(measure(self.mask, q, k)))
        return self.mask(q, k, v)


def measure(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """The largest q·k/√E of each head, over the keys that queries see, [H] in the dtype of q; q
    and k are as for a call. Some rows of queries at a time: all logits would be [B, H, S', S]."""
    assert mask.positions is not None
    q, k = (t.permute(1, 2, 0, 3) for t in (q, k))  # [B, heads, S, E]
    q = q / math.sqrt(q.shape[-1])  # before the product: float16 ends at 65,504
    found = q.new_full(q.shape[1:2], -math.inf)
    rows = max(1, LOGITS_BYTES // (q[:, :, 0, 0].nbytes * k.shape[2]))
    for begin in range(0, q.shape[2], rows):
        part, where = q[:, :, begin : begin + rows], mask.positions[begin : begin + rows]
        at = mask.first + begin
        # none of these queries sees a key before `start`; from `hides` on, some are hidden
        start = 0 if mask.window is None else max(0, at + 1 - mask.window)
        hides = start if mask.documents or mask.window else at
        # [B, K, H/K · rows, keys]; `bmm`, of which selective checkpointing keeps no result
        part = part.unflatten(1, (k.shape[1], -1))
        logits = part.flatten(2, 3) @ k[:, :, start : at + len(where)].mT
        logits = logits.unflatten(2, part.shape[2:4])
        bias = scores_bias(where, q.dtype, mask.window, at - hides).unsqueeze(1)
        # not added: an infinite logit that is hidden would be nan
        logits[..., hides - start :].masked_fill_(bias < 0, -math.inf)
        found = found.maximum(logits.amax((0, 3, 4)).flatten())
    return found
