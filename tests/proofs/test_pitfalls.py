"""Known mistakes of other training codebases, collected from their issue threads: a test for each
mistake that affects the mathematics and that no parity case (test_parity.py) shows.

The others (a loss scaled per rank or micro-batch, gradients of norms averaged or not reduced,
replicated weights or tied embeddings counted twice in the norm, or a norm local to a stage) are
planted in test_controls.py, where the comparison of parity finds them. A norm that depends on the
partition, because it is summed in the gradients' dtype, is found in test_kernel_adamw.py. Most
mistakes do not show in a loss curve. (Loader state, signals and background saves have their own
test files.)
"""

import pytest
import torch

from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from tests.steps import make_step, named_parameters, rows_of


def gradients_around_an_evaluation(case):
    """For each parameter, whether three gradients are equal: right after backward, after a
    subsequent evaluation, and of a second step."""
    step = make_step(case)

    def gradients():
        return [p.grad.to_local().clone() for _, p in named_parameters(step)]

    step.forward_backward(*rows_of(step))
    found = [gradients()]
    step.evaluate(*rows_of(step, 1))
    found.append(gradients())
    for _, p in named_parameters(step):
        p.grad = None
    step.forward_backward(*rows_of(step))
    found.append(gradients())
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
