"""The optimizer step: learning rate, skipped steps, rounding, and no waiting of the host for the
device. (test_kernel_adamw.py has clipping and decay.)"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from model.initialise import draw_rows
from model.kernels.backend import INTERPRETED
from parallel.axes import MeshSizes
from parallel.placement import local_region
from runtime.checkpoints.checkpoint import held_tensors
from tests.counting import Listener
from tests.planted import planted
from tests.runs import same_tensors
from tests.steps import make_step, rows_of
from tools.parity.cases import Case
from tools.parity.reference_training import warmup_cosine
from tools.parity.run import assemble, parts
from training.learning_rate import check_learning_rate, learning_rate
from training.sections import OptimizerConfig

INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is not there")
KERNELS = ["torch", pytest.param("triton", marks=INTERPRETER)]


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"warmup_steps": 4}, 100, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"warmup_steps": 2, "schedule": "wsd", "decay_steps": 4, "min_lr_ratio": 0.0}, 12,
         [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    ],
    ids=["warmup never starts at zero", "wsd is flat, then falls"],
)  # fmt: skip
def test_the_rate_rises_and_falls_linearly(options, steps, expected):
    config = OptimizerConfig(lr=1.0, **options)
    rates = [learning_rate(step, range(steps), config) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


def test_cosine_is_the_formula():
    config = OptimizerConfig(lr=3e-4, warmup_steps=10, min_lr_ratio=0.1)
    expected = warmup_cosine(peak=3e-4, warmup=10, steps=100, floor=0.1)
    for step in range(100):
        assert learning_rate(step, range(100), config) == pytest.approx(expected(step), rel=1e-12)
    half_way_down = learning_rate(55, range(100), config)
    assert half_way_down == pytest.approx(3e-4 * (0.1 + 0.9 / 2))
    for later in (100, 500):  # a longer run stays at the floor
        assert learning_rate(later, range(100), config) == pytest.approx(3e-5)


@pytest.mark.parametrize("warmup", range(13))
def test_no_accepted_wsd_jumps(warmup):
    """The rate rises in warmup and falls by one part of the decay a step, or is refused."""
    for decay in range(1, 13):
        config = OptimizerConfig(
            lr=1.0, warmup_steps=warmup, schedule="wsd", decay_steps=decay, min_lr_ratio=0.0
        )
        rates = [learning_rate(step, range(12), config) for step in range(13)]
        jumps = any(a - b > 1 / decay + 1e-12 for a, b in pairwise(rates))
        if warmup + decay <= 12:
            check_learning_rate(config, range(12), in_stages=False)
            assert not jumps
            assert max(rates) == 1
            continue
        assert jumps or warmup + decay == 13 or warmup == 12
        with pytest.raises(UserError, match=f"optimizer.decay_steps = {decay}: with ") as refused:
            check_learning_rate(config, range(12), in_stages=False)
        most = f"give at most {12 - warmup}, or " if warmup < 12 else "give "
        assert refused.value.remedy == f"{most}optimizer.warmup_steps={12 - decay} or less"


def weights_with_a_bad_step(case, kernels, bad_steps):
    """Norms of all steps, and weights after two updates with `bad_steps` steps between them in
    which only one rank has a NaN in a gradient."""
    step = make_step(case)
    step.optimizer.kernels = kernels
    rows = rows_of(step)

    @planted(step.partial, "sum_over_tp")
    def poison(honest):
        honest()
        if dist.get_rank() == 0:
            step.weights[0].gradient.to_local().view(-1)[0] = math.nan

    norms = [step(0, *rows).grad_norm]
    with poison():
        norms += [step(1, *rows).grad_norm for _ in range(bad_steps)]
    norms.append(step(1, *rows).grad_norm)
    return [norm.item() for norm in norms], weights_of(step)


def weights_of(step):
    return [each.parameter.to_local().clone() for each in step.weights]


def same_bits(mine, other):
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_rank_skips_a_step_whose_norm_is_no_number(ranks, kernels):
    disturbed, honest = (
        ranks.run(weights_with_a_bad_step, 2, Case(MeshSizes(pp=2)), kernels, bad_steps)
        for bad_steps in (1, 0)
    )
    for (norms, mine), (expected_norms, expected) in zip(disturbed, honest, strict=True):
        assert math.isnan(norms.pop(1))
        assert norms == expected_norms
        assert same_bits(mine, expected)
        assert all(weight.isfinite().all() for weight in mine)


def run_twice(case):
    """Twice from the same weights: losses and gradient norms of two steps as this rank reports
    them, as exact hexadecimal text, and its last weights."""
    runs = []
    for step in (make_step(case), make_step(case)):
        results = [step(index, *rows_of(step, index)) for index in range(2)]
        numbers = [x.item().hex() for each in results for x in (each.loss, each.grad_norm)]
        runs.append((numbers, weights_of(step)))
    return runs


@pytest.fixture(scope="module")
def twice(ranks):
    return ranks.run(run_twice, 4, Case(MeshSizes(pp=2, tp=2), dtype="bfloat16"))


def test_every_rank_reports_the_same_bits(twice):
    """Otherwise ranks would clip differently, and replicas would drift apart. (In other dtypes the
    parity proof shows it.)"""
    assert len({tuple(numbers) for (numbers, _), _ in twice}) == 1


def test_a_step_is_repeatable_bit_for_bit(twice):
    """The same steps twice give bitwise the same weights, which bitwise resuming relies on."""
    assert all(same_bits(first, second) for (_, first), (_, second) in twice)


def operations_of_a_step(case):
    step = make_step(case)
    step(0, *rows_of(step))
    with Listener(step.mesh) as listener:
        result = step(1, *rows_of(step))
    with Listener(step.mesh) as control:
        result.loss.item()
    return dict(listener.operations), dict(control.operations)


WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal",
         "aten::unique", "aten::masked_select")  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "zero_stage"),
    [(MeshSizes(pp=2, tp=2), 1), (MeshSizes(pp=2, dp_shard=2), 3)],
    ids=str,
)
def test_the_host_waits_for_nothing_in_a_step(ranks, layout, zero_stage):
    """No operation of a step copies a number from the device to the host: loss and norm stay on the
    device until they are logged."""
    case = Case(layout, zero_stage=zero_stage, tie_embeddings=True)
    for step, control in ranks.run(operations_of_a_step, 4, case):
        assert not [name for name in WAITS if name in step]
        assert WAITS[0] in control, "the listener would see a wait if there were one"


def pure_bfloat16(case):
    config = case.config()
    return replace(config, optimizer=replace(config.optimizer, pure_bfloat16=True))


def rounded_updates(case, resume):
    """bfloat16 weights and moments after three updates with given gradients; with `resume`, a new
    optimizer makes the third update."""
    config = pure_bfloat16(case)
    config.validate(dist.get_world_size())
    step = make_step(config)
    for update in range(3):
        if resume and update == 2:
            before, step = step, make_step(config)
            for old, new in zip(held_tensors(before), held_tensors(step), strict=True):
                new.tensor.to_local().copy_(old.tensor.to_local())
            step.optimizer.set_updates(update)
        for each in step.weights:
            p = each.parameter
            p.grad = torch.empty_like(p)
            rows, *columns = local_region(p)
            gradient = draw_rows(each.global_name, (*p.shape, 1)[:2], rows, 0.01, update)
            mine = gradient[:, slice(columns[0].start, columns[0].stop) if columns else 0]
            p.grad.to_local().copy_(mine)
        step.optimizer.step(1e-3, torch.ones((), dtype=torch.float64), 1.0)
    tensors = [(held.name, held.tensor) for held in held_tensors(step)]
    return {name: t.shape for name, t in tensors}, parts(tensors)


def test_stochastic_rounding_depends_on_no_layout(ranks):
    """From the same given gradients, every layout and a resumed run get bitwise the same weights
    and moments, in every replica."""
    found = []
    for layout, resume in (
        (MeshSizes(pp=2), False),
        (MeshSizes(pp=2, dp_replicate=2), True),
        (MeshSizes(pp=2, dp_shard=2, tp=2), False),
    ):
        case = Case(layout, tie_embeddings=True, dtype="bfloat16")
        runs = ranks.run(rounded_updates, case.world, case, resume)
        shapes = {name: shape for of_rank, _ in runs for name, shape in of_rank.items()}
        whole, spread = assemble([run for _, run in runs], shapes)
        assert spread == 0
        assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in whole.values())
        found.append(whole)
    assert all(same_tensors(found[0], other) for other in found[1:])


def test_pure_bfloat16_is_for_bfloat16():
    with pytest.raises(UserError, match=r"optimizer\.pure_bfloat16 = True: train\.dtype=float32"):
        pure_bfloat16(Case(MeshSizes(), dtype="float32")).validate(1)
