"""The checks that involve several sections, or the number of ranks.

They raise errors and never change a value.
"""

import math
from collections.abc import Callable

import torch

from costs.parameters import check_tp, kinds_of_blocks
from errors import UserError
from kinds import load_kind
from model.attention import attentions_of
from model.config import ModelConfig
from model.experts import Experts
from model.router import router_class
from parallel.axes import MeshSizes
from parallel.config import ParallelConfig
from parallel.pipeline.check import fault_in, splits_backward
from parallel.weight_gradient import adds_to_gradients
from settings.config import Config
from settings.data_stages import data_stages, in_data_stage
from settings.sections import MAX_TOKENS, OptimizerConfig

MAX_FORWARDS = 2**15  # in a step, over all stages; the largest known runs have a few thousand


def validate(config: Config, world_size: int) -> None:
    """Check everything that involves more than one section or the world size, in every data stage.
    Raises UserError, the first that is found."""
    for stage in data_stages(config):
        with in_data_stage(stage.number):
            sizes = stage.config.parallel.mesh_sizes(world_size)
            for check in CHECKS:
                check(stage.config, sizes)
            check_learning_rate(stage.config.optimizer, stage.phase, config.train.steps)


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


def sums_in_bfloat16(config: Config, zero_stage: int, several: bool, replicas: int) -> bool:
    """Whether gradients of micro-batches, of which there are `several`, are summed in bfloat16:
    before they are reduced, or with zero_stage 2 and 3 until they are reduced over the replicas."""
    precision = config.precision
    if precision.reduce != torch.bfloat16 or not several:
        return False
    if zero_stage >= 2:  # offloaded ones would wait for the host to add them
        adds = adds_to_gradients(replicas, precision.reduce, precision.master)
        return config.parallel.offload != "none" or not adds
    return config.train.dtype == "bfloat16" or config.train.compile  # of compiled blocks


def check_reduce_dtype(config: Config, sizes: MeshSizes) -> None:
    several, replicas = config.num_microbatches(sizes.dp) > 1, sizes.of_weights["dp_replicate"]
    if sums_in_bfloat16(config, config.parallel.zero_stage, several, replicas):
        why = "gradients of micro-batches would be summed in bfloat16, too"
        remedy = "use float32, or parallel.zero_stage=2 (or 3) and parallel.dp_replicate=1, where "
        remedy += "each is reduced separately, without parallel.offload and in float32 weights"
        raise UserError("parallel.reduce_dtype", "bfloat16", why, remedy)


def cuts_of_sequence(parallel: ParallelConfig) -> dict[str, int]:
    """The keys of `parallel` that cut a sequence, each with its number of equal parts: cp cuts it
    into two chunks per rank, and sequence parallelism each rank's part over tp."""
    cuts = {"cp": 2 * parallel.cp} if parallel.cp > 1 else {}
    if parallel.sequence_parallel and parallel.tp > 1:
        cuts["tp"] = parallel.tp
        if parallel.tp_pieces > 1:
            cuts["tp_pieces"] = parallel.tp_pieces
    return cuts


def check_sequence(config: Config, sizes: MeshSizes) -> None:
    cuts = cuts_of_sequence(config.parallel)
    parts = math.prod(cuts.values())
    if config.train.seq_len % parts:
        keys = " and ".join(f"parallel.{key}={getattr(config.parallel, key)}" for key in cuts)
        why = f"context and sequence parallelism cut it into {parts} equal parts ({keys})"
        remedy = f"use a multiple of {parts}, or smaller numbers there"
        raise UserError("train.seq_len", config.train.seq_len, why, remedy)


def check_pure_bfloat16(config: Config, sizes: MeshSizes) -> None:
    dtype, own = config.train.dtype, config.optimizer
    remedy = "set optimizer.pure_bfloat16=false"
    if not own.pure_bfloat16:
        return
    if dtype != "bfloat16":
        why = f"train.dtype={dtype} would compute with weights that are stored in bfloat16"
        remedy += ", or train.dtype=bfloat16"
    elif not load_kind(own.folders["name"], own.name, "Optimizer").rounds_stochastically:
        why = f"{own.name} rounds to nearest and would lose small updates"
    else:
        return
    raise UserError("optimizer.pure_bfloat16", True, why, remedy)


def check_qk_clip(config: Config, sizes: MeshSizes) -> None:
    if config.clips_logits:
        for block, _ in kinds_of_blocks(config.model):
            for _, attention in attentions_of(block):
                attention.rows_of_heads()


