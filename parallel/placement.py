"""Which part of a global tensor a rank holds."""

import math
from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from parallel.axes import EXPERT_AXES, WEIGHT_AXES

T = TypeVar("T", bound=Tensor)


def chunk_range(size: int, chunks: int, index: int) -> range:
    """The part of `range(size)` that rank `index` of `chunks` holds: ceil(size / chunks) elements;
    the last ranks may hold fewer, or none.

    This is the rule of `torch.chunk`, DTensor and FSDP2; nothing is padded.
    """
    width = -(-size // chunks)
    return range(min(index * width, size), min((index + 1) * width, size))


def local_region(tensor: DTensor) -> tuple[range, ...]:
    """The global indices, per dimension, of this rank's part of `tensor`.

    The tp axis shards first and FSDP shards the tp part further, so the axes are visited from the
    innermost (last) outwards.
    """
    region = [range(size) for size in tensor.shape]
    mesh = tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = dim_of(placement)
        part = chunk_range(len(region[dim]), mesh.size(axis), mesh.get_local_rank(axis))
        region[dim] = region[dim][part.start : part.stop]
    return tuple(region)


def dim_of(placement: Placement) -> int:
    """The dimension that an axis shards."""
    return placement.dim  # type: ignore[attr-defined]  # Shard, or FSDP2's private strided shard


def replicated_over(tensor: DTensor) -> list[str]:
    """The axes over which the ranks of one stage hold the same elements of `tensor`: those of its
    mesh that do not shard it, and those that its mesh does not have."""
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [a for a, p in zip(names, tensor.placements, strict=True) if not p.is_replicate()]
    axes = EXPERT_AXES if "ep" in names else WEIGHT_AXES
    return [axis for axis in axes if axis != "pp" and axis not in cut]


def shards_of(tensor: DTensor) -> int:
    """The number of different parts of `tensor` that the ranks of one stage hold."""
    mesh = tensor.device_mesh
    cut = (axis for axis, each in enumerate(tensor.placements) if not each.is_replicate())
    return math.prod(map(mesh.size, cut))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a weight or gradient. A plain tensor (of a layer without a mesh) is
    returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(local: Tensor, like: T) -> T:
    """Wrap `local` as this rank's part of a global tensor with the shape and placement of `like`
    (and its own dtype), without a copy or communication. (The inverse of `local_part`.)

    This calls the constructor that `DTensor.from_local` ends in. The rest of `from_local` would
    cost a third of a millisecond of host time for the gradient of every weight in every step.
    """
    if not isinstance(like, DTensor):
        return cast(T, local)
    spec = like._spec
    if local.dtype != like.dtype:
        assert spec.tensor_meta is not None
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return cast(T, DTensor(local, spec, requires_grad=False))
