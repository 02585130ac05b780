"""The optimizer's two kernels, the gradients' norm and AdamW's update, on the parameters of some
layers of an 8-billion model.

The norm is compared with `torch.nn.utils.get_total_norm`, which sums in float32, and with the same
sums compiled. The update is compared with clipping and `torch._fused_adamw_` (as with
model.kernels=torch), and with PyTorch's foreach AdamW with clipping, compiled into one graph. In
bfloat16, no other implementation rounds stochastically, so ours is compared only with our own
reference.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.operations import Case, Sizes, draw
from benchmarks.gpu.timing import DEVICE, Work, compiled
from model.kernels.adamw import Location, Rates, adamw
from model.kernels.gradient_norm import square_sum

RATES = Rates(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, max_norm=1.0)
DECAY = 0.1
NORM = 2.0  # the norm given to the update, with which gradients are halved


def parameter_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of the parameters of `layers` blocks: each block has 218,112,000 parameters at the
    widths of an 8-billion model."""
    d, (q_heads, k_heads, head_width), ffn = sizes.widths[0], sizes.heads, sizes.swiglu_shape[1]
    q, kv = q_heads * head_width, k_heads * head_width
    attention = [(q, d), (kv, d), (kv, d), (d, q)]
    return [*attention, (ffn, d), (ffn, d), (d, ffn), (d,), (d,)] * sizes.layers


class Norm:
    """The norm of all gradients: the square root of the sum of all squares."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.gradients = [draw(*shape, dtype=torch.float32) for shape in shapes]
        self.of_compiler = compiled(
            lambda: torch.stack([g.square().sum() for g in self.gradients]).sum().sqrt()
        )

    def ours(self) -> Tensor:
        return square_sum(self.gradients, [1] * len(self.gradients), "triton").sqrt()

    def work(self, implementation: str, name_of_pass: str) -> Work:
        functions: dict[str, Callable[[], Tensor]] = {
            "triton": self.ours,
            "torch": lambda: torch.nn.utils.get_total_norm(self.gradients),
            "compile": self.of_compiler,
        }
        return Work(lambda: None, lambda _: functions[implementation]())


class Update:
    """One in-place step of AdamW, on weights and moments like those after some steps."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.p, self.m, self.g = (
            [draw(*shape, dtype=dtype, scale=s) for shape in shapes] for s in (0.02, 1e-4, 1e-3)
        )
        self.v = [draw(*shape, dtype=dtype, scale=1e-4).square_() for shape in shapes]
        self.decays = [DECAY if len(shape) > 1 else 0.0 for shape in shapes]
        self.locations = [Location(i, 0, shape[-1], shape[-1]) for i, shape in enumerate(shapes)]
        self.updates = torch.tensor(9.0, device=DEVICE)
        self.norm = torch.tensor(NORM, dtype=torch.float64, device=DEVICE)

    def update(self, kernels: str) -> None:
        lists = self.p, self.g, self.m, self.v
        adamw(*lists, self.decays, self.locations, self.updates, self.norm, RATES, kernels)

    def work(self, implementation: str, name_of_pass: str) -> Work:
        if implementation == "compile":
            step = self.compiled_step()
            return Work(lambda: None, lambda _: step())
        return Work(lambda: None, lambda _: self.update(implementation))

    def compiled_step(self) -> Callable[[], Any]:
        """The step of torch.optim.AdamW, compiled, with its update count on the device."""
        parameters = [torch.nn.Parameter(p) for p in self.p]
        for parameter, gradient in zip(parameters, self.g, strict=True):
            parameter.grad = gradient
        decayed = list(zip(parameters, self.decays, strict=True))
        groups = [
            {"params": [p for p, d in decayed if d == decay], "weight_decay": decay}
            for decay in (0.0, DECAY)
        ]
        options = {"lr": RATES.lr, "betas": RATES.betas, "eps": RATES.eps}
        on_gpu = DEVICE == "cuda"
        optimizer = torch.optim.AdamW(groups, **options, foreach=True, capturable=on_gpu)

        def step() -> None:
            torch._foreach_mul_(self.g, (RATES.max_norm / self.norm).clamp(max=1.0).float())
            optimizer.step()

        return compiled(step)


def optimizer_cases(sizes: Sizes) -> list[Case]:
    shapes = parameter_shapes(sizes)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    shape = f"{len(shapes)} tensors, {count:,} parameters"
    each = [
        ("gradient_norm", 4.0, lambda: Norm(shapes), ("triton", "torch", "compile")),
        ("adamw float32", 28.0, lambda: Update(shapes, torch.float32),
         ("triton", "torch", "compile")),
        ("adamw bfloat16", 14.0, lambda: Update(shapes, torch.bfloat16), ("triton", "torch")),
    ]  # fmt: skip
    return [
        Case(name, shape, {"step": of_each * count}, build, implementations)
        for name, of_each, build, implementations in each
    ]
