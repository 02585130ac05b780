"""What a search needs to know of every layout, computed from sizes only: a lower bound on the bytes
that it needs, and an estimate of its step's seconds.

The bound counts bytes at the moment when a pipeline rank begins a backward with the most
activations alive. At that moment memory holds

    the rank's sharded weights and moments, and gathered weights in the compute dtype: all of them,
        or with zero_stage 3 those of one block
    what its blocks keep for the micro-batches that the schedule has alive on the rank

Gradients, buffers, messages, what is allocated and freed within a block, and the head are not
included; plan/memory.py counts them.

The estimate adds up what plan/time.py simulates: the work of the slowest rank, the schedule's
bubble by its paper's formula, and the exposed communication of data parallelism.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from costs.links import Links
from costs.units import LocalWeight
from parallel.fsdp_units import input_buffers
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD
from parallel.pipeline.schedules import build_schedule
from tools.plan.layout import Layout, Numbers, numbers_of, ranks_of_stages
from tools.plan.memory import GROWING
from tools.plan.time import (
    NOTHING,
    Gathers,
    Part,
    Reduction,
    StepTime,
    message_seconds,
    sharding_seconds,
    stalls,
)

SPLIT = ("zb_h1", "zb_v", "dualpipe_v")  # compute (some) weight gradients in separate actions
short_schedule = lru_cache(maxsize=256)(build_schedule)


class Stage:
    """What layouts have in common that differ only in pp, dp and the schedule. What blocks keep
    is the minimum over all kinds of blocks. `reduced`: whether the gradients of every
    micro-batch are reduced (zero_stage 2 and 3), so that products do not add to a sum of
    gradients."""

    def __init__(self, time: StepTime, world: int) -> None:
        self.time, self.layout, self.alike = time, time.layout, time.layout.config
        p = self.alike.parallel
        p = replace(p, dp_shard=2 * p.dp_shard, zero_stage=2)  # twice: so that there are shards
        layout = Layout(replace(self.alike, parallel=p), 2 * self.layout.world, 0)
        self.reduced = StepTime(layout, time.device)
        self.world = world  # of the whole job
        kinds = self.layout.kinds
        # of all blocks: parameters, bytes of the optimizer's states, and how many there are
        self.numel, self.states = self._of_blocks(), self._of_blocks(self.layout.bytes_of_states)
        self.blocks = kinds.total()
        # bytes that a block keeps of a micro-batch for backward, including its output
        effects = [self.layout.phase(FORWARD, unit).effect for unit in kinds]
        self.kept = min(sum(effect.changes.values()) for effect in effects)

    def _of_blocks(self, *number: Callable[[LocalWeight], int]) -> Numbers:
        each = [(numbers_of(unit, *number), n) for unit, n in self.layout.kinds.items()]
        return Numbers(*(sum(size[i] * n for size, n in each) for i in range(2)))

    @cache  # noqa: B019  (of one search)
    def parts(self, split: bool, reduced: bool) -> tuple[Part, Part, Part, float]:
        """Seconds of a block (the mean over all blocks), of the embedding, of the head, and of
        summing a gradient element."""
        time = self.reduced if reduced else self.time
        layout, kinds = time.layout, time.layout.kinds
        blocks = (time.part(unit, split) * (n / kinds.total()) for unit, n in kinds.items())
        embedding, head = (time.part(u, split) for u in (layout.embedding, layout.head))
        summing = time.summing(layout.embedding) / layout.embedding.numel
        return sum(blocks, NOTHING), embedding, head, summing


class Pipeline:
    """A pipeline, with bounds and estimates of the layouts that shard its weights in different
    ways.

    Args:
        stage: what the inside of a stage costs.
        settings: pp, schedule, stages_per_rank and layers_per_stage, as in the configuration.
        counts: the resulting number of layers of each stage.
        m: number of micro-batches.
    """

    def __init__(
        self, stage: Stage, settings: dict[str, Any], counts: Sequence[int], m: int
    ) -> None:
        self.stage, self.settings, self.m = stage, settings, m
        self.pp, self.v = settings["pp"], settings["stages_per_rank"]
        self.schedule = settings["schedule"]
        where = ranks_of_stages(self.schedule, self.pp, self.v)
        self.first, self.last = where[0], where[-1]  # have the embedding, and the head
        self.blocks = [0] * self.pp  # of each rank
        for rank, count in zip(where, counts, strict=True):
            self.blocks[rank] += count
        end, bytes_of_states = stage.layout.embedding, stage.layout.bytes_of_states
        self.parameters = self._shares(stage.numel, numbers_of(end))
        self.states = self._shares(stage.states, numbers_of(end, bytes_of_states))  # bytes
        if self.schedule in GROWING:
            live = [m * number for number in self.blocks]
        else:
            fewer = min(m, 2 * self.pp) if m > 1 else 1
            live = _live(self.schedule, self.pp, self.v, tuple(counts), fewer)
        # (parameters, bytes of states, bytes that blocks keep) → the first rank with these figures
        self.held: dict[tuple[Numbers, Numbers, int], int] = {}
        for r in reversed(range(self.pp)):
            self.held[self.parameters[r], self.states[r], live[r] * stage.kept] = r
        self._slowest: dict[bool, tuple[Part, Numbers, int, float]] = {}

    def _shares(self, blocks: Numbers, end: Numbers) -> list[Numbers]:
        """Each rank's share of what all `blocks` have, and what the ends of the model have."""
        shares = []
        for rank, number in enumerate(self.blocks):
            ends = (rank == self.first) + (rank == self.last)
            rest, experts = (round(number * n / self.stage.blocks) for n in blocks)
            shares.append(Numbers(rest + ends * end.rest, experts))
        return shares

    # --- bytes ---

    def bound(self, shards: Numbers, zero: int) -> tuple[float, int]:
        """The bound with weights sharded over `shards` ranks, and the pipeline rank whose it is."""
        each = self.held.items()
        bound, rank = max((self._of_rank(*held, shards, zero), -rank) for held, rank in each)
        return bound, -rank

    def _of_rank(
        self, numel: Numbers, states: Numbers, kept: int, shards: Numbers, zero: int
    ) -> float:
        layout, e, total = self.stage.layout, self.stage.layout.compute, float(kept)
        if not layout.offloads:
            total += numel.over(shards) * layout.master + states.over(shards)
        # unsharded weights of this dtype are not copied
        if zero < 3 and (zero > 0 or e != layout.master):
            total += numel.total * e
        return total

    # --- seconds ---

    def seconds(self, shards: Numbers, replicas: Numbers, zero: int) -> float:
        """Seconds of a step with weights sharded over `shards` ranks (cp included) and replicated
        `replicas` times."""
        reduced = zero >= 2
        if reduced not in self._slowest:
            self._slowest[reduced] = self._find_slowest(reduced)
        part, numel, number, seconds = self._slowest[reduced]
        stage, layout, time, m = self.stage, self.stage.layout, self.stage.time, self.m
        sizes, e = layout.sizes, layout.compute
        links = Links(time.device, sizes.tp, shards.rest, replicas.rest, stage.world, sizes.cp,
                      sizes.ep, shards.experts, replicas.experts)  # fmt: skip
        away = layout.master * layout.offloads  # bytes that are offloaded, of a parameter
        rest = sharding_seconds(links, False, numel.rest * e, numel.rest * layout.reduce, number,
                                numel.rest * away)  # fmt: skip
        gather, scatter, replicate = rest
        if numel.experts:
            sent = numel.experts * e, numel.experts * layout.reduce
            of_experts = sharding_seconds(links, True, *sent, number, numel.experts * away)
            gather, scatter, replicate = (a + b for a, b in zip(rest, of_experts, strict=True))
        cast = time.rates.memory(numel.total * 3 * e + numel.over(shards) * layout.master)
        each = zip(self.parameters, self.states, strict=True)
        seconds += max(time.updating(n.over(shards), s.over(shards), stage.world) for n, s in each)
        # the rank's v stages are taken as equal, and their units
        one, each_unit = 1 / self.v, 1 / number
        forward, backward = part.forward, part.input_grad + part.weight_grad
        before = 0.0 if self.schedule in SPLIT else backward * each_unit
        alike = [Reduction(before, scatter * each_unit, replicate * each_unit)]
        alike *= max(1, number // self.v)
        inputs = input_buffers(zero)
        waiting = stalls(alike, inputs, last=False)
        end = rest[0] * each_unit
        sharding = Gathers(gather * one, scatter * one, end, end, waiting)
        unit = stage.alike.parallel.fsdp_unit
        seconds += m * self.v * sharding.waits(zero, unit, part * one).total
        if zero == 3:
            seconds += m * 2 * cast
        else:
            seconds += gather + cast if unit == "stage" else max(0.0, gather + cast - forward)
        if zero < 2:
            seconds += waiting * self.v * self.pp
        return seconds + stalls(alike, inputs, last=True) - sharding.waited(zero, unit)

    def _find_slowest(self, reduced: bool) -> tuple[Part, Numbers, int, float]:
        """Of the pipeline rank that computes longest: its seconds for one micro-batch, its
        parameters, its number of FSDP units; and the seconds of a step without data parallelism."""
        stage, device = self.stage, self.stage.time.device
        block, embedding, head, summing = stage.parts(self.schedule in SPLIT, reduced)
        parts = [block * number for number in self.blocks]
        parts[self.first] += embedding
        parts[self.last] += head
        busiest = max(range(self.pp), key=lambda r: parts[r].total)
        part, numel, blocks = parts[busiest], self.parameters[busiest], self.blocks[busiest]
        units = self.v if stage.alike.parallel.fsdp_unit == "stage" else max(1, blocks)
        work = block * max(1, *self.blocks)
        slowest = part.total + numel.total * summing
        pipeline = self.m * slowest + _bubble(self.schedule, self.pp, self.v, work)
        messages = message_seconds(stage.layout.hidden_bytes, stage.world, device)
        pipeline += 2 * (self.pp - 1) * messages + device.step_seconds
        return part, numel, units, pipeline


@lru_cache(maxsize=4096)
def _live(schedule: str, pp: int, v: int, counts: tuple[int, ...], m: int) -> list[int]:
    """For each rank, the maximum over time of its blocks times the micro-batches alive in them,
    counted in the schedule for `m` micro-batches. With more micro-batches it is not lower."""
    most = []
    for actions in short_schedule(schedule, pp, v, m):
        live = highest = 0
        for kind, stage, _ in actions:
            if kind is FORWARD:
                live += counts[stage]
                highest = max(highest, live)
            elif kind in (BACKWARD, BACKWARD_INPUT):
                live -= counts[stage]
        most.append(highest)
    return most


def _bubble(schedule: str, pp: int, v: int, work: Part) -> float:
    """Seconds that a rank is idle, by the papers' formulas (parallel/pipeline/schedules.py)."""
    f, i, w = work.forward, work.input_grad, work.weight_grad
    if schedule == "zb_h1":
        return (pp - 1) * max(0.0, f + i - w)
    if schedule == "zb_v":
        return (pp - 1) * max(0.0, i - w)
    if schedule == "dualpipe_v":
        return (pp - 1) * max(0.0, f + i - w) / 2
    return (pp - 1) * (f + i + w) / v
