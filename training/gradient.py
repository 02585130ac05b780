"""The norm of all gradients of the model, over all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.kernels.gradient_norm import square_sum
from parallel.mesh import Mesh
from parallel.placement import shards_of


@torch.no_grad()
def unscale(gradients: Sequence[DTensor], scale: Tensor) -> None:
    """Divide this rank's reduced gradients by the scale of the loss, a power of two, in place."""
    local = [gradient.to_local() for gradient in gradients]
    if local:  # (offloaded gradients: the host waits, as for their norm)
        torch._foreach_mul_(local, (1 / scale).to(local[0].device, local[0].dtype))


@torch.no_grad()
def gradient_norm(gradients: Sequence[DTensor], mesh: Mesh, kernels: str = "auto") -> Tensor:
    """The L2 norm over the whole model, each parameter counted once: a float64 scalar, the same
    bits on every rank.

    A sum over the world would count a shard r times if r ranks of the stage hold it, so each square
    sum is divided by r: the ranks of the stage, divided by the gradient's shards. One number is
    all-reduced once, and the host does not wait (except, if gradients are offloaded, for its own
    sums).

    Args:
        gradients: this rank's reduced gradients; a tied embedding must be listed on one stage only
            (see `training/step.py`).
        mesh: the mesh.
        kernels: auto, triton or torch.
    """
    copies = [mesh.root.size() // mesh.pp.size // shards_of(each) for each in gradients]
    local = [gradient.to_local() for gradient in gradients]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if local:
        total += square_sum(local, copies, kernels).to(mesh.device)
    dist.all_reduce(total)
    return total.sqrt()
