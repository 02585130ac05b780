"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101,
algorithm 2), over all parameters of a rank in one launch, with gradient clipping included.

    g ← g · min(1, max_norm / norm)
    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    p ← p − lr · decay · p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)
    t: the number of updates, this one included

If the gradient norm is not finite, the step is skipped: p, m, v and t do not change. The norm, the
clip factor, t and the bias corrections are float64 scalars on the device; the host reads none of
them.

| weights and moments | reads        | writes    | bytes per parameter                           |
|---------------------|--------------|-----------|-----------------------------------------------|
| float32             | p, m, v, g   | p, m, v   | 28 (8 more if clipping were a separate pass)  |
| bfloat16            | p, m, v, g   | p, m, v   | 14                                            |

Weights and moments in bfloat16 are computed in float32 and rounded stochastically (Gupta et al.
2015, https://arxiv.org/abs/1502.02551): up or down, with probabilities that make the mean exact.
With rounding to nearest, an update below 2⁻⁹ of the weight would be lost every time, and with
β₂ = 0.999 v would never decay.

A float32 is rounded by adding 16 random bits below those that bfloat16 keeps, and truncating. The
bits do not come from a random stream of the rank. They are a hash of the seed and the parameter's
name (`Location.key`), of t, and of the element's index in the global tensor. So every layout, every
replica and every copy of a tied weight rounds alike, and a resumed run rounds with the same bits as
an uninterrupted one. p and m each take one half of the hash; v takes one half of the hash's hash.

The hash is lowbias32 (Wellons 2018, https://nullprogram.com/blog/2018/07/31/). Indices are taken
modulo 2³²: in a larger tensor, elements that lie 2³² apart round with the same bits, still without
bias.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.kernels.backend import accumulator, jit, tl, use_triton, warps_for
from model.kernels.multi_tensor import find, pointer, prepare, triton_type

BLOCK = 2048  # 8 elements per thread: two 16-byte loads of float32 from each of p, g, m and v


class Location(NamedTuple):
    """The position of a local matrix in its global matrix, in elements counted row by row. A vector
    is one row."""

    key: int  # 32 bits, from which the random bits of this global tensor are derived
    first: int  # the global index of the local tensor's first element
    width: int  # of a local row
    global_width: int


@dataclass(frozen=True)
class Rates:
    """AdamW's hyperparameters; `lr` is the learning rate of this step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    max_norm: float  # 0: no clipping


@torch.no_grad()
def adamw(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], decays: Sequence[float],
    locations: Sequence[Location], step: Tensor, norm: Tensor, rates: Rates, kernels: str,
) -> None:  # fmt: skip
    """Make one update in place. The lists have equal lengths, and all tensors of p, m, v and g have
    one dtype: float32, bfloat16 or float64.

    Args:
        p, m, v: weights, first and second moments, contiguous.
        g: gradients, of any strides; their contents may be overwritten.
        decays: the weight decay of each tensor.
        locations: of each tensor; used for bfloat16 only.
        step: the number of updates so far, a float32 scalar on the tensors' device; incremented,
            unless the step is skipped.
        norm: the norm of all gradients of the model, a float64 scalar on the same device.
        kernels: auto, triton or torch.
    """
    applied = norm.isfinite()
    step += applied
    scalars = _scalars(step, norm, applied, rates)
    rounded = list(locations) if p[0].dtype == torch.bfloat16 else []
    shrink = [rates.lr * decay for decay in decays]
    g = [gradient.contiguous() for gradient in g]  # torch's kernel for CPUs ignores strides, too
    if use_triton(p[0], kernels):
        flat = [number for location in rounded for number in location]
        torch.ops.lattice.adamw(p, g, m, v, scalars, shrink, *rates.betas, rates.eps, flat)
    elif rounded:
        for i, location in enumerate(rounded):
            _update_and_round(p[i], g[i], m[i], v[i], shrink[i], location, scalars, rates)
    else:
        if rates.max_norm:
            torch._foreach_mul_(g, scalars[1].to(g[0].dtype))
        for decay in sorted(set(decays)):
            alike = [i for i, of_this in enumerate(decays) if of_this == decay]
            ps, gs, ms, vs = ([tensors[i] for i in alike] for tensors in (p, g, m, v))
            torch._fused_adamw_(
                ps, gs, ms, vs, [], [step] * len(alike), lr=rates.lr, beta1=rates.betas[0],
                beta2=rates.betas[1], weight_decay=decay, eps=rates.eps, amsgrad=False,
                maximize=False, found_inf=(~applied).float(),
            )  # fmt: skip


def _scalars(step: Tensor, norm: Tensor, applied: Tensor, rates: Rates) -> Tensor:
    """Return float64 [5]: 1 if the step is applied and else 0, the clip factor, lr / (1 − β₁ᵗ),
    1 / √(1 − β₂ᵗ), t."""
    t = step.double()
    factor = (rates.max_norm / norm).clamp(max=1.0) if rates.max_norm else torch.ones_like(norm)
    # 1 − βᵗ without cancellation where βᵗ is near 1. β − 1 is exact for β ≥ 1/2.
    one, two = (
        -torch.expm1(t * (math.log1p(beta - 1.0) if beta - 1.0 > -1.0 else -math.inf))
        for beta in rates.betas
    )
    return torch.stack((applied.double(), factor, rates.lr / one, two.rsqrt(), t))


# --- random bits ----------------------------------------------------------------------------------


@jit
def _lowbias32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def _stochastic(x, bits):
    """Round float32 to bfloat16 with 16 random bits. A NaN remains a NaN: no bits are added to it,
    which could carry out of its mantissa."""
    exact = x.to(tl.uint32, bitcast=True)
    moved = tl.where(x == x, exact + bits, exact)
    return (moved >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def _random(row, start, offsets, t):
    """The hash of each element of this block, uint32. From field 6 on, the row holds the fields of
    a `Location`."""
    key = tl.load(row + 6).to(tl.uint32)
    first = tl.load(row + 7)
    width = tl.load(row + 8)
    global_width = tl.load(row + 9)
    if width == global_width:
        index = (first + start).to(tl.uint32) + offsets.to(tl.uint32)
    else:  # the global tensor's rows are longer: only this case needs divisions
        rows = start // width
        column = (start - rows * width).to(tl.uint32) + offsets.to(tl.uint32)
        corner = (first + rows * global_width).to(tl.uint32)
        index = (
            corner + column + column // width.to(tl.uint32) * (global_width - width).to(tl.uint32)
        )
    return _lowbias32(index ^ _lowbias32(key ^ _lowbias32(t.to(tl.int32).to(tl.uint32))))


def lowbias32(x: Tensor) -> Tensor:
    """Hash 32-bit numbers that are stored as int64; the hashes are 32-bit numbers in int64 too."""
    low = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & low
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & low
    return x ^ (x >> 16)


def stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 x to bfloat16 with random `bits` in [0, 2¹⁶), int64 and shaped like x."""
    exact = x.view(torch.int32).long()
    moved = torch.where(x == x, exact + bits, exact)
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)


def random_bits(location: Location, shape: torch.Size, t: Tensor) -> Tensor:
    """The hash of each element of a local tensor at update t (an integer scalar): int64, shaped
    `shape`."""
    key, first, width, global_width = location
    local = torch.arange(shape.numel(), device=t.device)
    index = first + local + local // width * (global_width - width)
    return lowbias32(index & 0xFFFFFFFF ^ lowbias32(key ^ lowbias32(t))).view(shape)


# --- the update -----------------------------------------------------------------------------------


@jit
def _step(
    row, start, left, WHOLE: tl.constexpr, SCALARS, BETA1: tl.constexpr, BETA2: tl.constexpr,
    EPS: tl.constexpr, ACC: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    p_at = pointer(row, 1, start, DTYPE, ALIGNED) + offsets
    g_at = pointer(row, 2, start, DTYPE, ALIGNED) + offsets
    m_at = pointer(row, 3, start, DTYPE, ALIGNED) + offsets
    v_at = pointer(row, 4, start, DTYPE, ALIGNED) + offsets
    if WHOLE:  # no mask: a mask that may end anywhere would rule out 16-byte accesses
        inside = None
    else:
        inside = offsets < left
    p = tl.load(p_at, mask=inside).to(ACC)
    g = tl.load(g_at, mask=inside).to(ACC) * tl.load(SCALARS + 1).to(ACC)
    m = tl.load(m_at, mask=inside).to(ACC)
    v = tl.load(v_at, mask=inside).to(ACC)
    shrink = tl.load(row + 5).to(tl.float64, bitcast=True).to(ACC)
    step_size = tl.load(SCALARS + 2).to(ACC)
    scale = tl.load(SCALARS + 3).to(ACC)
    m = tl.full((), BETA1, ACC) * m + tl.full((), 1.0 - BETA1, ACC) * g
    v = tl.full((), BETA2, ACC) * v + tl.full((), 1.0 - BETA2, ACC) * g * g
    p = p - shrink * p - step_size * (m / (tl.sqrt(v) * scale + tl.full((), EPS, ACC)))
    if ROUND:
        bits = _random(row, start, offsets, tl.load(SCALARS + 4))
        tl.store(p_at, _stochastic(p, bits & 0xFFFF), mask=inside)
        tl.store(m_at, _stochastic(m, bits >> 16), mask=inside)
        tl.store(v_at, _stochastic(v, _lowbias32(bits) & 0xFFFF), mask=inside)
    else:
        tl.store(p_at, p, mask=inside)
        tl.store(m_at, m, mask=inside)
        tl.store(v_at, v, mask=inside)


@jit
def _adamw(
    TABLE, PLACES, SCALARS, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(SCALARS) != 0:
        row, start, left = find(TABLE, PLACES, 10 if ROUND else 6, BLOCK)
        if left >= BLOCK:
            _step(row, start, left, True, SCALARS, BETA1, BETA2, EPS, ACC, DTYPE,
                  ALIGNED, ROUND, BLOCK)  # fmt: skip
        else:
            _step(row, start, left, False, SCALARS, BETA1, BETA2, EPS, ACC, DTYPE,
                  ALIGNED, ROUND, BLOCK)  # fmt: skip


@torch.library.custom_op("lattice::adamw", mutates_args=("p", "m", "v"))
def _update_all(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], scalars: Tensor,
    shrink: list[float], beta1: float, beta2: float, eps: float, locations: list[int],
) -> None:  # fmt: skip
    """Launch the kernel. `scalars`: see `_scalars`; `shrink`: lr · decay of each tensor;
    `locations`: four numbers per tensor, or an empty list."""
    bits = torch.tensor(shrink, dtype=torch.float64).view(torch.int64).tolist()
    launch = prepare([p, g, m, v], [bits, *(locations[i::4] for i in range(4) if locations)], BLOCK)
    if launch.grid[0]:
        dtype = p[0].dtype
        _adamw[launch.grid](
            launch.table, launch.places, scalars, BETA1=beta1, BETA2=beta2, EPS=eps,
            ACC=accumulator(dtype), DTYPE=triton_type(dtype), ALIGNED=launch.aligned,
            ROUND=bool(locations), BLOCK=BLOCK, num_warps=warps_for(2 * BLOCK),
        )  # fmt: skip


def _update_and_round(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    shrink: float,
    location: Location,
    scalars: Tensor,
    rates: Rates,
) -> None:
    """Do in PyTorch what the kernel does with one bfloat16 tensor."""
    factor, step_size, scale = scalars[1:4].float()
    (beta1, beta2), gradient = rates.betas, g.float() * factor
    first = beta1 * m.float() + (1 - beta1) * gradient
    second = beta2 * v.float() + (1 - beta2) * gradient * gradient
    moved = first / (second.sqrt() * scale + rates.eps)
    weight = p.float() - shrink * p.float() - step_size * moved
    bits = random_bits(location, p.shape, scalars[4].long())
    for old, new, random in (
        (p, weight, bits & 0xFFFF),
        (m, first, bits >> 16),
        (v, second, lowbias32(bits) & 0xFFFF),
    ):
        old.copy_(torch.where(scalars[0] != 0, stochastic(new, random), old))
