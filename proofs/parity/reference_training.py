"""The reference's training: the optimizer of reference_NAME.py, clipping, the learning rate, and
the biases of routers. As in reference.py, nothing but the configuration is shared with the code
under test."""

import math
from collections.abc import Iterable

from torch import Tensor, nn

from proofs.parity.reference import Reference, reference_of
from proofs.parity.reference_experts import auxiliary_losses, experts_of
from settings.sections import OptimizerConfig


def warmup_cosine(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of the update with this index, from 0 to `steps` - 1: linear to the peak in
    the warmup, then half a cosine down to min_lr_ratio · the peak."""
    peak, warmup, floor = config.lr, config.warmup_steps, config.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    angle = math.pi * (step - warmup) / (steps - warmup)
    return peak * (1 + floor + (1 - floor) * math.cos(angle)) / 2


def train(
    model: Reference,
    batches: Iterable[tuple[Tensor, Tensor]],
    config: OptimizerConfig,
    steps: int,
) -> tuple[list[float], list[float]]:
    """Make one update per (tokens, targets), the first of `steps`. Return the loss and the
    unclipped gradient norm of each."""
    parameters = list(model.parameters())
    make = reference_of("optimizer.name", config.name)
    optimizers = make(dict(model.named_parameters()), config)
    losses, norms = [], []
    for step, (tokens, targets) in enumerate(batches):
        model.zero_grad()
        loss = model.loss(tokens, targets)
        (loss + auxiliary_losses(model).sum()).backward()
        norm = gradient_norm(parameters)
        # not torch's clip_grad_norm_, which adds 1e-6 to the norm: too large an error here
        if norm > config.grad_clip:
            for p in parameters:
                p.grad.mul_(config.grad_clip / norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, config)
            optimizer.step()
        own = getattr(config, config.name)
        if getattr(own, "qk_clip", 0) and step % own.qk_clip_interval == 0:
            for block in model.blocks:
                block.attention.clip(own.qk_clip)
        for layer in experts_of(model):
            layer.update_bias()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The L2 norm of all gradients together."""
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))
