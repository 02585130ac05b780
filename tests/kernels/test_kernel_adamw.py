"""The optimizer's kernels: an update of many tensors is compared with torch's AdamW in float64;
skipped steps, stochastic rounding and the gradient norm."""

import math
from dataclasses import replace

import pytest
import torch

from model.kernels.adamw import BLOCK, Location, Rates, adamw, lowbias32, random_bits, stochastic
from model.kernels.backend import INTERPRETED
from model.kernels.gradient_norm import BLOCK as NORM_BLOCK
from model.kernels.gradient_norm import square_sum
from model.kernels.multi_tensor import prepare
from settings.sections import MAX_STEPS
from tests.kernels.device import DEVICE, DTYPES, KERNELS, randn

SIZES = (1, 13, BLOCK, 0, BLOCK + 1, 997, 7, 5)
DECAYS = [0.1, 0.0] * 4
# with 0.999, 1 − βᵗ as a difference in float32 would lose digits
RATES = Rates(lr=3e-3, betas=(0.9, 0.999), eps=1e-8, max_norm=1.0)
LOCATIONS = [Location(i, 0, max(1, n), max(1, n)) for i, n in enumerate(SIZES, 1)]  # for bfloat16

pytestmark = pytest.mark.usefixtures("on_device")
each_kernel = pytest.mark.parametrize("kernels", KERNELS)


class State:
    """Weights, moments and update count for tensors of SIZES."""

    def __init__(self, dtype):
        self.p = drawn(0, dtype)
        self.m, self.v = ([torch.zeros_like(t) for t in self.p] for _ in range(2))
        self.step = torch.zeros(())

    def update(self, gradients, kernels, rates=RATES, norm=None):
        """With the norm of these gradients, unless another is given. They are overwritten."""
        norm = torch.tensor(norm_of(gradients) if norm is None else norm, dtype=torch.float64)
        adamw(self.p, gradients, self.m, self.v, DECAYS, LOCATIONS, self.step, norm, rates, kernels)

    def tensors(self):
        return [*self.p, *self.m, *self.v, self.step]


def drawn(number, dtype):
    """Tensors of SIZES: 0 are the weights, 1 the gradients of the first step, and so on."""
    return [randn(n, dtype=dtype, seed=100 * number + i) for i, n in enumerate(SIZES)]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def norm_of(gradients):
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


def worst(ours, theirs):
    """The largest error relative to the largest number, because sums of gradients of both signs may
    cancel to small numbers."""
    a, b = (torch.cat(list(tensors)).double() for tensors in (ours, theirs))
    return ((a - b).abs().max() / b.abs().max()).item()


