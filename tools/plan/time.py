"""Seconds of each action of a pipeline stage and of a whole step, from the units' recorded code at
the rates of a device (costs/seconds.py).

Communication is hidden exactly where the code overlaps it with computation. Over tp and cp, a
collective is hidden behind what is computed between its start and its wait. Over dp, a unit is
gathered during the previous unit's forward; time beyond that of the overlapping computation is
exposed. It is reduced during the backwards after its own, which wait for reductions where FSDP has
no room for another input (`stalls`). The reductions of a stage's last backward run beside what the
rank does next. With `fsdp_unit: stage` there is no previous or next unit, so gathers are exposed.
The simulator accounts for the messages of the pipeline, which overlap with other actions as the
schedule allows.

With ep, in a forward of experts the host waits for the device, to learn how many rows go to each
rank. Then it has launched nothing that the device could compute meanwhile: each such wait takes
`host_wait_seconds` of the device. The experts have been gathered with their block, beside the
previous experts and the attention.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from costs.events import Sent, Waited
from costs.seconds import Cost, Links, Rates
from costs.summary import flops_per_token
from costs.timeline import Timeline
from costs.units import Unit
from parallel.axes import FSDP_AXES
from parallel.fsdp_units import input_buffers
from parallel.pipeline.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, Kind
from parallel.pipeline.simulate import Costs, simulate
from tools.plan.hardware import Device
from tools.plan.layout import KINDS, Gathered, Layout, numbers_of
from tools.plan.traffic import messages, times_a_step


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a stage: forward, input gradient, weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float

    def __add__(self, other: "Part") -> "Part":
        forward, input_grad = self.forward + other.forward, self.input_grad + other.input_grad
        return Part(forward, input_grad, self.weight_grad + other.weight_grad)

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    def __mul__(self, times: float) -> "Part":
        return Part(self.forward * times, self.input_grad * times, self.weight_grad * times)


NOTHING = Part(0.0, 0.0, 0.0)


class Gathers(NamedTuple):
    """Seconds of a stage's gathers and reductions over the ranks that share its weights."""

    gather: float  # of all its units
    scatter: float
    gather_first: float  # of the first unit
    gather_last: float  # of the last unit, which is the first in backward
    stalls: float  # of a backward, by its reductions (`stalls`)
    zero_stage: int
    fsdp_unit: str

    def waits(self, stage: Part) -> Part:
        """Seconds by which the actions of `stage` are longer, in every micro-batch. Nothing runs
        beside the first gather of an action."""
        forward, backward = stage.forward, stage.input_grad + stage.weight_grad
        both = self.gather + self.scatter
        if self.zero_stage < 2:
            return NOTHING
        if self.fsdp_unit == "stage":
            if self.zero_stage == 3:  # nothing hides it: the next action gathers over the same link
                return Part(self.gather, both, 0.0)
            # it runs beside the next actions
            return Part(0.0, 0.0, max(0.0, self.scatter - backward - forward))
        if self.zero_stage == 3:  # every forward and backward gathers; every backward reduces too
            first = max(self.gather_first, self.gather - forward)
            return Part(first, max(self.gather_last + self.stalls, both - backward), 0.0)
        return Part(0.0, 0.0, self.stalls)

    @property
    def waited(self) -> float:
        """The seconds for which each backward then waits for its own reductions."""
        whole = self.zero_stage == 3 and self.fsdp_unit == "stage"
        return self.scatter if whole else self.stalls


class Reduction(NamedTuple):
    """Seconds of an FSDP unit in a backward."""

    computing: float  # since the unit before had its gradients, until this one has
    shards: float  # to reduce them over the shards
    replicas: float  # and then over the replicas, in the last backward


def stalls(units: Iterable[Reduction], inputs: int, last: bool) -> float:
    """Seconds for which a backward waits for its reductions, which run one after another. FSDP
    keeps so many `inputs` of them: before it reduces a further unit, computation waits until the
    oldest of these is reduced over the shards. The `last` backward of a stage also waits for all of
    them."""
    now = reduced = replicated = computed = 0.0
    ends: deque[float] = deque()
    for computing, shards, replicas in units:
        computed += computing
        now += computing
        if len(ends) == inputs:
            now = max(now, ends.popleft())
        reduced = max(now, reduced) + shards
        ends.append(reduced)
        replicated = max(replicated, reduced) + replicas
    return (max(now, replicated) if last else now) - computed


