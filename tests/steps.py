"""A training step of a parity case, on a rank of a test."""

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from parallel.mesh import build_mesh
from proofs.parity.cases import BOS, Case
from proofs.parity.run import global_batch
from settings.config import Config
from training.build import build_stages
from training.step import TrainStep


def make_step(config: Config | Case) -> TrainStep:
    if isinstance(config, Case):
        config = config.config()
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, "cpu", config.model.has_experts)
    return TrainStep(config, mesh, build_stages(config, mesh), BOS)


def rows_of(step: TrainStep, index: int = 0) -> list[Tensor]:
    """This rank's tokens and targets of the global batch number `index`."""
    batch = global_batch(step.config.model.vocab_size, index)
    return [t.chunk(step.mesh.batch.size)[step.mesh.batch.rank] for t in batch]


def named_parameters(step: TrainStep) -> list[tuple[str, Parameter]]:
    return [named for stage in step.stages.values() for named in stage.named_parameters()]