def torch_adamw(state, max_norms):
    """Weights and moments after torch's own optimizer has made an update in float64 for each of
    `max_norms`, with drawn gradients, clipped."""
    parameters = [torch.nn.Parameter(w.to(torch.float64, copy=True)) for w in state.p]
    groups = [{"params": parameters[i::2], "weight_decay": DECAYS[i]} for i in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=RATES.lr, betas=RATES.betas, eps=RATES.eps)
    for step, max_norm in enumerate(max_norms):
        gradients = drawn(step + 1, state.p[0].dtype)
        norm = torch.tensor(norm_of(gradients), dtype=torch.float64)
        factor = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones(())
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.double() * factor.double()
        optimizer.step()
    moments = [[optimizer.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq")]
    return [[p.detach() for p in parameters], *moments]


# --- the update -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@each_kernel
def test_three_steps_are_torchs_in_float64(kernels, dtype, bound):
    if (kernels, dtype, DEVICE) == ("torch", torch.float32, "cuda"):
        bound = 2e-5  # torch's kernel takes 1 − βᵗ as a difference in float32
    state, max_norms = State(dtype), (1.0, 0.0, 1e3)  # clipped, no limit, within the limit
    expected = torch_adamw(state, max_norms)
    for step, max_norm in enumerate(max_norms):
        state.update(drawn(step + 1, dtype), kernels, replace(RATES, max_norm=max_norm))
    for ours, theirs in zip((state.p, state.m, state.v), expected, strict=True):
        assert worst(ours, theirs) <= bound
    assert state.step == 3


@each_kernel
def test_the_comparison_sees_a_wrong_bias_correction(kernels):
    state = State(torch.float32)
    state.step += 1  # plant: the first update is taken for the second
    expected = torch_adamw(state, [1.0])
    state.update(drawn(1, torch.float32), kernels)
    assert worst(state.m, expected[1]) <= 2e-6
    assert worst(state.p, expected[0]) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_kernel
def test_gradients_may_start_anywhere_and_have_any_strides(kernels, dtype):
    aligned, odd, strided = State(dtype), State(dtype), State(dtype)
    gradients = drawn(1, dtype)
    norm = norm_of(gradients)
    buffer = torch.cat([torch.zeros(1, dtype=dtype), *gradients])
    views = list(buffer[1:].split(SIZES))
    wide = [torch.stack((g, g), dim=1)[:, 0] for g in gradients]
    if kernels == "triton":
        assert prepare([gradients], [], BLOCK).aligned
        assert not prepare([views], [], BLOCK).aligned
    for state, theirs in ((aligned, gradients), (odd, views), (strided, wide)):
        state.update(theirs, kernels, norm=norm)
    for other in (odd, strided):
        assert same(aligned.tensors(), other.tensors())


@each_kernel
def test_updates_are_counted_up_to_the_last_step(kernels):
    state = State(torch.float32)
    state.step.fill_(MAX_STEPS - 2)
    for count in (MAX_STEPS - 1, MAX_STEPS):
        state.update(drawn(1, torch.float32), kernels)
        assert int(state.step) == count


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.float32, math.nan), (torch.float64, math.inf), (torch.bfloat16, math.nan)],
)
@each_kernel
def test_a_step_without_a_finite_norm_never_was(kernels, bad, dtype):
    """It changes neither weights nor moments, nor the bias correction and random bits of the next
    step."""
    state, undisturbed = State(dtype), State(dtype)
    for either in (state, undisturbed):
        either.update(drawn(1, dtype), kernels)
    before = [t.clone() for t in state.tensors()]
    poisoned = drawn(2, dtype)
    poisoned[4][7] = bad
    state.update(poisoned, kernels, norm=bad)
    assert same(state.tensors(), before)
    for either in (state, undisturbed):
        either.update(drawn(2, dtype), kernels)
    assert same(state.tensors(), undisturbed.tensors())
    assert not torch.equal(state.p[4], before[4])


# --- rounding -------------------------------------------------------------------------------------


def test_rounding_leaves_what_is_exact_and_what_is_no_number():
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3.0e38, math.inf, -math.inf]).bfloat16()
    bits = torch.full(exact.shape, 0xFFFF)
    assert torch.equal(stochastic(exact.float(), bits).view(torch.int16), exact.view(torch.int16))
    # NVIDIA's NaN: one more bit would make it −0
    worst_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert stochastic(worst_nan, bits[:1]).isnan().all()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_kernel_and_reference_round_with_the_same_bits():
    """Bit for bit in the interpreter, which multiplies and adds separately, as PyTorch on the CPU.
    (A GPU fuses the two.)"""
    kernel, reference = State(torch.bfloat16), State(torch.bfloat16)
    for step in range(2):
        kernel.update(drawn(step + 1, torch.bfloat16), "triton")
        reference.update(drawn(step + 1, torch.bfloat16), "torch")
    assert same(kernel.tensors(), reference.tensors())


def one_bfloat16_update(values, location, kernels):
    """p and v after an update without gradient from these values of both."""
    p, v, m, g = values.clone(), values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    norm = torch.ones((), dtype=torch.float64)
    rates = replace(RATES, betas=(0.9, 0.95))
    adamw([p], [g], [m], [v], [0.1], [location], torch.zeros(()), norm, rates, kernels)
    return p, v


