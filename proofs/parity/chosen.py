"""The cases of the parity proof that were chosen by hand, where the covering array (cases.py) tries
too few values, or would be too slow; and those with a mixture of experts: every layout with every
ep, a covering array over the options that affect experts, and loads as uneven as they can be."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kinds import kinds_in
from parallel.axes import MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from proofs.parity.cases import BATCH, Case, meshes_of, option_values
from proofs.parity.reference import keys_to_try

Options = dict[str, Any]  # of a case
FULL: Options = {"activation_checkpointing": "full"}
SELECTIVE: Options = {"activation_checkpointing": "selective"}
ZB_H1: Options = {"schedule": "zb_h1"}
ZB_V: Options = {"schedule": "zb_v", "stages_per_rank": 2}
WINDOW: Options = {
    "attention": ("sliding_window", "causal"),
    "keys": keys_to_try("attention", "sliding_window"),
}


def schedule_cases(worlds: Sequence[int]) -> list[Case]:
    """Every schedule, at every pipeline depth and number of stages per rank that it accepts, with
    tp and dp_shard where they fit, and with half as many to four times as many micro-batches as
    pipeline ranks. zero_stage and tie_embeddings alternate."""
    cases: list[Case] = []
    for layout in (
        MeshSizes(pp=2),
        MeshSizes(pp=2, dp_shard=2, tp=2),
        MeshSizes(pp=4, tp=2),
        MeshSizes(pp=4, dp_shard=2),
        MeshSizes(pp=8),
    ):
        for schedule, stages_per_rank in product(SCHEDULES, (1, 2, 4)):
            for microbatches in (layout.pp // 2, layout.pp, 2 * layout.pp, 4 * layout.pp):
                case = Case(
                    layout,
                    schedule=schedule,
                    stages_per_rank=stages_per_rank,
                    num_microbatches=microbatches,
                    zero_stage=1 + len(cases) % 3,
                    tie_embeddings=len(cases) % 2 == 1,
                )
                if case.world in worlds and case.is_valid():
                    cases.append(case)
    return cases


def context_cases() -> list[Case]:
    """Context parallelism with micro-batches of one sequence and without activation checkpointing,
    where backward gathers keys and values again: with every schedule, and with the options that
    affect what else a backward sends. (The covering array's micro-batches have more sequences.)"""
    cases = [
        Case(
            MeshSizes(pp=2, cp=2),
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            zero_stage=1 + number % 3,
            tie_embeddings=number % 2 == 1,
            document_mask=number % 2 == 0,
        )
        for number, (schedule, stages_per_rank) in enumerate(option_values()["pipeline"])
    ]
    cases += [
        Case(MeshSizes(cp=4), num_kv_heads=8, document_mask=True, offload="host"),
        Case(MeshSizes(cp=2, tp=2), num_kv_heads=8, tp_pieces=2),
        Case(MeshSizes(cp=2, tp=2), num_kv_heads=2, sequence_parallel=False, document_mask=True),
        Case(MeshSizes(dp_shard=2, cp=2), zero_stage=3, **WINDOW),
        Case(MeshSizes(dp_replicate=2, cp=2), zero_stage=0, tie_embeddings=True),
        Case(MeshSizes(dp_replicate=2, dp_shard=2, cp=2), zero_stage=2, offload="disk"),
        Case(MeshSizes(pp=2, cp=2, tp=2), tp_pieces=2, document_mask=True, **ZB_H1),
        Case(MeshSizes(pp=2, dp_shard=2, cp=2), zero_stage=3, **ZB_V),
    ]
    return [replace(case, num_microbatches=BATCH // case.layout.dp) for case in cases]


def kind_cases() -> list[Case]:
    """Every kind of attention and feed-forward that other cases do not have, in every second layer:
    over each axis, with each way of checkpointing. Raises UserError if a kind or a router has no
    reference, or if the reference of a router lacks settings that the router needs."""
    cases = []
    for key in ("attention", "feed_forward"):
        usual = getattr(Case, key)
        for kind in kinds_in(f"model.{key}"):
            kinds: Options = {key: (kind, usual), "keys": keys_to_try(key, kind)}
            if kind in (usual, "experts"):
                continue
            # each tp rank has whole keys, and the gradient of its own query heads
            shared: Options = {"num_kv_heads": 1, **kinds}
            whole: Options = {"sequence_parallel": False, **shared}
            cases += [
                Case(MeshSizes(tp=2), **SELECTIVE, **whole),
                Case(MeshSizes(pp=2, tp=2), layers="uneven", **ZB_H1, **shared),
                Case(MeshSizes(dp_shard=2), zero_stage=3, **FULL, **kinds),
                Case(MeshSizes(dp_replicate=2, cp=2), document_mask=True, **kinds),
            ]
    for router in kinds_in("model.router"):  # below, those that make a valid case
        Case(MeshSizes(), router=router).config()
    return cases


def kernel_cases() -> list[Case]:
    """The whole model with Triton's kernels: over tp, and with the ways of checkpointing, sharding
    and splitting that affect them."""
    cases = [
        *(Case(MeshSizes(tp=tp)) for tp in (1, 2, 4)),
        Case(MeshSizes(tp=2), sequence_parallel=False, num_kv_heads=8, attention_dim=64),
        Case(MeshSizes(dp_shard=2, tp=2), zero_stage=3, num_kv_heads=1, qk_norm=True, **FULL),
        Case(MeshSizes(dp_replicate=2), document_mask=True, **SELECTIVE),
        Case(MeshSizes(pp=2, tp=2), tie_embeddings=True, vocab_size=256, **ZB_V),
        Case(MeshSizes(pp=2, dp_shard=2), zero_stage=2, offload="disk", qk_norm=True, **ZB_H1),
        # rotates gradients that are parts of wider tensors
        Case(MeshSizes(cp=2), num_kv_heads=2, document_mask=True, **SELECTIVE),
    ]
    return [replace(case, kernels="triton") for case in cases]


# --- mixtures of experts ---

EXPERT_STEPS = 3  # with a clipped update in each, and a change of biases
EP = (1, 2, 4)
# For the covering array: ep inside each axis that it can be a part of, and across them, alone and
# with every other axis.
EXPERT_LAYOUTS = [
    MeshSizes(),
    MeshSizes(dp_shard=2, ep=2),
    MeshSizes(tp=2, ep=2),
    MeshSizes(cp=2, ep=2),
    MeshSizes(pp=2, tp=2),
    MeshSizes(pp=2, cp=2, ep=2),
    MeshSizes(dp_replicate=2, tp=2, ep=2),
    MeshSizes(dp_shard=4, ep=2),
    MeshSizes(dp_shard=2, tp=2, ep=4),
    MeshSizes(cp=2, tp=2, ep=4),
    MeshSizes(pp=2, dp_shard=2, tp=2, ep=2),
    MeshSizes(dp_replicate=2, dp_shard=2, cp=2, ep=4),
]
# Backward in one and in two parts, with one and two stages per rank. (The other schedules run the
# same in another order.)
PIPELINES = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)]


def expert_layout_cases(worlds: Sequence[int]) -> list[Case]:
    """Every layout of `worlds` with every ep that is possible there. The kind of router and
    zero_stage alternate."""
    layouts = [
        replace(sizes, ep=ep)
        for world in worlds
        for sizes, ep in product(meshes_of(world), EP)
        if sizes.dp_shard * sizes.cp * sizes.tp % ep == 0
    ]
    routers = kinds_in("model.router")
    cases = [
        Case(
            sizes,
            num_microbatches=4 if sizes.pp > 1 else 2,
            zero_stage=1 + number % 3,
            router=routers[number // 3 % len(routers)],
            router_losses=True,
            num_shared_experts=1,
        )
        for number, sizes in enumerate(layouts)
    ]
    return [case for case in cases if case.is_valid()]


def expert_values(layouts: Sequence[MeshSizes]) -> dict[str, Sequence[object]]:
    """The values of each option that the covering array combines."""
    others = option_values()
    same = ("zero_stage", "fsdp_unit", "offload", "activation_checkpointing", "num_microbatches")
    switches = ("tie_embeddings", "document_mask", "router_losses")
    return {
        "layout": layouts,
        "router": kinds_in("model.router"),
        "num_experts": (8, 4),  # with ep 4, fewer on a rank than ranks that shard them
        "experts_per_token": (3, 1),
        "expert_dim": (16, 12),
        "num_shared_experts": (0, 1, 2),
        "num_dense_layers": (0, 1),
        "tp_pieces": (1, 2),
        "pipeline": PIPELINES,
        **{name: others[name] for name in same},
        **dict.fromkeys(switches, (False, True)),
    }


def extreme_cases() -> list[Case]:
    """Loads as uneven as they can be, and numbers of experts at the limits of what can be sharded.
    Sigmoid scores are below 1, so no score outweighs a bias of 2."""
    one = (0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0)
    none = (-2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    # with ep 4 a rank has two of the experts: rank 1 receives no rows
    idle = (0.0, 0.0, -2.0, -2.0, 0.0, 0.0, 0.0, 0.0)
    layouts = [
        MeshSizes(),
        MeshSizes(dp_shard=2, ep=2),
        MeshSizes(tp=2, ep=2),
        MeshSizes(dp_shard=2, tp=2, ep=4),
        MeshSizes(pp=2, dp_shard=4, ep=4),
    ]
    biased = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, zero_stage=2)
    uneven = [
        replace(biased, layout=sizes, first_bias=first, experts_per_token=k, **options)
        for sizes in layouts
        for first, k in ((one, 1), (one, 3), (none, 3), (idle, 3))
        for options in ({}, {**SELECTIVE, **ZB_H1})
    ]
    # each expert cut in two or four: fewer on a rank than ranks that shard them
    few = Case(MeshSizes(), router="softmax", num_experts=4, zero_stage=3)
    return [
        *uneven,
        replace(few, layout=MeshSizes(dp_shard=8, ep=2)),
        replace(few, layout=MeshSizes(dp_shard=8, ep=4)),
        replace(few, layout=MeshSizes(dp_shard=4, tp=2)),
        replace(few, layout=MeshSizes(dp_replicate=2, cp=2, tp=2), num_experts=2,
                experts_per_token=2),
        # three experts of a rank over two ranks: one has two of them
        replace(few, layout=MeshSizes(dp_shard=4, ep=2), num_experts=6),
        replace(few, layout=MeshSizes(tp=2), num_experts=3),
        # every token to every expert
        replace(few, layout=MeshSizes(cp=2, tp=2, ep=4), experts_per_token=4),
        # the first stage has no experts, and FSDP shards only those, over tp
        replace(few, layout=MeshSizes(pp=2, tp=2), num_dense_layers=2),
    ]  # fmt: skip
