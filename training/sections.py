"""The sections of a configuration file that have no folder of their own. (`model`, `parallel` and
`data` are described beside the code that they configure.) A section checks itself."""

import re
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from errors import UserError
from kinds import kinds_in
from settings import Count, PathText, Text, Whole, between, section

# Tokens of a micro-batch. Four times as many, of a rank in a step, are 2 GB before any computing.
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
    # after so many since the process began the run saves and stops (runtime/stop.py); 0: no limit
    max_minutes: Annotated[float, between(0, 1e8)] = 0.0


OPTIMIZERS = kinds_in("training.optimizers")


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
    # the learning rate comes down to this times lr, which the step after the last would have
    min_lr_ratio: Annotated[float, between(0, 1)] = 0.1
    decay_steps: Whole = 0  # wsd only: how many last steps decay (linearly)
    # Weights and moments are stored in bfloat16, 6 bytes a parameter and not 12, and rounded
    # stochastically (model/kernels/adamw.py). So are reduced gradients, to nearest; zero_stage 2
    # and 3 add micro-batches in bfloat16.
    pure_bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            why = "there is no such optimizer"
            raise UserError("optimizer.name", self.name, why, f"choose one of {OPTIMIZERS}")


@section("checkpoint")
class CheckpointConfig:
    """Where a run starts from and how often it saves."""

    interval: Whole = 0  # save every so many steps and after the last; 0: never
    keep_last: Count = 2  # older checkpoints are deleted,
    keep_every: Whole = 0  # but for those of steps that this divides; 0: for none
    # training waits only for a copy of what is saved, not until it is written
    async_save: bool = True
    # auto: the newest of the run folder, if any; none; or a checkpoint's path
    resume: PathText = "auto"
    # start a fresh run from this checkpoint's weights: new optimizer, new data
    load_weights_only: Text = ""


@section("guard")
class GuardConfig:
    """What a run looks out for, and when it does something about it."""

    # no update where the loss is so far above the recent ones (guard.py); 0: no loss is too high
    spike_sigmas: Annotated[float, between(0, 1e30)] = 6.0
    # after so many steps in a row without update (seen when logged) back to a checkpoint; 0: never
    max_bad_steps: Whole = 5
    # compare what must be equal on several ranks every so many steps; before a save, always
    replica_interval: Whole = 100
    # A rank that takes longer for a step than hang_factor times the usual, and than hang_seconds,
    # says where it is and exits (runtime/watchdog.py). hang_factor 0: it waits forever, as under a
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
        if not self.profile:
            return
        form = r"[0-9]{1,9}:[0-9]{1,9}"
        if not re.fullmatch(form, self.profile) or not self.profiled_steps:
            why = "is not start:stop, a step and a later one"
            remedy = "write for example 10:13, which is steps 10, 11 and 12"
            raise UserError("run.profile", self.profile, why, remedy)
        if not self.profile_ranks:
            remedy = "name a rank, or leave run.profile out"
            raise UserError("run.profile_ranks", [], "nobody would profile", remedy)

    @property
    def profiled_steps(self) -> range:
        """1-based; empty where nothing is profiled."""
        start, _, stop = (self.profile or "0:0").partition(":")
        return range(int(start), int(stop))
