"""The optimizer's kernels: an update of many tensors is compared with torch's AdamW in float64;
skipped steps, stochastic rounding and the gradient norm."""

import math
from dataclasses import replace

import pytest
import torch

from model.kernels.adamw import BLOCK, Location, Rates, adamw, lowbias32, random_bits, stochastic
from model.kernels.backend import INTERPRETED, why_not_triton
from model.kernels.gradient_norm import BLOCK as NORM_BLOCK
from model.kernels.gradient_norm import square_sum
from model.kernels.multi_tensor import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason="needs Triton")
KERNELS = ["torch", pytest.param("triton", marks=triton)]
SIZES = (1, 13, BLOCK, 0, BLOCK + 1, 997, 7, 5)
DECAYS = [0.1, 0.0] * 4
RATES = Rates(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, max_norm=1.0)
LOCATIONS = [Location(i, 0, max(1, n), max(1, n)) for i, n in enumerate(SIZES, 1)]  # for bfloat16


@pytest.fixture(autouse=True)
def on_device():
    """Tests create their tensors on the device on which the kernels run."""
    with torch.device(DEVICE):
        yield


def randn(n, generator, dtype=torch.float64):
    """Random numbers that are the same on every device."""
    return torch.randn(n, generator=generator, dtype=dtype, device="cpu").to(DEVICE)


class State:
    """Weights, moments and update count for tensors of SIZES."""

    def __init__(self, dtype):
        self.p = random_tensors(0, dtype)
        self.m, self.v = ([torch.zeros_like(t) for t in self.p] for _ in range(2))
        self.step = torch.zeros(())

    def update(self, gradients, kernels, rates=RATES, norm=None):
        """With the norm of these gradients, unless another is given. They are overwritten."""
        norm = torch.tensor(norm_of(gradients) if norm is None else norm, dtype=torch.float64)
        adamw(self.p, gradients, self.m, self.v, DECAYS, LOCATIONS, self.step, norm, rates, kernels)

    def tensors(self):
        return [*self.p, *self.m, *self.v, self.step]


