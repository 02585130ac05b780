"""Bytes that a layout needs at least: from sizes alone, for all layouts of a search.

They are counted at the moment at which a pipeline rank begins the backward with most activations
alive. Then there are

    the rank's weights and moments, sharded; weights in the compute dtype, gathered: all, or with
        zero_stage 3 a block's
    what its blocks keep of all micro-batches that the schedule has alive on it
    what the backward of a block needs besides, the gradient that came in, and weight gradients that
        are put off
    where forwards and backwards take turns for long: the gradients of the micro-batches before, and
        with zero_stage 2 and 3 the last of them that each stage reduced, whole, which FSDP holds
        until the stage's next

Buffers of gathers, messages and the head come on top, and plan/memory.py counts them.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

from costs.recorder import Phase
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action, stage_ranks
from parallel.pipeline.schedules import build_schedule
from tools.plan.layout import Layout

GROWING = ("gpipe", "breadth_first")  # keep every micro-batch until all forwards are done
ALWAYS_SPLIT = ("zb_h1", "zb_v")  # no backward is whole
SPLIT = (*ALWAYS_SPLIT, "dualpipe_v")  # form weight gradients in actions of their own


class Block:
    """What a block needs of one micro-batch, in bytes; and numbers of parameters. Of several kinds
    of blocks, the least of each."""

    def __init__(self, layout: Layout) -> None:
        kinds = list(layout.kinds)
        self.part = layout.hidden_bytes  # its input's gradient, or its output
        phases = [unit.whole.phases for unit in kinds]
        # for backward, with its output
        self.kept = min(_stays(each["forward"]) for each in phases)
        # by which a backward rises above what is there when it begins
        self.whole = min(each["backward"].effect.height for each in phases)
        self.numel = min(unit.numel for unit in kinds)
        self.table = layout.embedding.numel  # or the head's
        self._kinds = kinds

    @cached_property
    def split(self) -> int:
        """The same of an input gradient."""
        return min(unit.split.phases["input"].effect.height for unit in self._kinds)

    @cached_property
    def more(self) -> int:
        """By which an input gradient ends above its begin."""
        return min(_stays(unit.split.phases["input"]) for unit in self._kinds)

    @property
    def deferred(self) -> int:
        """What waits for the weight gradient in all."""
        return self.more + self.kept


def _stays(phase: Phase) -> int:
    return sum(phase.effect.changes.values())


class Alive(NamedTuple):
    """Of a pipeline rank at that moment."""

    rank: int  # the first of those that are alike
    numel: int  # parameters
    kept: int  # bytes that blocks keep
    backward: int  # bytes that the backward has besides
    unreduced: int  # numbers of the gradients that each stage reduced last


def most_alive(
    block: Block,
    schedule: str,
    pp: int,
    v: int,
    counts: list[int],
    numbers: list[int],
    m: int,
    steady: bool,
) -> list[Alive]:
    """Ranks that differ.

    Args:
        counts: blocks of each stage.
        numbers: parameters of each rank.
        steady: forwards and backwards take turns for long.
    """
    blocks, fewest, unreduced = ([0] * pp for _ in range(3))
    for s, (rank, count) in enumerate(zip(where(schedule, pp, v), counts, strict=True)):
        blocks[rank] += count
        if count:  # the fewest of the rank's stages that have any
            fewest[rank] = min(count, fewest[rank]) if fewest[rank] else count
        unreduced[rank] += block.numel if s and count else block.table
    if schedule in GROWING:
        live = [m * count for count in blocks]
    else:
        live = _live(schedule, pp, v, tuple(counts), min(m, 2 * pp) if m > 1 else 1)
    found: dict[tuple[int, int, int, int], int] = {}
    for rank in reversed(range(pp)):
        # An input gradient leaves more at each block than it frees, and is highest at the last.
        backward = block.whole
        if schedule in SPLIT:
            split = block.split + max(0, block.more) * (fewest[rank] - 1)
            backward = split if schedule in ALWAYS_SPLIT else min(block.whole, split)
        if schedule == "zb_h1" and steady:  # weight gradients of `rank` micro-batches still to come
            backward += rank * blocks[rank] * block.deferred
        most = block.part + backward if live[rank] else 0
        found[numbers[rank], live[rank] * block.kept, most, unreduced[rank]] = rank
    return [Alive(rank, *key) for key, rank in found.items()]


def least_bytes(
    alive: Alive, layout: Layout, shard: int, zero: int, again: bool, steady: bool
) -> tuple[float, float]:
    """Of a rank whose weights are sharded over `shard`: the bound; and what is kept only, states
    and activations. `again`: every stage has whole gradients of some micro-batch before any stage
    reduces those of the last."""
    e, master, reduce = layout.compute, layout.master, layout.reduce
    states = alive.numel / shard * (1 + layout.states_per_weight) * master + alive.numel * e * (
        zero < 3
    )
    summed = alive.numel * reduce * (1.0 if zero < 2 and again else 1 / shard)
    before = summed if steady else 0.0
    kept = states + max(alive.kept + before, summed)
    if not alive.kept:
        return kept, kept
    besides = alive.backward + (layout.smallest_block * e if zero == 3 else 0)
    if steady and zero >= 2:
        besides += alive.unreduced * reduce
    return states + max(alive.kept + besides + before, summed), kept


@lru_cache(maxsize=1024)
def where(schedule: str, pp: int, v: int) -> list[int]:
    """The rank of each stage."""
    return list(stage_ranks(build_schedule(schedule, pp, v, 2 * pp)))


@lru_cache(maxsize=4096)
def _live(schedule: str, pp: int, v: int, counts: tuple[int, ...], m: int) -> list[int]:
    """The most micro-batches of blocks that each rank holds at once, by the schedule itself; with
    more than `m`, not fewer."""
    most = []
    for actions in _schedule(schedule, pp, v, m):
        live = highest = 0
        for kind, stage, _ in actions:
            if kind is FORWARD:
                live += counts[stage]
                highest = max(highest, live)
            elif kind in (BACKWARD, BACKWARD_INPUT):
                live -= counts[stage]
        most.append(highest)
    return most


@lru_cache(maxsize=256)
def _schedule(schedule: str, pp: int, v: int, m: int) -> list[list[Action]]:
    return build_schedule(schedule, pp, v, m)
