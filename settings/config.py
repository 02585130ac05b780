"""A whole configuration: one field per section, and the checks that involve several sections.

Validation raises errors and never changes a value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from costs.setting import Setting
from costs.summary import layer_costs
from data.config import DataConfig
from errors import UserError
from model.config import ModelConfig
from model.transformer import check_tp
from parallel.axes import MeshSizes
from parallel.config import ParallelConfig
from parallel.pipeline.actions import Action, splits_backward
from parallel.pipeline.balance import LayerCosts
from parallel.pipeline.check import fault_in
from parallel.pipeline.schedules import MAX_FORWARDS, build_schedule
from settings.checks import check_experts, check_learning_rate
from settings.data_stages import NEW_PHASE, LaterStage, in_stage
from settings.precision import Precision
from settings.sections import (
    MAX_TOKENS,
    CheckpointConfig,
    GuardConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Place:
    """What a Config describes of a run with stages: one stage."""

    number: int
    steps: range  # of the stage, 0-based
    phase: range  # the steps over which its learning rate is scheduled
    whole: "Config"  # of stage 0, without a place


@dataclass(frozen=True)
class Config:
    """The configuration of a run; of a run with stages, that of one stage (stages.py)."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    guard: GuardConfig
    run: RunConfig
    stages: tuple[LaterStage, ...] = ()
    place: Place | None = None

    @property
    def stage(self) -> int:
        return self.place.number if self.place else 0

    @property
    def steps(self) -> range:
        """The steps of this stage, 0-based."""
        return self.place.steps if self.place else range(self.train.steps)

    @property
    def phase(self) -> range:
        """The steps over which the learning rate is scheduled."""
        return self.place.phase if self.place else range(self.train.steps)

    @property
    def whole(self) -> "Config":
        """The configuration as in the file: the sections of stage 0, and `stages`."""
        return self.place.whole if self.place else self

    @property
    def alone(self) -> "Config":
        """The configuration of a run that has only this stage."""
        return replace(self, stages=(), place=None)

    @cached_property
    def each_stage(self) -> "tuple[Config, ...]":
        """The configuration of each stage. Raises UserError."""
        return self.whole.each_stage if self.place else _each_stage(self)

    def at_stage(self, number: int) -> "Config":
        return self.each_stage[number]

    def stage_of(self, step: int) -> int:
        """The stage that makes step `step`, 0-based; the last one for later steps."""
        return sum(step >= one.steps.start for one in self.each_stage[1:])

    def tokens_after(self, step: int) -> int:
        """How many tokens are trained on in the first `step` steps."""
        return sum(
            len(one.steps[: max(0, step - one.steps.start)])
            * one.train.global_batch_size
            * one.train.seq_len
            for one in self.each_stage
        )

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
        parallel, train, dtype = self.parallel, self.train, Precision.of(self).compute
        return Setting(self.model, train.seq_len, parallel.tp, tp_rank, parallel.sequence_parallel,
                       parallel.tp_pieces, train.micro_batch_size, self.data.document_mask,
                       train.activation_checkpointing, dtype, parallel.cp, cp_rank,
                       parallel.ep)  # fmt: skip

    def schedule(self, dp_size: int) -> list[list[Action]]:
        """Each pipeline rank's actions in one step."""
        p, microbatches = self.parallel, self.num_microbatches(dp_size)
        return build_schedule(p.schedule, p.pp, p.stages_per_rank, microbatches)

    def validate(self, world_size: int) -> None:
        """Check everything that involves more than one section or the world size, in every stage;
        raises UserError."""
        for number, config in enumerate(self.each_stage):
            with in_stage(number):
                sizes = config.parallel.mesh_sizes(world_size)
                for check_one in CHECKS:
                    check_one(config, sizes)


SECTIONS: dict[str, Any] = {
    field.name: field.type for field in fields(Config) if field.name not in ("stages", "place")
}


