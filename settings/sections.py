"""The sections of a configuration file that have no folder of their own. (`model`, `parallel` and
`data` are defined in the folders that they configure.) Each section checks its own values."""

import re
from dataclasses import field
from typing import Annotated, Literal

from declare import Count, NonEmpty, PathOrNone, PathText, Text, Whole, WithKinds, between, section
from errors import UserError
from hardware import FAILURES_PER_GPU_DAY
from parallel.activation import Mode

# The most tokens in a micro-batch. A rank may have four times as many in a step: 2 GB of token ids.
MAX_TOKENS = 2**26
MAX_STEPS = 2**24  # updates are counted in float32, as torch's AdamW wants them


@section("train")
class TrainConfig:
    """The length of training, the batch sizes, and the precision."""

    steps: Annotated[int, between(0, MAX_STEPS)]  # optimizer steps of the whole run
    seq_len: Annotated[int, between(1, MAX_TOKENS)]  # S: tokens in a sequence
    global_batch_size: Count  # sequences per optimizer step, over all ranks
    micro_batch_size: Count  # sequences per forward on one data-parallel rank
    # of the initial weights, the order of the data and stochastic rounding
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] = 0
    # dtype of forward and backward; with 16 bits, master weights stay in float32, and with float16,
    # for GPUs without bfloat16, the loss is scaled (training/guard.py)
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    compile: bool = False  # torch.compile each block; only with parallel.tp=1
    # see parallel/activation.py
    activation_checkpointing: Mode = "none"
    # bitwise repeatable results on GPUs too, which is slower; on CPUs they always are
    deterministic: bool = False
    # evaluate on held-out text after every this many steps and after the last; 0: never
    eval_interval: Whole = 0
    eval_samples: Count = 256  # held-out sequences per evaluation; fewer if a source would repeat
    # evaluate on these tasks too: names of bundled ones, or paths of others (docs/evaluation.md)
    tasks: list[PathText] = field(default_factory=list)
    # minutes since the start of the process after which the run saves and stops (runtime/stop.py);
    # 0: no limit
    max_minutes: Annotated[float, between(0, 1e8)] = 0.0


@section("optimizer")
class OptimizerConfig(WithKinds, name="training.optimizers"):
    """The optimizer and its learning-rate schedule."""

    lr: Annotated[float, between(0, 1000, example=3e-4)]  # peak learning rate
    name: Text = "adamw"  # a file of training/optimizers/
    # weight decay of matrices and embeddings; norm weights are not decayed
    weight_decay: Annotated[float, between(0, 1000)] = 0.1
    # the norm of all gradients together is clipped to this; 0: no clipping
    grad_clip: Annotated[float, between(0, 1e30)] = 1.0
    # number of first steps, in which the learning rate rises linearly from lr / warmup_steps
    warmup_steps: Whole = 0
    # wsd: warmup, stable, decay; linear and stable: for phases of data stages (learning_rate.py)
    schedule: Literal["cosine", "wsd", "linear", "stable"] = "cosine"
    # the learning rate falls to this times lr, which the step after the last would have
    min_lr_ratio: Annotated[float, between(0, 1)] = 0.1
    decay_steps: Whole = 0  # wsd only: number of last steps, in which the rate falls linearly
    # Store weights and moments in bfloat16, 6 instead of 12 bytes per parameter, with stochastic
    # rounding (model/kernels/adamw.py). Reduced gradients are also in bfloat16, rounded to nearest.
    pure_bfloat16: bool = False

    def __post_init__(self) -> None:
        self.select("name", [self.name])


@section("checkpoint")
class CheckpointConfig:
    """What a run starts from and how often it saves."""

    # save after every this many steps and after the last; 0: only after the last; auto: as often as
    # costs the least time, from what saves take and how often the job fails
    # (runtime/checkpoint/save_interval.py); never: only at a stop, for a file SAVE, and where a
    # data stage ends
    interval: Whole | Literal["auto", "never"] = "auto"
    # interval: auto only: how often a GPU (on CPUs: a process) fails and ends the job. The default
    # is Llama 3's rate, one failure in 2,112 days of a GPU (hardware.py)
    failures_per_gpu_day: Annotated[float, between(0, 1e6)] = FAILURES_PER_GPU_DAY
    keep_last: Count = 2  # number of newest checkpoints to keep; older ones are deleted
    keep_every: Whole = 0  # also keep the checkpoints of steps that this divides; 0: none
    # save in the background: training waits only for an in-memory copy
    async_save: bool = True
    # auto: the newest checkpoint of the run folder, if any; none: do not resume; or the path of a
    # checkpoint, or of a run, with whose newest it begins (later starts then continue this run)
    resume: PathText = "auto"
    # start a new run from the weights of this checkpoint, with a new optimizer state and new data
    load_weights_only: PathOrNone = ""
    # A command that is run for each committed checkpoint until it succeeds, without a shell, and
    # never waited for by a step: COMMAND … CHECKPOINT CHECKPOINT/manifest.json
    # (runtime/monitor/after_commit.py); "": none
    after_commit: Text = ""
    # the command is ended after this time and tried again; a finished run waits for its last
    # commands at most as long
    after_commit_minutes: Annotated[float, between(0.001, 1e6)] = 60.0


