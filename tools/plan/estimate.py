"""What a search needs to know of every layout, computed from sizes only: a lower bound on the bytes
that it needs, and an estimate of its step's seconds.

The bound counts bytes at the moment when a pipeline rank begins a backward with the most
activations alive. At that moment memory holds

    the rank's sharded weights and moments, and gathered weights in the compute dtype: all of them,
        or with zero_stage 3 those of one block
    what its blocks keep for the micro-batches that the schedule has alive on the rank
    what they keep for the weight gradients that zb_h1 defers
    the additional needs of one block's backward, and the incoming gradient
    where forwards and backwards alternate for long: the gradients of the previous micro-batches

Buffers of gathers and reductions, messages, other deferred weight gradients and the head are not
included; plan/memory.py counts them.

The estimate adds up what plan/time.py simulates: the work of the slowest rank, the schedule's
bubble by its paper's formula, and the exposed communication of data parallelism.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Literal, NamedTuple

from costs.links import Links
from costs.recorder import Phase
from costs.units import Sums
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action
from parallel.pipeline.schedules import build_schedule
from parallel.weight_gradient import sum_dtype
from tools.plan.layout import SHARDED_OVER, Layout, Numbers, numbers_of, ranks_of_stages
from tools.plan.memory import GROWING
from tools.plan.time import NOTHING, Gathers, Part, StepTime
from training.precision import Precision

ALWAYS_SPLIT = ("zb_h1", "zb_v")  # split every backward
SPLIT = (*ALWAYS_SPLIT, "dualpipe_v")  # compute (some) weight gradients in separate actions


class Pipeline(NamedTuple):
    """How layers are split into stages, and the schedule."""

    pp: int
    schedule: str
    stages_per_rank: int
    layers_per_stage: list[int] | Literal["auto"] | None  # as in the configuration
    counts: list[int]  # the resulting number of layers of each stage

    @property
    def where(self) -> list[int]:
        """The rank of each stage."""
        return ranks_of_stages(self.schedule, self.pp, self.stages_per_rank)

    def ranks(self) -> list["Rank"]:
        """What each pipeline rank holds."""
        blocks, where = [0] * self.pp, self.where
        for rank, count in zip(where, self.counts, strict=True):
            blocks[rank] += count
        return [Rank(blocks[r], r == where[0], r == where[-1]) for r in range(self.pp)]


class Rank(NamedTuple):
    """What one rank of a pipeline holds."""

    blocks: int
    first: bool  # has the embedding
    last: bool  # has the head


class Block:
    """The bytes that a block needs for one micro-batch, and its parameters. If there are several
    kinds of blocks, each figure is the minimum over them."""

    def __init__(self, layout: Layout) -> None:
        self._kinds = list(layout.kinds)
        # Sums of gradients are counted separately.
        dtypes = Precision.of(layout.config)
        dtype = sum_dtype(False, 0, dtypes.compute, dtypes.master, dtypes.reduce)
        assert dtype is not None
        self._sums = Sums(dtype, begun=True)
        phases = [unit.record(False, self._sums).phases for unit in self._kinds]
        # kept for backward, including the block's output
        self.kept = min(_stays(each["forward"]) for each in phases)
        # the peak of backward above its beginning
        self.whole = min(each["backward"].effect.height for each in phases)
        self.numel = min(numbers_of(unit).rest for unit in self._kinds)  # without experts

    @cached_property
    def _inputs(self) -> list[Phase]:
        return [unit.record(True, self._sums).phases["input"] for unit in self._kinds]

    @property
    def split(self) -> int:
        """The peak of an input gradient above its beginning."""
        return min(phase.effect.height for phase in self._inputs)

    @property
    def deferred(self) -> int:
        """All bytes that are kept for the weight gradient."""
        return self.kept + min(map(_stays, self._inputs))


def _stays(phase: Phase) -> int:
    return sum(phase.effect.changes.values())


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
            return Numbers(rest + (rank.first + rank.last) * self.layout.embedding.numel, experts)

        return list(map(of, ranks))

    @cache  # noqa: B019  (of one search)
    def message_seconds(self, pp: int, world: int) -> float:
        p = self.alike.parallel
        parallel = replace(p, pp=pp, dp_shard=world // (p.tp * p.cp * pp))
        layout = Layout(replace(self.alike, parallel=parallel), world, 0)
        return StepTime(layout, self.time.device).message_seconds


# --- bytes ---


class Bound:
    """Lower bounds of the layouts that shard one pipeline's weights in different ways.

    Args:
        stage: what the inside of a stage costs.
        pipe: the pipeline, and `ranks`, what each of its ranks holds.
        m: number of micro-batches.
    """

    def __init__(self, stage: Stage, pipe: Pipeline, ranks: Sequence[Rank], m: int) -> None:
        block, self.layout = stage.block, stage.layout
        growing, several = pipe.schedule in GROWING, pipe.stages_per_rank > 1
        # Every stage has whole gradients of some micro-batch before any stage reduces those of the
        # last. (In breadth_first a stage ends all its backwards before the next begins its own.)
        self.again = m > (pipe.pp if several else 1) and not (several and growing)
        # forwards and backwards alternate for long
        self.steady = m >= 4 * pipe.pp and not growing
        backward = block.whole
        if pipe.schedule in SPLIT:
            backward = block.split
            if pipe.schedule not in ALWAYS_SPLIT:
                backward = min(block.whole, block.split)
        # a block's backward, and the incoming gradient; with zero_stage 3 also its weights
        self.backward = self.layout.hidden_bytes + backward
        self.weights = block.numel * self.layout.compute
        if growing:
            live = [m * rank.blocks for rank in ranks]
        else:
            fewer = min(m, 2 * pipe.pp) if m > 1 else 1
            live = _live(pipe.schedule, pipe.pp, pipe.stages_per_rank, tuple(pipe.counts), fewer)
        # (parameters, bytes that blocks keep) → the first of the ranks with these figures
        self.ranks: dict[tuple[Numbers, int], int] = {}
        numbers = stage.parameters(ranks)
        deferred = block.deferred if pipe.schedule == "zb_h1" else 0
        for rank in reversed(range(pipe.pp)):
            kept = live[rank] * block.kept
            if self.steady:
                kept += rank * ranks[rank].blocks * deferred  # of `rank` micro-batches
            self.ranks[numbers[rank], kept] = rank

    def bytes(self, shards: Numbers, zero: int) -> tuple[float, int]:
        """The bound with weights sharded over `shards` ranks, and the pipeline rank whose it is."""
        each = self.ranks.items()
        bound, rank = max((self._of_rank(*figures, shards, zero), -rank) for figures, rank in each)
        return bound, -rank

    def _of_rank(self, numel: Numbers, kept: int, shards: Numbers, zero: int) -> float:
        layout, e, master = self.layout, self.layout.compute, self.layout.master
        states = numel.over(shards) * (1 + layout.states_per_weight) * master
        gathered = 0
        if zero < 3 and (zero > 0 or e != master):  # unsharded weights of this dtype are not copied
            gathered = numel.total * e
        whole = zero < 2 and self.again
        summed = layout.reduce * (numel.total if whole else numel.over(shards))
        # A stage's last backward frees a block's gathered weights before it reduces the gradients.
        end = summed + (gathered if self.again else 0)
        most = gathered + kept + (summed if self.steady else 0.0)
        if kept:
            most += self.backward + (self.weights if zero == 3 else 0)
        return states + max(most, end)


@lru_cache(maxsize=4096)
def _live(schedule: str, pp: int, v: int, counts: tuple[int, ...], m: int) -> list[int]:
    """For each rank, the maximum over time of its blocks times the micro-batches alive in them,
    counted in the schedule for `m` micro-batches. With more micro-batches it is not lower."""
    most = []
    for actions in _schedule(schedule, pp, v, m):
        live = highest = 0
        for kind, stage, _ in actions:
            if kind is FORWARD:
                live += counts[stage]
                highest = max(highest, live)
            elif kind in (BACKWARD, BACKWARD_INPUT):
                live -= counts[stage]
        most.append(highest)
    return most


@lru_cache(maxsize=256)
def _schedule(schedule: str, pp: int, v: int, m: int) -> list[list[Action]]:
    return build_schedule(schedule, pp, v, m)


# --- seconds ---


class Estimate:
    """Estimates of the same layouts, for a job of `world` GPUs. `reduced`: as in `Stage`."""

    def __init__(
        self,
        stage: Stage,
        pipe: Pipeline,
        ranks: Sequence[Rank],
        m: int,
        world: int,
        reduced: bool,
    ) -> None:
        self.stage, self.m, self.world = stage, m, world
        device, (pp, schedule, v, *_) = stage.time.device, pipe
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
        links = Links(time.device, sizes.tp, shards.rest, replicas.rest, self.world, sizes.cp,
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
        cast = time.rates.memory(self.numel.total * 3 * e + self.numel.over(shards) * layout.master)
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
