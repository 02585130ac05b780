"""What one rank of a world holds: parameters by FSDP's units, tokens, widths of numbers."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from errors import UserError
from model.config import ModelConfig
from model.kernels.linear_cross_entropy import PIECE_BYTES
from parallel.axes import AXES, MeshSizes
from parallel.pipeline.actions import Action
from parallel.placement import chunk_range
from plan.categories import ATTENDED, GATED, NORMED, PRODUCTS, PROJECTED, STREAM
from training.config import Config
from training.optimizers import optimizer_class
from training.precision import Precision


def world_of(path: str, config: Config, gpus: int | None) -> int:
    """The number of ranks: `gpus`, or the product of the axes, or what the file's first line says
    (`# world: 256`)."""
    parallel = config.parallel
    if gpus is not None:
        return gpus
    if parallel.dp_shard != -1:
        return math.prod(getattr(parallel, axis) for axis in AXES)
    first_line = re.match(r"# world: (\d+)\n", Path(path).read_text(encoding="utf-8"))
    if first_line is None:
        raise UserError(
            "--gpus",
            None,
            "parallel.dp_shard=-1 takes what is left of a world nobody named",
            "give --gpus N",
        )
    return int(first_line[1])


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and reduces together: the embedding, a block, or the final norm with the
    head; or all of a stage.

    Shapes are those of the tp rank, before FSDP cuts their rows.
    """

    name: str  # embedding, block, head or stage
    shapes: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)

    def padded(self, ranks: int) -> int:
        """Numbers that travel in a gather or reduction over `ranks`: rows are filled up to a
        multiple of them."""
        return sum(-(-rows // ranks) * ranks * columns for rows, columns in self.shapes)


@dataclass(frozen=True)
class Layout:
    """One rank's part of the job. Ranks that differ in their data-parallel coordinates alone are
    alike."""

    config: Config
    world: int
    pp_rank: int
    tp_rank: int = 0
    dp_shard_rank: int = 0

    @classmethod
    def of_rank(cls, config: Config, world: int, rank: int) -> "Layout":
        at = config.parallel.mesh_sizes(world).coordinates(rank)
        return cls(config, world, at["pp"], at["tp"], at["dp_shard"])

    @cached_property
    def sizes(self) -> MeshSizes:
        return self.config.parallel.mesh_sizes(self.world)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def tp(self) -> int:
        return self.sizes.tp

    @property
    def dp_shard(self) -> int:
        return self.sizes.dp_shard

    @property
    def dp_replicate(self) -> int:
        return self.sizes.dp_replicate

    # --- widths, in bytes ---

    @cached_property
    def compute(self) -> int:
        return Precision.of(self.config).compute.itemsize

    @cached_property
    def master(self) -> int:
        """Of weights, moments and reduced gradients between steps."""
        return Precision.of(self.config).master.itemsize

    @cached_property
    def states_per_weight(self) -> int:
        """Tensors that the optimizer keeps of each weight, in the master dtype."""
        return len(optimizer_class(self.config.optimizer.name).state_names)

    @cached_property
    def reduce(self) -> int:
        return Precision.of(self.config).reduce.itemsize

    @cached_property
    def exact(self) -> int:
        """Of statistics and losses."""
        return Precision.of(self.config).exact.itemsize

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
    def q_width(self) -> int:
        """Numbers of one token's queries on a tp rank."""
        return self.model.attention_width // self.tp

    @cached_property
    def vocabulary(self) -> int:
        """This tp rank's rows of it."""
        return len(chunk_range(self.model.vocab_size, self.tp, self.tp_rank))

    @cached_property
    def block(self) -> Unit:
        dim, heads, ffn = self.model.dim, self.q_width, self.model.ffn_dim // self.tp
        attention = ((dim, 1), (heads, dim), (self.kv_rows, dim), (self.kv_rows, dim), (dim, heads))
        norms = ((self.model.head_dim, 1),) * 2 if self.model.qk_norm else ()
        return Unit("block", (*attention, *norms, (dim, 1), (ffn, dim), (ffn, dim), (dim, ffn)))

    def units(self, stage: int) -> list[Unit]:
        """Of a stage, in the order of forward."""
        dim, split = self.model.dim, self._split
        units = [self.block] * len(split[stage])
        if stage == 0:
            units.insert(0, Unit("embedding", ((self.vocabulary, dim),)))
        if stage == len(split) - 1:
            units.append(Unit("head", ((dim, 1), (self.vocabulary, dim))))
        return units

    def fsdp_units(self, stage: int) -> list[tuple[range, Unit]]:
        """What is gathered and reduced at once, and which of `units` it is."""
        units = self.units(stage)
        if self.config.parallel.fsdp_unit == "stage":
            shapes = tuple(shape for unit in units for shape in unit.shapes)
            return [(range(len(units)), Unit("stage", shapes))]
        return [(range(i, i + 1), unit) for i, unit in enumerate(units)]

    @cached_property
    def _split(self) -> list[range]:
        return self.config.split_layers()

    @cached_property
    def where(self) -> list[int]:
        """The pipeline rank of each stage."""
        return self.config.parallel.ranks_of_stages

    @cached_property
    def stages(self) -> list[int]:
        """Of this pipeline rank."""
        return [s for s, rank in enumerate(self.where) if rank == self.pp_rank]

    def at(self, pp_rank: int) -> "Layout":
        """The same on another pipeline rank; what is alike on all is not computed again."""
        other = replace(self, pp_rank=pp_rank)
        alike = {
            "where": self.where,
            "_split": self._split,
            "schedule": self.schedule,
            "sizes": self.sizes,
        }
        other.__dict__.update(alike, num_microbatches=self.num_microbatches)
        return other

    @cached_property
    def num_stages(self) -> int:
        return self.config.parallel.num_stages

    @cached_property
    def head_pieces(self) -> list[int]:
        """Tokens of the pieces in which the head forms its logits
        (model/kernels/linear_cross_entropy.py)."""
        widest = -(-self.model.vocab_size // self.tp)
        piece_tokens = max(1, PIECE_BYTES["cuda"] // (widest * self.compute))
        positions = self.config.train.seq_len // (self.tokens // self.local_tokens)
        height = max(1, -(-positions // max(1, -(-self.tokens // piece_tokens))))
        each = self.tokens // positions  # tokens of one position of every rank
        return [each * min(height, positions - at) for at in range(0, positions, height)]


class Sizes:
    """Bytes of what one micro-batch passes through a block."""

    def __init__(self, layout: Layout) -> None:
        model, tokens, e = layout.model, layout.tokens, layout.compute
        self.cut = layout.tp > 1 and layout.config.parallel.sequence_parallel
        self.whole = tokens * model.dim * e  # [S, B, D]
        self.part = layout.local_tokens * model.dim * e  # [S/tp, B, D]
        self.query = tokens * layout.q_width * e
        self.key = tokens * layout.kv_width * e
        self.inner = tokens * (model.ffn_dim // layout.tp) * e
        self.rows = tokens * (model.num_heads // layout.tp) * 4  # log of attention's normalisers
        self.norm = layout.local_tokens * layout.exact
        # Where heads are normalised: q and k before that, and one number for each head.
        heads = (layout.q_width + layout.kv_width) // model.head_dim
        self.unnormed = (
            self.query + self.key + tokens * heads * layout.exact if model.qk_norm else 0
        )
        angles = tokens if layout.config.data.document_mask else layout.config.train.seq_len
        self.angles = angles * model.head_dim * layout.exact  # cosines and sines, once a stage
        # Between forward and backward, by kind; without the output, which is the next block's.
        self.kinds_none = {
            STREAM: self.part,
            NORMED: 2 * self.part + 2 * self.norm,
            PROJECTED: self.query + 2 * self.key + self.unnormed,
            ATTENDED: self.query + self.rows,
            GATED: 3 * self.inner,
        }
        selective = {
            PROJECTED: self.query + 2 * self.key,
            ATTENDED: self.query + self.rows,
            GATED: 2 * self.inner,
        }
        # Row-parallel products: computed again where parallel/activation.py sees that they are
        # partial sums.
        whole = [
            width
            for width in (layout.q_width, model.ffn_dim // layout.tp)
            if layout.tp == 1 or width == model.dim
        ]
        selective[PRODUCTS] = len(whole) * self.whole
        mode = layout.config.train.activation_checkpointing
        kinds = {"none": self.kinds_none, "selective": selective, "full": {}}
        self.kinds: dict[str, int] = kinds[mode]
        self.kept_none, self.kept = sum(self.kinds_none.values()), sum(self.kinds.values())
        self.gather = self.whole if self.cut else 0  # what a gather of the sequence allocates
        # and a scatter, or the copy that an all-reduce makes
        self.scatter = self.part if layout.tp > 1 else 0
