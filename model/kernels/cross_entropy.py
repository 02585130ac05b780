"""Cross-entropy over a vocabulary that is sharded over tp: no rank ever holds the whole logits
(Shoeybi et al. 2019, section 3).

    loss = lse − z[y] (+ c · lse²)       summed over target tokens
    lse  = log Σ_j exp(z_j) = m + log s       m = max z,  s = Σ exp(z − m)
    dz_j = scale · ((1 + 2 c · lse) · exp(z_j − m) / s − [j = y])

m and s are stored separately instead of as lse, for precision: where logits are about 10⁴, float32
leaves three digits after the decimal point of lse, whereas z − m keeps full precision.

The second term, with c = `z_loss`, keeps the normaliser near 1 (PaLM: Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, section 5). In one read-only pass over its columns, each rank
computes three numbers per token: m and s of its columns, and z[y] if it holds the target's column
(an online softmax: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). One all-gather
of these three gives every rank the numbers of the whole row (model/linear_cross_entropy.py).

| pass       | reads  | writes                | bytes per bfloat16 logit |
|------------|--------|-----------------------|--------------------------|
| statistics | logits | 3 numbers per token   | 2 + 20 / columns         |
| gradient   | logits | gradient, over logits | 4                        |
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.kernels.backend import (
    accumulator,
    cdiv,
    exact,
    jit,
    next_power_of_2,
    rows_at_once,
    tl,
    use_triton,
    warps_for,
)
from tokens import IGNORE

# Columns handled at once, by threads that handle 32 each. Of 8 such choices this one was among the
# best for both kernels on an H200, for 8192 tokens and 128,256 columns: statistics took 0.56 ms
# instead of 0.73 with 8192 columns and 16 a thread.
MAX_BLOCK = 4096


class Normaliser(NamedTuple):
    """Statistics of each token's row of logits, each [T] float32 (float64)."""

    peak: Tensor  # m
    total: Tensor  # s
    target_logit: Tensor  # z[y]

    @property
    def lse(self) -> Tensor:
        return self.peak + self.total.log()


def merge(shards: Tensor) -> Normaliser:
    """Combine the statistics of all shards of the vocabulary, [tp, 3, T], into those of whole
    rows."""
    peaks, totals, target_logits = shards.unbind(1)
    peak = peaks.amax(0)
    return Normaliser(peak, (totals * (peaks - peak).exp()).sum(0), target_logits.sum(0))


def statistics(logits: Tensor, targets: Tensor, first_row: int, kernels: str) -> Tensor:
    """Compute m, s and z[y] (0 where another rank holds column y) of logits [T, V/tp]: [3, T]."""
    if use_triton(logits, kernels):
        return torch.ops.lattice.cross_entropy_statistics(logits, targets, first_row)
    z = logits.to(exact(logits.dtype))
    peak = z.amax(dim=-1)
    # if all columns are masked (−∞), their exponentials are 0, not NaN
    finite = peak.masked_fill(peak == -torch.inf, 0).unsqueeze(-1)
    index, mine = _columns(targets, first_row, z.shape[-1])
    target_logit = z.gather(-1, index).squeeze(-1).masked_fill(~mine, 0)
    return torch.stack((peak, (z - finite).exp_().sum(dim=-1), target_logit))


def token_losses(row: Normaliser, targets: Tensor, z_loss: float) -> Tensor:
    """The loss of each token, [T]; 0 where there is no target."""
    losses = (row.peak - row.target_logit) + row.total.log()
    if z_loss:
        losses += z_loss * row.lse.square()
    return losses.masked_fill(targets == IGNORE, 0)


def gradient_over_logits_(
    logits: Tensor,
    targets: Tensor,
    row: Normaliser,
    scale: Tensor,
    first_row: int,
    z_loss: float,
    kernels: str,
) -> None:
    """Overwrite the logits [T, V/tp] with the gradient of scale · Σ losses; `scale` is a scalar
    tensor."""
    if use_triton(logits, kernels):
        torch.ops.lattice.cross_entropy_gradient_(
            logits, targets, row.peak, row.total, scale, first_row, z_loss
        )
        return
    exact_dtype = row.peak.dtype
    scale = scale.to(exact_dtype)
    factors = scale * (1 + 2 * z_loss * row.lse) / row.total  # [T]
    same = logits.dtype == exact_dtype
    z = logits if same else logits.to(exact_dtype)
    z.sub_(row.peak.unsqueeze(-1)).exp_().mul_(factors.unsqueeze(-1))
    index, mine = _columns(targets, first_row, z.shape[-1])
    at_target = z.gather(-1, index) - torch.where(mine, scale, 0).unsqueeze(-1)  # [T, 1]
    # not scatter_add_, which adds in no fixed order on a GPU
    z.scatter_(-1, index, at_target)
    z.masked_fill_((targets == IGNORE).unsqueeze(-1), 0)  # even if a logit is infinite or NaN
    if not same:
        logits.copy_(z)


