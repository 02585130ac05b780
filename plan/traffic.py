"""Every collective of one training step on one rank: over which axis, of which kind, how many, how
many bytes.

Bytes are those of the whole tensor: what an all-gather ends with, what a reduce-scatter begins
with, what an all-reduce or a message holds. `wire_bytes` says what of it passes a rank's link.
Collectives over one rank move nothing and do not count.

| when              | over         | sequence parallel: T tokens, D wide, e bytes | else          |
|-------------------|--------------|----------------------------------------------|---------------|
| embedding, F      | tp           | 1 reduce-scatter T·D·e; in B 1 all-gather    | 1 all-reduce  |
| block, F          | tp           | 2 all-gathers, 2 reduce-scatters, T·D·e each | 2 all-reduces |
| block, B          | tp           | 4 all-gathers, 2 reduce-scatters             | 2 all-reduces |
| block, split: I   | tp           | 2 and 2                                      | 2 all-reduces |
| block, split: W   | tp           | 4 all-gathers                                | none          |
| block, recomputed | tp           | 2 all-gathers, 1 reduce-scatter more         | 1 more        |
| head, F, a piece  | tp           | gather, reduce-scatter of it, and 3 numbers  | all-reduce,   |
|                   |              | a token                                      | and the 3     |
| between stages    | pp           | T·D·e / tp: hidden states, their gradients   | T·D·e         |
| once a step       | tp           | gradients that each tp rank knows in part    | shared k, v;  |
|                   |              |                                              | q's, k's norm |
| gather of a unit  | dp_shard     | its weights, compute dtype: once a step;                     |
|                   |              | zero_stage 3: every forward, every backward                  |
| reduction of one  | dp_shard     | its gradients in reduce_dtype: once a step;                  |
|                   |              | zero_stage 2, 3: every micro-batch                           |
|                   | dp_replicate | 1 / dp_shard of them, once a step                            |
| once a step       | loss         | 1 all-reduce of the target tokens (int64), 1 of the loss     |
|                   | pp           | 1 all-reduce of the loss                                     |
|                   | world        | 1 all-reduce of the gradients' squares (float64)             |
|                   | ends         | 1 all-reduce of a tied embedding's gradient, on two ranks    |
"""

from collections import Counter
from typing import Any, NamedTuple

from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from parallel.pipeline.lower import need_of, result_of
from parallel.placement import chunk_range
from plan.layout import Layout, Unit
from training.config import Config
from training.precision import Precision


class Call(NamedTuple):
    """A collective."""

    axis: str
    kind: str
    bytes: int


def collectives(layout: Layout) -> Counter[Call]:
    """Those of one step, with their number."""
    calls: Counter[Call] = Counter()
    actions = layout.schedule[layout.pp_rank]
    for kind, stage, number in _counted(actions):
        calls += _times(action_calls(layout, Action(kind, stage, 0)), number)
    for stage in layout.stages:
        calls += fsdp_calls(layout, stage)
    where = layout.where
    message = Call("pp", "", layout.local_tokens * layout.model.dim * layout.compute)
    for action in actions:
        result, need = result_of(action, layout.num_stages), need_of(action, layout.num_stages)
        if result is not None and where[result.stage] != layout.pp_rank:
            calls[message._replace(kind="send")] += 1
        if (
            need is not None
            and where[need.stage + (1 if need.is_gradient else -1)] != layout.pp_rank
        ):
            calls[message._replace(kind="receive")] += 1
    calls += _once_a_step(layout)
    return calls


def action_calls(layout: Layout, action: Action) -> Counter[Call]:
    """Over tp, in one action."""
    calls: Counter[Call] = Counter()
    if layout.tp == 1:
        return calls
    kind, stage, _ = action
    cut = layout.config.parallel.sequence_parallel
    whole = layout.tokens * layout.model.dim * layout.compute
    gather, scatter = Call("tp", "all_gather", whole), Call("tp", "reduce_scatter", whole)
    both = Call("tp", "all_reduce", whole)
    blocks = sum(unit.name == "block" for unit in layout.units(stage))
    first, last = stage == 0, stage == layout.num_stages - 1
    back = kind in (BACKWARD, BACKWARD_INPUT)
    again = layout.config.train.activation_checkpointing != "none" and back
    # of a block; with whole activations an all-reduce stands where a reduce-scatter does
    scatters = {FORWARD: 2, BACKWARD: 2, BACKWARD_INPUT: 2, BACKWARD_WEIGHT: 0}[kind] + again
    calls[scatter if cut else both] += blocks * scatters + (first and kind is FORWARD)
    if cut:
        gathers = {FORWARD: 2, BACKWARD: 4, BACKWARD_INPUT: 2, BACKWARD_WEIGHT: 4}[kind]
        calls[gather] += blocks * (gathers + 2 * again) + (first and back)
    if last and kind is FORWARD:
        for tokens in layout.head_pieces:
            piece = tokens * layout.model.dim * layout.compute
            if cut:
                calls[gather._replace(bytes=piece)] += 1
            calls[(scatter if cut else both)._replace(bytes=piece)] += 1
            calls[Call("tp", "all_gather", 3 * tokens * layout.tp * layout.exact)] += 1
    return +calls