@section("guard")
class GuardConfig:
    """The failures that a run looks for, and the limits at which it reacts."""

    # skip updates whose loss is this many standard deviations above recent losses (guard.py); 0: no
    # limit
    spike_sigmas: Annotated[float, between(0, 1e30)] = 6.0
    # go back to a checkpoint after this many consecutive steps without an update (checked when the
    # run logs); 0: never
    max_bad_steps: Whole = 5
    # compare values that must be equal on several ranks after every this many steps; before a save
    # they are always compared
    replica_interval: Whole = 100
    # a rank that takes longer for a step than hang_factor times the usual time and longer than
    # hang_seconds prints where it is and exits (runtime/watchdog.py); hang_factor 0: it waits
    # forever, for example under a debugger
    hang_factor: Annotated[float, between(0, 1e6)] = 10.0
    # see hang_factor
    hang_seconds: Annotated[float, between(0, 1e8)] = 120.0
    # name: ranks that compute slower than their peers are named in the log, events.jsonl,
    # metrics.jsonl and status.json; exclude: and the next start leaves their nodes out
    # (runtime/health/slow_ranks.py)
    slow_ranks: Literal["name", "exclude", "none"] = "name"
    # a rank is slow if it takes this many times as long as its peers
    slow_factor: Annotated[float, between(1.01, 100)] = 1.15
    # if replicas differ, or updates were skipped: compute the step again, on other machines too, to
    # tell a faulty machine from bad data or a diverged model (runtime/health/examine.py)
    examine: bool = True


@section("run")
class RunConfig:
    """The run folder, and what a run reports."""

    dir: PathText  # the run folder
    log_interval: Count = 1  # steps between log lines
    gc_interval: Count = 50  # steps between collections of garbage (runtime/garbage.py)
    # write to trace.json when each rank ran each action of one step, the third after this start
    trace: bool = False
    # start:stop: profile these steps, without `stop`, numbered as in metrics.jsonl
    # (runtime/profiling/profile.py)
    profile: Text = ""
    # the ranks that profile, and that write a memory report when a file SNAPSHOT appears
    profile_ranks: list[Whole] = field(default_factory=lambda: [0])
    # on GPUs: memory snapshots also have the last allocations, each with its source line; costs
    # time (runtime/metrics/memory_report.py)
    memory_history: bool = False
    # record the run in Weights & Biases (runtime/metrics/trackers.py)
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: NonEmpty = "lattice"  # the project in Weights & Biases
    tensorboard: bool = False  # also write event files to the run folder's tensorboard/
    # where alarms are sent (runtime/monitor/alarms.py): the URL of a webhook, or a command, which
    # gets the alarm as JSON on standard input; $NAME: that variable's value; "": nowhere
    on_event: Text = ""
    # numbers for Prometheus: a file ….prom for node_exporter, or PORT or HOST:PORT of an endpoint,
    # on loopback without a HOST; "": none
    prometheus: Annotated[int, between(1, 65535)] | PathOrNone = ""

    def __post_init__(self) -> None:
        if not self.profile:
            return
        form = r"[0-9]{1,9}:[0-9]{1,9}"
        if not re.fullmatch(form, self.profile) or not self.profiled_steps:
            why = "is not start:stop, a step and a later step"
            remedy = "write for example 10:13, which profiles steps 10, 11 and 12"
            raise UserError("run.profile", self.profile, why, remedy)
        if not self.profile_ranks:
            remedy = "name a rank, or leave run.profile out"
            raise UserError("run.profile_ranks", [], "no rank would profile", remedy)

    @property
    def profiled_steps(self) -> range:
        """The profiled steps, 1-based; empty if nothing is profiled."""
        start, _, stop = (self.profile or "0:0").partition(":")
        return range(int(start), int(stop))
