"""What one rank of a world holds: parameters by FSDP's units, tokens, widths of numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from errors import UserError
from model.config import ModelConfig
from parallel.pipeline.actions import Action
from parallel.placement import chunk_range
from training.config import Config

WIDTH = {"bfloat16": 2, "float32": 4, "float64": 8}  # bytes


def world_of(path: str, config: Config, gpus: int | None) -> int:
    """The number of ranks: `gpus`, or the product of the axes, or what the file's first line says (`# world: 256`)."""
    parallel = config.parallel
    if gpus is not None:
        return gpus
    if parallel.dp_shard != -1:
        return parallel.tp * parallel.pp * parallel.dp_replicate * parallel.dp_shard
    first_line = re.match(r"# world: (\d+)\n", Path(path).read_text(encoding="utf-8"))
    if first_line is None:
        raise UserError("--gpus", None, "parallel.dp_shard=-1 takes what is left of a world nobody named", "give --gpus N")
    return int(first_line[1])


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and reduces together: the embedding, a block, or the final norm with the head.

    Shapes are those of the tp rank, before FSDP cuts their rows.
    """

    name: str  # embedding, block or head
    shapes: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)

    def padded(self, ranks: int) -> int:
        """Numbers that travel in a gather or reduction over `ranks`: rows are filled up to a multiple of them."""
        return sum(-(-rows // ranks) * ranks * columns for rows, columns in self.shapes)


@dataclass(frozen=True)
class Layout:
    """One rank's part of the job. Ranks that differ in their data-parallel coordinates alone are alike."""

    config: Config
    world: int
    pp_rank: int
    tp_rank: int = 0
    dp_shard_rank: int = 0

    @classmethod
    def of_rank(cls, config: Config, world: int, rank: int) -> "Layout":
        """Inverts the order of ranks in parallel/mesh.py."""
        _, dp_replicate, dp_shard, tp = config.parallel.mesh_shape(world)
        return cls(config, world, rank // (dp_replicate * dp_shard * tp), rank % tp, rank // tp % dp_shard)

    @cached_property
    def mesh_shape(self) -> tuple[int, int, int, int]:
        return self.config.parallel.mesh_shape(self.world)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def tp(self) -> int:
        return self.mesh_shape[3]

    @property
    def dp_shard(self) -> int:
        return self.mesh_shape[2]

    @property
    def dp_replicate(self) -> int:
        return self.mesh_shape[1]

    # --- widths, in bytes ---

    @cached_property
    def compute(self) -> int:
        return WIDTH[self.config.train.dtype]

    @cached_property
    def master(self) -> int:
        """Of weights, moments and reduced gradients between steps."""
        return self.compute if self.config.optimizer.pure_bfloat16 else max(4, self.compute)

    @cached_property
    def reduce(self) -> int:
        return 8 if self.compute == 8 else WIDTH[self.config.parallel.reduce_dtype]

    @cached_property
    def exact(self) -> int:
        """Of statistics and losses."""
        return max(4, self.compute)

    # --- tokens ---

    @cached_property
    def tokens(self) -> int:
        """T of a micro-batch: what a tp rank sees between a gather and a scatter."""
        return self.config.train.seq_len * self.config.train.micro_batch_size

    @cached_property
    def local_tokens(self) -> int:
        """Those it keeps elsewhere."""
        return self.tokens // self.tp if self.config.parallel.sequence_parallel else self.tokens

    @cached_property
    def num_microbatches(self) -> int:
        return self.config.num_microbatches(self.dp_replicate * self.dp_shard)

    @cached_property
    def schedule(self) -> Sequence[Sequence[Action]]:
        return self.config.schedule(self.dp_replicate * self.dp_shard)

    # --- parameters ---

    @cached_property
    def kv_rows(self) -> int:
        """Rows of the key's weight on a tp rank; with fewer heads than tp ranks, all."""
        heads, tp = self.model.num_kv_heads, self.tp
        return self.model.head_dim * (heads // tp if heads >= tp else heads)

    @cached_property
    def kv_width(self) -> int:
        """Numbers of a key, or value, of one token on a tp rank."""
        return self.model.head_dim * max(1, self.model.num_kv_heads // self.tp)

    @cached_property
    def vocabulary(self) -> int:
        """This tp rank's rows of it."""
        return len(chunk_range(self.model.vocab_size, self.tp, self.tp_rank))

    @cached_property
    def block(self) -> Unit:
        dim, heads, ffn = self.model.dim, self.model.dim // self.tp, self.model.ffn_dim // self.tp
        attention = ((dim, 1), (heads, dim), (self.kv_rows, dim), (self.kv_rows, dim), (dim, heads))
        return Unit("block", (*attention, (dim, 1), (ffn, dim), (ffn, dim), (dim, ffn)))

    def units(self, stage: int) -> list[Unit]:
        """Of a stage, in the order of forward."""
        dim, split = self.model.dim, self._split
        units = [self.block] * len(split[stage])
        if stage == 0:
            units.insert(0, Unit("embedding", ((self.vocabulary, dim),)))
        if stage == len(split) - 1:
            units.append(Unit("head", ((dim, 1), (self.vocabulary, dim))))
        return units

    @cached_property
    def _split(self) -> list[range]:
        return self.config.split_layers()

    @cached_property
    def stages(self) -> list[int]:
        """Of this pipeline rank."""
        return [s for s, rank in enumerate(self.config.parallel.ranks_of_stages) if rank == self.pp_rank]

    @cached_property
    def num_stages(self) -> int:
        return self.config.parallel.num_stages

    @cached_property
    def head_pieces(self) -> list[int]:
        """Tokens of the pieces in which the head forms its logits (model/kernels/linear_cross_entropy.py)."""
        widest = -(-self.model.vocab_size // self.tp)
        piece_tokens = max(1, PIECE_BYTES // (widest * self.compute))
        positions = self.config.train.seq_len // (self.tokens // self.local_tokens)
        height = max(1, -(-positions // max(1, -(-self.tokens // piece_tokens))))
        each = self.tokens // positions  # tokens of one position of every rank
        return [each * min(height, positions - at) for at in range(0, positions, height)]


PIECE_BYTES = 1 << 30  # of logits at one time on a GPU


class Sizes:
    """Bytes of what one micro-batch passes through a block."""

    def __init__(self, layout: Layout) -> None:
        model, tokens, e = layout.model, layout.tokens, layout.compute
        self.cut = layout.tp > 1 and layout.config.parallel.sequence_parallel
        self.whole = tokens * model.dim * e  # [S, B, D]
        self.part = layout.local_tokens * model.dim * e  # [S/tp, B, D]
        self.query = tokens * (model.dim // layout.tp) * e
        self.key = tokens * layout.kv_width * e
        self.inner = tokens * (model.ffn_dim // layout.tp) * e
        self.rows = tokens * (model.num_heads // layout.tp) * 4  # log of attention's normalisers
        self.norm = layout.local_tokens * layout.exact
        angles = tokens if layout.config.data.document_mask else layout.config.train.seq_len
        self.angles = angles * model.head_dim * layout.exact  # cosines and sines, once a stage
        # Between forward and backward; without the output, which is the next block's.
        self.kept_none = 3 * self.part + 2 * self.query + 2 * self.key + 3 * self.inner + self.rows + 2 * self.norm
        selective = 2 * self.query + 2 * self.key + 2 * self.inner + self.rows
        selective += (
            2 * self.whole if layout.tp == 1 else 0
        )  # row-parallel products: computed again where they are partial sums
        mode = layout.config.train.activation_checkpointing
        self.kept = {"none": self.kept_none, "selective": selective, "full": 0}[mode]
        self.gather = self.whole if self.cut else 0  # what a gather of the sequence allocates
        self.scatter = self.part if layout.tp > 1 else 0  # and a scatter, or the copy that an all-reduce makes
