"""The norm of all gradients of the model, wherever they are, and clipping by it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.mesh import Mesh


@torch.no_grad()
def gradient_norm(gradients: Sequence[DTensor], mesh: Mesh) -> Tensor:
    """The L2 norm over the whole model, each parameter counted once: a float64 scalar, the same bits on every rank.

    A shard that r ranks of the stage hold alike would be counted r times by a sum over the world, so each square sum is
    divided by r: the product of the sizes of the axes on which the gradient is replicated. One all-reduce of one number; the
    host waits for nothing (but, with cpu_offload, for its own sums).

    Args:
        gradients: this rank's, reduced; a tied embedding must be listed on one stage only (see `training/step.py`).
        mesh: the mesh.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for gradient in gradients:
        copies = 1
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            assert not placement.is_partial(), "a gradient was not reduced"
            copies *= size if placement.is_replicate() else 1
        local = gradient.to_local()
        # dtype=float64 accumulates in float64 without a float64 copy of the gradient.
        total += torch.linalg.vector_norm(local, dtype=torch.float64).square().to(mesh.device) / copies
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale local gradients in place by min(1, max_norm / norm); max_norm 0 leaves them alone."""
    if max_norm == 0 or not gradients:
        return
    factor = (max_norm / norm).clamp(max=1.0)
    torch._foreach_mul_(list(gradients), factor.to(gradients[0].dtype).to(gradients[0].device))
