"""Seconds of each action of a pipeline's stage, and of a whole step. From shapes and rates alone:
nothing runs.

    product m × n × k         2·m·n·(k + ramp) / (peak · efficiency), never less than its bytes take
    attention, causal         2·T·S·D / tp forward, 2.5 times that backward
    everything else           bytes read and written / memory's rate
    collectives               plan/links.py

What hides behind what is what the code overlaps. Over tp: in backward the gather of a product's
input runs behind its input gradient, the scatter of that behind the weight gradients; forward
waits. Over dp: units are gathered during the forward before, and reduced during the backward after;
what takes longer than the computing beside it is waited for. With `fsdp_unit: stage` there is no
unit before and none after: gathers are waited for, and reductions run behind what the rank does
next. Messages of the pipeline hide in the schedule, through the simulator.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from parallel.pipeline.simulate import Costs, Timeline, simulate
from plan.hardware import Device
from plan.layout import Layout, Unit
from plan.links import Links
from plan.traffic import gather_bytes, message_bytes, reduce_bytes

KERNELS = {FORWARD: 14, BACKWARD: 30, BACKWARD_INPUT: 20}  # of a block


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a stage: forward, input gradient, weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float

    def __add__(self, other: "Part") -> "Part":
        mine = (self.forward, self.input_grad, self.weight_grad)
        theirs = (other.forward, other.input_grad, other.weight_grad)
        return Part(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    def __mul__(self, times: float) -> "Part":
        return Part(self.forward * times, self.input_grad * times, self.weight_grad * times)


NOTHING = Part(0.0, 0.0, 0.0)


class Cost(NamedTuple):
    """Of a unit or stage: what it computes, what it has to say over tp, and how much of that
    computing waits for."""

    computing: Part
    wire: Part
    exposed: Part


class StepTime:
    """Of one job: `timeline` (of all pipeline ranks), `step_seconds`, and what it is made of."""

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout, self.device = layout, device
        self.links = Links(device, layout.tp, layout.dp_shard, layout.dp_replicate, layout.world)

    # --- computing ---

    def product(self, m: float, n: float, k: float) -> float:
        device, e = self.device, self.layout.compute
        flops = 2.0 * m * n * (k + device.matmul_ramp)
        moved = (m * n + m * k + n * k) * e
        rate = device.peak(e) * device.matmul_efficiency
        return max(flops / rate, self.memory(moved)) + device.kernel_seconds

    def memory(self, size: float) -> float:
        return size / (self.device.memory_bytes_per_second * self.device.memory_efficiency)

    @cached_property
    def block(self) -> Cost:
        layout, model, e = self.layout, self.layout.model, self.layout.compute
        dim, tokens, tp = model.dim, layout.tokens, layout.tp
        heads, ffn, kv = layout.q_width, model.ffn_dim // tp, layout.kv_width
        attending = [(heads, dim), (kv, dim), (kv, dim), (dim, heads)]
        shapes = [*attending, (ffn, dim), (ffn, dim), (dim, ffn)]
        forward = sum(self.product(tokens, n, k) for n, k in shapes)
        input_grad = sum(self.product(tokens, k, n) for n, k in shapes)
        weight_grad = sum(self.product(n, k, tokens) for n, k in shapes)
        rate = self.device.peak(e) * self.device.attention_efficiency
        attention = 2.0 * tokens * layout.config.train.seq_len * heads / rate
        # Elements moved: norms and residual sums on the rank's part of the sequence; rotation,
        # attention's edges; the gate; norms of q and k.
        normed = tokens * (heads + kv) if model.qk_norm else 0
        part, turned = layout.local_tokens * dim, 2 * (heads + kv)
        light = e * (part * 8 + tokens * (turned + 3 * ffn) + 2 * normed)
        light_back = e * (part * 9 + tokens * (turned + 5 * ffn) + 3 * normed)
        kernels = {kind: number + (2 if model.qk_norm else 0) for kind, number in KERNELS.items()}
        launch = self.device.kernel_seconds
        forward += attention + self.memory(light) + kernels[FORWARD] * launch
        input_grad += 2.5 * attention + self.memory(light_back) + kernels[BACKWARD_INPUT] * launch
        # Over tp.
        whole = tokens * dim * e
        cut = layout.config.parallel.sequence_parallel
        once = self.links.collective("tp", whole, 1 if cut else 2)
        gathered = (shapes[0:3], shapes[4:6])
        into = [sum(self.product(tokens, k, n) for n, k in some) for some in gathered]
        of = [sum(self.product(n, k, tokens) for n, k in some) for some in gathered]
        talk = once * (4 if cut else 2)
        # two gathers of output gradients, two of inputs again, two scatters
        back = once * (6 if cut else 2)
        beside = [*into, *of] if cut else of
        waits = (2 * once if cut else 0.0) + sum(max(0.0, once - seconds) for seconds in beside)
        mode = layout.config.train.activation_checkpointing
        again = 0.0 if mode == "none" else talk * 3 / 4
        if mode == "full":
            input_grad += forward
        elif mode == "selective":
            input_grad += self.memory(light)
            if tp > 1:  # the row-parallel products too
                input_grad += sum(self.product(tokens, *shapes[i]) for i in (3, 6))
        exposed = Part(talk, waits + again, 0.0)
        return Cost(Part(forward, input_grad, weight_grad), Part(talk, back + again, 0.0), exposed)

    @cached_property
    def head(self) -> Cost:
        """All three products are in forward (model/kernels/linear_cross_entropy.py)."""
        layout, e = self.layout, self.layout.compute
        dim, tokens = layout.model.dim, layout.tokens
        vocabulary = -(-layout.model.vocab_size // layout.tp)
        products = [(tokens, vocabulary, dim), (tokens, dim, vocabulary), (vocabulary, dim, tokens)]
        forward = sum(self.product(*shape) for shape in products)
        forward += self.memory(
            tokens * vocabulary * e * 3 + vocabulary * dim * 6 + layout.local_tokens * dim * e * 3
        )
        talk = Part(self.links.collective("tp", tokens * dim * e, 2), 0.0, 0.0)
        backward = self.memory(layout.local_tokens * dim * e * 6 + vocabulary * dim * e * 2)
        return Cost(Part(forward, backward, 0.0), talk, talk)

    @cached_property
    def embedding(self) -> Cost:
        whole = self.layout.tokens * self.layout.model.dim * self.layout.compute
        once = self.links.collective("tp", whole)
        talk = Part(once, once, 0.0)
        moved = Part(self.memory(5 * whole), self.memory(3 * whole), self.memory(2 * whole))
        return Cost(moved, talk, talk)

    def unit(self, unit: Unit) -> Cost:
        return {"embedding": self.embedding, "block": self.block, "head": self.head}[unit.name]

    def part(self, unit: Unit) -> Part:
        """What a unit takes of an action: computing, and waiting for tp."""
        cost = self.unit(unit)
        return cost.computing + cost.exposed

    # --- a stage, and what FSDP does around it ---

    def summing(self, unit: Unit) -> float:
        """What a micro-batch's gradients cost beside the products: added up in a wider dtype, or
        copied for a reduction."""
        layout = self.layout
        if layout.compute == layout.reduce:
            return 0.0
        return self.memory(unit.numel * (layout.compute + 2 * layout.reduce))

    def data_parallel(self, stage: int) -> tuple[float, float, float]:
        """Seconds to gather a stage's weights, to reduce its gradients over dp_shard, and then over
        dp_replicate."""
        layout, units = self.layout, [unit for _, unit in self.layout.fsdp_units(stage)]
        links, shard, number = self.links, layout.dp_shard, len(units)
        gathered = sum(gather_bytes(layout, unit) for unit in units)
        gather = links.collective("dp_shard", gathered, number=number)
        reduced = sum(reduce_bytes(layout, unit) for unit in units)
        scatter = links.collective("dp_shard", reduced, number=number)
        return gather, scatter, links.collective("dp_replicate", reduced / shard, 2, number)

    @cached_property
    def casts(self) -> list[float]:
        """Of each stage: seconds to bring its weights to the compute dtype, and what was gathered
        to its place."""
        layout = self.layout
        width = 3 * layout.compute + layout.master / layout.dp_shard
        stages = map(layout.units, range(layout.num_stages))
        return [self.memory(sum(unit.numel for unit in units) * width) for units in stages]

    @cached_property
    def stages(self) -> list[Part]:
        """Seconds of each stage's actions, without what they wait for over dp_shard."""
        stages = map(self.layout.units, range(self.layout.num_stages))
        return [
            sum((self.part(u) + Part(0.0, 0.0, self.summing(u)) for u in units), NOTHING)
            for units in stages
        ]

    def waits(self, stage: int) -> Part:
        """Seconds by which gathers and reductions of every micro-batch make a stage's actions
        longer."""
        parallel = self.layout.config.parallel
        zero, as_one = parallel.zero_stage, parallel.fsdp_unit == "stage"
        gather, scatter, _ = self.data_parallel(stage)
        part = self.stages[stage]
        forward, backward = part.forward, part.input_grad + part.weight_grad
        if zero == 3 and as_one:  # nothing hides it: the next action gathers over the same link
            return Part(gather, gather + scatter, 0.0)
        if zero == 3:  # every forward and backward gathers; every backward reduces too
            return Part(max(0.0, gather - forward), max(0.0, gather + scatter - backward), 0.0)
        if zero == 2:
            return Part(0.0, 0.0, max(0.0, scatter - backward - (forward if as_one else 0.0)))
        return NOTHING

    @cached_property
    def costs(self) -> Costs:
        layout, parallel = self.layout, self.layout.config.parallel
        parts, weights_at = [], []
        busy = [0.0] * layout.sizes.pp  # each rank's link, with gathers of stages before
        for stage, rank in enumerate(layout.where):
            part, cast = self.stages[stage] + self.waits(stage), self.casts[stage]
            if parallel.zero_stage == 3:
                part += Part(cast, cast, 0.0)
            gather, _, _ = self.data_parallel(stage)
            busy[rank] += (0.0 if parallel.zero_stage == 3 else gather) + cast
            # the first forward begins when all is there
            late = parallel.fsdp_unit == "stage" and parallel.zero_stage < 3
            weights_at.append(busy[rank] + (part.forward if late else 0.0))
            parts.append(part)
        return Costs(
            [part.forward for part in parts],
            [part.input_grad for part in parts],
            [part.weight_grad for part in parts],
            self.message_seconds,
            weights_at,
        )

    @cached_property
    def message_seconds(self) -> float:
        """A hidden state on its way to another rank."""
        pp, device = self.layout.sizes.pp, self.device
        if pp == 1:
            return 0.0
        rate = device.network_bytes_per_second * device.network_efficiency
        if self.layout.world <= device.gpus_per_node:
            rate = device.node_bytes_per_second * device.node_efficiency
        return message_bytes(self.layout.config) / rate + device.collective_seconds

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.layout.schedule, self.costs)

    @cached_property
    def waiting_for_messages(self) -> float:
        """By how much the step would be shorter if messages took no time."""
        silent = simulate(self.layout.schedule, replace(self.costs, communication=0.0))
        return max(0.0, self.timeline.step_time - silent.step_time)

    @cached_property
    def reductions(self) -> list[float]:
        """When each rank has reduced its gradients: a stage's leave during its last backward, as
        one unit after it."""
        parallel, ends = self.layout.config.parallel, []
        last = self.layout.num_microbatches - 1
        for events in self.timeline.ranks:
            link = 0.0
            for action, start, end in events:
                if action.microbatch == last and action.kind in (BACKWARD, BACKWARD_WEIGHT):
                    _, scatter, replicas = self.data_parallel(action.stage)
                    link = max(link, end if parallel.fsdp_unit == "stage" else start)
                    link += (scatter if parallel.zero_stage < 2 else 0.0) + replicas
            ends.append(link)
        return ends

    @property
    def reductions_end(self) -> float:
        return max(self.reductions)

    @cached_property
    def optimizer_seconds(self) -> float:
        """AdamW and the norm, on the rank that has most."""
        ranks = [0.0] * self.layout.sizes.pp
        for stage, rank in enumerate(self.layout.where):
            numel = sum(unit.numel for unit in self.layout.units(stage))
            ranks[rank] += numel / self.layout.dp_shard
        return self.memory(max(ranks) * 8 * self.layout.master)

    @cached_property
    def step_seconds(self) -> float:
        end = max(self.timeline.step_time, self.reductions_end)
        return end + self.optimizer_seconds + self.device.step_seconds

    @property
    def tokens_per_second(self) -> float:
        train = self.layout.config.train
        return train.global_batch_size * train.seq_len / self.step_seconds

    @property
    def mfu(self) -> float:
        """tokens a second · ModelConfig.flops_per_token / (GPUs · peak)."""
        flops = self.layout.model.flops_per_token(self.layout.config.train.seq_len)
        return self.tokens_per_second * flops / (self.layout.world * self.device.peak_flops)

    @property
    def mfu_full_attention(self) -> float:
        """The same with attention counted as the whole square, as Megatron-LM counts it."""
        model, seq_len = self.layout.model, self.layout.config.train.seq_len
        whole = model.flops_per_token(seq_len, whole_attention=True)
        return self.mfu * whole / model.flops_per_token(seq_len)
