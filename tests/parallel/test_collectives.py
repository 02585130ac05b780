"""Communication is part of the specification: for each pass and mesh axis, the number of
collectives and their bytes."""

from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import pytest
import torch

from costs.collectives import wire_bytes
from costs.summary import mean_of_blocks
from model.transformer import Head
from parallel.axes import MeshSizes
from parallel.data import fsdp_modules
from proofs.parity.cases import BATCH, SEQ_LEN, Case
from tests.counting import B, Listener, S, once, one_block, sent_over_cp
from tests.kernels.flash import flash_attention_stands_in
from tests.planted import name_of
from tests.proofs.parity_tiers import thorough_but
from tests.steps import make_step, rows_of

DOUBLE = 8  # bytes of a float64


def bytes_sent(block):
    """Bytes that one rank sends over tp, in rings."""
    calls = [call for phase in block.phases().values() for call in phase.sends.elements()]
    return sum(wire_bytes(c.kind, c.bytes, block.setting.tp) for c in calls if c.axis == "tp")


@pytest.mark.parametrize(
    ("sequence_parallel", "tp", "p"),
    [(True, 1, 2), (True, 4, 1), (True, 2, 4), (False, 4, 1), (False, 2, 4)],
)
def test_collectives_of_a_block(ranks, sequence_parallel, tp, p):
    """With sequence parallelism, attention and feed-forward each all-gather their input and
    reduce-scatter their output. Backward does the reverse, and all-gathers x again. In p pieces,
    these are p times as many collectives with the same bytes. Without it, they each all-reduce
    their output, in p pieces, and in backward their input gradient. The bytes are those that
    costs/units.py records. A block on one rank sends nothing."""
    case = Case(MeshSizes(tp=tp), sequence_parallel=sequence_parallel, tp_pieces=p)
    size = S * B * 32 * DOUBLE
    config = case.config()
    recorded = mean_of_blocks(config.setting(), bytes_sent)
    recorded *= config.num_microbatches(1)
    told = recorded * S * B / (config.train.global_batch_size * config.train.seq_len)
    for forward, backward in ranks.run(one_block, tp, case):
        if tp == 1:
            assert forward == backward == {}
        elif sequence_parallel:
            twice = (2 * p, 2 * size)
            assert forward == {"all_gather": twice, "reduce_scatter": twice}
            assert backward == {"all_gather": (4 * p, 4 * size), "reduce_scatter": twice}
        else:
            assert forward == {"all_reduce": (2 * p, 2 * size)}
            assert backward == {"all_reduce": (2, 2 * size)}
        sent = [
            total * (tp - 1) / tp * (2 if kind == "all_reduce" else 1)
            for counted in (forward, backward)
            for kind, (_, total) in counted.items()
        ]
        assert sum(sent) == told


def one_step(case):
    """The collectives of the second training step by axis, the numbers in this rank's unsharded
    weights by FSDP unit, and the dtypes of weights and moments between steps."""
    step = make_step(case)
    step(0, *rows_of(step))
    with Listener(step.mesh) as listener:
        step(1, *rows_of(step))
    units = []
    for stage in step.stages.values():
        modules = [stage.embedding, *stage.blocks.values()]
        units += [list(module.parameters()) for module in modules if module is not None]
        units += [[stage.norm.weight, stage.head.weight]] if stage.norm is not None else []
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "world", "other")
    sizes = [sum(p.numel() for p in unit) for unit in units]
    moments = [states["exp_avg"] for states in step.optimizer.states]
    kept = [*moments, *(weight.sharded for weight in step.weights)]
    return {axis: listener.count(axis) for axis in axes}, sizes, {t.dtype for t in kept}


M = 2  # micro-batches
UNITS = {"block": 4, "stage": 1}  # FSDP's units: embedding, two blocks, norm and head
BACKWARDS = ("1f1b", "zb_h1")  # whole, and in two parts


