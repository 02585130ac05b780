"""A training step of a parity case, on a rank of a test."""

from torch import Tensor
from torch.nn import Parameter

from proofs.parity import run
from proofs.parity.cases import Case
from proofs.parity.run import global_batch
from settings.config import Config
from training.step import TrainStep


def make_step(config: Config | Case) -> TrainStep:
    return run.make_step(config.config() if isinstance(config, Case) else config)


def rows_of(step: TrainStep, index: int = 0) -> list[Tensor]:
    """This rank's tokens and targets of the global batch number `index`."""
    batch = global_batch(step.config.model.vocab_size, index)
    return [t.chunk(step.mesh.batch.size)[step.mesh.batch.rank] for t in batch]


def named_parameters(step: TrainStep) -> list[tuple[str, Parameter]]:
    return [named for stage in step.stages.values() for named in stage.named_parameters()]
