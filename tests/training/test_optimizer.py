"""The optimizer step: learning rate and rounding. (test_kernel_adamw.py has the update,
test_guard.py a step with a NaN on one rank, and tests/rehearse/test_streams.py a host that waits
for the device in a step.)"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from model.initialise import draw_rows
from parallel.axes import MeshSizes
from parallel.placement import local_region
from proofs.parity.cases import Case
from proofs.parity.reference_training import warmup_cosine
from proofs.parity.run import assemble, parts
from runtime.trainer_state import held_tensors
from settings.checks import check_learning_rate, validate
from settings.sections import OptimizerConfig
from tests.runs import same_tensors
from tests.steps import make_step
from training.learning_rate import learning_rate


def test_cosine_is_the_formula():
    config = OptimizerConfig(lr=3e-4, warmup_steps=10, min_lr_ratio=0.1)
    for step in range(100):
        expected = warmup_cosine(step, 100, config)
        assert learning_rate(step, range(100), config) == pytest.approx(expected, rel=1e-12)
    half_way_down = learning_rate(55, range(100), config)
    assert half_way_down == pytest.approx(3e-4 * (0.1 + 0.9 / 2))
    for later in (100, 500):  # a longer run stays at the floor
        assert learning_rate(later, range(100), config) == pytest.approx(3e-5)


@pytest.mark.parametrize("warmup", [0, 1, 6, 11, 12])
def test_no_accepted_wsd_jumps(warmup):
    """The rate rises in warmup and falls by one part of the decay a step, or is refused."""
    for decay in range(1, 13):
        config = OptimizerConfig(
            lr=1.0, warmup_steps=warmup, schedule="wsd", decay_steps=decay, min_lr_ratio=0.0
        )
        rates = [learning_rate(step, range(12), config) for step in range(13)]
        jumps = any(a - b > 1 / decay + 1e-12 for a, b in pairwise(rates))
        if warmup + decay <= 12:
            check_learning_rate(config, range(12), 12)
            assert not jumps
            assert max(rates) == 1
            continue
        assert jumps or warmup + decay == 13 or warmup == 12
        with pytest.raises(UserError, match=f"optimizer.decay_steps = {decay}: with ") as refused:
            check_learning_rate(config, range(12), 12)
        most = f"give at most {12 - warmup}, or " if warmup < 12 else "give "
        assert refused.value.remedy == f"{most}optimizer.warmup_steps={12 - decay} or less"


def rounded_updates(case, resume, seed=0):
    """bfloat16 weights and moments after three updates with given gradients; with `resume`, a new
    optimizer makes the third update."""
    config = case.config()
    config = replace(config, optimizer=replace(config.optimizer, pure_bfloat16=True))
    config = replace(config, train=replace(config.train, seed=seed))
    validate(config, dist.get_world_size())
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
    and moments, in every replica. Another seed gives other weights, and rounds otherwise."""
    found = []
    for layout, *about in (
        (MeshSizes(pp=2), False),
        (MeshSizes(pp=2, dp_replicate=2), True),
        (MeshSizes(pp=2, dp_shard=2, tp=2), False),
        (MeshSizes(pp=2), False, 1),
    ):
        case = Case(layout, tie_embeddings=True, dtype="bfloat16")
        runs = ranks.run(rounded_updates, case.world, case, *about)
        shapes = {name: shape for of_rank, _ in runs for name, shape in of_rank.items()}
        whole, spread = assemble([run for _, run in runs], shapes)
        assert spread == 0
        assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in whole.values())
        found.append(whole)
    first, *others, reseeded = found
    assert all(same_tensors(first, other) for other in others)
    apart = {name: (first[name] - other).abs().max() for name, other in reseeded.items()}
    assert apart["model.embedding.weight"] > 0.1, "the seed of the weights"
    # moments depend on the given gradients and rounding only
    assert 0 < apart["optimizer.embedding.weight.exp_avg"] < 1e-3