def random_tensors(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [randn(n, generator).to(dtype) for n in SIZES]


def gradients_of(step, dtype):
    return random_tensors(100 + step, dtype)


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def norm_of(gradients):
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


def worst(ours, theirs):
    """The largest error relative to the largest number, because sums of gradients of both signs may
    cancel to small numbers."""
    a, b = (torch.cat(list(tensors)).double() for tensors in (ours, theirs))
    return ((a - b).abs().max() / b.abs().max()).item()


def torch_adamw(state, steps, dtype, max_norm=1.0, fused=False):
    """Weights and moments after torch's own optimizer has made `steps` updates in `dtype` with the
    gradients of `gradients_of`, clipped."""
    parameters = [torch.nn.Parameter(w.to(dtype, copy=True)) for w in state.p]
    groups = [{"params": parameters[i::2], "weight_decay": DECAYS[i]} for i in range(2)]
    optimizer = torch.optim.AdamW(
        groups, lr=RATES.lr, betas=RATES.betas, eps=RATES.eps, fused=fused
    )
    for step in range(steps):
        gradients = gradients_of(step, state.p[0].dtype)
        norm = torch.tensor(norm_of(gradients), dtype=torch.float64)
        factor = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones(())
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.to(dtype) * factor.to(dtype)
        optimizer.step()
    moments = [[optimizer.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq")]
    return [[p.detach() for p in parameters], *moments]


# --- the update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e3], ids=["no limit", "clipped", "within"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_three_steps_are_torchs_in_float64(kernels, dtype, bound, max_norm):
    state = State(dtype)
    expected = torch_adamw(state, 3, torch.float64, max_norm)
    for step in range(3):
        state.update(gradients_of(step, dtype), kernels, replace(RATES, max_norm=max_norm))
    for ours, theirs in zip((state.p, state.m, state.v), expected, strict=True):
        assert worst(ours, theirs) <= bound
    assert state.step == 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_comparison_sees_a_wrong_bias_correction(kernels):
    state = State(torch.float32)
    state.step += 1  # plant: the first update is taken for the second
    expected = torch_adamw(state, 1, torch.float64)
    state.update(gradients_of(0, torch.float32), kernels)
    assert worst(state.m, expected[1]) <= 2e-6
    assert worst(state.p, expected[0]) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_is_torchs_fused_adamw_to_the_bit(dtype):
    state = State(dtype)
    weights, first, second = torch_adamw(state, 3, dtype, fused=True)
    for step in range(3):
        state.update(gradients_of(step, dtype), "torch")
    assert same(state.tensors(), [*weights, *first, *second, state.step])


@triton
def test_bias_corrections_lose_no_digits():
    """1 − βᵗ is exact for β = 0.999999 and t = 1. As a difference in float32 it would have only one
    correct digit."""
    state = State(torch.float32)
    before = [p.clone() for p in state.p]
    rates = Rates(1.0, (0.999999, 0.999999), 1e-12, 0.0)
    state.update([torch.full_like(p, 0.5) for p in state.p], "triton", rates)
    for p, old, decay in zip(state.p, before, DECAYS, strict=True):
        # m/(1−β₁) = g, v/(1−β₂) = g²
        assert torch.allclose(old * (1 - decay) - p, torch.ones_like(p), rtol=2e-6)


@triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_start_anywhere_and_have_any_strides(dtype):
    aligned, odd, strided = State(dtype), State(dtype), State(dtype)
    gradients = gradients_of(0, dtype)
    buffer = torch.cat([torch.zeros(1, dtype=dtype), *gradients])
    views = list(buffer[1:].split(SIZES))
    wide = [torch.stack((g, g), dim=1)[:, 0] for g in gradients]
    assert prepare([gradients], [], BLOCK).aligned
    assert not prepare([views], [], BLOCK).aligned
    for state, theirs in ((aligned, gradients), (odd, views), (strided, wide)):
        state.update(theirs, "triton")
    for other in (odd, strided):
        assert same(aligned.tensors(), other.tensors())


@pytest.mark.parametrize("kernels", KERNELS)
def test_without_gradients_only_decay_changes_weights(kernels):
    """A norm of zero is no denominator."""
    state = State(torch.float64)
    expected = [p * (1 - RATES.lr * decay) for p, decay in zip(state.p, DECAYS, strict=True)]
    state.update([torch.zeros_like(p) for p in state.p], kernels)
    assert worst(state.p, expected) < 1e-15


@triton
def test_a_table_of_unlike_tensors_is_refused():
    """Of other sizes, dtypes or strides, because the kernel trusts its table."""
    a, b = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    for lists in ([[a, b]], [[a], [torch.zeros(5)]], [[torch.zeros(4, 2)[:, 0]]]):
        with pytest.raises(AssertionError):
            prepare(lists, [], BLOCK)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.float32, math.nan), (torch.float64, math.inf), (torch.bfloat16, math.nan)],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_without_a_finite_norm_never_was(kernels, bad, dtype):
    """A step with a norm that is not finite changes neither weights nor moments, nor the bias
    correction and random bits of the next step."""
    state, undisturbed = State(dtype), State(dtype)
    for either in (state, undisturbed):
        either.update(gradients_of(0, dtype), kernels)
    before = [t.clone() for t in state.tensors()]
    poisoned = gradients_of(1, dtype)
    poisoned[4][7] = bad
    state.update(poisoned, kernels, norm=bad)
    assert same(state.tensors(), before)
    for either in (state, undisturbed):
        either.update(gradients_of(1, dtype), kernels)
    assert same(state.tensors(), undisturbed.tensors())
    assert not torch.equal(state.p[4], before[4])


# --- rounding -------------------------------------------------------------------------------------


def test_every_input_bit_turns_every_output_bit_half_of_the_time():
    """Each input bit flips each output bit with probability one half, as in a good hash. With a
    wrong constant or shift, some pair of bits is far from that."""
    x = torch.randint(
        0, 2**32, (1 << 13,), generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(DEVICE)
    for bit in range(32):
        turned = lowbias32(x) ^ lowbias32(x ^ (1 << bit))
        rates = torch.stack([(turned >> out & 1).double().mean() for out in range(32)])
        assert (rates - 0.5).abs().max() < 0.04, bit


def test_rounding_is_to_a_neighbour_and_right_on_average():
    count = 1 << 16
    bits = random_bits(Location(9, 0, count, count), torch.Size([count]), torch.tensor(3)) & 0xFFFF
    for value in (0.95, -0.95, 1e-20, 3.14159e7, 1.0 + 2**-20):
        x = torch.full((count,), value)
        rounded = stochastic(x, bits).double()
        below, above = rounded.min().item(), rounded.max().item()
        ulp = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
        assert above - below <= ulp
        assert below <= x[0].item() <= above
        # within four standard deviations
        assert abs(rounded.mean().item() - x[0].item()) < 4 * 0.5 * ulp / math.sqrt(count)


def test_rounding_leaves_what_is_exact_and_what_is_no_number():
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3.0e38, math.inf, -math.inf]).bfloat16()
    bits = torch.full(exact.shape, 0xFFFF)
    assert torch.equal(stochastic(exact.float(), bits).view(torch.int16), exact.view(torch.int16))
    # NVIDIA's NaN: one more bit would make it −0
    worst_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert stochastic(worst_nan, bits[:1]).isnan().all()