def check_schedule(config: Config, sizes: MeshSizes) -> None:
    p, name = config.parallel, config.parallel.schedule
    if fault := fault_in(name, p.pp, p.stages_per_rank, config.num_microbatches(sizes.dp)):
        # in a schedule that the user added; without this check it could hang
        remedy = "correct the schedule; parallel/pipeline/check.py has the rules"
        raise UserError("parallel.schedule", name, fault, remedy)
    config.split_layers()  # which asks the schedule where its stages are


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
    parallel, precision = config.parallel, config.precision
    of_one = parallel.zero_stage < 2 and config.num_microbatches(sizes.dp) == 1
    is_wider = torch.promote_types(precision.reduce, precision.compute) != precision.compute
    uses_fsdp = sizes.dp * sizes.cp > 1 or parallel.offload != "none"  # as `shard` (fsdp_units.py)
    if parallel.fsdp_unit == "stage" and of_one and is_wider and uses_fsdp:
        why = "compiled blocks leave the gradients of a single micro-batch in train.dtype, and the "
        why += "rest of the unit in parallel.reduce_dtype: FSDP reduces a unit in one dtype"
        remedy = "set parallel.fsdp_unit=block, train.compile=false, or a smaller micro-batch"
        raise UserError("train.compile", True, why, remedy)


def check_experts(config: Config, sizes: MeshSizes) -> None:
    model, experts = config.model, config.model.find(Experts)
    if experts is None:
        if sizes.ep > 1:
            remedy = "set parallel.ep=1, or model.experts.count"
            raise UserError("parallel.ep", sizes.ep, "the model has no experts", remedy)
        return
    number = experts.count
    if number % sizes.ep:
        why = f"does not divide model.experts.count={number}"
        fits = [n for n in range(1, number + 1) if number % n == 0]
        raise UserError("parallel.ep", sizes.ep, why, f"choose one of {fits}")
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        why = "tp ranks must have different tokens, which go to different experts"
        raise UserError(
            "parallel.sequence_parallel", False, why, "set it to true, or parallel.tp=1"
        )
    if config.train.compile:
        why = "how many rows an expert gets is known only while a step runs, and a compiled "
        why += "block is one graph"
        raise UserError("train.compile", True, why, "set train.compile=false")
    router = router_class(model.router)
    if experts.per_token == 1 and router.renormalises and not experts.has_router_losses:
        why = f"router {model.router} divides weights by their sum, so a single one is always 1 "
        why += "and the router would learn nothing"
        remedy = "set model.router=softmax, or choose 2 experts or more"
        raise UserError("model.experts.per_token", 1, why, remedy)
    shards = sizes.of_experts["efsdp"]
    for key, side in sides_that_cannot_be_cut(model, sizes.ep, shards):
        why = f"must be a multiple of {shards}: a rank has {number // sizes.ep} of the "
        why += f"experts, fewer than the {shards} ranks (dp_shard · cp · tp / ep) that shard them, "
        why += "so each is cut"
        remedy = f"give {max(1, side // shards) * shards}, or another parallel.ep"
        raise UserError(key, side, why, remedy)


def sides_that_cannot_be_cut(model: ModelConfig, ep: int, shards: int) -> list[tuple[str, int]]:
    """The sides of an expert's matrices, with their keys, that `shards` ranks of FSDP would have to
    share and cannot. They share experts as wholes if an ep rank has as many."""
    experts = model.find(Experts)
    if experts is None or experts.count // ep >= shards:
        return []
    return [(key, side) for key, side in model.expert_sides.items() if side % shards]


def check_learning_rate(config: OptimizerConfig, phase: range, steps_of_run: int) -> None:
    """Raise UserError if `decay_steps` does not fit the schedule over `phase` (data_stages.py)."""
    steps, decay, warmup = len(phase), config.decay_steps, config.warmup_steps
    given = f"train.steps={steps}" if steps == steps_of_run else f"its phase of {steps} steps"
    if config.schedule != "wsd":
        if not decay:
            return
        why = f"schedule {config.schedule} does not read it"
        remedy = "leave it out, or set optimizer.schedule=wsd"
    elif not steps_of_run:
        return
    elif not 0 < decay <= steps:
        why = f"schedule wsd decays over the last steps of {given}"
        remedy = f"give a number between 1 and {steps}, often a tenth or a fifth of it"
    elif warmup + decay > steps:
        why = f"with optimizer.warmup_steps={warmup} they would be more than {given}: the rate "
        why += "would fall at once from where warmup ends to where the decay is by then"
        remedy = f"give at most {steps - warmup}, or " if warmup < steps else "give "
        remedy += f"optimizer.warmup_steps={steps - decay} or less"
    else:
        return
    raise UserError("optimizer.decay_steps", decay, why, remedy)


CHECKS: list[Callable[[Config, MeshSizes], None]] = [
    check_lengths,  # first: others build something of these lengths
    check_profile,
    check_batch,
    check_reduce_dtype,
    lambda config, sizes: check_tp(config.model, sizes.tp),
    check_experts,
    check_sequence,
    check_pure_bfloat16,
    check_qk_clip,
    check_schedule,
    check_compile,
]
