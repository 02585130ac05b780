"""The DeviceMesh of a run, with experts a second one over the same ranks, and their views."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.axes import EXPERT_AXES, FSDP_AXES, WEIGHT_AXES, MeshSizes
from parallel.collectives import ONE_RANK


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh, or several as one, as a rank sees it. An axis that a run does not have
    is one rank."""

    size: int = 1
    rank: int = 0  # of `size`
    group: ProcessGroup = ONE_RANK
    # Over which layers place weights. None: they are plain meta tensors with the shapes of this
    # rank's parts, so that any process can examine what a layer holds and computes (costs/).
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class Mesh:
    """The mesh and its named views. Code uses a view wherever it does not mean one particular axis,
    so a new axis can be added to the view in one place."""

    device: str  # "cuda" or "cpu"
    sizes: MeshSizes
    root: DeviceMesh  # WEIGHT_AXES
    fsdp: dict[bool, DeviceMesh]  # FSDP_AXES; of experts, if the model has any
    # By name, innermost first: all that follow, WEIGHT_AXES and EXPERT_AXES, if the run has them.
    views: dict[str, Axis]
    pp: Axis  # each has different layers
    batch: Axis  # dp_replicate × dp_shard: each reads its part of the rows of the global batch
    loss: Axis  # batch × cp: each has the loss of different tokens, to be summed
    cp: Axis  # each has different parts of the same sequences
    tp: Axis  # each has different parts of the same layers
    ep: Axis  # each has different experts of the same layers

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
    fsdp = {False: root[FSDP_AXES[False]]}
    loss = fsdp[False]._flatten("loss")
    batch, cp = loss, {}  # the same ranks, of which there is one group
    if sizes.cp > 1:
        split = of_weights[sizes.with_cp] // sizes.cp, sizes.cp
        at = WEIGHT_AXES.index(sizes.with_cp)  # torch 2.11 does not accept an axis by name here
        of_tokens = root._unflatten(at, split, ("rows", "cp"))
        of_rows = tuple("rows" if axis == sizes.with_cp else axis for axis in FSDP_AXES[False])
        batch, cp = of_tokens[of_rows]._flatten("batch"), {"cp": of_tokens["cp"]}
    meshes = {"tp": root["tp"], **cp, **{axis: root[axis] for axis in reversed(WEIGHT_AXES)}}
    if has_experts:
        shape = tuple(sizes.of_experts.values())
        experts = init_device_mesh(device, shape, mesh_dim_names=EXPERT_AXES)
        fsdp[True] = experts[FSDP_AXES[True]]
        meshes |= {axis: experts[axis] for axis in EXPERT_AXES[:0:-1]}
    meshes |= {"loss": loss, "batch": batch}
    views = {
        name: Axis(mesh.size(), mesh.get_local_rank(), mesh.get_group(), mesh)
        for name, mesh in meshes.items()
    }
    axes = {name: views.get(name, Axis()) for name in ("pp", "batch", "loss", "cp", "tp", "ep")}
    return Mesh(device, sizes, root, fsdp, views, **axes)


def to_device(x: Tensor, device: str) -> Tensor:
    """Copy a host tensor to `device`. A copy to a GPU starts from pinned memory: from other memory
    the host would wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
