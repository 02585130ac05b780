"""`DTensor.full_tensor` gathers what the ranks hold, also where shards differ in size."""

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from tools.parity.cases import Case
from tools.parity.run import assemble, parts
from training.build import build_stages
from training.step import TrainStep


def full_tensors(case):
    """The gradients as `DTensor.full_tensor` gathers them, and this rank's parts of them."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    stages = build_stages(config, mesh)
    step = TrainStep(config, mesh, stages)
    tokens = torch.arange(32 * 16).view(32, 16) * 7 % case.vocab_size
    local = tokens.chunk(mesh.dp_size)[mesh.dp_rank]
    step.forward_backward(local, local)
    gradients = {name: p.grad for stage in stages.values() for name, p in stage.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}, parts(
        gradients.items()
    )


@pytest.mark.thorough
def test_full_tensor_gathers_uneven_shards_too(ranks):
    """`DTensor.full_tensor`, which tools use, also gathers shards of different sizes: 251 rows over
    tp 2 and then dp_shard 4 divide evenly nowhere."""
    results = ranks.run(full_tensors, 8, Case(MeshSizes(dp_shard=4, tp=2)))
    gathered = results[0][0]
    whole, spread = assemble(
        [mine for _, mine in results], {name: tensor.shape for name, tensor in gathered.items()}
    )
    assert spread == 0
    assert whole.keys() == gathered.keys()
    for name, tensor in gathered.items():
        assert torch.equal(tensor, whole[name]), name
