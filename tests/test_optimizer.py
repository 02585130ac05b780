"""The update: learning rate, decay, clipping, and a step in which the host never waits for the device."""

import math

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import build_mesh
from tests.counting import Listener
from tools.parity_cases import Case
from tools.parity_run import global_batch, parts
from tools.reference import warmup_cosine
from training.build import build_stages
from training.config import OptimizerConfig
from training.gradient import clip_gradients
from training.optimizer import learning_rate
from training.step import TrainStep


def test_warmup_rises_linearly_and_never_starts_at_zero():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, 100, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_the_formula():
    config = OptimizerConfig(lr=3e-4, warmup_steps=10, min_lr_ratio=0.1)
    expected = warmup_cosine(peak=3e-4, warmup=10, steps=100, floor=0.1)
    for step in range(100):
        assert learning_rate(step, 100, config) == pytest.approx(expected(step), rel=1e-12)
    assert learning_rate(55, 100, config) == pytest.approx(3e-4 * (0.1 + 0.9 / 2))  # half-way down
    assert learning_rate(100, 100, config) == pytest.approx(3e-5)
    assert learning_rate(500, 100, config) == pytest.approx(3e-5)  # a longer run stays at the floor


def test_wsd_is_flat_then_falls_linearly():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_steps=4, min_lr_ratio=0.0)
    rates = [learning_rate(step, 12, config) for step in range(13)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def updated_without_gradient(case):
    """Weights without a gradient move by decay alone: the ratio of each after one update to before it."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_shape(dist.get_world_size()), "cpu")
    stages = build_stages(config, mesh)
    step = TrainStep(config, mesh, stages)
    named = [named for stage in stages.values() for named in stage.named_parameters()]
    before = {name: p.to_local().clone() for name, p in named}
    for _, p in named:
        p.grad = torch.zeros_like(p)
    step.optimizer.step(learning_rate(0, 20, config.optimizer))
    return {name: (p.to_local() / before[name]).flatten() for name, p in named}


def test_decay_is_of_matrices_only(ranks):
    lr, decay = 3e-3 / 5, 0.1
    for ratios in ranks.run(updated_without_gradient, 2, Case((1, 1, 2, 1))):
        assert any(name.endswith("norm.weight") for name in ratios)
        for name, ratio in ratios.items():
            expected = 1.0 if name.endswith("norm.weight") else 1.0 - lr * decay
            assert (ratio - expected).abs().max() < 1e-15, name


@pytest.mark.parametrize(("size", "limit", "expected"), [(5.0, 1.0, 1.0), (5.0, 0.0, 5.0), (0.5, 1.0, 0.5), (0.0, 1.0, 0.0)])
def test_clipping_limits_the_norm_and_never_enlarges(size, limit, expected):
    gradients = [torch.tensor([0.6, 0.0]) * size, torch.tensor([[0.8]]) * size]
    clip_gradients(gradients, torch.tensor(size, dtype=torch.float64), limit)
    assert math.hypot(*(g.norm().item() for g in gradients)) == pytest.approx(expected)


def reported(case):
    """Loss and norm of two steps as this rank reports them, exactly."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_shape(dist.get_world_size()), "cpu")
    step = TrainStep(config, mesh, build_stages(config, mesh))
    results = []
    for index in range(2):
        rows = (t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, index))
        result = step(index, *rows)
        results += [result.loss.item().hex(), result.grad_norm.item().hex()]
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_reports_the_same_bits(ranks, dtype):
    """Else ranks clip differently, and replicas drift apart."""
    results = ranks.run(reported, 8, Case((2, 1, 2, 2), dtype=dtype))
    assert all(result == results[0] for result in results)


def operations_of_a_step(case):
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_shape(dist.get_world_size()), "cpu")
    step = TrainStep(config, mesh, build_stages(config, mesh))
    rows = [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, 0)]
    step(0, *rows)
    with Listener(mesh) as listener:
        result = step(1, *rows)
    with Listener(mesh) as control:
        result.loss.item()
    return dict(listener.operations), dict(control.operations)


WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::unique", "aten::masked_select")


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_host_waits_for_nothing_in_a_step(ranks, zero_stage):
    """No operation reads a number back from the device: loss and norm stay there until the logger asks."""
    case = Case((2, 1, 2, 2), zero_stage=zero_stage, tie_embeddings=True)
    for step, control in ranks.run(operations_of_a_step, 8, case):
        assert not [name for name in WAITS if name in step]
        assert "aten::_local_scalar_dense" in control, "the listener would see a wait if there were one"


def weights_after(case, steps):
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_shape(dist.get_world_size()), "cpu")
    stages = build_stages(config, mesh)
    step = TrainStep(config, mesh, stages)
    for index in range(steps):
        step(index, *(t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, index)))
    return parts(named for stage in stages.values() for named in stage.named_parameters())


def test_a_step_is_repeatable_bit_for_bit(ranks):
    """Resuming bitwise rests on this: the same run twice is the same run."""
    case = Case((2, 1, 1, 2), dtype="float32")
    first, second = (ranks.run(weights_after, 4, case, 3) for _ in range(2))
    for mine, again in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(mine, again, strict=True))
