"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the hidden matrices, and
AdamW for the rest: embedding, head, routers, norms.

A hidden matrix W [out, in] moves along the orthogonal matrix that is nearest to its momentum:

    M ← μ M + (1 − μ) G
    U = μ M + (1 − μ) G                       Nesterov's momentum
    W ← W − lr · (0.2 √max(out, in) · orthogonalise(U) + decay · W)

The factor gives the step the root mean square that AdamW's usually has, so that AdamW's learning
rate and decay hold for it too (Liu et al. 2025, https://arxiv.org/abs/2502.16982, section 2.2).
q, k, v, gate and up are matrices apart, and so is each expert's.

Each number of the result depends on the whole matrix. Orthogonalised shards would be another
optimizer in each layout. So every matrix is put together on one of the ranks that have parts of it
(parallel/whole_matrices.py), and every layout computes the same step.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from declare import Count, between, section
from errors import UserError
from parallel.parameter import MATRIX, NamedWeight, WeightSpec
from parallel.whole_matrices import Round, interleave, matrices_of, rounds_of
from settings.config import Config
from training.optimizers import State, adamw, like

# a, b, c of the iterations X ← a X + (b A + c A²) X, where A = X Xᵀ. They drive singular values
# between 0.003 and 1 towards 1: the first set to 0.68 to 1.20, the second to 0.97 to 1.15.
COEFFICIENTS = {
    # of Jordan et al.
    "quintic": [(3.4445, -4.7750, 2.0315)] * 5,
    # of Emerging-Optimizers (https://github.com/NVIDIA-NeMo/Emerging-Optimizers), which calls it
    # "quintic", and the first "simple"
    "varying": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


@section("optimizer.muon")
class Settings(adamw.Settings):
    """Of Muon, and of AdamW for the weights that are no hidden matrices."""

    name: ClassVar[str] = "muon"
    # how slowly the mean of gradients changes, per step
    momentum: Annotated[adamw.Beta, Field(examples=[0.95])] = 0.95
    # of the iterations that orthogonalise
    coefficients: Literal["quintic", "varying"] = "quintic"
    # The largest attention logit of a head: above it, the head's rows of q, and of k unless heads
    # share them, are scaled down (training/qk_clip.py). Usual is 100; 0: no limit.
    qk_clip: Annotated[float, between(0, 1e30)] = 0.0
    # Measure logits, and limit them, in every so many steps: torch's operators return none, so it
    # takes one more product of q and k in each layer.
    qk_clip_interval: Count = 1

    def __post_init__(self) -> None:
        if self.qk_clip_interval > 1 and not self.qk_clip:
            why, remedy = "nothing is measured without optimizer.muon.qk_clip", "leave it out, or "
            remedy += "give a limit (1e30: only measure)"
            raise UserError("optimizer.muon.qk_clip_interval", self.qk_clip_interval, why, remedy)


class Optimizer(adamw.Optimizer):
    """Muon, and AdamW for the weights that are no hidden matrices: `mine`."""

    rounds_stochastically = False
    settings = Settings

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        super().__init__(weights, config)
        self.hidden = [i for i, each in enumerate(weights) if self.takes_whole(each.spec)]
        self.decay = config.optimizer.weight_decay if MATRIX.decays else 0.0
        self.matrices = matrices(self.shards[i] for i in self.hidden)
        self.in_rounds = rounds_of(
            [matrix for i in self.hidden for matrix in matrices_of(weights[i].sharded)]
        )

    @staticmethod
    def states_of(weight: WeightSpec) -> dict[str, State]:
        hidden = {"momentum": like(weight)}
        return hidden if Optimizer.takes_whole(weight) else adamw.Optimizer.states_of(weight)

    @staticmethod
    def takes_whole(weight: WeightSpec) -> bool:
        return weight.group is MATRIX

    @staticmethod
    def flops(matrix: Sequence[int]) -> float:
        short, long = sorted(matrix)
        return len(COEFFICIENTS["quintic"]) * (4.0 * short**2 * long + 2.0 * short**3)

    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        applied = norm.isfinite()
        clip = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        if self.mine:
            super().update(lr, gradients, norm, max_norm)
        else:  # a group of weights in a file may have hidden matrices alone
            self.updates += applied
        own = self.config.of(self.settings)
        for i in self.hidden:
            momentum, gradient = self.states[i]["momentum"], gradients[i]
            gradient.mul_(clip.to(gradient.dtype))
            new = gradient.lerp(momentum, own.momentum)
            torch.where(applied, new, momentum, out=momentum)
            gradient.lerp_(momentum, own.momentum)  # now the direction
        directions = matrices(gradients[i] for i in self.hidden)
        for rounds in self.in_rounds:
            interleave(self._round(each, lr, directions, applied) for each in rounds)

    def _round(
        self, each: Round, lr: float, directions: list[Tensor], applied: Tensor
    ) -> Generator[None, None, None]:
        device, dtype = self._of_products()
        results = yield from each.travel(
            [directions[one.number].to(device, dtype) for one in each.owned], self._orthogonalise
        )
        for one, result in zip(each.owned, results, strict=True):
            weight = self.matrices[one.number]
            step = 0.2 * max(one.matrix.shape) ** 0.5 * result.to(weight) + self.decay * weight
            weight.sub_(torch.where(applied, lr * step, 0.0))

    def _of_products(self) -> tuple[torch.device, torch.dtype]:
        """Where products run, and in which dtype: on the GPU, although weights may be offloaded, as
        `products_in` says; on a CPU in the dtype of the weights."""
        weight = self.weights[0].sharded
        device = weight.to_local().device
        if weight.device_mesh.device_type == "cuda":
            device = torch.device("cuda")
        return device, weight.dtype if device.type == "cpu" else self.products_in(weight.dtype)

    def _orthogonalise(self, each: list[Tensor]) -> list[Tensor]:
        if not each:
            return []
        flat = [x if len(x) <= x.shape[1] else x.mT for x in each]
        own = self.config.of(self.settings)
        found = orthogonalise(torch.stack(flat), COEFFICIENTS[own.coefficients])
        return [y if len(x) <= x.shape[1] else y.mT for x, y in zip(each, found, strict=True)]


def matrices(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of each tensor [out, in] itself, of experts' [X, out, in] one after another: views."""
    return [matrix for x in tensors for matrix in (x if x.ndim == 3 else [x])]


def orthogonalise(x: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Of each matrix of x [n, m, k], m <= k, about U Vᵀ of its singular value decomposition U S Vᵀ,
    by a Newton–Schulz iteration."""
    # The square of a number below about 1e-19 is lost in float32, and with it the norm: the matrix
    # of an expert that nobody has chosen for long then takes a small step, or none.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-12)
    for a, b, c in coefficients:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
