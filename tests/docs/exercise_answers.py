"""Answers to the exercises in docs/exercises, under the exercises' names. Try them first."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from docs.exercises.test_checkpoints import Region
from docs.exercises.test_kernels import Block
from parallel.pipeline.actions import BACKWARD, FORWARD, Action


def ranks_that_share(axis: str, rank: int, shape: tuple[int, int, int, int, int]) -> list[int]:
    dim = ("pp", "dp_replicate", "dp_shard", "cp", "tp").index(axis)
    stride = math.prod(shape[dim + 1 :])  # from one rank of the group to the next
    mine = rank // stride % shape[dim]
    return [rank + (other - mine) * stride for other in range(shape[dim])]


def shard_of_rows(weight: Tensor, tp_rank: int, tp: int) -> Tensor:
    return weight.chunk(tp)[tp_rank]


def gathered(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    if not sequence_parallel:
        return x
    whole = x.new_empty(group.size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def column_parallel_forward(
    x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> Tensor:
    return gathered(x, group, sequence_parallel) @ weight.T


def column_parallel_backward(
    dy: Tensor, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    partial = dy @ weight  # only from this rank's outputs: a partial sum
    dx = torch.empty_like(x)
    if sequence_parallel:
        dist.reduce_scatter_tensor(dx, partial, group=group)
    else:
        dist.all_reduce(partial, group=group)
        dx = partial
    # complete: no other rank contributes to this rank's rows
    return dx, dy.T @ gathered(x, group, sequence_parallel)


def leave_backward(dy: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(dy) for _ in range(group.size())]
    dist.all_gather(parts, dy, group=group)
    return torch.cat(parts)  # each element of x went into one element of y, with factor 1


def norm_weight_gradient(
    dy: Tensor, normed: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> Tensor:
    gradient = (dy * normed).sum(0)
    if sequence_parallel:
        dist.all_reduce(gradient, group=group)
    return gradient


def keys_that_are_needed(chunk: range, begins: list[int]) -> range:
    return range(max(begin for begin in begins if begin <= chunk.start), chunk.stop)


def gradient_of_my_keys(dk: Tensor, group: ProcessGroup) -> Tensor:
    cp = group.size()
    chunks = dk.chunk(2 * cp)
    of_ranks = torch.cat([chunks[i] for r in range(cp) for i in (r, 2 * cp - 1 - r)])
    mine = dk.new_empty(len(dk) // cp, *dk.shape[1:])
    dist.reduce_scatter_tensor(mine, of_ranks, group=group)
    return mine


def rows_to_send(chosen: Tensor, num_experts: int, ep: int) -> list[int]:
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    rows: list[int] = counts.view(ep, -1).sum(1).tolist()
    return rows


def sent(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    arrived = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=group)
    return arrived


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor, group: ProcessGroup
) -> Tensor:
    ep, local, k = group.size(), len(experts), chosen.shape[1]
    send = rows_to_send(chosen, ep * local, ep)
    one_each = [1] * ep
    receive: list[int] = sent(torch.tensor(send), one_each, one_each, group).tolist()
    order = chosen.flatten().argsort(stable=True)  # rows of one rank are contiguous
    rows = sent(x[order // k], send, receive, group)
    expert = sent(chosen.flatten()[order] % local, send, receive, group)
    y = torch.empty_like(rows)
    for e in range(local):
        y[expert == e] = rows[expert == e] @ experts[e].T
    back = torch.empty(len(order), x.shape[1], dtype=x.dtype)
    back[order] = sent(y, receive, send, group)
    return (weights.unsqueeze(2) * back.view(*chosen.shape, -1)).sum(1)


def new_bias(bias: Tensor, chosen: Tensor, rate: float, group: ProcessGroup) -> Tensor:
    counts = torch.bincount(chosen.flatten(), minlength=len(bias))
    dist.all_reduce(counts, group=group)  # integers: exact
    return bias + rate * (counts.sum() - counts * len(bias)).sign()


def balance_loss(probabilities: Tensor, chosen: Tensor, group: ProcessGroup) -> Tensor:
    length, experts = len(chosen) * group.size(), probabilities.shape[1]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    dist.all_reduce(counts, group=group)  # of the whole sequence
    share = counts.to(probabilities.dtype) * experts / (chosen.shape[1] * length)
    return (share * probabilities.sum(0) / length).sum()  # the sum over ranks completes the mean


def idle_fraction(schedule: str, p: int, m: int) -> float:
    bubble = (p - 1) * {"gpipe": 3, "1f1b": 3, "zb_h1": 1}[schedule]  # F + B, or F + I − W
    return bubble / (3 * m + bubble)


def my_1f1b(p: int, m: int) -> list[list[Action]]:
    ranks = []
    for r in range(p):
        ahead = min(p - 1 - r, m)
        actions = [Action(FORWARD, r, i) for i in range(ahead)]
        for i in range(m):
            if i + ahead < m:
                actions.append(Action(FORWARD, r, i + ahead))
            actions.append(Action(BACKWARD, r, i))
        ranks.append(actions)
    return ranks


def bytes_per_parameter(zero_stage: int, ranks: int) -> float:
    weights = 4 if zero_stage == 0 else 4 / ranks
    moments = 8 if zero_stage == 0 else 8 / ranks
    copies = 2 if zero_stage < 3 else 0
    gradients = 4 if zero_stage < 2 else 4 / ranks
    return weights + moments + copies + gradients


def rows_of(step: int, dp_rank: int, dp_size: int, batches: list[tuple[int, int]]) -> range:
    first = 0  # the loader's whole state
    for steps, size in batches:
        if step < steps:
            rows = size // dp_size
            first += step * size + dp_rank * rows
            return range(first, first + rows)
        first, step = first + steps * size, step - steps
    raise ValueError("the run has ended")


def kept_per_token(dim: int, ffn_dim: int, num_heads: int, num_kv_heads: int, tp: int) -> float:
    head_dim = dim // num_heads
    return (4 * dim + 2 * dim + 2 * num_kv_heads * head_dim + 3 * ffn_dim) / tp


def micro_batches_alive(rank: int, p: int, m: int) -> int:
    return min(p - rank, m)


def merge(a: Block, b: Block) -> Block:
    largest = torch.maximum(a[0], b[0])
    of_a, of_b = (a[0] - largest).exp(), (b[0] - largest).exp()
    return largest, a[1] * of_a + b[1] * of_b, a[2] * of_a.unsqueeze(-1) + b[2] * of_b.unsqueeze(-1)


def moved_bytes(elements: int, fused: bool) -> int:
    # fused: g, u and y; otherwise one input and one output, then twice two inputs and one output
    numbers = 3 if fused else 2 + 3 + 3
    return 2 * numbers * elements


def needed(saved: Region, wanted: Region) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
    both = [
        range(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(saved, wanted, strict=True)
    ]
    if not all(both):
        return None

    def within(region: Region) -> tuple[slice, slice]:
        rows, columns = (
            slice(c.start - r.start, c.stop - r.start) for c, r in zip(both, region, strict=True)
        )
        return rows, columns

    return within(saved), within(wanted)


def time_lost(interval: float, save: float, restart: float, mean_between_failures: float) -> float:
    return save / interval + (restart + interval / 2) / mean_between_failures


def best_interval(save: float, mean_between_failures: float) -> float:
    return math.sqrt(2 * save * mean_between_failures)


def trust_ratio(weight: Tensor, update: Tensor, group: ProcessGroup) -> Tensor:
    squares = torch.stack([weight.double().square().sum(), update.double().square().sum()])
    # two numbers per matrix; one all-reduce could serve all matrices
    dist.all_reduce(squares, group=group)
    whole, step = squares.sqrt()
    return torch.where((whole > 0) & (step > 0), whole / step, torch.ones_like(whole)).to(
        weight.dtype
    )


def break_it(schedule: list[list[Action]]) -> list[list[Action]]:
    first = schedule[0]
    backward = first.pop(next(i for i, action in enumerate(first) if action.kind is BACKWARD))
    # rank 0 waits for a gradient; rank 1 first waits for a forward that rank 0 runs only after it
    first.insert(1, backward)
    return schedule
