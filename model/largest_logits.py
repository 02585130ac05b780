"""The largest logit of each head in a step, for QK-clip (training/qk_clip.py).

None of torch's operators for attention returns it. (cuDNN can, through Transformer Engine's
`return_max_logit`.) Flash attention returns the logarithm of the sum of a row's exponentials, which
lies above the row's largest logit by up to log S. So it takes a pass of its own: queries times keys
once more (`Mask.largest_logits`), rounded to the dtype of activations as all products are.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model.mask import Mask
from parallel.context import Attend, SplitAttention


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
            found, self.unseen = self.unseen.split([q.shape[2], len(self.unseen) - q.shape[2]])
            with torch.no_grad():
                found.copy_(found.maximum(self.mask.largest_logits(q, k)))
        return self.mask(q, k, v)