def _each_stage(whole: Config) -> tuple[Config, ...]:
    """The configuration of each stage of a run."""
    if not whole.stages:
        return (whole,)
    stages, begins, tokens = [whole], [0], 0
    for number, later in enumerate(whole.stages, 1):
        before, train = stages[-1], stages[-1].train
        with in_stage(number):
            changes = {
                name: replace(
                    getattr(before, name), **(NEW_PHASE if name == "optimizer" else {}) | keys
                )
                for name, keys in later.changes.items()
            }
        per_step = train.global_batch_size * train.seq_len
        begin = later.first_step(begins[-1], tokens, per_step)
        if not begins[-1] < begin < whole.train.steps:
            key, value = later.begins
            why = f"it would begin after step {begin}, the stage before begins after step "
            why += f"{begins[-1]}, and train.steps={whole.train.steps}"
            remedy = "each stage needs a step; give more train.steps, or leave the stage out "
            remedy += "(stages=[] leaves out all)"
            raise UserError(f"stages.{number}.{key}", value, why, remedy)
        tokens += (begin - begins[-1]) * per_step
        begins.append(begin)
        stages.append(replace(before, **changes))
    ends = [*begins[1:], whole.train.steps]
    phases = [0, *(n for n, one in enumerate(whole.stages, 1) if "optimizer" in one.changes)]
    placed = []
    for number, config in enumerate(stages):
        phase = max(n for n in phases if n <= number)
        end = min((begins[n] for n in phases if n > number), default=whole.train.steps)
        steps = range(begins[number], ends[number])
        place = Place(number, steps, range(begins[phase], end), whole)
        placed.append(replace(config, place=place))
    return tuple(placed)


