"""Seconds of each action of a pipeline's stage, and of a whole step. From shapes and rates alone: nothing runs.

    product m × n × k         2·m·n·(k + ramp) / (peak · efficiency)       never less than its bytes take
    attention, causal         2·T·S·D / tp forward, 2.5 times that backward
    everything else           bytes read and written / memory's rate
    a gather, a scatter       bytes · (n − 1) / n / the link's rate; all-reduce: twice

What hides behind what is what the code overlaps. Over tp: in backward the gather of a product's input runs behind its input
gradient, the scatter of that behind the weight gradients; forward waits. Over dp: units are gathered during the forward before,
and reduced during the backward after; what takes longer than the computing beside it is waited for. Messages of the pipeline
hide in the schedule, through the simulator. A group that has g ranks in a node has g links out of it (NCCL's rings).
"""

from dataclasses import dataclass
from functools import cached_property

from parallel.pipeline.actions import B, F, I, W
from parallel.pipeline.simulate import Costs, Timeline, simulate
from plan.hardware import Device
from plan.layout import Layout, Unit
from plan.traffic import gather_bytes, message_bytes, reduce_bytes

KERNELS = {F: 14, B: 30, I: 20}  # of a block


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a stage: forward, input gradient, weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float

    def __add__(self, other: "Part") -> "Part":
        mine, theirs = (self.forward, self.input_grad, self.weight_grad), (other.forward, other.input_grad, other.weight_grad)
        return Part(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def __mul__(self, times: float) -> "Part":
        return Part(self.forward * times, self.input_grad * times, self.weight_grad * times)


class StepTime:
    """Of one job: `timeline` (of all pipeline ranks), `step_seconds`, and what it is made of."""

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout, self.device = layout, device
        self.split = layout.config.split_layers()

    # --- links ---

    def link(self, axis: str) -> float:
        """Bytes a second that a rank can send in a collective over `axis`."""
        device, layout = self.device, self.layout
        inner = {"tp": 1, "dp_shard": layout.tp, "dp_replicate": layout.tp * layout.dp_shard}[axis]
        ranks = {"tp": layout.tp, "dp_shard": layout.dp_shard, "dp_replicate": layout.dp_replicate}[axis]
        node = device.node_bytes_per_second * device.node_efficiency
        in_node = max(1, min(ranks, device.gpus_per_node // inner))
        if in_node == ranks:
            return node
        return min(node, in_node * device.network_bytes_per_second * device.network_efficiency)

    def collective(self, axis: str, size: float, times: float = 1) -> float:
        """Seconds of a gather or a scatter of `size` bytes."""
        ranks = {"tp": self.layout.tp, "dp_shard": self.layout.dp_shard, "dp_replicate": self.layout.dp_replicate}[axis]
        if ranks == 1:
            return 0.0
        return times * (size * (ranks - 1) / ranks / self.link(axis) + self.device.collective_seconds)

    # --- computing ---

    def product(self, m: float, n: float, k: float) -> float:
        device, e = self.device, self.layout.compute
        flops = 2.0 * m * n * (k + device.matmul_ramp)
        moved = (m * n + m * k + n * k) * e
        rate = device.peak_flops * device.matmul_efficiency / (1 if e == 2 else e / 1)
        return max(flops / rate, self.memory(moved)) + device.kernel_seconds

    def memory(self, size: float) -> float:
        return size / (self.device.memory_bytes_per_second * self.device.memory_efficiency)

    @cached_property
    def block(self) -> Part:
        layout, model, e = self.layout, self.layout.model, self.layout.compute
        dim, tokens, tp = model.dim, layout.tokens, layout.tp
        heads, ffn, kv = dim // tp, model.ffn_dim // tp, layout.kv_width
        shapes = [(heads, dim), (kv, dim), (kv, dim), (dim, heads), (ffn, dim), (ffn, dim), (dim, ffn)]
        forward = sum(self.product(tokens, n, k) for n, k in shapes)
        input_grad = sum(self.product(tokens, k, n) for n, k in shapes)
        weight_grad = sum(self.product(n, k, tokens) for n, k in shapes)
        rate = self.device.peak_flops * self.device.attention_efficiency / (1 if e == 2 else e / 1)
        attention = 2.0 * tokens * layout.config.train.seq_len * heads / rate
        # Elements moved: norms and residual sums on the rank's part of the sequence; rotation, attention's edges; the gate.
        light = e * (layout.local_tokens * dim * 8 + tokens * (2 * (heads + kv) + 3 * ffn))
        light_back = e * (layout.local_tokens * dim * 9 + tokens * (2 * (heads + kv) + 5 * ffn))
        forward += attention + self.memory(light) + KERNELS[F] * self.device.kernel_seconds
        input_grad += 2.5 * attention + self.memory(light_back) + KERNELS[I] * self.device.kernel_seconds
        # Over tp.
        whole = tokens * dim * e
        cut = layout.config.parallel.sequence_parallel
        once = self.collective("tp", whole, 1 if cut else 2)
        into = [sum(self.product(tokens, k, n) for n, k in shapes[a:b]) for a, b in ((0, 3), (4, 6))]
        of = [sum(self.product(n, k, tokens) for n, k in shapes[a:b]) for a, b in ((0, 3), (4, 6))]
        forward_talk = once * (4 if cut else 2)
        hidden_gathers = sum(max(0.0, once - seconds) for seconds in into) if cut else 0.0
        hidden_scatters = sum(max(0.0, once - seconds) for seconds in of)
        talk = (2 * once if cut else 0.0) + hidden_gathers + hidden_scatters
        mode = layout.config.train.activation_checkpointing
        if mode == "full":
            input_grad += forward + forward_talk * 3 / 4
        elif mode == "selective":
            input_grad += self.memory(light) + forward_talk * 3 / 4
            if tp > 1:  # the row-parallel products too
                input_grad += sum(self.product(tokens, *shapes[i]) for i in (3, 6))
        return Part(forward + forward_talk, input_grad + talk, weight_grad)

    @cached_property
    def head(self) -> Part:
        """All three products are in forward (model/kernels/linear_cross_entropy.py)."""
        layout, e = self.layout, self.layout.compute
        dim, vocabulary, tokens = layout.model.dim, -(-layout.model.vocab_size // layout.tp), layout.tokens
        products = [(tokens, vocabulary, dim), (tokens, dim, vocabulary), (vocabulary, dim, tokens)]
        forward = sum(self.product(*shape) for shape in products)
        forward += self.memory(tokens * vocabulary * e * 3 + vocabulary * dim * 6 + layout.local_tokens * dim * e * 3)
        forward += self.collective("tp", tokens * dim * e, 2)
        return Part(forward, self.memory(layout.local_tokens * dim * e * 6 + vocabulary * dim * e * 2), 0.0)

    @cached_property
    def embedding(self) -> Part:
        layout, e = self.layout, self.layout.compute
        whole = layout.tokens * layout.model.dim * e
        talk = self.collective("tp", whole)
        return Part(self.memory(5 * whole) + talk, self.memory(3 * whole) + talk, self.memory(2 * whole))

    def part(self, unit: Unit) -> Part:
        return {"embedding": self.embedding, "block": self.block, "head": self.head}[unit.name]

    # --- a stage, and what FSDP does around it ---

    def summing(self, unit: Unit) -> float:
        """What a micro-batch's gradients cost beside the products: added up in a wider dtype, or copied for a reduction."""
        layout = self.layout
        if layout.compute == layout.reduce:
            return 0.0
        return self.memory(unit.numel * (layout.compute + 2 * layout.reduce))

    def data_parallel(self, stage: int) -> tuple[float, float, float]:
        """Seconds to gather a stage's weights, to reduce its gradients over dp_shard, and then over dp_replicate."""
        layout, units = self.layout, self.layout.units(stage)
        gather = sum(self.collective("dp_shard", gather_bytes(layout, unit)) for unit in units)
        scatter = sum(self.collective("dp_shard", reduce_bytes(layout, unit)) for unit in units)
        replicas = sum(self.collective("dp_replicate", reduce_bytes(layout, unit) / layout.dp_shard, 2) for unit in units)
        return gather, scatter, replicas

    @cached_property
    def costs(self) -> Costs:
        layout, zero = self.layout, self.layout.config.parallel.zero_stage
        parts, weights_at = [], []
        busy = [0.0] * layout.mesh_shape[0]  # each rank's link, with gathers of stages before
        for stage, rank in enumerate(layout.config.parallel.ranks_of_stages):
            units = layout.units(stage)
            part = sum((self.part(unit) + Part(0.0, 0.0, self.summing(unit)) for unit in units), Part(0.0, 0.0, 0.0))
            gather, scatter, _ = self.data_parallel(stage)
            cast = self.memory(sum(unit.numel for unit in units) * (3 * layout.compute + layout.master / layout.dp_shard))
            backward = part.input_grad + part.weight_grad
            if zero == 3:  # every forward and backward gathers; every backward reduces too
                slower = max(0.0, gather + scatter - backward) + cast
                part = Part(max(part.forward, gather) + cast, part.input_grad + slower, part.weight_grad)
            elif zero == 2:
                part = Part(part.forward, part.input_grad, part.weight_grad + max(0.0, scatter - backward))
            busy[rank] += (0.0 if zero == 3 else gather) + cast
            weights_at.append(busy[rank])
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
        pp, device = self.layout.mesh_shape[0], self.device
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
    def reductions_end(self) -> float:
        """When the last rank has reduced its gradients: a stage's leave during its last backward, stage after stage."""
        zero, end = self.layout.config.parallel.zero_stage, 0.0
        last = self.layout.num_microbatches - 1
        for events in self.timeline.ranks:
            link = 0.0
            for action, start, _ in events:
                if action.microbatch == last and action.kind in (B, W):
                    _, scatter, replicas = self.data_parallel(action.stage)
                    link = max(link, start) + (scatter if zero < 2 else 0.0) + replicas
            end = max(end, link)
        return end

    @cached_property
    def optimizer_seconds(self) -> float:
        """AdamW and the norm, on the rank that has most."""
        ranks = [0.0] * self.layout.mesh_shape[0]
        for stage, rank in enumerate(self.layout.config.parallel.ranks_of_stages):
            ranks[rank] += sum(unit.numel for unit in self.layout.units(stage)) / self.layout.dp_shard
        return self.memory(max(ranks) * 8 * self.layout.master)

    @cached_property
    def step_seconds(self) -> float:
        return max(self.timeline.step_time, self.reductions_end) + self.optimizer_seconds + self.device.step_seconds

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
        full = model.flops_per_token(seq_len) + 6.0 * model.num_layers * seq_len * model.dim
        return self.mfu * full / model.flops_per_token(seq_len)
