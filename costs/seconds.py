"""Seconds of a recorded computation, at the rates of a device, and of a collective over each axis
of the mesh, depending on where its ranks are.

a matrix product        ⌈tiles / multiprocessors⌉ waves of tiles of the result, each at the peak ·
                        efficiency of the whole device; or the time of its bytes if longer
attention               FLOPs / (peak · efficiency)
every other operation   bytes read and written / (memory bandwidth · efficiency)
a gather, a scatter     of s bytes over n ranks: s · (n − 1) / n / rate + latency
an all-reduce           twice that
an all-to-all           s / n / rate for each other rank + latency

Over each of tp, cp and ep one collective runs after another, and is hidden behind what is computed
between its start and its wait.

A group with g ranks in a node uses g network links of that node (NCCL's rings). The latency grows
with the group: the last piece of a ring makes one hop for every other node, and an all-reduce over
replicas goes up and down a tree of nodes (NCCL's src/graph/tuning.cc, which chooses by the same
count). Hops inside a node are part of `collective_seconds`. In an all-to-all each rank sends equal
parts to all ranks, without a ring: to other nodes over its own link, and at the same time to the
ranks of its node.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costs.collectives import rounds
from costs.events import Attention, Moved, Product, Sent, Waited
from costs.recorder import Phase
from hardware import Device


@dataclass(frozen=True)
class Links:
    """The links of one mesh on one kind of device. dp_shard and dp_replicate are those of weights,
    of which one contains cp (parallel/axes.py). Ranks are numbered as there: tp innermost, then cp,
    then dp_shard; and, of the same ranks, ep innermost."""

    device: Device
    tp: int
    dp_shard: int
    dp_replicate: int
    world: int
    cp: int = 1
    ep: int = 1
    efsdp: int = 1
    ep_replicate: int = 1

    def ranks(self, axis: str) -> int:
        found: int = getattr(self, axis)
        return found

    def in_node(self, axis: str) -> int:
        """How many ranks of a group share a node."""
        inner = {"tp": 1, "cp": self.tp, "dp_shard": self.tp,
                 "dp_replicate": self.tp * self.dp_shard, "ep": 1, "efsdp": self.ep,
                 "ep_replicate": self.ep * self.efsdp}[axis]  # fmt: skip
        ranks, node = self.ranks(axis), self.device.gpus_per_node
        whole = max(1, min(ranks, node // inner))
        # some groups span two nodes, and the others wait for them
        if self.world > node and node % min(inner * ranks, node):
            return max(1, whole // 2)
        return whole

    def rate(self, axis: str) -> float:
        """Bytes a second that a rank can send in a collective over `axis`."""
        device, in_node = self.device, self.in_node(axis)
        node = device.node_bytes_per_second * device.node_efficiency
        if in_node == self.ranks(axis):
            return node
        return min(node, in_node * device.network_bytes_per_second * device.network_efficiency)

    def latency(self, axis: str) -> float:
        """Seconds of latency of one gather or scatter, or of half an all-reduce."""
        nodes = -(-self.ranks(axis) // self.in_node(axis))
        tree = axis in ("dp_replicate", "ep_replicate")
        hops = math.ceil(math.log2(nodes)) if tree else nodes - 1
        return self.device.collective_seconds + hops * self.device.hop_seconds

    def collective(self, axis: str, size: float, times: float = 1, number: int = 1) -> float:
        """Seconds of `number` gathers or scatters of `size` bytes in total. For an all-reduce
        `times` is 2."""
        ranks = self.ranks(axis)
        if ranks == 1:
            return 0.0
        return times * (size * (ranks - 1) / ranks / self.rate(axis) + number * self.latency(axis))

    def all_to_all(self, axis: str, size: float) -> float:
        """Seconds of an all-to-all in which a rank sends or receives `size` bytes, its own
        included."""
        device, ranks, in_node = self.device, self.ranks(axis), self.in_node(axis)
        if ranks == 1:
            return 0.0
        node = device.node_bytes_per_second * device.node_efficiency
        network = device.network_bytes_per_second * device.network_efficiency
        seconds = max((in_node - 1) / node, (ranks - in_node) / network) * size / ranks
        hop = device.hop_seconds if ranks > in_node else 0.0
        return seconds + device.collective_seconds + hop

    def seconds(self, kind: str, axis: str, size: float) -> float:
        """Seconds of one collective of `kind`."""
        if kind == "all_to_all":
            return self.all_to_all(axis, size)
        return self.collective(axis, size, rounds(kind))


class Cost(NamedTuple):
    """Seconds of one phase."""

    computing: float
    wire: Mapping[str, float]  # of collectives, by axis: tp, cp and ep
    exposed: Mapping[str, float]  # the part of `wire` during which computation waits

    @property
    def total(self) -> float:
        return self.computing + sum(self.exposed.values())


@dataclass(frozen=True)
class Rates:
    """The rates of one rank of a mesh."""

    device: Device
    links: Links
    width: int  # bytes of a number of the dtype in which it computes

    def memory(self, size: float) -> float:
        """Seconds to read and write `size` bytes in total."""
        return size / (self.device.memory_bytes_per_second * self.device.memory_efficiency)

    def operation(self, event: Product | Attention | Moved) -> float:
        device = self.device
        if isinstance(event, Product):
            tiles = event.tiles(device.tile) // event.launches
            waves = -(-tiles // device.multiprocessors) * event.launches
            # a wave takes equally long whether or not all multiprocessors have a tile
            flops = 2.0 * waves * device.multiprocessors * device.tile**2 * event.inner
            peak = device.peak(event.width) * device.matmul_efficiency
            busy = max(flops / peak, self.memory(event.bytes))
        elif isinstance(event, Attention):
            busy = event.flops / (device.peak(self.width) * device.attention_efficiency)
        else:
            busy = self.memory(event.bytes)
        launches = event.launches if isinstance(event, Product) else 1
        return busy + launches * device.kernel_seconds

    def cost(self, phase: Phase, is_weight: bool = False) -> Cost:
        """The cost of one phase. `is_weight`: the phase computes deferred weight gradients. These
        run continuously from unit to unit, so the first gather of a unit overlaps with the last
        products of the previous unit (run_jobs in parallel/weight_gradient.py)."""
        computing = waited = last = 0.0
        wire: dict[str, float] = defaultdict(float)
        exposed: dict[str, float] = defaultdict(float)
        at_once = 0.0  # seconds waited for before anything is computed
        # by number: the axis of a collective, and when it ends, in seconds of the phase
        ends: dict[int, tuple[str, float]] = {}
        # when the last one ends: collectives of one group run in the order of starts
        free: dict[str, float] = defaultdict(float)
        for event in phase.events:
            if isinstance(event, Sent):
                axis, kind, size = event.call
                seconds = self.links.seconds(kind, axis, size)
                free[axis] = max(free[axis], computing + waited) + seconds
                ends[event.number] = axis, free[axis]
                wire[axis], last = wire[axis] + seconds, computing
            elif isinstance(event, Waited):
                axis, end = ends.pop(event.number)
                wait = max(0.0, end - (computing + waited))
                exposed[axis], waited = exposed[axis] + wait, waited + wait
                at_once = waited if computing == 0.0 else at_once
            else:
                computing += self.operation(event)
        if is_weight and at_once:  # the inputs of weights are gathered over tp
            exposed["tp"] -= min(at_once, computing - last)
        return Cost(computing, wire, exposed)