def sharding_seconds(
    links: Links,
    is_expert: bool,
    gathered: float,
    reduced: float,
    number: int = 1,
    offloaded: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds to gather weights, those of experts or all others, to reduce their gradients over the
    shards, and then over the replicas; of so many bytes, in `number` collectives each. Groups of
    experts share the links with those of other weights: one collective runs after another.

    offloaded: bytes of the shards of all of these weights that come from the host before each
    gather, and whose gradients go there after the last reduction."""
    copies, axis = FSDP_AXES[is_expert]
    copied = offloaded / links.ranks(axis) / links.device.host_bytes_per_second
    return (
        links.collective(axis, gathered, number=number) + copied,
        links.collective(axis, reduced, number=number),
        links.collective(copies, reduced / links.ranks(axis), 2, number) + copied,
    )


def message_seconds(size: int, world: int, device: Device) -> float:
    """Seconds to send `size` bytes to another pipeline rank."""
    rate = device.network_bytes_per_second * device.network_efficiency
    if world <= device.gpus_per_node:
        rate = device.node_bytes_per_second * device.node_efficiency
    return size / rate + device.collective_seconds


class StepTime:
    """The time of one job's step: `timeline` (of all pipeline ranks), `step_seconds`, and their
    parts."""

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout, self.device = layout, device
        sizes, weights, experts = layout.sizes, layout.sharding[False], layout.sharding[True]
        self.links = Links(device, sizes.tp, weights.shards, weights.replicas, layout.world,
                           sizes.cp, sizes.ep, experts.shards, experts.replicas)  # fmt: skip
        self.rates = Rates(device, self.links, layout.compute)
        # to send a hidden state to another rank
        self.message_seconds = message_seconds(layout.hidden_bytes, layout.world, device)
        self._costs: dict[tuple[Unit, Kind], Cost] = {}

    # --- computing ---

    def cost(self, unit: Unit, kind: Kind) -> Cost:
        """The cost of a unit in an action of this kind."""
        if (unit, kind) not in self._costs:
            phase = self.layout.phase(kind, unit)
            cost = self.rates.cost(phase, kind is BACKWARD_WEIGHT)
            waits = kind is FORWARD and self.layout.sizes.ep > 1 and numbers_of(unit).experts
            if waits:  # `counts_on_host`
                cost = cost._replace(computing=cost.computing + self.device.host_wait_seconds)
            self._costs[unit, kind] = cost
        return self._costs[unit, kind]

    def part(self, unit: Unit, split: bool | None = None) -> Part:
        """A unit's part of the seconds of each action: computation and exposed communication over
        tp and cp. `split`: whether the schedule splits backward (default: the layout's); otherwise
        `input_grad` holds the whole backward."""
        kinds = KINDS[self.layout.splits_backward if split is None else split]
        each = [self.cost(unit, kind).total for kind in kinds]
        return Part(*each, *[0.0] * (3 - len(each)))

    # --- a stage, and what FSDP does around it ---

    def summing(self, unit: Unit) -> float:
        """Seconds that a micro-batch's gradients take in addition to the matrix products, to be
        copied for a reduction in a wider dtype."""
        layout = self.layout
        if layout.sum_dtype is not None or layout.compute == layout.reduce:
            return 0.0
        return self.rates.memory(unit.numel * (layout.compute + 2 * layout.reduce))

    def of_unit(self, unit: Gathered) -> tuple[float, float, float]:
        """Seconds to gather an FSDP unit, to reduce its gradients over their shards, and then over
        their replicas."""
        sizes = unit.padded * self.layout.compute, unit.padded * self.layout.reduce
        offloaded = unit.numel * self.layout.master * self.layout.offloads
        return sharding_seconds(self.links, unit.is_expert, *sizes, offloaded=offloaded)

    def cast(self, stage: int) -> float:
        """Seconds to convert a stage's weights to the compute dtype and to copy the gathered
        weights into place."""
        layout, size = self.layout, 0.0
        for _, unit in layout.fsdp_units(stage):
            if not layout.whole:
                # experts that are cut are copied once more
                again = 2 * unit.cut_within * layout.compute
                size += unit.numel * (3 * layout.compute + layout.master / unit.shards) + again
            elif layout.compute != layout.master:
                size += unit.numel * (layout.compute + layout.master)
        return self.rates.memory(size)

    @cached_property
    def stages(self) -> list[Part]:
        """Seconds of each stage's actions, without exposed communication over dp_shard."""
        stages = map(self.layout.units, range(self.layout.num_stages))
        return [
            sum((self.part(u) + Part(0.0, 0.0, self.summing(u)) for u in units), NOTHING)
            for units in stages
        ]

    @cached_property
    def gathers(self) -> list[Gathers]:
        """Of each stage."""
        found, parallel = [], self.layout.config.parallel
        for stage in range(self.layout.num_stages):
            units = [(unit, self.of_unit(unit)) for _, unit in self.layout.fsdp_units(stage)]
            gather, scatter = (sum(seconds[i] for _, seconds in units) for i in (0, 1))
            first, *_, last = [seconds[0] for unit, seconds in units if not unit.is_expert] * 2
            each = gather, scatter, first, last, self.stalls(stage, last=False)
            found.append(Gathers(*each, parallel.zero_stage, parallel.fsdp_unit))
        return found

    @cached_property
    def costs(self) -> Costs:
        layout, parallel = self.layout, self.layout.config.parallel
        parts, weights_at = [], []
        busy = [0.0] * layout.sizes.pp  # each rank's link, by the gathers of its previous stages
        for stage, rank in enumerate(layout.where):
            part, cast = self.stages[stage], self.cast(stage)
            part += self.gathers[stage].waits(part)
            if parallel.zero_stage == 3:
                part += Part(cast, cast, 0.0)
            busy[rank] += (0.0 if parallel.zero_stage == 3 else self.gathers[stage].gather) + cast
            # then the first forward begins when the whole stage has been gathered
            late = parallel.fsdp_unit == "stage" and parallel.zero_stage < 3
            weights_at.append(busy[rank] + (part.forward if late else 0.0))
            parts.append(part)
        forward, input_grad, weight_grad = map(list, zip(*map(astuple, parts), strict=True))
        return Costs(forward, input_grad, weight_grad, self.message_seconds, weights_at)

    @cached_property
    def timeline(self) -> Timeline:
        return Timeline(simulate(self.layout.schedule, self.costs))

    @cached_property
    def waiting_for_messages(self) -> float:
        """Seconds by which the step would be shorter if messages took no time."""
        costs = replace(self.costs, communication=0.0)
        silent = Timeline(simulate(self.layout.schedule, costs))
        return max(0.0, self.timeline.step_time - silent.step_time)

    def reductions_of(self, stage: int) -> list[Reduction]:
        """The reductions of a stage, in the order of a backward. If the schedule splits it, all of
        them come after the weight gradients."""
        units, waiting = self.layout.units(stage), []
        each = [0.0 if self.layout.splits_backward else self.part(u).input_grad for u in units]
        for (first, *_), gathered in self.layout.fsdp_units(stage):
            left = sum(each[:first])  # seconds of the backward after its gradients are complete
            if gathered.is_expert:
                left += each[first] * self._share_after_experts(units[first])
            waiting.append((left, gathered))
        before, found = sum(each), []
        for left, gathered in sorted(waiting, key=lambda one: -one[0]):
            found.append(Reduction(before - left, *self.of_unit(gathered)[1:]))
            before = left
        return found

    def stalls(self, stage: int, last: bool) -> float:
        """Seconds for which a stage's backward waits for its reductions."""
        inputs = input_buffers(self.layout.config.parallel.zero_stage)
        return stalls(self.reductions_of(stage), inputs, last)

    def _share_after_experts(self, unit: Unit) -> float:
        """The share of a block's backward after that of its experts."""
        computed = [
            sum(self.rates.operation(e) for e in part if not isinstance(e, (Sent, Waited)))
            for part in self.layout.phase(BACKWARD, unit).parts
        ]
        return computed[-1] / sum(computed)

    @cached_property
    def reductions(self) -> list[float]:
        """When each rank has finished reducing its gradients. The reductions of a stage's last
        backward run beside what the rank does after it. With zero_stage below 2 only that backward
        reduces; if it stalls, the stages before it are late."""
        last = self.layout.num_microbatches - 1
        late, behind = [0.0], []  # of the stages from the last one on
        for stage, gathers in reversed([*enumerate(self.gathers)]):
            late.append(late[-1] + (gathers.stalls if gathers.zero_stage < 2 else 0.0))
            behind.append(max(0.0, self.stalls(stage, last=True) - gathers.waited))
        late, behind = late[:0:-1], behind[::-1]
        return [
            max(
                end + late[action.stage] + behind[action.stage]
                for action, _, end in events
                if action.microbatch == last and action.kind in (BACKWARD, BACKWARD_WEIGHT)
            )
            for events in self.timeline.ranks
        ]

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer on the rank on which it takes longest."""
        ranks = [0.0] * self.layout.sizes.pp  # seconds
        for stage, rank in enumerate(self.layout.where):
            for _, unit in self.layout.fsdp_units(stage):
                states = sum(map(self.layout.bytes_of_states, unit.weights)) / unit.shards
                ranks[rank] += self.updating(unit.numel / unit.shards, states, self.layout.world)
        whole = (self.putting_together(self.layout.at(rank)) for rank in range(len(ranks)))
        return max(map(sum, zip(ranks, whole, strict=True)))

    def putting_together(self, layout: Layout) -> float:
        """Seconds in which the optimizer computes with whole matrices: of the rank with most
        products, and of the messages that they do not hide."""
        seconds = 0.0
        rate = self.device.peak(layout.products) * self.device.matmul_efficiency
        for rounds in layout.rounds():
            work: defaultdict[tuple[int, ...], float] = defaultdict(float)  # by owner
            for each in rounds:
                for one in each.owned:
                    work[one.owner] += layout.optimizer.flops(one.matrix.shape)
            sent = messages(rounds, layout.products)
            wire = sum(self.rates.links.seconds(kind, axis, size) for axis, kind, size in sent)
            busy = max(work.values()) / rate
            # the first round's way there and the last one's back have nothing beside them
            seconds += max(busy, wire) + min(busy, wire) / len(rounds)
        return seconds

    def updating(self, numbers: float, states: float, world: int) -> float:
        """Seconds of the optimizer and the gradient norm for so many parameters, with so many bytes
        of states: weights and states are read and written, gradients are read twice. On a disk,
        states are read and all is written meanwhile. `world`: the ranks of the job."""
        weights, where = numbers * self.layout.master, self.layout.config.parallel.offload
        moved = 2 * states + 4 * weights
        if where == "none":
            return self.rates.memory(moved)
        sharing = self.device.gpus_of_node(world)
        seconds = moved * sharing / self.device.host_memory_bytes_per_second
        if where == "disk":
            moved = 2 * states + weights
            seconds = max(seconds, moved * sharing / self.device.disk_bytes_per_second)
        return seconds

    @cached_property
    def step_seconds(self) -> float:
        end = max(self.timeline.step_time, *self.reductions)
        return end + self.optimizer_seconds + self.device.step_seconds

    @property
    def tokens_per_second(self) -> float:
        train = self.layout.config.train
        return train.global_batch_size * train.seq_len / self.step_seconds

    def mfu(self, whole_attention: bool = False) -> float:
        """Model FLOPs utilization: tokens per second · flops_per_token / (GPUs · peak).
        `whole_attention`: attention is counted as the whole square, as Megatron-LM does."""
        config = self.layout.config
        flops = flops_per_token(config.model, config.train.seq_len, whole_attention)
        return self.tokens_per_second * flops / (self.layout.world * self.device.peak_flops)


# --- a rank's communication, and how much of it is exposed ---


def seconds_on_the_wire(
    time: StepTime, layout: Layout, sends: int
) -> dict[str, tuple[float, float]]:
    """By axis, the seconds of communication in one step, and those during which computation waits,
    on the pipeline rank of `layout`, which sends so many messages. The exposed seconds of `pp` are
    by how much the whole step is longer because messages take time. Those of gathers and reductions
    are shared out to the axes of experts and of other weights as their seconds on the wire."""
    m, (gathers, reductions) = layout.num_microbatches, times_a_step(layout)
    table: dict[str, tuple[float, float]] = {}
    units = [unit for stage in layout.stages for unit in layout.units(stage)]
    costs = [time.cost(unit, kind) for unit in units for kind in KINDS[layout.splits_backward]]
    for axis in ("tp", "cp", "ep"):  # recorded from the units
        wire = m * sum(cost.wire.get(axis, 0.0) for cost in costs)
        table[axis] = wire, m * sum(cost.exposed.get(axis, 0.0) for cost in costs)
    sharding: dict[str, float] = defaultdict(float)  # seconds on the wire
    for stage in layout.stages:
        for _, unit in layout.fsdp_units(stage):
            gather, scatter, over_replicas = time.of_unit(unit)
            copies, axis = FSDP_AXES[unit.is_expert]
            sharding[axis] += gather * gathers + scatter * reductions
            sharding[copies] += over_replicas
    waits = sum(m * time.gathers[s].waits(time.stages[s]).total for s in layout.stages)
    # first forwards, which wait for weights, are longer than later ones
    events, usual = time.timeline.ranks[layout.pp_rank], time.costs.forward
    first = [e for e in events if e.action.microbatch == 0 and e.action.kind is FORWARD]
    waits += max(0.0, sum(e.end - e.start - usual[e.action.stage] for e in first))
    tail = max(0.0, time.reductions[layout.pp_rank] - events[-1].end)
    replicas, shards = zip(*FSDP_AXES.values(), strict=True)
    late = min(tail, sum(sharding[axis] for axis in replicas))  # the last, over replicas
    for axes, exposed in ((shards, waits + tail - late), (replicas, late)):
        total = sum(sharding[axis] for axis in axes) or 1.0
        table |= {axis: (sharding[axis], exposed * sharding[axis] / total) for axis in axes}
    table["pp"] = sends * time.message_seconds, time.waiting_for_messages
    return {axis: seconds for axis, seconds in table.items() if seconds[0]}
