"""One DeviceMesh for everything, and the names and order of its axes.

    rank = ((pp · dp_replicate_size + dp_replicate) · dp_shard_size + dp_shard) · tp_size + tp

The innermost axis changes fastest, so neighbours in rank share it: tensor parallelism talks most, several times per block,
and gets the fastest links (inside a node); pipeline stages talk least and sit farthest apart. This is the order of
Megatron-LM (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 3).

A size-1 axis is not a special case: one process is the mesh (1, 1, 1, 1).
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Mesh:
    """The mesh and its named views. Views, not axes, are what the code asks for, so that a new axis changes this file alone.

    `loss` is every rank that sees other tokens, over which the loss is summed (dp_replicate × dp_shard). `fsdp` is the
    two-dimensional view that FSDP2 shards over in its last and replicates over in its first axis.
    """

    device: str  # "cuda" or "cpu"
    root: DeviceMesh  # axes AXES
    loss: DeviceMesh

    @cached_property  # slicing a DeviceMesh builds a new one, every time
    def pp(self) -> DeviceMesh:
        return self.root["pp"]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        return self.root["dp_replicate", "dp_shard"]

    @cached_property
    def tp(self) -> DeviceMesh:
        return self.root["tp"]

    @property
    def pp_rank(self) -> int:
        return self.root.get_local_rank("pp")

    @property
    def dp_rank(self) -> int:
        """Which share of each global batch this rank reads: 0 … dp_size − 1."""
        return self.loss.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.loss.size()

    def describe(self) -> str:
        """The rank order, for the log: `8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2 (tp fastest)`."""
        sizes = " × ".join(f"{name} {size}" for name, size in zip(AXES, self.root.shape, strict=True))
        return f"{self.root.size()} ranks = {sizes} (tp fastest)"


def build_mesh(shape: tuple[int, int, int, int], device: str) -> Mesh:
    """Create the mesh of sizes (pp, dp_replicate, dp_shard, tp) over all processes; every rank calls it.

    Needs an initialised default process group whose size is the product of `shape`.
    """
    root = init_device_mesh(device, shape, mesh_dim_names=AXES)
    return Mesh(device, root, loss=root["dp_replicate", "dp_shard"]._flatten("loss"))


def to_device(x: Tensor, device: str) -> Tensor:
    """A tensor of the host, on `device`. To a GPU from pinned memory: from other memory the host would wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
