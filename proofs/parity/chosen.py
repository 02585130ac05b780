"""The cases of the parity proof that were chosen by hand, where the covering array (cases.py) tries
too few values, or would be too slow."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kinds import kinds_in
from model.attention import sliding_window
from parallel.axes import MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from proofs.parity.cases import BATCH, Case, option_values
from proofs.parity.reference import keys_to_try


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
        Case(
            MeshSizes(dp_shard=2, cp=2),
            zero_stage=3,
            attention=("sliding_window", "causal"),
            keys=(("sliding_window", sliding_window.Settings(window=5)),),
        ),
        Case(MeshSizes(dp_replicate=2, cp=2), zero_stage=0, tie_embeddings=True),
        Case(MeshSizes(dp_replicate=2, dp_shard=2, cp=2), zero_stage=2, offload="disk"),
        Case(MeshSizes(pp=2, cp=2, tp=2), schedule="zb_h1", tp_pieces=2, document_mask=True),
        Case(MeshSizes(pp=2, dp_shard=2, cp=2), schedule="zb_v", stages_per_rank=2, zero_stage=3),
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
            kinds: dict[str, Any] = {key: (kind, usual), "keys": keys_to_try(key, kind)}
            if kind in (usual, "experts"):
                continue
            # each tp rank has whole keys, and the gradient of its own query heads
            shared: dict[str, Any] = {"num_kv_heads": 1, **kinds}
            whole: dict[str, Any] = {"sequence_parallel": False, **shared}
            cases += [
                Case(MeshSizes(tp=2), activation_checkpointing="selective", **whole),
                Case(MeshSizes(pp=2, tp=2), schedule="zb_h1", layers="uneven", **shared),
                Case(MeshSizes(dp_shard=2), zero_stage=3, activation_checkpointing="full", **kinds),
                Case(MeshSizes(dp_replicate=2, cp=2), document_mask=True, **kinds),
            ]
    for router in kinds_in("model.router"):  # expert_cases.py tries those that make a valid case
        Case(MeshSizes(), router=router).config()
    return cases


def kernel_cases() -> list[Case]:
    """The whole model with Triton's kernels: over tp, and with the ways of checkpointing, sharding
    and splitting that affect them."""
    cases = [
        *(Case(MeshSizes(tp=tp)) for tp in (1, 2, 4)),
        Case(MeshSizes(tp=2), sequence_parallel=False, num_kv_heads=8, attention_dim=64),
        Case(
            MeshSizes(dp_shard=2, tp=2),
            zero_stage=3,
            activation_checkpointing="full",
            num_kv_heads=1,
            qk_norm=True,
        ),
        Case(MeshSizes(dp_replicate=2), activation_checkpointing="selective", document_mask=True),
        Case(
            MeshSizes(pp=2, tp=2),
            schedule="zb_v",
            stages_per_rank=2,
            tie_embeddings=True,
            vocab_size=256,
        ),
        Case(
            MeshSizes(pp=2, dp_shard=2),
            schedule="zb_h1",
            zero_stage=2,
            offload="disk",
            qk_norm=True,
        ),
        # rotates gradients that are parts of wider tensors
        Case(
            MeshSizes(cp=2),
            activation_checkpointing="selective",
            num_kv_heads=2,
            document_mask=True,
        ),
    ]
    return [replace(case, kernels="triton") for case in cases]
