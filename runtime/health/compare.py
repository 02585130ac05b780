"""Compares the products of two computations of the same rows, bit for bit.

In a computation each rank notes, for each of its products in order, a hash of its inputs and one of
its output. If in another computation the inputs of a product were the same and the output is not,
one of the two ranks that computed it has computed wrongly: a *dispute*. A product whose inputs
differ says nothing about its rank, because a wrong number reaches all that is computed from it.
"""

import itertools
import os
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from model.kernels.bit_hash import hash_of
from model.matmul import Matmul
from runtime.device import deterministic
from runtime.health.products import Around, Compute, Inputs, linear_layers, wrap
from training.step import TrainStep

FIRST = 2  # disputed products that each pair of ranks settles
TF32 = 2.0**-10  # of a number that a GPU may round to TF32, as a product of float32 does


@dataclass
class Computed:
    """What a computation of the gradients gave, on this rank."""

    loss: float  # of the global batch
    norm: float  # of the gradients
    products: Tensor  # [n, 2] int64, on the CPU: hashes of the inputs and the output of each


def compute(train: TrainStep, tokens: Tensor, targets: Tensor) -> Computed:
    """Compute the gradients of a batch, and drop them; every rank calls it, between steps."""
    hashes: list[Tensor] = []
    kernels = train.config.model.kernels

    def hashed(name: str, kind: str, compute: Compute, inputs: Inputs) -> Tensor:
        before = hash_of((each for each in inputs if each is not None), kernels)
        result = compute()
        hashes.extend([before, hash_of([result], kernels)])
        return result

    loss, norm = _forward_backward(train, tokens, targets, hashed)
    values = torch.stack(hashes).view(-1, 2) if hashes else torch.zeros(0, 2, dtype=torch.int64)
    return Computed(loss, norm, values.cpu())


def settle(train: TrainStep, tokens: Tensor, targets: Tensor, which: set[int]) -> bool:
    """Compute the gradients of a batch once more. Returns whether one of this rank's products
    `which`, by number, is wrong; every rank calls it. Takes minutes for large products, for which
    the others wait in collectives."""
    numbers, wrong = itertools.count(), False

    def settled(name: str, kind: str, compute: Compute, inputs: Inputs) -> Tensor:
        nonlocal wrong
        if next(numbers) not in which:
            return compute()
        # in float64, on the host, before the product may overwrite one of them
        exact = [None if each is None else _exact(each) for each in inputs]
        result = compute()
        wrong |= not _is_rounding(kind, result, exact)
        return result

    threads = torch.get_num_threads()
    if train.mesh.device == "cuda":  # torchrun gives each process one thread; several ranks settle
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        share = min((os.cpu_count() or 1) // local, len(os.sched_getaffinity(0)))
        torch.set_num_threads(max(threads, share))
    _forward_backward(train, tokens, targets, settled)
    torch.set_num_threads(threads)
    return wrong


def disputes(mine: Tensor, other: Tensor) -> list[int]:
    """The first products with the same inputs and different outputs, by number."""
    both = min(len(mine), len(other))
    same = mine[:both] == other[:both]
    return torch.nonzero(same[:, 0] & ~same[:, 1]).flatten()[:FIRST].tolist()


def passed_on(tensor: Tensor, train: TrainStep, by: int) -> Tensor:
    """Send `tensor` to the data-parallel rank `by` after this one (the first comes after the last),
    and return what the rank as many before this one sends: of the same shape, on the CPU."""
    mesh, group = train.mesh, train.mesh.batch.group
    ranks, me = dist.get_process_group_ranks(group), mesh.batch.rank
    if len(ranks) == 1:
        return tensor
    sent = tensor.to(mesh.device).contiguous()
    got = torch.empty_like(sent)
    to, source = ranks[(me + by) % len(ranks)], ranks[(me - by) % len(ranks)]
    send = dist.P2POp(dist.isend, sent, to, group)
    receive = dist.P2POp(dist.irecv, got, source, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return got.cpu()


def _forward_backward(
    train: TrainStep, tokens: Tensor, targets: Tensor, around: Around
) -> tuple[float, float]:
    """The loss and the norm of the gradients, with `around` each product of linear layers."""
    with ExitStack() as stack:
        stack.callback(wrap(linear_layers(train), around))
        stack.enter_context(deterministic(train.mesh.device))
        loss, norm = train.forward_backward(tokens, targets, deterministic=True)
    for each in train.weights:
        each.parameter.grad = None
    return loss.item(), norm.item()


def _exact(tensor: Tensor) -> Tensor:
    """A copy in float64 on the host, converted there: the device has no memory for it."""
    return tensor.detach().cpu().to(torch.float64, copy=True)


def _is_rounding(kind: str, result: Tensor, inputs: list[Tensor | None]) -> bool:
    """Whether the result of a product is as close to that of `inputs` in float64 as rounding
    allows: each number within (K + 8) ε of the sum of K absolute values that it adds up. Numbers
    that are infinite or nan, or may overflow on the way, say nothing."""
    products = Matmul()
    first, second, *rest = inputs
    assert first is not None
    assert second is not None
    product = getattr(products, kind)
    exact, scale = product(first, second), product(first.abs(), second.abs())
    into = rest[0] if rest else None
    if into is not None:
        exact, scale = exact + into.view_as(exact), scale + into.abs().view_as(scale)
    terms = first.numel() // first.shape[-1] if kind == "weight_gradient" else first.shape[-1]
    of = torch.finfo(result.dtype)
    unit = of.eps + torch.finfo(torch.float32).eps * (terms + 8)
    if result.is_cuda and result.dtype == torch.float32:
        unit += TF32
    error = (_exact(result).view_as(exact) - exact).abs()
    small = of.tiny * (terms + 8)  # below it, a device may round to zero
    within = (error <= unit * scale + small) | ~(scale < of.max / 2)
    return bool(within.all())
