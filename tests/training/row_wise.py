"""Adam with one float32 second moment per row of a matrix (of a vector: per element)."""

import torch
from torch import Tensor

from parallel.parameter import WeightSpec
from training.optimizers import ShardedOptimizer, State, like

BETAS, EPS = (0.9, 0.95), 1e-8


class Optimizer(ShardedOptimizer):
    """m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) · the row's mean of g²
    p ← p − lr · (m / (√v + ε) + decay · p)
    """

    @staticmethod
    def states_of(weight: WeightSpec) -> dict[str, State]:
        rows = range(max(1, len(weight.shape) - 1))
        return {"momentum": like(weight), "row": State(rows, torch.float32)}

    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        applied = norm.isfinite()
        self.updates += applied
        clip = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        gradients = [g * clip.to(g.dtype) for g in gradients]
        means = [
            ((g * g).sum(-1) / each.spec.shape[-1] if g.ndim > 1 else g * g).float()
            for g, each in zip(gradients, self.weights, strict=True)
        ]
        self.sum_over_parts("row", means)
        for p, g, mean, states, decay in zip(
            self.shards, gradients, means, self.states, self.decays, strict=True
        ):
            m = torch.lerp(g, states["momentum"], BETAS[0])
            v = torch.lerp(mean, states["row"], BETAS[1])
            root = v.sqrt().to(p.dtype).view(*v.shape, *[1] * (p.ndim - v.ndim))
            new_p = p - lr * (m / (root + EPS) + decay * p)
            for old, new in ((p, new_p), (states["momentum"], m), (states["row"], v)):
                old.copy_(torch.where(applied, new, old))
