"""One DeviceMesh for everything: the axes of axes.py, and views of them."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.axes import AXES, MeshSizes


@dataclass(frozen=True)
class Mesh:
    """The mesh and its named views. Code asks for views, which a new axis may join, wherever it
    does not mean one axis.

    | view   | which ranks              | what for                                              |
    |--------|--------------------------|-------------------------------------------------------|
    | batch  | dp_replicate × dp_shard  | each reads other rows of the global batch             |
    | loss   | dp_replicate × dp_shard  | each computes the loss of other tokens: it is summed  |
    | fsdp   | (dp_replicate, dp_shard) | FSDP2 shards over the last, replicates over the first |
    | pp, tp | of one axis              | stages; parts of a layer                              |
    """

    device: str  # "cuda" or "cpu"
    root: DeviceMesh  # axes AXES
    batch: DeviceMesh

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(*self.root.shape)

    @property
    def loss(self) -> DeviceMesh:
        return self.batch  # no axis cuts sequences

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
        return self.batch.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.batch.size()

    def describe(self) -> str:
        """The rank order, for the log: `8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2 (tp
        fastest)`."""
        return f"{self.root.size()} ranks = {self.sizes} (tp fastest)"

    def coordinates(self) -> dict[str, int]:
        """Of this rank on each axis."""
        return {axis: self.root.get_local_rank(axis) for axis in AXES}


def build_mesh(sizes: MeshSizes, device: str) -> Mesh:
    """Create the mesh over all processes; every rank calls it.

    Needs an initialised default process group of `sizes.world` ranks.
    """
    root = init_device_mesh(device, tuple(sizes.by_axis().values()), mesh_dim_names=AXES)
    return Mesh(device, root, batch=root["dp_replicate", "dp_shard"]._flatten("batch"))


def to_device(x: Tensor, device: str) -> Tensor:
    """A tensor of the host, on `device`. To a GPU from pinned memory: from other memory the host
    would wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