def _columns(targets: Tensor, first_row: int, width: int) -> tuple[Tensor, Tensor]:
    """The index of each target among this rank's columns (0 if it is not among them), [T, 1], and
    whether it is among them, [T]."""
    local = targets - first_row
    mine = (local >= 0) & (local < width)
    return local.masked_fill(~mine, 0).unsqueeze(-1), mine


@jit
def _statistics_kernel(
    LOGITS, TARGETS, OUT, stride, width, first_row, tokens,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = token < tokens
    row = LOGITS + token * stride
    target = tl.load(TARGETS + token, mask=there, other=0) - first_row
    columns = tl.arange(0, BLOCK)[None, :]
    peak = tl.full((ROWS, 1), float("-inf"), ACC)
    total = tl.zeros((ROWS, BLOCK), ACC)  # one sum per lane; added up over the row at the end
    for start in range(0, width, BLOCK):
        z = tl.load(
            row + start + columns, mask=there & (start + columns < width), other=float("-inf")
        ).to(ACC)
        peak_before = peak
        peak = tl.maximum(peak, tl.max(z, 1, keep_dims=True))
        # if all columns so far are masked (−∞), their exponentials are 0, not NaN
        finite = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp(peak_before - finite) + tl.exp(z - finite)
    mine = there & (target >= 0) & (target < width)
    target_logit = tl.load(row + tl.where(mine, target, 0), mask=mine, other=0.0).to(ACC)
    tl.store(OUT + token, peak, mask=there)
    tl.store(OUT + tokens + token, tl.sum(total, 1, keep_dims=True), mask=there)
    tl.store(OUT + 2 * tokens + token, target_logit, mask=there)


@jit
def _gradient_kernel(
    LOGITS, TARGETS, PEAK, TOTAL, SCALE, stride, width, first_row, tokens,
    IGNORED: tl.constexpr, Z_LOSS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = token < tokens
    inside = there & (columns < width)
    target = tl.load(TARGETS + token, mask=there, other=IGNORED)
    peak = tl.load(PEAK + token, mask=there, other=0.0)
    total = tl.load(TOTAL + token, mask=there, other=1.0)
    place = LOGITS + token * stride + columns
    z = tl.load(place, mask=inside, other=float("-inf")).to(ACC)
    p = tl.exp(z - peak) * ((1.0 + 2.0 * tl.full((), Z_LOSS, ACC) * (peak + tl.log(total))) / total)
    gradient = tl.load(SCALE).to(ACC) * tl.where(columns == target - first_row, p - 1.0, p)
    gradient = tl.where(target == IGNORED, 0.0, gradient)  # even if a logit is infinite or NaN
    tl.store(place, gradient.to(LOGITS.dtype.element_ty), mask=inside)


@torch.library.custom_op("lattice::cross_entropy_statistics", mutates_args=())
def _statistics(logits: Tensor, targets: Tensor, first_row: int) -> Tensor:
    tokens, width = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = logits.new_empty((3, tokens), dtype=exact(logits.dtype))
    block = min(MAX_BLOCK, next_power_of_2(width))
    at_once = rows_at_once(block)
    if tokens:
        _statistics_kernel[(cdiv(tokens, at_once),)](
            logits, targets.contiguous(), out, logits.stride(0), width, first_row, tokens,
            ACC=accumulator(logits.dtype), ROWS=at_once, BLOCK=block,
            num_warps=warps_for(at_once * block // 2),
        )  # fmt: skip
    return out


@_statistics.register_fake
def _(logits: Tensor, targets: Tensor, first_row: int) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=exact(logits.dtype))


@torch.library.custom_op("lattice::cross_entropy_gradient_", mutates_args=("logits",))
def _gradient_(
    logits: Tensor,
    targets: Tensor,
    peak: Tensor,
    total: Tensor,
    scale: Tensor,
    first_row: int,
    z_loss: float,
) -> None:
    tokens, width = logits.shape
    assert logits.stride(-1) == 1
    block = min(MAX_BLOCK, next_power_of_2(width))
    at_once = rows_at_once(block)
    if tokens:
        _gradient_kernel[(cdiv(tokens, at_once), cdiv(width, block))](
            logits, targets.contiguous(), peak, total, scale, logits.stride(0), width, first_row,
            tokens, IGNORED=IGNORE, Z_LOSS=z_loss, ACC=accumulator(logits.dtype), ROWS=at_once,
            BLOCK=block, num_warps=warps_for(at_once * block // 2),
        )  # fmt: skip
