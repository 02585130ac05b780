"""The one DeviceMesh of a run: the axes of axes.py, and named views of them."""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.axes import EXPERT_AXES, WEIGHT_AXES, MeshSizes


@dataclass(frozen=True)
class Mesh:
    """The mesh and its named views. Code uses a view wherever it does not mean one particular axis,
    so a new axis can be added to the view in one place.

    | view       | ranks                    | purpose                                              |
    |------------|--------------------------|------------------------------------------------------|
    | batch      | dp_replicate × dp_shard  | each reads different rows of the global batch        |
    | loss       | batch × cp               | each has the loss of different tokens, to be summed  |
    | fsdp       | (dp_replicate, dp_shard) | FSDP2 shards over the last, replicates over the      |
    |            |                          | first; one of them contains cp (axes.py)             |
    | pp, cp, tp | one axis each            | pipeline stages; parts of the sequence; of a layer   |
    | ep         | one axis                 | each has different experts                           |
    | fsdp_ep    | (ep_replicate, efsdp)    | what fsdp is, for the weights of experts             |
    """

    device: str  # "cuda" or "cpu"
    sizes: MeshSizes
    root: DeviceMesh  # WEIGHT_AXES
    batch: DeviceMesh
    loss: DeviceMesh
    cp: DeviceMesh | None  # None: one rank
    experts: DeviceMesh | None = None  # EXPERT_AXES; None: the model has no experts

    @cached_property  # slicing a DeviceMesh builds a new one each time
    def pp(self) -> DeviceMesh:
        return self.root["pp"]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        return self.root["dp_replicate", "dp_shard"]

    @cached_property
    def tp(self) -> DeviceMesh:
        return self.root["tp"]

    @cached_property
    def ep(self) -> DeviceMesh:
        assert self.experts is not None
        return self.experts["ep"]

    @cached_property
    def fsdp_ep(self) -> DeviceMesh:
        assert self.experts is not None
        return self.experts["ep_replicate", "efsdp"]

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

    def views(self) -> dict[str, DeviceMesh]:
        """The views of one group each, innermost first: the axes of weights, and those of
        tokens."""
        cp = {} if self.cp is None else {"cp": self.cp}
        axes = {axis: self.root[axis] for axis in reversed(WEIGHT_AXES)}
        of_experts = EXPERT_AXES[:0:-1] if self.experts is not None else ()
        axes |= {axis: self.axis(axis) for axis in of_experts}
        return {"tp": axes.pop("tp"), **cp, **axes, "loss": self.loss, "batch": self.batch}

    def axis(self, name: str) -> DeviceMesh:
        """The group of this rank on one of `WEIGHT_AXES` or `EXPERT_AXES`."""
        mesh = self.root if name in WEIGHT_AXES else self.experts
        assert mesh is not None
        return mesh[name]

    def describe(self) -> str:
        """The rank order, for the log: `8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2 (tp
        fastest)`."""
        return f"{self.root.size()} ranks = {self.sizes} (tp fastest)"

    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return self.sizes.coordinates(dist.get_rank())


def build_mesh(sizes: MeshSizes, device: str, has_experts: bool = False) -> Mesh:
    """Create the mesh over all processes; every rank calls it. `has_experts`: the model has
    experts.

    Needs an initialised default process group of `sizes.world` ranks.
    """
    of_weights = sizes.of_weights
    root = init_device_mesh(device, tuple(of_weights.values()), mesh_dim_names=WEIGHT_AXES)
    loss = root["dp_replicate", "dp_shard"]._flatten("loss")
    experts = None
    if has_experts:
        shape = tuple(sizes.of_experts.values())
        experts = init_device_mesh(device, shape, mesh_dim_names=EXPERT_AXES)
    if sizes.cp == 1:  # batch is then the same group, which is not created again
        return Mesh(device, sizes, root, loss, loss, None, experts)
    split = of_weights[sizes.with_cp] // sizes.cp, sizes.cp
    at = WEIGHT_AXES.index(sizes.with_cp)  # torch 2.11 does not accept an axis by name here
    of_tokens = root._unflatten(at, split, ("rows", "cp"))
    other = "dp_replicate" if sizes.with_cp == "dp_shard" else "dp_shard"
    in_order = [name for name in of_tokens.mesh_dim_names or () if name in ("rows", other)]
    batch = of_tokens[tuple(in_order)]._flatten("batch")
    return Mesh(device, sizes, root, batch, loss, of_tokens["cp"], experts)


def to_device(x: Tensor, device: str) -> Tensor:
    """Copy a host tensor to `device`. A copy to a GPU starts from pinned memory: from other memory
    the host would wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
