"""Initial weights: a function of (seed, parameter name), so every layout starts from the same bits."""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.config import ModelConfig
from model.transformer import Transformer
from parallel.placement import local_region

# A global tensor is drawn in blocks of whole rows, each from its own generator, so that a rank draws only the rows it holds:
# about this many numbers a block.
BLOCK_NUMBERS = 1 << 16


def canonical_name(name: str, config: ModelConfig) -> str:
    """The global tensor behind a parameter (or, with a prefix or suffix, behind what belongs to it).

    With tied embeddings the head's weight *is* the embedding's: it starts from the same bits, and where each global tensor
    counts once (gradient norm, checkpoints), only names that are canonical count.
    """
    return name.replace("head.weight", "embedding.weight") if config.tie_embeddings else name


def standard_deviation(name: str, config: ModelConfig) -> float:
    """init_std, and 1 / sqrt(2 L) of it for the matrices that write into the residual stream: 2 L independent terms are added
    to it, and their sum should not grow with depth (GPT-2, Radford et al. 2019, section 2.3)."""
    depth_scaled = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    return config.init_std / math.sqrt(2 * config.num_layers) if depth_scaled else config.init_std


def draw_rows(name: str, shape: torch.Size, rows: range, std: float, seed: int) -> Tensor:
    """Rows `rows` of the global matrix `name` of `shape`: float32 on the CPU, the same bits whoever draws them."""
    height = max(1, BLOCK_NUMBERS // math.prod(shape[1:]))
    drawn = []
    for block in range(rows.start // height, -(-rows.stop // height)):
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        first = block * height
        numbers = torch.randn((min(height, shape[0] - first), *shape[1:]), generator=generator)
        drawn.append(numbers[max(rows.start - first, 0) : rows.stop - first])
    return torch.cat(drawn).mul_(std)


@torch.no_grad()
def initialise(stage: Transformer, seed: int) -> None:
    """Fill this rank's part of every parameter of a materialised, sharded stage: normal matrices, norm weights of one."""
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if parameter.ndim == 1:
            local.fill_(1.0)
        elif local.numel():
            rows, columns = local_region(parameter)
            name = canonical_name(name, stage.config)
            numbers = draw_rows(name, parameter.shape, rows, standard_deviation(name, stage.config), seed)
            local.copy_(numbers[:, columns.start : columns.stop])
