"""A whole configuration: one field per section, what changes at a later step, and its dtypes."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from costs.setting import Setting
from costs.summary import layer_costs
from data.config import DataConfig
from model.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.pipeline.actions import Action
from parallel.pipeline.balance import LayerCosts
from parallel.pipeline.schedules import build_schedule
from settings.sections import CheckpointConfig, GuardConfig, OptimizerConfig, RunConfig, TrainConfig

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
Entry = dict[str, Any]  # of the list `data_stages`: where it begins, and keys by section


class Precision(NamedTuple):
    """The dtypes of a run.

    | train.dtype | compute  | master                         | reduce                | exact   |
    |-------------|----------|--------------------------------|-----------------------|---------|
    | bfloat16    | bfloat16 | float32; bfloat16 with         | parallel.reduce_dtype | float32 |
    |             |          | optimizer.pure_bfloat16        |                       |         |
    | float16     | float16  | float32                        | parallel.reduce_dtype | float32 |
    | float32     | float32  | float32                        | parallel.reduce_dtype | float32 |
    | float64     | float64  | float64                        | float64               | float64 |
    """

    compute: torch.dtype  # forward and backward
    master: torch.dtype  # weights, moments and reduced gradients between steps
    reduce: torch.dtype  # data-parallel reductions of gradients
    exact: torch.dtype  # statistics and losses


@dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    guard: GuardConfig
    run: RunConfig
    # as in the file; `data_stages` (data_stages.py) makes the configuration of each
    data_stages: tuple[Entry, ...] = ()

    @property
    def precision(self) -> Precision:
        compute: torch.dtype = DTYPES[self.train.dtype]
        exact = torch.promote_types(compute, torch.float32)
        reduce = compute if compute == torch.float64 else DTYPES[self.parallel.reduce_dtype]
        master = compute if self.optimizer.pure_bfloat16 else exact
        return Precision(compute, master, reduce, exact)

    @property
    def kernels_of_states(self) -> str:
        """`model.kernels` for weights and optimizer states: on a host Triton's do not run."""
        return self.model.kernels if self.parallel.offload == "none" else "torch"

    @property
    def clips_logits(self) -> bool:
        """Whether the optimizer limits attention logits (training/qk_clip.py)."""
        own = getattr(self.optimizer, self.optimizer.name)
        return getattr(own, "qk_clip", 0.0) > 0

    def num_microbatches(self, dp_size: int) -> int:
        """Micro-batches of each data-parallel rank in one step."""
        return self.train.global_batch_size // (dp_size * self.train.micro_batch_size)

    def split_layers(self) -> list[range]:
        """The blocks of each pipeline stage, first to last."""
        return self.parallel.split_layers(self.model.num_layers, self.layer_costs)

    def layer_costs(self) -> LayerCosts:
        return layer_costs(self.setting())

    def setting(self, tp_rank: int = 0, cp_rank: int = 0) -> Setting:
        """The settings on which the recorded costs of this run's units depend."""
        parallel, train, dtype = self.parallel, self.train, self.precision.compute
        return Setting(self.model, train.seq_len, parallel.tp, tp_rank, parallel.sequence_parallel,
                       parallel.tp_pieces, train.micro_batch_size, self.data.document_mask,
                       train.activation_checkpointing, dtype, parallel.cp, cp_rank,
                       parallel.ep, notes_logits=self.clips_logits)  # fmt: skip

    def schedule(self, dp_size: int) -> list[list[Action]]:
        """Each pipeline rank's actions in one step."""
        p, microbatches = self.parallel, self.num_microbatches(dp_size)
        return build_schedule(p.schedule, p.pp, p.stages_per_rank, microbatches)


SECTIONS: dict[str, Any] = {
    field.name: field.type for field in fields(Config) if field.name != "data_stages"
}
