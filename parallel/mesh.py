"""The one DeviceMesh of a run: the axes of axes.py, and named views of them."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.axes import AXES, MeshSizes


@dataclass(frozen=True)
class Mesh:
    """The mesh and its named views. Code uses a view wherever it does not mean one particular axis,
    so a new axis can be added to the view in one place.

    | view   | ranks                    | purpose                                               |
    |--------|--------------------------|-------------------------------------------------------|
    | batch  | dp_replicate × dp_shard  | each reads different rows of the global batch         |
    | loss   | dp_replicate × dp_shard  | each has the loss of different tokens, to be summed   |
    | fsdp   | (dp_replicate, dp_shard) | FSDP2 shards over the last, replicates over the first |
    | pp, tp | one axis each            | pipeline stages; parts of a layer                     |
    """

    device: str  # "cuda" or "cpu"
    root: DeviceMesh  # axes AXES
    batch: DeviceMesh

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(*self.root.shape)

    @property
    def loss(self) -> DeviceMesh:
        return self.batch  # no other axis splits the tokens of which the loss is computed

    @cached_property  # slicing a DeviceMesh builds a new one each time
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
        """The index of the part of each global batch that this rank reads: 0 … dp_size − 1."""
        return self.batch.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.batch.size()

    def describe(self) -> str:
        """The rank order, for the log: `8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2 (tp
        fastest)`."""
        return f"{self.root.size()} ranks = {self.sizes} (tp fastest)"

    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return {axis: self.root.get_local_rank(axis) for axis in AXES}


def build_mesh(sizes: MeshSizes, device: str) -> Mesh:
    """Create the mesh over all processes; every rank calls it.

    Needs an initialised default process group of `sizes.world` ranks.
    """
    root = init_device_mesh(device, tuple(sizes.by_axis().values()), mesh_dim_names=AXES)
    return Mesh(device, root, batch=root["dp_replicate", "dp_shard"]._flatten("batch"))


def to_device(x: Tensor, device: str) -> Tensor:
    """Copy a host tensor to `device`. A copy to a GPU starts from pinned memory: from other memory
    the host would wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
