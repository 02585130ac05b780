"""Known mistakes of other training codebases, collected from their issue threads: one test for each
mistake that affects the mathematics and that no parity case (test_parity.py) shows.

The others (a loss scaled per rank or micro-batch, gradients of norms averaged or not reduced,
replicated weights or tied embeddings counted twice in the norm, or a norm local to a stage) are
planted in test_controls.py, where the comparison of parity finds them. Most mistakes do not show in
a loss curve. (Loader state, signals and background saves have their own test files.)
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from proofs.parity.cases import Case
from tests.steps import make_step, named_parameters, rows_of
from training.gradient import gradient_norm


def norms_of_the_same():
    """The norms of the same bfloat16 numbers sharded by rows, sharded by columns and replicated;
    and the expected norm, computed in float64."""
    mesh, world = build_mesh(MeshSizes(tp=dist.get_world_size()), "cpu"), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1024, 512, generator=generator) * torch.logspace(-3, 3, 512)
    numbers = numbers.bfloat16()
    norms = []
    for place in (Shard(0), Shard(1), Replicate()):
        whole = isinstance(place, Replicate)
        local = numbers if whole else numbers.chunk(world, place.dim)[dist.get_rank()].contiguous()
        cut = DTensor.from_local(local, mesh.tp.mesh, [place], run_check=False)
        norms.append(gradient_norm([cut, cut], mesh).item())
    return norms, math.sqrt(2) * numbers.double().norm().item()


def test_norm_that_depends_on_the_partition(ranks):
    """If it were summed in the gradients' dtype, half a million numbers would round differently for
    every sharding."""
    for norms, truth in ranks.run(norms_of_the_same, 4):
        assert norms == pytest.approx([truth] * 3, rel=1e-12)


def gradients_around_an_evaluation(case):
    """For each parameter, whether three gradients are equal: right after backward, after a
    subsequent evaluation, and of a second step."""
    step = make_step(case)
    found = []

    def note():
        found.append([p.grad.to_local().clone() for _, p in named_parameters(step)])

    step.forward_backward(*rows_of(step))
    note()
    step.evaluate(*rows_of(step, 1))
    note()
    for _, p in named_parameters(step):
        p.grad = None
    step.forward_backward(*rows_of(step))
    note()
    return [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "case",
    [Case(MeshSizes(pp=2, dp_shard=2)), Case(MeshSizes(dp_shard=2), zero_stage=3)],
    ids=str,
)
def test_accumulated_gradients_wiped_when_a_stage_is_used_again(ranks, case):
    """An evaluation on the same stages neither erases accumulated gradients nor adds to later
    ones."""
    for same in ranks.run(gradients_around_an_evaluation, case.world, case):
        assert all(same)
