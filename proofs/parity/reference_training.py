"""The reference's training: the optimizer of reference_NAME.py, clipping, the learning rate, and
the biases of routers. As in reference.py, nothing but the configuration is shared with the code
under test."""

import math

from torch import Tensor

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


class Training:
    """Trains `model` for `steps` steps, each a `forward_backward` and an `update`."""

    def __init__(self, model: Reference, config: OptimizerConfig, steps: int) -> None:
        self.model, self.config, self.steps = model, config, steps
        make = reference_of("optimizer.name", config.name)
        self.optimizers = make(dict(model.named_parameters()), config)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """Return the loss, and the L2 norm of all gradients together, before clipping."""
        self.model.zero_grad()
        loss = self.model.loss(tokens, targets)
        (loss + auxiliary_losses(self.model).sum()).backward()
        squares = (p.grad.double().square().sum().item() for p in self.model.parameters())
        return loss.item(), math.sqrt(sum(squares))

    def update(self, step: int, norm: float) -> None:
        config = self.config
        # not torch's clip_grad_norm_, which adds 1e-6 to the norm: too large an error here
        if norm > config.grad_clip:
            for p in self.model.parameters():
                p.grad.mul_(config.grad_clip / norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, self.steps, config)
            optimizer.step()
        own = getattr(config, config.name)
        if getattr(own, "qk_clip", 0) and step % own.qk_clip_interval == 0:
            for block in self.model.blocks:
                block.attention.clip(own.qk_clip)
        for layer in experts_of(self.model):
            layer.update_bias()
