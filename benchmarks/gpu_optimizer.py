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

from benchmarks.gpu_check import Check, poisoned_memory
from benchmarks.gpu_operations import Case, Sizes, draw
from benchmarks.gpu_timing import DEVICE, Work, compiled
from model.kernels.adamw import Location, Rates, adamw
from model.kernels.gradient_norm import square_sum

RATES = Rates(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, max_norm=1.0)
DECAY = 0.1
NORM = 2.0  # the norm given to the update, with which gradients are halved


def parameter_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of the parameters of `layers` blocks: each block has 218,112,000 parameters at the
    widths of an 8-billion model."""
    d, (q_heads, k_heads, head_width), ffn = sizes.widths[0], sizes.heads, sizes.swiglu_shape[1]
    attention = [
        (q_heads * head_width, d),
        (k_heads * head_width, d),
        (k_heads * head_width, d),
        (d, q_heads * head_width),
    ]
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

    def check(self) -> list[Check]:
        with poisoned_memory():
            found = self.ours().item()
        exact = torch.stack([g.double().square().sum() for g in self.gradients]).sum().sqrt().item()
        # the bound allows for sums of 10⁹ squares in another order
        return [Check("norm", abs(found / exact - 1), 1e-12)]


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
        groups = [
            {
                "params": [p for p, d in zip(parameters, self.decays, strict=True) if d == decay],
                "weight_decay": decay,
            }
            for decay in (0.0, DECAY)
        ]
        options = {
            "lr": RATES.lr,
            "betas": RATES.betas,
            "eps": RATES.eps,
            "foreach": True,
            "capturable": DEVICE == "cuda",
        }
        optimizer = torch.optim.AdamW(groups, **options)

        def step() -> None:
            torch._foreach_mul_(self.g, (RATES.max_norm / self.norm).clamp(max=1.0).float())
            optimizer.step()

        return compiled(step)

    def check(self) -> list[Check]:
        before = [[t.clone() for t in tensors] for tensors in (self.p, self.g, self.m, self.v)]
        t = self.updates.item() + 1
        with poisoned_memory():
            self.update("triton")
        checks = []
        worst = dict.fromkeys(("p", "m", "v"), 0.0)
        size = dict.fromkeys(worst, 0.0)
        for i, old in enumerate(
            zip(*before, strict=True)
        ):  # one tensor at a time, because float64 is large
            exact = self.exact([x.double() for x in old], t, self.decays[i])
            for name, found in zip(worst, (self.p[i], self.m[i], self.v[i]), strict=True):
                error, magnitude = (found.double() - exact[name]).abs(), exact[name].abs()
                # stochastic rounding may give either bfloat16 neighbour; they are 2⁻⁷ apart
                if self.dtype == torch.bfloat16:
                    error = (error - 2**-7 * magnitude).clamp(min=0)
                worst[name] = _greatest(worst[name], error.max().item())
                size[name] = _greatest(size[name], magnitude.max().item())
        checks += [Check(name, error, 2e-6 * size[name]) for name, error in worst.items()]
        if self.dtype == torch.bfloat16:
            checks.append(self.check_bits(before))
        return checks

    def check_bits(self, before: list[list[Tensor]]) -> Check:
        """Checks that kernel and reference round with the same random bits. If their float32
        results differ by an ulp, the rounded ones differ with a probability of 2⁻¹⁶. So nearly all
        numbers agree, but with different random bits about half of them would not."""
        found = [*self.p, *self.m, *self.v]
        self.p, self.g, self.m, self.v = before
        self.updates -= 1
        self.update("torch")
        expected = [*self.p, *self.m, *self.v]
        differing = sum((a != b).sum().item() for a, b in zip(found, expected, strict=True))
        return Check("bits", differing / sum(a.numel() for a in found), 1e-3)

    def exact(self, old: list[Tensor], t: float, decay: float) -> dict[str, Tensor]:
        """AdamW in float64, as in model/kernels/adamw.py."""
        p, g, m, v = old
        g = g * min(1.0, RATES.max_norm / NORM)
        m = RATES.betas[0] * m + (1 - RATES.betas[0]) * g
        v = RATES.betas[1] * v + (1 - RATES.betas[1]) * g * g
        one, two = (1 - beta**t for beta in RATES.betas)
        p = p - RATES.lr * decay * p - RATES.lr / one * m / ((v / two).sqrt() + RATES.eps)
        return {"p": p, "m": m, "v": v}


def _greatest(a: float, b: float) -> float:
    """The maximum, or NaN if either is NaN, which `max` could lose."""
    return a if a != a or a > b else b


def optimizer_cases(sizes: Sizes) -> list[Case]:
    shapes = parameter_shapes(sizes)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    shape = f"{len(shapes)} tensors, {count:,} parameters"
    norm, float32, bfloat16 = {"step": 4.0 * count}, {"step": 28.0 * count}, {"step": 14.0 * count}
    beside = ("triton", "torch", "compile")
    return [
        Case("gradient_norm", shape, norm, beside, lambda: Norm(shapes)),
        Case("adamw float32", shape, float32, beside, lambda: Update(shapes, torch.float32)),
        Case(
            "adamw bfloat16",
            shape,
            bfloat16,
            ("triton", "torch"),
            lambda: Update(shapes, torch.bfloat16),
        ),
    ]
