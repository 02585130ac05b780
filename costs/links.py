"""Seconds of a collective over each axis of the mesh, depending on where its ranks are.

    gather, scatter of s bytes over n ranks      s · (n − 1) / n / rate + latency
    all-reduce                                   twice that
    all-to-all                                   s / n / rate for each other rank + latency

A group with g ranks in a node uses g network links of that node (NCCL's rings). The latency grows
with the group: the last piece of a ring makes one hop for every other node, and an all-reduce over
replicas goes up and down a tree of nodes (NCCL's src/graph/tuning.cc, which chooses by the same
count). Hops inside a node are part of `collective_seconds`. In an all-to-all each rank sends equal
parts to all ranks, without a ring: to other nodes over its own link, and at the same time to the
ranks of its node.
"""

import math
from dataclasses import dataclass

from costs.collectives import rounds
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