def check_lengths(config: Config, sizes: MeshSizes) -> None:
    """Refuse sizes whose products are too large, before the other checks build something of that
    length: a schedule has an action for each stage and micro-batch."""
    parallel, train, batch = config.parallel, config.train, config.train.global_batch_size
    stages, step = parallel.num_stages, sizes.dp * train.micro_batch_size
    # some schedules are first built for 2 pp micro-batches
    if stages * max(2 * parallel.pp, 128) > 2 * MAX_FORWARDS:
        value, key = max((parallel.stages_per_rank, "stages_per_rank"), (parallel.pp, "pp"))
        why = f"makes {stages:,} stages in all: too many"
        raise UserError(f"parallel.{key}", value, why, "use a smaller number")
    tokens = train.micro_batch_size * train.seq_len
    if tokens > MAX_TOKENS:
        why = f"makes {tokens:,} tokens: it counts sequences of train.seq_len={train.seq_len}"
        remedy = "give a smaller number, often 1 to 16"
        raise UserError("train.micro_batch_size", train.micro_batch_size, why, remedy)
    microbatches = config.num_microbatches(sizes.dp)
    if stages * microbatches > MAX_FORWARDS or batch * train.seq_len > sizes.dp * 4 * MAX_TOKENS:
        why = f"it counts sequences ({microbatches:,} micro-batches of each data-parallel rank): "
        why += f"are {batch:,} tokens meant?"
        meant = max(step, batch // train.seq_len // step * step)
        remedy = f"for that many tokens of train.seq_len={train.seq_len} give {meant}; else raise "
        raise UserError("train.global_batch_size", batch, why, remedy + "train.micro_batch_size")


def check_profile(config: Config, sizes: MeshSizes) -> None:
    run, last = config.run, config.train.steps
    steps = run.profiled_steps
    if steps and not 1 <= steps[0] <= steps[-1] <= last:
        why = f"the run's steps are 1 to {last}, and the step `stop` is not profiled"
        remedy = f"start at 1 or later, stop at {last + 1} or before"
        raise UserError("run.profile", run.profile, why, remedy)
    for rank in run.profile_ranks:
        if not 0 <= rank < sizes.world:
            why = f"the world has ranks 0 to {sizes.world - 1}, but not {rank}"
            raise UserError("run.profile_ranks", run.profile_ranks, why, "choose from these")


def check_batch(config: Config, sizes: MeshSizes) -> None:
    train = config.train
    step = sizes.dp * train.micro_batch_size
    if train.global_batch_size % step:
        why = "must be a multiple of data-parallel ranks × train.micro_batch_size = "
        why += f"{sizes.dp} × {train.micro_batch_size}"
        remedy = f"for example {max(step, train.global_batch_size // step * step)}"
        raise UserError("train.global_batch_size", train.global_batch_size, why, remedy)


def check_reduce_dtype(config: Config, sizes: MeshSizes) -> None:
    parallel = config.parallel
    sums_microbatches = config.num_microbatches(sizes.dp) > 1 and parallel.zero_stage < 2
    sums = sums_microbatches or sizes.of_weights()["dp_replicate"] > 1
    if parallel.reduce_dtype == config.train.dtype == "bfloat16" and sums:
        why = "gradients of micro-batches would be summed in bfloat16 too, before they are reduced"
        remedy = "use float32, or parallel.zero_stage=2 (or 3) and parallel.dp_replicate=1, where "
        remedy += "each is reduced separately"
        raise UserError("parallel.reduce_dtype", "bfloat16", why, remedy)


def check_tensor_parallel(config: Config, sizes: MeshSizes) -> None:
    check_tp(config.model, sizes.tp)


def cuts_of_sequence(parallel: ParallelConfig) -> dict[str, int]:
    """The keys of `parallel` that cut a sequence, each with its number of equal parts: cp cuts it
    into two chunks per rank, and sequence parallelism each rank's part over tp."""
    cuts = {"cp": 2 * parallel.cp} if parallel.cp > 1 else {}
    if parallel.sequence_parallel and parallel.tp > 1:
        cuts["tp"] = parallel.tp
        if parallel.tp_pieces > 1:
            cuts["tp_pieces"] = parallel.tp_pieces
    return cuts


REMEDIES_OF_CUTS = {
    "cp": "a smaller parallel.cp",
    "tp_pieces": "fewer pieces",
    "tp": "parallel.sequence_parallel=false",
}


def check_routing(config: Config, sizes: MeshSizes) -> None:
    check_experts(config.model, config.parallel, config.train, sizes)


def check_sequence(config: Config, sizes: MeshSizes) -> None:
    length, parallel = config.train.seq_len, config.parallel
    cuts = cuts_of_sequence(parallel)
    parts = math.prod(cuts.values())
    if length % parts:
        by = "sequence parallelism cuts"
        if sizes.cp > 1:
            by = (
                "context and sequence parallelism cut"
                if len(cuts) > 1
                else "context parallelism cuts"
            )
        factors = " × ".join(
            f"{'2 · ' if key == 'cp' else ''}parallel.{key}={getattr(parallel, key)}"
            for key in cuts
        )
        why = f"{by} it into {factors} equal parts"
        # experts need sequence parallelism (check_experts.py)
        possible = cuts.keys() - ({"tp"} if config.model.has_experts else set())
        remedies = [remedy for key, remedy in REMEDIES_OF_CUTS.items() if key in possible]
        *others, last = [f"use a multiple of {parts}", *remedies]
        remedy = f"{', '.join(others)}, or {last}" if others else last
        raise UserError("train.seq_len", length, why, remedy)


def check_pure_bfloat16(config: Config, sizes: MeshSizes) -> None:
    dtype = config.train.dtype
    if config.optimizer.pure_bfloat16 and dtype != "bfloat16":
        why = f"train.dtype={dtype} would compute with weights that are stored in bfloat16"
        remedy = "set train.dtype=bfloat16, or optimizer.pure_bfloat16=false"
        raise UserError("optimizer.pure_bfloat16", True, why, remedy)


def check_rate(config: Config, sizes: MeshSizes) -> None:
    check_learning_rate(config.optimizer, config.phase, in_stages=bool(config.stages))


def check_schedule(config: Config, sizes: MeshSizes) -> None:
    config.split_layers()
    p, name = config.parallel, config.parallel.schedule
    if fault := fault_in(name, p.pp, p.stages_per_rank, config.num_microbatches(sizes.dp)):
        # in a schedule that the user added; without this check it could hang
        remedy = "correct the schedule; parallel/pipeline/check.py has the rules"
        raise UserError("parallel.schedule", name, fault, remedy)


def check_compile(config: Config, sizes: MeshSizes) -> None:
    if not config.train.compile:
        return
    if sizes.tp > 1:
        why = "the compiler runs the collectives of parallel.tp > 1 as synchronous ones, so no "
        why += "computation would hide them"
        remedy = "set train.compile=false, or parallel.tp=1"
        raise UserError("train.compile", True, why, remedy)
    name = config.parallel.schedule
    if splits_backward(config.schedule(sizes.dp)):
        why = f"a compiled block forms its weight gradients in backward, and schedule {name} "
        remedy = "set train.compile=false, or choose a schedule that does not split backward (1f1b,"
        remedy += " interleaved_1f1b)"
        raise UserError("train.compile", True, why + "defers them", remedy)


# The checks that involve several sections, in order: the first error is reported.
CHECKS: list[Callable[[Config, MeshSizes], None]] = [
    check_lengths,
    check_profile,
    check_batch,
    check_reduce_dtype,
    check_tensor_parallel,
    check_routing,
    check_sequence,
    check_pure_bfloat16,
    check_rate,
    check_schedule,
    check_compile,
]
