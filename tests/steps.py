"""A training step of a parity case, on a rank of a test."""

import torch
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


def gradients_around_an_evaluation(case: Case) -> list[bool]:
    """For each parameter, whether three gradients are equal: right after backward, after a
    subsequent evaluation, and of a second step. (Ranks import this file; importing test_parity.py
    takes seconds.)"""
    step = make_step(case)

    def gradients() -> list[Tensor]:
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
