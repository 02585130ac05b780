"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from torch import Tensor
from torch.distributed.tensor import Replicate

from model.config import ModelConfig
from model.kernels.rms_norm import add_rms_norm, rms_norm
from parallel.layer import Layer, TensorParallel
from parallel.parameter import NORM, Constant, WeightSpec


class RMSNorm(Layer):
    """Computes y = x / sqrt(mean(x²) + eps) · weight over the last dimension. The weight [width] is
    whole on every tp rank.

    Norms of the residual stream have width D, norms of heads width E; parallel/partial.py says
    which of their gradients are partial sums.
    """

    def __init__(
        self, config: ModelConfig, width: int, tp: TensorParallel, gradient_is_partial: bool
    ) -> None:
        super().__init__(tp)
        self.eps, self.kernels = config.norm_eps, config.kernels
        weight = WeightSpec(
            (width,), Replicate(), Constant(1.0), NORM, gradient_is_partial=gradient_is_partial
        )
        self.add_weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.local_weight(), self.eps, self.kernels, self.gradient)

    def add(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum itself, in one pass; and so in backward."""
        weight = self.local_weight()
        return add_rms_norm(x, residual, weight, self.eps, self.kernels, self.gradient)
