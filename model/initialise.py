"""Initial weights: a function of (seed, global name), so every layout starts with the same bits."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel.parameter import Constant, weights_of
from parallel.placement import local_region

# A global tensor is drawn in blocks of whole rows, each with its own generator, so that a rank
# draws only the blocks whose rows it holds. A block has about this many numbers.
BLOCK_NUMBERS = 1 << 16


def draw_rows(name: str, shape: Sequence[int], rows: range, std: float, seed: int) -> Tensor:
    """Draw rows `rows` of the global tensor `name` of `shape`: float32 on the CPU, the same bits on
    every rank."""
    height = max(1, BLOCK_NUMBERS // math.prod(shape[1:]))
    drawn = []
    for block in range(rows.start // height, -(-rows.stop // height)):
        # torch keeps 32 bits of the seed: of 6.6 million blocks of 405B, some 5,000 pairs are equal
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        first = block * height
        numbers = torch.randn((min(height, shape[0] - first), *shape[1:]), generator=generator)
        drawn.append(numbers[max(rows.start - first, 0) : rows.stop - first])
    return torch.cat(drawn).mul_(std)


@torch.no_grad()
def initialise(stage: nn.Module, seed: int) -> None:
    """Fill this rank's part of every weight of a materialised, sharded stage, as described by its
    `initial` (parallel/parameter.py)."""
    for each in weights_of(stage):
        local, initial = each.sharded.to_local(), each.spec.initial
        if isinstance(initial, Constant):
            local.fill_(initial.value)
        elif local.numel():
            rows, *others = local_region(each.sharded)
            numbers = draw_rows(each.global_name, each.spec.shape, rows, initial.std, seed)
            local.copy_(numbers[(slice(None), *(slice(part.start, part.stop) for part in others))])
