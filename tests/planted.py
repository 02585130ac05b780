"""Mistakes that tests plant in the code under test, and must find."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import training.step
from training.step import TrainStep


def planted(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Make a context manager of a mistake, which replaces `owner.name` and gets the original as its
    first argument. At the top level of a file, ranks can import it by its name."""

    def decorate(mistake: Callable[..., Any]) -> Callable[[], Any]:
        @functools.wraps(mistake)
        def plant() -> Any:
            honest = getattr(owner, name)
            return patch.object(owner, name, lambda *args, **more: mistake(honest, *args, **more))

        return plant

    return decorate


@contextlib.contextmanager
def from_table(module: str, *names: str) -> Iterator[None]:
    """Plant mistakes of the table MISTAKES of a module of tests: name → (owner, name in it, the
    mistake, …)."""
    with contextlib.ExitStack() as patches:
        for each in names:
            owner, attribute, mistake, *_ = importlib.import_module(module).MISTAKES[each]
            patches.enter_context(planted(owner, attribute)(mistake)())
        yield


def planting(bug: str | Callable[[], Any], module: str) -> Callable[[], Any]:
    """A mistake itself, or that of the table MISTAKES of `module` with this name."""
    return functools.partial(from_table, module, bug) if isinstance(bug, str) else bug


@planted(TrainStep, "forward_backward")
def nothing_wrong(forward_backward, *args, **more):
    return forward_backward(*args, **more)


def name_of(value: object) -> str:
    """A test id that is the same in every process; a set is sorted, because its order is not."""
    return getattr(value, "__name__", str(sorted(value) if isinstance(value, set) else value))


@planted(FSDPModule, "set_gradient_divide_factor")
def gradients_averaged(divide, self, _):
    """FSDP averages gradients over ranks instead of summing them."""
    divide(self, 2.0)


@planted(training.step, "gradient_norm")
def replicas_counted_in_the_norm(_, gradients, *about):
    """Square sums of all ranks are added, so replicated parameters count once per replica."""
    total = sum(g.to_local().double().square().sum() for g in gradients)
    dist.all_reduce(total)
    return total.sqrt()