@triton
def test_kernel_and_reference_round_with_the_same_bits():
    """In the interpreter, whole updates by the kernel and the reference agree bit for bit, because
    it multiplies and adds separately, as PyTorch on the CPU. (A GPU fuses the two.)"""
    if not INTERPRETED:
        pytest.skip("kernels are compiled here")
    kernel, reference = State(torch.bfloat16), State(torch.bfloat16)
    for step in range(2):
        kernel.update(gradients_of(step, torch.bfloat16), "triton")
        reference.update(gradients_of(step, torch.bfloat16), "torch")
    assert same(kernel.tensors(), reference.tensors())


def one_bfloat16_update(values, location, kernels):
    """p and v after an update without gradient from these values of both."""
    p, v, m, g = values.clone(), values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    norm = torch.ones((), dtype=torch.float64)
    adamw([p], [g], [m], [v], [0.1], [location], torch.zeros(()), norm, RATES, kernels)
    return p, v


@pytest.mark.parametrize("kernels", KERNELS)
def test_small_changes_are_not_lost(kernels):
    """Stochastic rounding keeps small changes on average. 0.95 lies a fifth of the way between two
    bfloat16 numbers: rounded to nearest, every result would be too small by a fifth of a unit."""
    count = 4 * BLOCK
    p, v = one_bfloat16_update(torch.ones(count).bfloat16(), Location(1, 0, count, count), kernels)
    ulp = 2**-8
    bound = 5 * 0.4 * ulp / math.sqrt(count)  # five standard deviations
    nearest = torch.tensor(0.95).bfloat16().item()
    assert abs(v.double().mean().item() - 0.95) < bound < abs(nearest - 0.95) / 5
    # 2⁻⁸·0.077 below one: rounded to nearest, no weight would ever decay
    decayed = 1 - RATES.lr * 0.1
    assert abs(p.double().mean().item() - decayed) < bound < (1 - decayed) / 3


ROWS, COLUMNS = 9, 701


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 9), (0, 701)), ((2, 7), (0, 701)), ((0, 9), (300, 701)), ((4, 9), (17, 18))],
)
@pytest.mark.parametrize("kernels", KERNELS)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernels", KERNELS)
def test_squares_are_summed_in_float64_and_divided_by_the_copies(kernels, dtype):
    sizes = (1, 0, 13, NORM_BLOCK, NORM_BLOCK + 1, 2 * NORM_BLOCK + 77)
    generator = torch.Generator().manual_seed(0)
    gradients = [randn(n, generator, torch.float32).to(dtype) for n in sizes]
    # starts at an address that is not a multiple of 16 bytes
    gradients.append(randn(99, generator, torch.float32).to(dtype)[1:])
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


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_no_square_leaves_the_range(kernels, value):
    """Squares do not overflow or underflow: each value here is a float32, but its square is outside
    the range of float32."""
    gradients = [torch.full((100,), value)]
    expected = pytest.approx(100 * value * value, rel=1e-6)
    assert square_sum(gradients, [1], kernels).item() == expected


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_gradient_that_is_no_number_is_noticed_wherever_it_is(kernels):
    for position, bad in ((0, math.nan), (NORM_BLOCK + 5, math.inf)):
        gradient = torch.zeros(NORM_BLOCK + 6)
        gradient[position] = bad
        assert not square_sum([gradient[:0], gradient], [1, 2], kernels).isfinite()
    assert square_sum([gradient[:0]], [1], kernels) == 0


# --- as PyTorch's operations ----------------------------------------------------------------------


@triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_keep_what_they_promise(dtype):
    p, m, g = ([torch.randn(3).to(dtype), torch.randn(5, 2).to(dtype)] for _ in range(3))
    v = [t.abs() for t in m]
    scalars = torch.tensor([1.0, 0.5, 1e-3, 2.0, 3.0], dtype=torch.float64)
    locations = [7, 0, 3, 3, 8, 4, 2, 6] if dtype == torch.bfloat16 else []
    arguments = p, g, m, v, scalars, [1e-4, 0.0], 0.9, 0.95, 1e-8, locations
    torch.library.opcheck(torch.ops.lattice.adamw.default, arguments)
    torch.library.opcheck(torch.ops.lattice.square_sum.default, (g, [1, 2]))
