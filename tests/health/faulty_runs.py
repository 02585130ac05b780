"""Runs in which something goes wrong."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import train
import training.step
from runtime.checkpoint import saving
from runtime.trainer_state import held_tensors
from tests.planted import planted
from tests.runs import train_run
from training.step import TrainStep


def flip_a_bit(step: TrainStep, name: str) -> None:
    """Flip one bit of the last number of the first tensor that this rank holds with `name`."""
    held = (each.tensor.to_local() for each in held_tensors(step) if name in each.name)
    tensor = next(filter(torch.Tensor.numel, held))
    tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32).view(-1)[-1] ^= 1


def run_with_a_bit_flipped(arguments: list[str]) -> str:
    """Train; before the second save, a bit of a norm's weight flips on rank 1."""
    calls = []

    @planted(saving, "check_replicas")
    def flipped(check_replicas: Any, step: TrainStep) -> None:
        calls.append(None)
        if len(calls) == 2 and dist.get_rank() == 1:
            flip_a_bit(step, "norm.weight")
        check_replicas(step)

    with flipped():
        return train_run(arguments)


@planted(training.step, "gradient_norm")
def a_gradient_is_nan(gradient_norm, gradients, *about):
    held = next(g.to_local() for g in gradients if g.to_local().numel())
    held.view(-1)[-1] = math.nan
    return gradient_norm(gradients, *about)


def poisoned(
    is_bad: Callable[[int, torch.Tensor], bool], rank: int
) -> AbstractContextManager[None]:
    """One element of one gradient on `rank` is NaN in every step for which `is_bad(number of the
    call, tokens of this rank)` holds."""
    calls = []

    @planted(TrainStep, "forward_backward")
    def poison(forward_backward: Any, self: Any, tokens: torch.Tensor, *args: Any, **more: Any):
        calls.append(None)
        bad = is_bad(len(calls), tokens) and dist.get_rank() == rank
        with a_gradient_is_nan() if bad else nullcontext():
            return forward_backward(self, tokens, *args, **more)

    return poison()


def run_with_bad_steps(arguments: list[str], rank: int, bad: set[int]) -> str:
    with poisoned(lambda call, tokens: call in bad, rank):
        return train_run([*arguments, "guard.examine=false"])  # which would call it again


def run_with_bad_batches(arguments: list[str], bad: list[torch.Tensor], rank: int) -> str:
    """Train with a NaN on `rank` whenever it gets one of these batches."""
    with poisoned(lambda _, tokens: any(torch.equal(tokens, each) for each in bad), rank):
        return train_run([*arguments, "guard.examine=false"])


def run_without(arguments: list[str], samples: tuple[int, int]) -> str:
    """Train with a loader that never yields these samples."""

    @planted(train.BatchLoader, "__init__")
    def skipping(build: Any, *args: Any, **more: Any) -> None:
        build(*args, **{**more, "skipped": [samples]})

    with skipping():
        return train_run(arguments)
