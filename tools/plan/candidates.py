"""Lists every layout of a model on a number of GPUs, each with a lower bound on the bytes that it
needs and an estimate of its step's seconds, computed from sizes only.

The bound, the largest of its ranks', counts bytes at the moment when a pipeline rank begins a
backward with the most activations alive: its sharded weights and moments; gathered weights in the
compute dtype, or with zero_stage 3 those of one block; what its blocks keep for the micro-batches
that the schedule has alive on the rank; what a backward that is not split adds; and where forwards
and backwards alternate for long, the gradients of earlier micro-batches. plan/memory.py counts the
rest.

The estimate adds up what plan/time.py simulates: the work of the slowest rank, the schedule's
bubble by its paper's formula, and the exposed communication of data parallelism.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, get_args

from costs.parameters import check_tp
from costs.seconds import Links
from errors import UserError
from model.experts import Experts
from parallel.activation import Mode
from parallel.fsdp_units import input_buffers
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD
from parallel.pipeline.balance import LayerCosts, balanced_split, even_split
from parallel.pipeline.schedules import STAGES_PER_RANK, build_schedule
from settings.checks import cuts_of_sequence, sides_that_cannot_be_cut, sums_in_bfloat16
from settings.config import Config
from tools.plan.hardware import Device
from tools.plan.layout import PLAIN, Layout, Numbers, numbers_of, ranks_of_stages
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
INTERLEAVED = ("interleaved_1f1b", "breadth_first")
MODES = get_args(Mode)
MICRO_BATCHES = (1, 2, 4, 8)  # sequences
CP_TOKENS = 8192  # of a sequence; a cp rank keeps at least as many, which fill its kernels
VIRTUAL = 8  # stages per rank of interleaved schedules: all up to this; more only if even

balanced_layers = lru_cache(maxsize=4096)(balanced_split)


# --- a lower bound, and an estimate ---

short_schedule = lru_cache(maxsize=256)(build_schedule)


class Stage:
    """What layouts have in common that differ only in pp, dp and the schedule. What blocks keep
    and need is the minimum over all kinds of blocks. `reduced`: whether the gradients of every
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
        # of all blocks: parameters, and how many there are
        each = [(numbers_of(unit), n) for unit, n in kinds.items()]
        self.numel = Numbers(*(sum(size[i] * n for size, n in each) for i in range(2)))
        self.blocks = kinds.total()
        # the least bytes of the optimizer's states for a parameter, of any weight
        units = (self.layout.embedding, *kinds, self.layout.head)
        weights = [weight for unit in units for weight in unit.weights]
        self.states = min(self.layout.bytes_of_states(one) / one.numel for one in weights)
        # bytes that a block keeps of a micro-batch for backward, including its output
        effects = [self.layout.phase(FORWARD, unit).effect for unit in kinds]
        self.kept = min(sum(effect.changes.values()) for effect in effects)
        self.numel_of_block = min(numbers_of(unit).rest for unit in kinds)  # without experts
        # the peak of a whole backward above its beginning, when the incoming gradient exists
        heights = [self.layout.phase(BACKWARD, unit).effect.height for unit in kinds]
        self.height = min(heights) + self.layout.hidden_bytes

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
        # of each rank: its share of all blocks' parameters, and those of the model's ends
        self.parameters: list[Numbers] = []
        for rank, number in enumerate(self.blocks):
            ends = (rank == self.first) + (rank == self.last)
            rest, experts = (round(number * n / stage.blocks) for n in stage.numel)
            rest += ends * stage.layout.embedding.numel
            self.parameters.append(Numbers(rest, experts))
        growing = self.schedule in GROWING
        # forwards and backwards alternate for long
        self.steady = m >= 4 * self.pp and not growing
        if growing:
            live = [m * number for number in self.blocks]
        else:
            fewer = min(m, 2 * self.pp) if m > 1 else 1
            live = _live(self.schedule, self.pp, self.v, tuple(counts), fewer)
        # parameters, and bytes that blocks keep, of ranks that differ in these
        kept = [number * stage.kept for number in live]
        self.held = {*zip(self.parameters, kept, strict=True)}
        self._slowest: dict[bool, tuple[Part, Numbers, int, float]] = {}

    # --- bytes ---

    def bound(self, shards: Numbers, zero: int) -> float:
        """The bound with weights sharded over `shards` ranks."""
        layout, e = self.stage.layout, self.stage.layout.compute
        # unsharded weights of the master's dtype are not copied
        whole = e if zero < 3 and (zero > 0 or e != layout.master) else 0
        whole += layout.reduce if self.steady and zero < 2 else 0
        cut = 0 if layout.offloads else layout.master + self.stage.states
        cut += layout.reduce if self.steady and zero >= 2 else 0
        height = 0 if self.schedule in SPLIT else self.stage.height
        height += self.stage.numel_of_block * e if zero == 3 else 0
        return max(
            numel.total * whole + numel.over(shards) * cut + kept + (height if kept else 0)
            for numel, kept in self.held
        )

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
        of_kinds = [
            sharding_seconds(links, is_expert, n * e, n * layout.reduce, number, n * away)
            for is_expert, n in zip((False, True), numel, strict=True)
            if n
        ]
        gather, scatter, replicate = map(sum, zip(*of_kinds, strict=True))
        cast = time.rates.memory(numel.total * 3 * e + numel.over(shards) * layout.master)
        numbers = max(n.over(shards) for n in self.parameters)
        seconds += time.updating(numbers, numbers * stage.states, stage.world)
        # the rank's v stages are taken as equal, and their units
        one, each_unit = 1 / self.v, 1 / number
        forward, backward = part.forward, part.input_grad + part.weight_grad
        before = 0.0 if self.schedule in SPLIT else backward * each_unit
        alike = [Reduction(before, scatter * each_unit, replicate * each_unit)]
        alike *= max(1, number // self.v)
        inputs = input_buffers(zero)
        waiting = stalls(alike, inputs, last=False)
        end = of_kinds[0][0] * each_unit
        unit = stage.alike.parallel.fsdp_unit
        sharding = Gathers(gather * one, scatter * one, end, end, waiting, zero, unit)
        seconds += m * self.v * sharding.waits(part * one).total
        if zero == 3:
            seconds += m * 2 * cast
        else:
            seconds += gather + cast if unit == "stage" else max(0.0, gather + cast - forward)
        if zero < 2:
            seconds += waiting * self.v * self.pp
        return seconds + stalls(alike, inputs, last=True) - sharding.waited

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
    sign = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: -1}
    return [
        max(itertools.accumulate(sign.get(kind, 0) * counts[stage] for kind, stage, _ in actions))
        for actions in short_schedule(schedule, pp, v, m)
    ]


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


