"""Counts every collective of one training step on one rank: its axis, its kind, how many there are,
and their bytes.

Bytes are those of the whole tensor: the output of an all-gather, the input of a reduce-scatter, the
tensor of an all-reduce or a message. `wire_bytes` (costs/collectives.py) converts them to the bytes
that one rank sends. Collectives over one rank move nothing and are not counted.

The collectives over tp, cp and ep are recorded from the units (costs/units.py). The others are as
follows; dp_shard and dp_replicate are those of weights, of which one contains cp
(parallel/axes.py). For the weights of experts, read efsdp and ep_replicate instead.

| when             | over         | what                                                         |
|------------------|--------------|--------------------------------------------------------------|
| between stages   | pp           | hidden states and their gradients                            |
| gather of a unit | dp_shard     | its weights in the compute dtype: once a step; zero_stage 3: |
|                  |              | in every forward and every backward                          |
| reduction of one | dp_shard     | its gradients in reduce_dtype: once a step; zero_stage 2, 3: |
|                  |              | for every micro-batch                                        |
|                  | dp_replicate | 1 / dp_shard of them, once a step                            |
| once a step      | tp           | gradients that are partial on each tp rank, together         |
|                  | batch        | the number of target tokens (int64)                          |
|                  | loss         | the loss                                                     |
|                  | pp           | the loss                                                     |
|                  | world        | the gradients' squares (float64)                             |
|                  | ends         | a tied embedding's gradient, on two ranks                    |
|                  | loss, tp, pp | the load of experts (int64), and the routers' losses         |
|                  | loss, tp, pp | the largest logits: of each head, then of all                |
|                  | where cut    | optimizer states that lack a dimension of their weight, or   |
|                  |              | whole matrices (all-to-alls)                                 |
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from costs.collectives import Call
from costs.parameters import kinds_of_blocks
from costs.units import LocalWeight, Unit
from model.attention import attentions_of
from model.experts import Experts
from parallel.axes import FSDP_AXES
from parallel.pipeline.lower import Exchange
from parallel.whole_matrices import Round
from tools.plan.layout import Layout


def collectives(layout: Layout) -> Counter[Call]:
    """The collectives of one step, each with its count."""
    calls: Counter[Call] = Counter()
    actions = layout.schedule[layout.pp_rank]
    counts = Counter((action.kind, action.stage) for action in actions)
    for (kind, stage), number in counts.items():  # over tp, cp and ep
        for unit in layout.units(stage):
            for call, each in layout.phase(kind, unit).sends.items():
                calls[call] += number * each
    gathers, reductions = times_a_step(layout)
    for _, one in (pair for stage in layout.stages for pair in layout.fsdp_units(stage)):
        over_replicas, over_shards = FSDP_AXES[one.is_expert]
        reduced = one.padded * layout.reduce
        if one.shards > 1:
            calls[Call(over_shards, "all_gather", one.padded * layout.compute)] += gathers
            calls[Call(over_shards, "reduce_scatter", reduced)] += reductions
        if one.replicas > 1:
            calls[Call(over_replicas, "all_reduce", reduced // one.shards)] += 1
    for exchange in layout.program:
        for message in exchange.transfers if isinstance(exchange, Exchange) else ():
            way = "send" if message.sends else "receive"
            calls[Call("pp", way, layout.hidden_bytes)] += 1
    calls += _once_a_step(layout)
    return calls


def over_groups(layout: Layout) -> Counter[Call]:
    """The collectives of one step as a rehearsal counts them, which knows groups, not axes: a group
    has the name of the innermost axis with the same ranks, those of experts have their own unless
    all ranks share them, and if cp has all ranks, the group of all has its name. (If ep has all
    ranks, all-to-alls over them keep its name.)"""
    calls: Counter[Call] = Counter()
    sizes, world = layout.sizes, layout.world
    of_experts = sizes.of_experts
    for call, number in collectives(layout).items():
        axis = call.axis
        of_all = axis not in of_experts or of_experts[axis] == world  # if cp has all ranks
        if call.kind == "all_to_all" and sizes.ep == world > 1:
            axis = "ep" if (sizes.of_weights | of_experts)[axis] == world else axis
        elif sizes.cp == world > 1 and of_all:
            axis = "cp"
        elif axis in ("efsdp", "ep_replicate") and of_experts[axis] == world > 1:
            axis = _axis_of_all(layout) or "world"
        calls[call._replace(axis=axis)] += number
    return calls


def _axis_of_all(layout: Layout) -> str | None:
    """The innermost axis of weights with all ranks."""
    axes = reversed(layout.sizes.of_weights.items())
    return next((axis for axis, size in axes if size == layout.world), None)


def times_a_step(layout: Layout) -> tuple[int, int]:
    """How often a step gathers a unit's weights, and reduces its gradients over the shards."""
    zero, m = layout.config.parallel.zero_stage, layout.num_microbatches
    return 2 * m if zero == 3 else 1, m if zero >= 2 else 1


