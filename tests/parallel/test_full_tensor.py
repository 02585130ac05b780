"""`DTensor.full_tensor` gathers what the ranks hold, also where shards differ in size."""

import pytest
import torch

from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.parity.run import assemble, parts
from tests.steps import make_step, named_parameters, rows_of


def full_tensors(case):
    """The gradients as `DTensor.full_tensor` gathers them, and this rank's parts of them."""
    step = make_step(case)
    step.forward_backward(*rows_of(step))
    gradients = {name: p.grad for name, p in named_parameters(step)}
    return {name: g.full_tensor() for name, g in gradients.items()}, parts(gradients.items())


@pytest.mark.thorough
def test_full_tensor_gathers_uneven_shards_too(ranks):
    """`DTensor.full_tensor`, which tools use, also gathers shards of different sizes: 251 rows over
    tp 2 and then dp_shard 4 divide evenly nowhere."""
    results = ranks.run(full_tensors, 8, Case(MeshSizes(dp_shard=4, tp=2)))
    gathered = results[0][0]
    whole, spread = assemble(
        [mine for _, mine in results], {n: t.shape for n, t in gathered.items()}
    )
    assert spread == 0
    assert whole.keys() == gathered.keys()
    for name, tensor in gathered.items():
        assert torch.equal(tensor, whole[name]), name
