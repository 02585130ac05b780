"""Which part of a global tensor a rank holds."""

from typing import TypeVar, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.axes import AXES

T = TypeVar("T", bound=Tensor)


def chunk_range(size: int, chunks: int, index: int) -> range:
    """The part of `range(size)` that rank `index` of `chunks` holds: ceil(size / chunks) each, the
    last ones less.

    This is `torch.chunk`'s rule, which DTensor and FSDP2 follow too; nothing is padded.
    """
    width = -(-size // chunks)
    return range(min(index * width, size), min((index + 1) * width, size))


def local_region(tensor: DTensor) -> tuple[range, ...]:
    """The global indices, per dimension, of this rank's part of `tensor`.

    The tp axis cuts first and FSDP cuts what tp left, so the axes are walked from the innermost
    (last) outwards.
    """
    region = [range(size) for size in tensor.shape]
    mesh = tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]  # Shard, or FSDP2's private strided shard
        part = chunk_range(len(region[dim]), mesh.size(axis), mesh.get_local_rank(axis))
        region[dim] = region[dim][part.start : part.stop]
    return tuple(region)


def replicated_over(tensor: DTensor) -> list[str]:
    """The axes over which ranks of one stage hold the same numbers of `tensor`: those of its mesh
    that do not cut it, and those that its mesh does not have."""
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [a for a, p in zip(names, tensor.placements, strict=True) if not p.is_replicate()]
    return [axis for axis in AXES if axis != "pp" and axis not in cut]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a weight or gradient; without a mesh, which only shapes do without, it is
    the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(local: Tensor, like: T) -> T:
    """`local` as this rank's part of a global tensor that is shaped and placed as `like` is: no
    copy, no communication. (`local_part`'s inverse.)

    This is the constructor that `DTensor.from_local` ends in; the way there costs a third of a
    millisecond of host time, and every weight's gradient takes it in every step.
    """
    made = DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local
    return cast(T, made)
