"""Every key of a configuration file: `Config` has one field per section, each a frozen dataclass.

`model`, `parallel` and `data` are described beside the code they configure. Validation raises, and
never rewrites.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from data.config import DataConfig
from errors import UserError
from model.config import ModelConfig
from model.cost import layer_costs
from parallel.config import ParallelConfig
from parallel.pipeline.actions import Action, splits_backward
from parallel.pipeline.check import Fault, check
from parallel.pipeline.schedules import build_schedule
from parallel.placement import chunk_range
from settings import Count, PathText, Text, Whole, between, section

MAX_FORWARDS = 2**16  # of a step, over all stages; the largest runs known have some thousands
# of a micro-batch; four times as many, of a rank in a step, are 2 GB before anything is computed
MAX_TOKENS = 2**26
MAX_STEPS = 99_999_999  # a checkpoint's name has eight digits
Beta = Annotated[float, Field(ge=0, lt=1)]


@section("train")
class TrainConfig:
    """How long, on how much at a time, and in which arithmetic."""

    steps: Annotated[int, between(0, MAX_STEPS)]  # optimizer steps of the whole run
    seq_len: Annotated[int, between(1, MAX_TOKENS)]  # S: tokens of one sequence
    global_batch_size: Count  # sequences of one optimizer step, over all ranks
    micro_batch_size: Count  # sequences of one forward on one data-parallel rank
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] = 0
    # bfloat16 computes; master weights stay float32
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    compile: bool = False  # torch.compile each block
    # see parallel/activation.py
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False  # bitwise repeatable on GPUs too, slower there; the CPU always is
    # evaluate on held-out text every so many steps and after the last; 0: never
    eval_interval: Whole = 0
    eval_samples: Count = 256  # held-out sequences of each evaluation
    max_minutes: Annotated[float, between(0, 1e8)] = (
        # after so many since the process began the run stops, and saves (runtime/stop.py); 0: no
        # limit
        0.0
    )


# Of optimizer.name: the files of that folder.
OPTIMIZERS = sorted(file.stem for file in (Path(__file__).parent / "optimizers").glob("[!_]*.py"))


@section("optimizer")
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    lr: Annotated[float, between(0, 1000, example=3e-4)]  # peak learning rate
    name: Text = "adamw"  # a file of training/optimizers/
    # of matrices; norm weights are not decayed
    weight_decay: Annotated[float, between(0, 1000)] = 0.1
    betas: Annotated[tuple[Beta, Beta], Field(strict=False, examples=[[0.9, 0.95]])] = (0.9, 0.95)
    eps: Annotated[float, between(1e-30, 1, example=1e-8)] = 1e-8
    # largest norm of all gradients together; 0: no clipping
    grad_clip: Annotated[float, between(0, 1e30)] = 1.0
    warmup_steps: Whole = 0  # the learning rate rises linearly, from lr / warmup_steps
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, decay
    min_lr_ratio: Annotated[float, between(0, 1)] = 0.1  # the learning rate ends at this times lr
    decay_steps: Whole = 0  # wsd only: how many last steps decay (linearly)
    # Weights and moments are stored in bfloat16, 6 bytes a parameter and not 12, and rounded
    # stochastically (model/kernels/adamw.py). So are reduced gradients, to nearest; zero_stage 2
    # and 3 add micro-batches in bfloat16.
    pure_bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise UserError(
                "optimizer.name",
                self.name,
                "there is no such optimizer",
                f"choose one of {OPTIMIZERS}",
            )


@section("checkpoint")
class CheckpointConfig:
    """Where a run starts from and how often it saves."""

    interval: Whole = 0  # save every so many steps and after the last; 0: never
    keep_last: Count = 2  # older checkpoints are deleted,
    keep_every: Whole = 0  # but for those of steps that this divides; 0: for none
    # training waits for a copy of what is saved alone, not until it is written
    async_save: bool = True
    # auto: the newest of the run folder, if any; none; or a checkpoint's path
    resume: PathText = "auto"
    # start a fresh run from this checkpoint's weights: new optimizer, new data
    load_weights_only: Text = ""


@section("guard")
class GuardConfig:
    """What a run looks out for, and when it does something about it."""

    spike_sigmas: Annotated[float, between(0, 1e30)] = (
        # no update where the loss is so far above the recent ones (guard.py); 0: no loss is too
        # high
        6.0
    )
    # after so many steps in a row without update (seen when logged) back to a checkpoint; 0: never
    max_bad_steps: Whole = 5
    # compare what must be equal on several ranks every so many steps; before a save, always
    replica_interval: Whole = 100
    # A rank that takes longer for a step than hang_factor times the usual, and than hang_seconds,
    # says where it is and exits (runtime/watchdog.py). hang_factor 0: it waits for ever, as under a
    # debugger it should.
    hang_factor: Annotated[float, between(0, 1e6)] = 10.0
    hang_seconds: Annotated[float, between(0, 1e8)] = 120.0


@section("run")
class RunConfig:
    """Where a run leaves what it has to say."""

    dir: PathText  # the run folder
    log_interval: Count = 1  # steps between lines
    # write what every rank did when in one step, the third of this start, to trace.json
    trace: bool = False
    # start:stop: profile these steps, counted as in metrics.jsonl, without `stop`
    # (runtime/profile.py)
    profile: Text = ""
    # which ranks do, and which answer a file SNAPSHOT
    profile_ranks: list[Whole] = field(default_factory=lambda: [0])
    # GPUs: memory snapshots know who allocated what; costs time (runtime/memory_report.py)
    memory_history: bool = False
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: PathText = "lattice"
    tensorboard: bool = False  # also write event files to the run folder's tensorboard/

    def __post_init__(self) -> None:
        if self.profile and (
            not re.fullmatch(r"[0-9]{1,9}:[0-9]{1,9}", self.profile) or not self.profiled_steps
        ):
            why = "is not start:stop, a step and a later one"
            raise UserError(
                "run.profile",
                self.profile,
                why,
                "write for example 10:13, which is steps 10, 11 and 12",
            )
        if self.profile and not self.profile_ranks:
            raise UserError(
                "run.profile_ranks",
                [],
                "nobody would profile",
                "name a rank, or leave run.profile out",
            )

    @property
    def profiled_steps(self) -> range:
        """1-based; empty where nothing is profiled."""
        start, _, stop = (self.profile or "0:0").partition(":")
        return range(int(start), int(stop))


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    guard: GuardConfig
    run: RunConfig

    def num_microbatches(self, dp_size: int) -> int:
        """Micro-batches of each data-parallel rank in one step."""
        return self.train.global_batch_size // (dp_size * self.train.micro_batch_size)

    def split_layers(self) -> list[range]:
        """The blocks of each pipeline stage, first to last."""
        costs = layer_costs(self.model, self.train.seq_len, self.train.activation_checkpointing)
        return self.parallel.split_layers(self.model.num_layers, costs)

    def schedule(self, dp_size: int) -> list[list[Action]]:
        """Each pipeline rank's actions in one step."""
        parallel = self.parallel
        return build_schedule(
            parallel.schedule, parallel.pp, parallel.stages_per_rank, self.num_microbatches(dp_size)
        )

    def _check_sizes(self, dp: int) -> None:
        """What would be as long as these products is not begun: a schedule has an action for each
        stage and micro-batch."""
        parallel, train = self.parallel, self.train
        stages, step = parallel.num_stages, dp * train.micro_batch_size
        if stages * max(2 * parallel.pp, 128) > MAX_FORWARDS:
            key = (
                "parallel.pp"
                if parallel.pp > parallel.stages_per_rank
                else "parallel.stages_per_rank"
            )
            value = max(parallel.pp, parallel.stages_per_rank)
            raise UserError(key, value, f"makes {stages:,} stages in all: too many", "use fewer")
        if train.micro_batch_size * train.seq_len > MAX_TOKENS:
            why = f"is {train.micro_batch_size * train.seq_len:,} tokens: it counts sequences, of train.seq_len={train.seq_len}"
            raise UserError(
                "train.micro_batch_size", train.micro_batch_size, why, "give fewer, often 1 to 16"
            )
        microbatches = self.num_microbatches(dp)
        batch = train.global_batch_size
        if stages * microbatches > MAX_FORWARDS or batch * train.seq_len > dp * 4 * MAX_TOKENS:
            sequences = batch // train.seq_len
            why = f"it counts sequences ({microbatches:,} micro-batches of each data-parallel rank): are {batch:,} tokens meant?"
            meant = f"for so many tokens of train.seq_len={train.seq_len} give {max(step, sequences // step * step)}"
            raise UserError(
                "train.global_batch_size", batch, why, f"{meant}; else raise train.micro_batch_size"
            )

    def validate(self, world_size: int) -> None:
        """Check everything that involves more than one section or the world's size; raises
        UserError."""
        model, parallel, train = self.model, self.parallel, self.train
        sizes = parallel.mesh_sizes(world_size)
        dp, tp = sizes.dp, sizes.tp
        self._check_sizes(dp)
        if (
            self.run.profiled_steps
            and not 1 <= self.run.profiled_steps[0] <= self.run.profiled_steps[-1] <= train.steps
        ):
            why = f"the run's steps are 1 to {train.steps}, and stop is not profiled"
            raise UserError(
                "run.profile",
                self.run.profile,
                why,
                f"start at 1 or later, stop at {train.steps + 1} or before",
            )
        for rank in self.run.profile_ranks:
            if not 0 <= rank < world_size:
                why = f"the world has ranks 0 to {world_size - 1}, and not {rank}"
                raise UserError(
                    "run.profile_ranks", self.run.profile_ranks, why, "choose from these"
                )
        step = dp * train.micro_batch_size
        if train.global_batch_size % step:
            raise UserError(
                "train.global_batch_size",
                train.global_batch_size,
                f"must be a multiple of data-parallel ranks × train.micro_batch_size = {dp} × {train.micro_batch_size}",
                f"for example {max(step, train.global_batch_size // step * step)}",
            )
        sums_microbatches = self.num_microbatches(dp) > 1 and parallel.zero_stage < 2
        if parallel.reduce_dtype == train.dtype == "bfloat16" and (
            sums_microbatches or sizes.dp_replicate > 1
        ):
            raise UserError(
                "parallel.reduce_dtype",
                "bfloat16",
                "gradients of micro-batches would be summed in bfloat16 too, before they are reduced",
                "use float32, or parallel.zero_stage=2 (or 3) and parallel.dp_replicate=1, where each is reduced by itself",
            )
        if model.num_heads % tp:
            _tp_does_not_divide(tp, "model.num_heads", model.num_heads)
        if model.ffn_dim % tp:
            _tp_does_not_divide(tp, "model.ffn_dim", model.ffn_dim)
        if model.num_kv_heads % tp and tp % model.num_kv_heads:
            raise UserError(
                "parallel.tp",
                tp,
                f"must divide model.num_kv_heads={model.num_kv_heads}, or be a multiple of it (heads are then replicated)",
                f"choose one of {[t for t in range(1, 65) if model.num_kv_heads % t == 0 or t % model.num_kv_heads == 0]}",
            )
        if parallel.sequence_parallel and train.seq_len % tp:
            raise UserError(
                "train.seq_len",
                train.seq_len,
                f"sequence parallelism cuts it into parallel.tp={tp} equal parts",
                f"use a multiple of {tp}, or parallel.sequence_parallel=false",
            )
        if len(chunk_range(model.vocab_size, tp, tp - 1)) == 0:
            raise UserError(
                "parallel.tp",
                tp,
                f"model.vocab_size={model.vocab_size} leaves the last rank no row",
                "use fewer",
            )
        if self.optimizer.pure_bfloat16 and train.dtype != "bfloat16":
            raise UserError(
                "optimizer.pure_bfloat16",
                True,
                f"train.dtype={train.dtype} would compute with weights that are stored in bfloat16",
                "set train.dtype=bfloat16, or optimizer.pure_bfloat16=false",
            )
        if self.optimizer.schedule == "wsd" and not 0 < self.optimizer.decay_steps <= train.steps:
            raise UserError(
                "optimizer.decay_steps",
                self.optimizer.decay_steps,
                f"schedule wsd decays over the last steps of train.steps={train.steps}",
                "give a number between 1 and train.steps, often a tenth or fifth of it",
            )
        self.split_layers()
        schedule = self.schedule(dp)
        try:
            check(schedule)
        # a schedule of the user's own: better here than as a wait without end
        except Fault as fault:
            raise UserError(
                "parallel.schedule",
                parallel.schedule,
                str(fault),
                "mend it: parallel/pipeline/check.py",
            ) from fault
        if splits_backward(schedule) and train.compile:
            raise UserError(
                "train.compile",
                True,
                f"a compiled block forms its weight gradients in backward, and schedule {parallel.schedule} defers them",
                "set train.compile=false, or choose a schedule that does not split backward (1f1b, interleaved_1f1b)",
            )


def _tp_does_not_divide(tp: int, key: str, value: int) -> None:
    raise UserError(
        "parallel.tp",
        tp,
        f"does not divide {key}={value}",
        f"choose one of {[t for t in range(1, 65) if value % t == 0]}",
    )
