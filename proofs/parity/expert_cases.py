"""The cases of the parity proof with a mixture of experts: every layout with every ep, a covering
array over the options that affect experts, and loads as uneven as they can be."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from kinds import kinds_in
from parallel.axes import MeshSizes
from proofs.parity.cases import Case, meshes_of, option_values

STEPS = 3  # with a clipped update in each, and a change of biases
EP = (1, 2, 4)
# For the covering array: ep inside each axis that it can be a part of, and across them, alone and
# with every other axis.
LAYOUTS = [
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
        for options in ({}, {"activation_checkpointing": "selective", "schedule": "zb_h1"})
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