def fsdp_calls(layout: Layout, stage: int) -> Counter[Call]:
    """Over the data-parallel axes, in one step."""
    calls: Counter[Call] = Counter()
    zero, m = layout.config.parallel.zero_stage, layout.num_microbatches
    for _, unit in layout.fsdp_units(stage):
        if layout.dp_shard > 1:
            calls[Call("dp_shard", "all_gather", gather_bytes(layout, unit))] += (
                2 * m if zero == 3 else 1
            )
            calls[Call("dp_shard", "reduce_scatter", reduce_bytes(layout, unit))] += (
                m if zero >= 2 else 1
            )
        if layout.dp_replicate > 1:
            calls[
                Call("dp_replicate", "all_reduce", reduce_bytes(layout, unit) // layout.dp_shard)
            ] += 1
    return calls


def gather_bytes(layout: Layout, unit: Unit) -> int:
    return unit.padded(layout.dp_shard) * layout.compute


def reduce_bytes(layout: Layout, unit: Unit) -> int:
    return unit.padded(layout.dp_shard) * layout.reduce


def message_bytes(config: Config) -> int:
    """A hidden state between stages."""
    tokens = config.train.seq_len * config.train.micro_batch_size
    cut = config.parallel.tp if config.parallel.sequence_parallel else 1
    return tokens // cut * config.model.dim * Precision.of(config).compute.itemsize


def _once_a_step(layout: Layout) -> Counter[Call]:
    """The loss, the gradient norm, and gradients that are summed after the last backward."""
    calls: Counter[Call] = Counter()
    loss, world, ends = axis_names(layout)
    pp, model = layout.sizes.pp, layout.model

    def add(axis: str, size: int, number: int) -> None:
        if size > 1:
            calls[Call(axis, "all_reduce", number)] += 1

    add(loss, layout.dp_replicate * layout.dp_shard, 8)  # target tokens: int64
    add(loss, layout.dp_replicate * layout.dp_shard, layout.exact)
    add("pp", pp, layout.exact)
    add(world, layout.world, 8)  # squares: float64

    def local(rows: int, columns: int) -> int:
        return len(chunk_range(rows, layout.dp_shard, layout.dp_shard_rank)) * columns

    units = [unit.name for stage in layout.stages for unit in layout.units(stage)]
    blocks = units.count("block")
    numbers = 0
    if layout.config.parallel.sequence_parallel:
        numbers += (2 * blocks + units.count("head")) * local(model.dim, 1)
    if model.qk_norm:
        numbers += 2 * blocks * local(model.head_dim, 1)
    if model.num_kv_heads < layout.tp:
        numbers += 2 * blocks * local(layout.kv_rows, model.dim)
    if numbers:
        add("tp", layout.tp, numbers * layout.master)
    if model.tie_embeddings and ends is not None and ("embedding" in units) != ("head" in units):
        calls[Call(ends, "all_reduce", local(layout.vocabulary, model.dim) * layout.master)] += 1
    return calls


def axis_names(layout: Layout) -> tuple[str, str, str | None]:
    """By which axis `loss`, `world`, and the pair of the first and last stage's ranks go: the
    innermost with the same ranks."""
    sizes = layout.sizes
    loss = (
        "dp_shard" if sizes.dp_replicate == 1 else "dp_replicate" if sizes.dp_shard == 1 else "loss"
    )
    alone = [axis for axis, size in reversed(sizes.by_axis().items()) if size == layout.world]
    world = alone[0] if alone else "loss" if sizes.dp == layout.world else "world"
    where = layout.where
    ends = None if where[0] == where[-1] else "pp" if sizes.pp == 2 else "ends"
    return loss, world, ends


def wire_bytes(call: Call, ranks: int) -> float:
    """What one rank sends of it in a ring over `ranks`: all others' parts of a gather or scatter,
    both of an all-reduce."""
    if call.kind in ("send", "receive"):
        return float(call.bytes) if call.kind == "send" else 0.0
    return call.bytes * (ranks - 1) / ranks * (2 if call.kind == "all_reduce" else 1)


def by_axis(calls: Counter[Call]) -> dict[str, dict[str, Any]]:
    """`{axis: {"count": …, "bytes": …, "kinds": {kind: {"count": …, "bytes": …}}}}`, as
    tools/rehearse counts."""
    table: dict[str, dict[str, Any]] = {}
    for call, number in sorted(calls.items()):
        axis = table.setdefault(call.axis, {"count": 0, "bytes": 0, "kinds": {}})
        for row in (axis, axis["kinds"].setdefault(call.kind, {"count": 0, "bytes": 0})):
            row["count"] += number
            row["bytes"] += number * call.bytes
    return table


def _counted(actions: Any) -> list[tuple[Any, int, int]]:
    counts = Counter((action.kind, action.stage) for action in actions)
    return [(kind, stage, number) for (kind, stage), number in counts.items()]


def _times(calls: Counter[Call], number: int) -> Counter[Call]:
    return Counter({call: each * number for call, each in calls.items()})