@each_kernel
def test_small_changes_are_not_lost(kernels):
    """0.95 lies a fifth of the way between two bfloat16 numbers: rounded to nearest, every result
    would be too small by a fifth of a unit."""
    count = 4 * BLOCK
    p, v = one_bfloat16_update(torch.ones(count).bfloat16(), Location(1, 0, count, count), kernels)
    ulp = 2**-8
    bound = 5 * 0.4 * ulp / math.sqrt(count)  # five standard deviations
    nearest = torch.tensor(0.95).bfloat16().item()
    assert abs(v.double().mean().item() - 0.95) < bound < abs(nearest - 0.95) / 5
    assert v.max().item() - v.min().item() == ulp  # its two neighbours, and no other
    # 2⁻⁸·0.077 below one: rounded to nearest, no weight would ever decay
    decayed = 1 - RATES.lr * 0.1
    assert abs(p.double().mean().item() - decayed) < bound < (1 - decayed) / 3


ROWS, COLUMNS = 9, 701


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 9), (0, 701)), ((2, 7), (0, 701)), ((0, 9), (300, 701)), ((4, 9), (17, 18))],
)
@each_kernel
def test_a_part_rounds_as_the_whole_does(kernels, rows, columns):
    """A shard (by rows, columns or both) rounds as the same part of the whole tensor. Global
    indices here need more than 31 bits."""
    first = 3_000_000_000
    whole = torch.linspace(0.5, 1.5, ROWS * COLUMNS).view(ROWS, COLUMNS).bfloat16()
    region = slice(*rows), slice(*columns)
    expected = [
        t[region] for t in one_bfloat16_update(whole, Location(5, first, COLUMNS, COLUMNS), "torch")
    ]
    part, width = whole[region].contiguous(), columns[1] - columns[0]
    place = Location(5, first + rows[0] * COLUMNS + columns[0], width, COLUMNS)
    assert same(one_bfloat16_update(part, place, kernels), expected)
    if width > 1:  # control: with a wrong location, a shard rounds differently
        lost = Location(5, first + 1, width, width)
        assert not torch.equal(one_bfloat16_update(part, lost, kernels)[1], expected[1])


def test_bits_differ_from_step_to_step_and_from_tensor_to_tensor():
    shape = torch.Size([1 << 12])
    draws = [
        random_bits(Location(key, 0, 1 << 12, 1 << 12), shape, torch.tensor(t))
        for key in (1, 2)
        for t in (1, 2)
    ]
    draws += [draws[0] >> 16, lowbias32(draws[0])]  # the bits for m and v
    low = torch.stack([(draw & 0xFFFF).double() for draw in draws])
    # five standard deviations
    assert (torch.corrcoef(low) - torch.eye(len(draws))).abs().max() < 0.08


# --- the norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@each_kernel
def test_squares_are_summed_in_float64_and_divided_by_the_copies(kernels, dtype):
    sizes = (1, 0, 13, NORM_BLOCK, NORM_BLOCK + 1, 2 * NORM_BLOCK + 77)
    gradients = [randn(n, dtype=dtype, seed=n) for n in sizes]
    # starts at an address that is not a multiple of 16 bytes
    gradients.append(randn(99, dtype=dtype)[1:])
    copies = [1, 2, 8, 4, 1, 2, 3]
    expected = math.fsum(
        g.double().square().sum().item() / c for g, c in zip(gradients, copies, strict=True)
    )
    total = square_sum(gradients, copies, kernels)
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(expected, rel=1e-14)
    assert total.item() == square_sum(gradients, copies, kernels).item()
    # control: without division by the copies the sum is different
    assert square_sum(gradients, [1] * 7, kernels).item() != pytest.approx(expected, rel=0.1)


@each_kernel
def test_no_square_leaves_the_range_and_no_nan_is_lost(kernels):
    """Squares of float32 numbers may be outside the range of float32."""
    for value in (1e-30, 1e30):
        expected = pytest.approx(100 * value * value, rel=1e-6)
        assert square_sum([torch.full((100,), value)], [1], kernels).item() == expected
    for position, bad in ((0, math.nan), (NORM_BLOCK + 5, math.inf)):
        gradient = torch.zeros(NORM_BLOCK + 6)
        gradient[position] = bad
        assert not square_sum([gradient[:0], gradient], [1, 2], kernels).isfinite()
    assert square_sum([gradient[:0]], [1], kernels) == 0
