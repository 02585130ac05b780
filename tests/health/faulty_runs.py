"""Runs in which something goes wrong."""

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import train
import training.step
from runtime.checkpoint import saving
from runtime.health.products import linear_layers, wrap
from runtime.listener import Run
from runtime.trainer_state import held_tensors
from tests.planted import planted
from tests.runs import train_run
from training.step import TrainStep

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def flip(tensor: torch.Tensor, bit: int, at: int = 0) -> None:
    """Flip a bit of one of the tensor's numbers. (Bit 30 of a float32, and bit 14 of a bfloat16,
    are the highest of the exponent.)"""
    tensor.view(BITS[tensor.element_size()]).view(-1)[at] ^= 1 << bit


def flip_a_bit(step: TrainStep, name: str) -> None:
    """Flip one bit of the last number of the first tensor that this rank holds with `name`."""
    held = (each.tensor.to_local() for each in held_tensors(step) if name in each.name)
    flip(next(filter(torch.Tensor.numel, held)), 0, -1)


@dataclass(frozen=True)
class Fault:
    """On one rank, a bit flips in a product of the last linear layer of a block: once, in `step`,
    or `always` from then on."""

    rank: int
    step: int
    always: bool
    layer: int = 1
    product: str = "input_gradient"
    bit: int = 30


def faulty_run(arguments: list[str], fault: Fault, runs: Callable[..., str] = train_run) -> str:
    @planted(train, "build_listeners")
    def faulty(build: Any, run: Run, *about: Any) -> Any:
        left = [fault]

        def disturbed(name: str, kind: str, compute: Callable[[], Any], inputs: Any) -> Any:
            result = compute()
            if kind == fault.product and run.step + 1 >= fault.step and left:
                flip(result, fault.bit)
                if not fault.always:
                    left.clear()
            return result

        if dist.get_rank() == fault.rank:  # before all listeners: what they compute is wrong, too
            layers = linear_layers(run.train)
            name = [name for name in layers if f"blocks.{fault.layer}." in name][-1]
            wrap({name: layers[name]}, disturbed)
        return build(run, *about)

    with faulty():
        return runs(arguments)


def run_with_a_bit_flipped(arguments: list[str]) -> str:
    """Train; before the second save, a bit of a norm's weight flips on rank 1."""
    saves = itertools.count(1)

    @planted(saving, "check_replicas")
    def flipped(check_replicas: Any, step: TrainStep) -> None:
        if next(saves) == 2 and dist.get_rank() == 1:
            flip_a_bit(step, "norm.weight")
        check_replicas(step)

    with flipped():
        return train_run(arguments)


@planted(training.step, "gradient_norm")
def a_gradient_is_nan(gradient_norm, gradients, *about):
    held = next(g.to_local() for g in gradients if g.to_local().numel())
    held.view(-1)[-1] = math.nan
    return gradient_norm(gradients, *about)


def poisoned(is_bad: Callable[[int, torch.Tensor], bool], rank: int) -> AbstractContextManager:
    """One element of one gradient on `rank` is NaN in every step for which `is_bad(number of the
    call, tokens of this rank)` holds."""
    calls = itertools.count(1)

    @planted(TrainStep, "forward_backward")
    def poison(forward_backward: Any, self: Any, tokens: torch.Tensor, *args: Any, **more: Any):
        bad = is_bad(next(calls), tokens) and dist.get_rank() == rank
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