def _once_a_step(layout: Layout) -> Counter[Call]:
    """The collectives of the loss, of the gradient norm, and of gradients that are summed after the
    last backward."""
    calls: Counter[Call] = Counter()
    loss, batch, world, ends = axis_names(layout)
    sizes = layout.sizes

    def add(axis: str, size: int, number: int) -> None:
        if size > 1:
            calls[Call(axis, "all_reduce", number)] += 1

    add(batch, sizes.dp, 8)  # target tokens: int64
    add(loss, sizes.dp * sizes.cp, layout.exact)
    add("pp", sizes.pp, layout.exact)
    add(world, layout.world, 8)  # squares: float64
    model = layout.config.model
    if experts := model.find(Experts):  # training/balance.py
        for axis, size in ((loss, sizes.dp * sizes.cp), ("tp", sizes.tp), ("pp", sizes.pp)):
            add(axis, size, 8 * model.num_layers * experts.count)
            add(axis, size, 2 * layout.exact)

    units = [unit for stage in layout.stages for unit in layout.units(stage)]
    if layout.config.clips_logits:  # training/qk_clip.py
        of_kinds = zip(layout.kinds, kinds_of_blocks(model, sizes.tp), strict=True)
        heads = {
            unit.name: sum(each.local_heads for _, each in attentions_of(block))
            for unit, (block, _) in of_kinds
        }
        mine = sum(heads.get(unit.name, 0) for unit in units)
        add(loss, sizes.dp * sizes.cp, layout.exact * mine)
        add("tp", sizes.tp, layout.exact)
        add("pp", sizes.pp, layout.exact)

    def local(units: Iterable[Unit], which: Callable[[LocalWeight], bool]) -> int:
        return layout.master * sum(math.prod(part) for w, part in layout.parts(units) if which(w))

    partial = local(units, lambda weight: weight.spec.gradient_is_partial)
    if partial:
        add("tp", layout.sizes.tp, partial)
    copies = local([layout.head], lambda weight: weight.spec.copy_of is not None)
    has_one_end = (layout.embedding in units) != (layout.head in units)
    if copies and ends is not None and has_one_end:
        calls[Call(ends, "all_reduce", copies)] += 1
    # states that lack a dimension which an axis cuts (`sum_over_parts`, training/optimizers/)
    for weight, part in layout.parts(units):
        for state in layout.states_of(weight.spec).values():
            for hop in layout.axes_of(weight):
                if hop.cuts_beside(state.dims):
                    calls[Call(hop.group, "all_reduce", state.bytes(part, layout.master))] += 1
    for rounds in layout.rounds():
        calls.update(messages(rounds, layout.products))
    return calls


def messages(rounds: Iterable[Round], width: int) -> Iterator[Call]:
    """What an optimizer sends to put matrices together, and of the results, in numbers of `width`
    bytes."""
    for axis, numbers in (sent for each in rounds for sent in each.sends()):
        yield Call(axis, "all_to_all", numbers * width)


def axis_names(layout: Layout) -> tuple[str, str, str, str | None]:
    """The axes by which collectives over `loss`, over `batch`, over `world`, and over the pair of
    the first and last stage's ranks are counted: the innermost axis of weights with the same ranks,
    if there is one."""
    sizes = layout.sizes
    shards, replicas, _ = layout.sharding[False]
    batch = loss = "dp_shard" if replicas == 1 else "dp_replicate" if shards == 1 else "loss"
    if sizes.cp > 1:
        batch = "dp_replicate" if sizes.dp_replicate == replicas == sizes.dp else "batch"
    world = _axis_of_all(layout) or ("loss" if sizes.dp * sizes.cp == layout.world else "world")
    where = layout.where
    ends = None if where[0] == where[-1] else "pp" if sizes.pp == 2 else "ends"
    return loss, batch, world, ends


def by_axis(calls: Counter[Call]) -> dict[str, dict[str, Any]]:
    """Return `{axis: {"count": …, "bytes": …, "kinds": {kind: {"count": …, "bytes": …}}}}`, the
    format in which tools/rehearse counts."""
    table: dict[str, dict[str, Any]] = {}
    for call, number in sorted(calls.items()):
        axis = table.setdefault(call.axis, {"count": 0, "bytes": 0, "kinds": {}})
        for row in (axis, axis["kinds"].setdefault(call.kind, {"count": 0, "bytes": 0})):
            row["count"] += number
            row["bytes"] += number * call.bytes
    return table