# --- all layouts ---


class Candidate(NamedTuple):
    """A layout, with its estimate and its bound."""

    estimate: float  # seconds of a step; infinite if the bound does not fit, as it is not needed
    bound: float  # bytes; the layout needs no less
    alike: Config  # the part of the configuration that concerns the inside of a stage
    rest: dict[str, Any]  # the other settings of `parallel`

    def config(self) -> Config:
        return replace(self.alike, parallel=replace(self.alike.parallel, **self.rest))


def candidates(config: Config, world: int, device: Device) -> Iterator[Candidate]:
    """Yield every layout that obeys the configuration's rules."""
    batch, seq_len = config.train.global_batch_size, config.train.seq_len
    longest = max(1, seq_len // CP_TOKENS)
    experts = config.model.find(Experts) or Experts(count=1)
    axes = itertools.product(
        _tp_sizes(config, world, device),
        [cp for cp in _divisors(world) if cp <= longest],
        _divisors(math.gcd(world, experts.count)),
    )
    micro_batches = sorted({*MICRO_BATCHES, config.train.micro_batch_size})
    for tp, cp, ep in axes:
        # the fewest data-parallel ranks with which ep has its ranks
        dp_shard = ep // math.gcd(ep, tp * cp)
        if world % (tp * cp * dp_shard):
            continue
        given = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "ep": ep}
        parallel = replace(config.parallel, **PLAIN | given, zero_stage=1)
        if seq_len % math.prod(cuts_of_sequence(parallel).values()):
            continue
        for size, mode in itertools.product(micro_batches, MODES):
            train = replace(config.train, micro_batch_size=size, activation_checkpointing=mode)
            alike = replace(config, parallel=parallel, train=train)
            layout = Layout(alike, tp * cp * dp_shard, 0)
            stage = Stage(StepTime(layout, device), world)
            for pp in _divisors(world // (tp * cp)):
                dp = world // (tp * cp * pp)
                if pp <= config.model.num_layers + 2 and batch % (dp * size) == 0:
                    for pipe in pipelines(stage, pp, batch // (dp * size)):
                        yield from _data_parallel(pipe, dp)


def _tp_sizes(config: Config, world: int, device: Device) -> list[int]:
    """The sizes of tp that divide the world and the model's layers, and do not exceed a node; if
    there are several nodes, they also divide a node. Compiled blocks run with tp 1 only, and
    experts without sequence parallelism (settings/checks.py)."""
    whole = config.model.has_experts and not config.parallel.sequence_parallel
    node = 1 if config.train.compile or whole else device.gpus_per_node
    found = []
    for tp in _divisors(world):
        if tp <= node and (world <= node or node % tp == 0):
            with contextlib.suppress(UserError):
                check_tp(config.model, tp)
                found.append(tp)
    return found


def pipelines(stage: Stage, pp: int, m: int) -> Iterator[Pipeline]:
    """Yield the schedules and splits of the layers for `m` micro-batches on `pp` ranks."""
    config, costs = stage.alike, stage.alike.layer_costs()
    for schedule, v in _schedules(pp, m, config.model.num_layers):
        if config.train.compile and schedule in SPLIT:
            continue
        for layers_per_stage, counts in _splits(costs, tuple(ranks_of_stages(schedule, pp, v))):
            settings = {"pp": pp, "schedule": schedule, "stages_per_rank": v,
                        "layers_per_stage": layers_per_stage}  # fmt: skip
            yield Pipeline(stage, settings, counts, m)


def _splits(costs: LayerCosts, where: tuple[int, ...]) -> Iterator[tuple[object, list[int]]]:
    """Yield the ways to split the layers over stages, as the configuration has them, and the number
    of layers of each stage."""
    layers, stages = len(costs.blocks), len(where)
    if layers < stages:
        # one layer per stage, but none in the last, which has the head, or in the first and last
        light = [
            int(0 < s < stages - 1 or (s == 0 and layers == stages - 1)) for s in range(stages)
        ]
        if stages - layers <= 2 and stages > 2 and sum(light) == layers:
            yield light, light
        return
    even = even_split(layers, stages)
    yield None, even
    balanced = balanced_layers(costs, where)
    if balanced != even:
        yield "auto", balanced


def _data_parallel(pipe: Pipeline, dp: int) -> Iterator[Candidate]:
    """Yield all ways to shard one pipeline's weights over `dp` ranks."""
    stage, config, m = pipe.stage, pipe.stage.alike, pipe.m
    device, sizes = stage.time.device, stage.layout.sizes
    cp, ep = sizes.cp, sizes.ep
    inner = sizes.tp * cp  # the ranks that share a stage's work on one sequence
    for shard in _divisors(dp):
        if shard < dp and shard * inner < min(device.gpus_per_node, dp * inner):
            continue
        of_experts = shard * inner // ep
        if shard * inner % ep or sides_that_cannot_be_cut(config.model, ep, of_experts):
            continue
        shards = Numbers(shard * cp, of_experts if config.model.has_experts else 1)
        replicas = Numbers(dp // shard, dp // shard)
        for zero in (1, 2, 3) if max(shards) > 1 else (0,):
            if sums_in_bfloat16(config, zero, m > 1, dp // shard):
                continue
            bound = pipe.bound(shards, zero)
            fits = bound <= device.room
            seconds = pipe.seconds(shards, replicas, zero) if fits else math.inf
            rest = {"dp_shard": shard, "dp_replicate": dp // shard, "zero_stage": zero}
            yield Candidate(seconds, bound, config, pipe.settings | rest)


def _schedules(pp: int, m: int, layers: int) -> Iterator[tuple[str, int]]:
    """Yield names and stages per rank of the schedules that accept these sizes."""
    most_stages = (layers + 2) // pp
    if pp == 1:
        yield "1f1b", 1
        return
    for name in ("gpipe", "1f1b", *SPLIT):
        v = STAGES_PER_RANK[name]
        if v <= most_stages and not (name == "dualpipe_v" and m < 2 * pp):
            yield name, v
    for v, name in itertools.product(range(2, most_stages + 1), INTERLEAVED):
        # either counting layers only, or counting the embedding and the head as a layer each
        even = layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0
        if (v <= VIRTUAL or even) and m >= pp and not (name == "interleaved_1f1b" and m % pp):
            yield name, v


@lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
