"""An estimate of a step's seconds without a simulation, because a search needs it for many layouts.

It adds up what plan/time.py simulates: the work of the slowest rank, the schedule's bubble by its
paper's formula, and the exposed communication of data parallelism.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from costs.links import Links
from tools.plan.bounds import SPLIT, Block, where
from tools.plan.layout import SHARDED_OVER, Layout, Numbers, numbers_of
from tools.plan.time import NOTHING, Gathers, Part, StepTime


class Rank(NamedTuple):
    """What one rank of a pipeline holds."""

    blocks: int
    first: bool  # has the embedding
    last: bool  # has the head


def ranks_of(schedule: str, pp: int, v: int, counts: Sequence[int]) -> list[Rank]:
    """What each pipeline rank holds. `counts`: blocks of each stage."""
    rank_of = where(schedule, pp, v)
    blocks = [0] * pp
    for rank, count in zip(rank_of, counts, strict=True):
        blocks[rank] += count
    return [Rank(blocks[r], r == rank_of[0], r == rank_of[-1]) for r in range(pp)]


class Stage:
    """What layouts have in common that differ only in pp, dp and the schedule. `reduced`: whether
    the gradients of every micro-batch are reduced (zero_stage 2 and 3), so that products do not add
    to a sum of gradients."""

    def __init__(self, time: StepTime) -> None:
        self.time, self.layout, self.alike = time, time.layout, time.layout.config
        kinds = self.layout.kinds
        # parameters of all blocks, and their number
        each = [(numbers_of(unit), n) for unit, n in kinds.items()]
        self.numel = Numbers(*(sum(size[i] * n for size, n in each) for i in range(2)))
        self.blocks = kinds.total()
        self.block = Block(self.layout)

    @cache  # noqa: B019  (of one search)
    def of(self, reduced: bool) -> StepTime:
        if not reduced:
            return self.time
        twice = 2 * self.alike.parallel.dp_shard
        parallel = replace(self.alike.parallel, dp_shard=twice, zero_stage=2)
        config = replace(self.alike, parallel=parallel)
        return StepTime(Layout(config, 2 * self.layout.world, 0), self.time.device)

    def summing(self, reduced: bool) -> float:
        """Seconds per gradient element."""
        time = self.of(reduced)
        return time.summing(time.layout.embedding) / time.layout.embedding.numel

    @cache  # noqa: B019  (of one search)
    def parts(self, split: bool, reduced: bool) -> tuple[Part, Part, Part]:
        """Seconds of a block (the mean over all blocks), of the embedding, and of the head."""
        time = self.of(reduced)
        layout, kinds = time.layout, time.layout.kinds
        blocks = (time.part(unit, split) * (n / kinds.total()) for unit, n in kinds.items())
        embedding, head = (time.part(u, split) for u in (layout.embedding, layout.head))
        return sum(blocks, NOTHING), embedding, head

    def parameters(self, ranks: Sequence[Rank]) -> list[Numbers]:
        """The parameters of each pipeline rank."""

        def of(rank: Rank) -> Numbers:
            rest, experts = (round(rank.blocks * n / self.blocks) for n in self.numel)
            return Numbers(rest + (rank.first + rank.last) * self.block.table, experts)

        return list(map(of, ranks))

    @cache  # noqa: B019  (of one search)
    def message_seconds(self, pp: int, world: int) -> float:
        p = self.alike.parallel
        parallel = replace(p, pp=pp, dp_shard=world // (p.tp * p.cp * pp))
        layout = Layout(replace(self.alike, parallel=parallel), world, 0)
        return StepTime(layout, self.time.device).message_seconds


class Estimate:
    """Estimates of the layouts that shard one pipeline's weights in different ways.

    Args:
        stage: what the inside of a stage costs.
        schedule, v: the schedule, and its stages per rank.
        ranks: what each pipeline rank holds.
        m: number of micro-batches.
        world: number of GPUs.
        reduced: as in `Stage`.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: str,
        v: int,
        ranks: Sequence[Rank],
        m: int,
        world: int,
        reduced: bool,
    ) -> None:
        self.stage, self.m, self.world = stage, m, world
        device, pp = stage.time.device, len(ranks)
        block, embedding, head = stage.parts(schedule in SPLIT, reduced)
        seconds_of = {
            r: block * r.blocks
            + (embedding if r.first else NOTHING)
            + (head if r.last else NOTHING)
            for r in set(ranks)
        }
        parts = [seconds_of[r] for r in ranks]
        numbers = stage.parameters(ranks)
        busiest = max(range(pp), key=lambda r: parts[r].total)
        self.part, self.numel, self.numbers = parts[busiest], numbers[busiest], numbers
        work = block * max(1, max(r.blocks for r in ranks))
        slowest = self.part.total + self.numel.total * stage.summing(reduced)
        self.pipeline = m * slowest + _bubble(schedule, pp, v, work)
        self.pipeline += 2 * (pp - 1) * stage.message_seconds(pp, world) + device.step_seconds
        self.v, self.unit = v, stage.alike.parallel.fsdp_unit
        self.units = v if self.unit == "stage" else max(1, ranks[busiest].blocks)

    def seconds(self, shards: Numbers, replicas: Numbers, zero: int) -> float:
        """Seconds of a step with weights sharded over `shards` ranks (cp included) and replicated
        `replicas` times."""
        layout, time, m = self.stage.layout, self.stage.time, self.m
        sizes, e, number = layout.sizes, layout.compute, self.units
        links = Links(time.device, layout.tp, shards.rest, replicas.rest, self.world, sizes.cp,
                      sizes.ep, shards.experts, replicas.experts)  # fmt: skip

        def of(view: str, numel: int, over: int) -> tuple[float, float, float]:
            """Seconds to gather, to reduce over shards, and over replicas."""
            if not numel:
                return 0.0, 0.0, 0.0
            axis, copies = SHARDED_OVER[view]
            reduced = numel * layout.reduce
            return (
                links.collective(axis, numel * e, number=number),
                links.collective(axis, reduced, number=number),
                links.collective(copies, reduced / over, 2, number),
            )

        rest = of("fsdp", self.numel.rest, shards.rest)
        experts = of("fsdp_ep", self.numel.experts, shards.experts)
        gather, scatter, replicate = (a + b for a, b in zip(rest, experts, strict=True))
        cast = time.memory(self.numel.total * 3 * e + self.numel.over(shards) * layout.master)
        most = max(numbers.over(shards) for numbers in self.numbers)
        seconds = self.pipeline + time.updating(most)
        # the rank's v stages are taken as equal, and their units
        one, ends = 1 / self.v, (rest[0] / number, rest[0] / number, rest[1] / number)
        sharding = Gathers(gather * one, scatter * one, *ends)
        seconds += m * self.v * sharding.waits(zero, self.unit, self.part * one).total
        forward, backward = self.part.forward, self.part.input_grad + self.part.weight_grad
        as_one = self.unit == "stage"
        if zero == 3:
            seconds += m * 2 * cast
        else:
            seconds += gather + cast if as_one else max(0.0, gather + cast - forward)
        behind = 0.0 if as_one else backward  # the computation that hides the last reductions
        return seconds + max(0.0, replicate + (scatter if zero < 2 else 0.0) - behind)


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