@pytest.mark.parametrize(
    ("unit", "schedule", "zero_stage"),
    thorough_but(
        {("block", "1f1b", 1), ("block", "zb_h1", 2), ("stage", "zb_h1", 3)},
        product(UNITS, BACKWARDS, (1, 2, 3)),
    ),
)
def test_zero_stage_is_what_the_table_says(ranks, unit, schedule, zero_stage):
    """A unit's weights are all-gathered and its gradients reduce-scattered as often per step as the
    table in parallel/data.py says. A backward split in two parts gathers and reduces as often as a
    whole one. A stage as one unit moves the same bytes at once. Of bfloat16 (here with zero_stage
    3) weights are gathered, and gradients are summed in float32, as weights and moments are kept.
    """
    case = Case(
        MeshSizes(dp_replicate=2, dp_shard=2),
        schedule=schedule,
        zero_stage=zero_stage,
        fsdp_unit=unit,
        vocab_size=256,
        num_microbatches=M,
        dtype="bfloat16" if zero_stage == 3 else "float64",
    )
    compute, exact = (2, 4) if zero_stage == 3 else (DOUBLE, DOUBLE)  # bytes of a number
    number = UNITS[unit]
    gathers, scatters = {1: (1, 1), 2: (1, M), 3: (2 * M, M)}[zero_stage]
    for axes, units, dtypes in ranks.run(one_step, 4, case):
        size = sum(units)
        assert len(units) == 4
        assert dtypes == {torch.float32 if zero_stage == 3 else torch.float64}
        assert axes["dp_shard"] == {
            "all_gather": (gathers * number, gathers * size * compute),
            "reduce_scatter": (scatters * number, scatters * size * exact),
        }
        # the sharded gradients, once per step
        assert axes["dp_replicate"] == {"all_reduce": (number, size * exact // 2)}
        assert axes["tp"] == axes["pp"] == axes["other"] == {}


def modules_not_called(case):
    """The modules under FSDP whose forward a step does not call as that of a module."""
    step = make_step(case)
    left = set()
    for stage in step.stages.values():
        for module in fsdp_modules(stage):
            left.add(type(module).__name__)
            module.register_forward_hook(lambda one, *_: left.discard(type(one).__name__))
    step.forward_backward(*rows_of(step))
    return left


@pytest.mark.parametrize("zero_stage", thorough_but({1}, [1, 3]))
def test_every_module_of_an_fsdp_unit_is_called(ranks, zero_stage):
    """FSDP gathers a unit before the first of its modules is called, and shards it after the last.
    If one is never called (the head, if its loss were another method), torch 2.11 trains with
    weights that were not gathered again. Control: a step that calls the head's forward directly."""
    case = Case(MeshSizes(dp_shard=2), zero_stage=zero_stage)
    assert ranks.run(modules_not_called, 2, case) == [set(), set()]
    if zero_stage == 1:
        assert ranks.run(beside_the_head, 2, case) == [{"FSDPHead"}] * 2


def beside_the_head(case):
    with patch.object(Head, "__call__", Head.forward):
        return modules_not_called(case)


def test_zero_stage_0_only_reduces_gradients(ranks):
    """With whole replicas no weight is gathered, and gradients are all-reduced once per step."""
    case = Case(MeshSizes(pp=2, dp_replicate=2), zero_stage=0, num_microbatches=M)
    for axes, units, _ in ranks.run(one_step, 4, case):
        assert axes["dp_shard"] == {}
        assert axes["dp_replicate"] == {"all_reduce": (len(units), sum(units) * DOUBLE)}


PIPELINES = [
    Case(MeshSizes(pp=3, dp_shard=2), tie_embeddings=True, vocab_size=256, num_microbatches=M),
    Case(MeshSizes(pp=2, tp=2), num_microbatches=M),
    Case(MeshSizes(pp=2, tp=2), sequence_parallel=False, num_microbatches=M),
]


@pytest.mark.parametrize("case", thorough_but(PIPELINES[:2], PIPELINES), ids=str)
def test_pipeline_sends_one_message_per_boundary_and_microbatch(ranks, case):
    """Hidden states [S/tp, B, D] are sent downstream and their gradients upstream, one message
    each. The first and the last rank have one neighbour, the others two. (test_schedule.py counts
    the messages of other schedules.) The gradient of a tied embedding, [V / (tp · dp_shard), D] per
    rank, is all-reduced once between the first and the last stage."""
    layout = case.layout
    length = SEQ_LEN // (layout.tp if case.sequence_parallel else 1)
    message = length * (BATCH // layout.dp // M) * 32 * DOUBLE
    for rank, (axes, *_) in enumerate(ranks.run(one_step, case.world, case)):
        at_end = rank * layout.pp // case.world in (0, layout.pp - 1)
        number = M if at_end else 2 * M
        once = (number, number * message)
        assert axes["pp"].pop("all_reduce") == (1, DOUBLE)  # distributes the last stage's loss
        assert axes["pp"] == {"send": once, "recv": once}
        tied = {"all_reduce": (1, 256 // 2 * 32 * DOUBLE)} if case.tie_embeddings else {}
        assert axes["other"] == (tied if at_end else {})


@pytest.mark.parametrize(
    ("schedule", "p"), thorough_but([("zb_h1", 4)], product(("1f1b", "zb_h1"), (1, 4)))
)
def test_whole_step_over_tp(ranks, schedule, p):
    """Over tp a step has the collectives of the blocks, the embedding, the head and the loss, and
    one all-reduce of the partial gradients of the norms. The head divides the tokens in its own
    way; the collectives of the others are one for each of the sequence's p pieces."""
    case = Case(MeshSizes(dp_replicate=2, tp=2), schedule=schedule, num_microbatches=M, tp_pieces=p)
    tokens = SEQ_LEN * BATCH // 2 // M * DOUBLE
    hidden = 32 * tokens
    blocks, norms = 2, 5
    gathers = 6 * blocks + 2 + (2 * blocks if schedule == "zb_h1" else 0)
    for axes, *_ in ranks.run(one_step, 4, case):
        assert axes["tp"] == {
            # forward: 2 per block, the head's, and the loss's three numbers per token and rank;
            # backward: 4 per block and the embedding's gradient; deferred weight gradients gather
            # the output gradients of a block's row-parallel layers again
            "all_gather": (M * ((gathers - 1) * p + 2), M * (gathers * hidden + 2 * 3 * tokens)),
            "reduce_scatter": (M * ((4 * blocks + 1) * p + 1), M * (4 * blocks + 2) * hidden),
            "all_reduce": (1, norms * 32 * DOUBLE),
        }


# --- context parallelism ---


FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
DOCUMENTS = {"document_mask": True}
CONTEXT = [  # layout, options, key/value heads of a tp rank, sequences per micro-batch, attention
    (MeshSizes(dp_shard=2, cp=2), DOCUMENTS, 4, 1, nullcontext),
    (MeshSizes(dp_shard=2, cp=2), DOCUMENTS, 4, 2, flash_attention_stands_in),
    (MeshSizes(cp=2, tp=2), SELECTIVE, 2, 2, nullcontext),
    (MeshSizes(pp=2, cp=2), {"schedule": "zb_h1"}, 4, 2, nullcontext),
]
LAYERS = [
    *CONTEXT,
    (MeshSizes(dp_shard=2, cp=2), DOCUMENTS, 4, 1, flash_attention_stands_in),
    (MeshSizes(dp_shard=2, cp=2), DOCUMENTS, 4, 2, nullcontext),
    (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8} | FULL, 8, 1, nullcontext),
    (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8} | FULL, 8, 2, nullcontext),
    (MeshSizes(dp_replicate=2, cp=2), SELECTIVE, 4, 1, nullcontext),
    (MeshSizes(cp=2, tp=2), {"sequence_parallel": False, "num_kv_heads": 2}, 1, 2, nullcontext),
    (MeshSizes(pp=2, cp=2), {"schedule": "zb_h1"}, 4, 1, nullcontext),
    (MeshSizes(dp_shard=2, cp=4), {"num_kv_heads": 8}, 8, 1, nullcontext),
]


@pytest.mark.parametrize(
    ("layout", "options", "kv_heads", "rows", "attention"),
    thorough_but(CONTEXT, LAYERS),
    ids=name_of,
)
def test_gathers_and_scatters_of_a_layer(ranks, layout, options, kv_heads, rows, attention):
    """Per layer and micro-batch, in every mode of activation checkpointing, and with a backward in
    two parts: gradients are scattered once. Backward gathers again if it recomputes, or if a
    micro-batch is one sequence; else what forward gathered is kept, as are the copies into which
    flash attention packs two. A tp rank sends its own heads. Evaluation gathers once."""
    case = Case(layout, **options)
    number, size = once(case, rows, kv_heads, itemsize=8)
    times = 1 if case.activation_checkpointing == "none" and rows > 1 else 2
    for sent in ranks.run(sent_over_cp, layout.world, case, rows, True, attention):
        assert sent == {"all_gather": (times * number, times * size),
                        "reduce_scatter": (number, size)}  # fmt: skip
    for sent in ranks.run(sent_over_cp, layout.world, case, rows, False, attention):
        assert sent == {"all_gather": (number, size)}


def in_their_dtype():
    return patch("torch.promote_types", lambda own, wider: own)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), thorough_but([("bfloat16", 2)], [("bfloat16", 2), ("float32", 4)])
)
def test_gradients_are_summed_in_float32(ranks, dtype, itemsize):
    """The number of bytes sent shows it. Control: a sum in bfloat16 sends half as many."""
    case = Case(MeshSizes(dp_shard=2, cp=2), dtype=dtype)
    sent = {"all_gather": once(case, 2, 4, itemsize), "reduce_scatter": once(case, 2, 4, 4)}
    assert ranks.run(sent_over_cp, 4, case, 2, True) == [sent] * 4
    if dtype == "bfloat16":
        control = sent | {"reduce_scatter": once(case, 2, 4, 2)}
        assert ranks.run(sent_over_cp, 4, case, 2, True, in_their_dtype) == [control] * 4
