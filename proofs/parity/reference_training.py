"""The reference's training: AdamW as torch has it, clipping, the learning rate, and the biases of
routers. As in reference.py, nothing here is shared with the code under test."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from proofs.parity.reference import Reference
from proofs.parity.reference_experts import auxiliary_losses, experts_of


def warmup_cosine(*, peak: float, warmup: int, steps: int, floor: float) -> Callable[[int], float]:
    """The learning rate as a function of the update's index from 0: linear to `peak` in `warmup`
    updates, then half a cosine down to floor · peak."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        angle = math.pi * (step - warmup) / (steps - warmup)
        return peak * (1 + floor + (1 - floor) * math.cos(angle)) / 2

    return rate


def train(
    model: Reference,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    rate: Callable[[int], float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_clip: float,
) -> tuple[list[float], list[float]]:
    """Make one AdamW update per (tokens, targets). Return the loss and the unclipped gradient norm
    of each step."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate(0), betas=betas, eps=eps)
    losses, norms = [], []
    for step, (tokens, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = model.loss(tokens, targets)
        (loss + auxiliary_losses(model).sum()).backward()
        norm = gradient_norm(parameters)
        # not torch's clip_grad_norm_, which adds 1e-6 to the norm: too large an error here
        if norm > grad_clip:
            for p in parameters:
                p.grad.mul_(grad_clip / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        for layer in experts_of(model):
            layer.update_bias()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The L2 norm of all gradients together."""
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))
