"""A lower bound on the bytes that a layout needs, computed from sizes only, because a search needs
it for all layouts.

Bytes are counted at the moment when a pipeline rank begins a backward with the most activations
alive. At that moment memory holds

    the rank's sharded weights and moments, and gathered weights in the compute dtype: all of them,
        or with zero_stage 3 those of one block
    what its blocks keep for the micro-batches that the schedule has alive on the rank
    the additional needs of one block's backward, the incoming gradient, and what is kept for
        deferred weight gradients
    where forwards and backwards alternate for long: the gradients of the previous micro-batches,
        and with zero_stage 2 and 3, for each stage, the unsharded gradients that it reduced last,
        which FSDP holds until the stage's next reduction

Buffers of gathers, messages and the head are not included; plan/memory.py counts them.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

from costs.recorder import Phase
from costs.units import Sums
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action, stage_ranks
from parallel.pipeline.schedules import build_schedule
from parallel.weight_gradient import sum_dtype
from tools.plan.layout import Layout, Numbers, numbers_of
from training.precision import Precision

GROWING = ("gpipe", "breadth_first")  # keep every micro-batch until all forwards are done
ALWAYS_SPLIT = ("zb_h1", "zb_v")  # split every backward
SPLIT = (*ALWAYS_SPLIT, "dualpipe_v")  # compute (some) weight gradients in separate actions


class Block:
    """The bytes that a block needs for one micro-batch, and numbers of parameters. If there are
    several kinds of blocks, each figure is the minimum over them."""

    def __init__(self, layout: Layout) -> None:
        kinds = list(layout.kinds)
        self.part = layout.hidden_bytes  # its input's gradient, or its output
        # Sums of gradients are counted separately.
        dtypes = Precision.of(layout.config)
        dtype = sum_dtype(False, 0, dtypes.compute, dtypes.master, dtypes.reduce)
        assert dtype is not None
        self.sums = Sums(dtype, begun=True)
        phases = [unit.record(False, self.sums).phases for unit in kinds]
        # kept for backward, including the block's output
        self.kept = min(_stays(each["forward"]) for each in phases)
        # the peak of backward above its beginning
        self.whole = min(each["backward"].effect.height for each in phases)
        # of the FSDP unit that is reduced last, which is the one without experts
        self.numel = min(numbers_of(unit).rest for unit in kinds)
        self.table = layout.embedding.numel  # or that of the head
        self._kinds = kinds

    @cached_property
    def _inputs(self) -> list[Phase]:
        return [unit.record(True, self.sums).phases["input"] for unit in self._kinds]

    @cached_property
    def split(self) -> int:
        """The peak of an input gradient above its beginning."""
        return min(
            unit.record(True, self.sums).phases["input"].effect.height for unit in self._kinds
        )

    @cached_property
    def more(self) -> int:
        """The bytes that an input gradient adds from its beginning to its end."""
        return min(map(_stays, self._inputs))

    @property
    def deferred(self) -> int:
        """All bytes that are kept for the weight gradient."""
        return self.more + self.kept


def _stays(phase: Phase) -> int:
    return sum(phase.effect.changes.values())


class Alive(NamedTuple):
    """What is alive on a pipeline rank at the moment that the top of this file describes."""

    rank: int  # the first of the ranks with equal figures
    numel: Numbers  # parameters
    kept: int  # bytes that blocks keep
    backward: int  # bytes that the backward needs in addition
    unreduced: int  # elements of the gradients that each stage reduced last, before reduction


def most_alive(
    block: Block,
    schedule: str,
    pp: int,
    v: int,
    counts: list[int],
    numbers: list[Numbers],
    m: int,
    steady: bool,
) -> list[Alive]:
    """What is alive on each pipeline rank; ranks with equal figures are listed once.

    Args:
        block: the bytes that a block needs.
        counts: blocks of each stage.
        numbers: parameters of each rank.
        steady: whether forwards and backwards alternate for long.
    """
    blocks, fewest, unreduced = ([0] * pp for _ in range(3))
    for s, (rank, count) in enumerate(zip(where(schedule, pp, v), counts, strict=True)):
        blocks[rank] += count
        if count:  # the fewest blocks in any of the rank's stages that have blocks
            fewest[rank] = min(count, fewest[rank]) if fewest[rank] else count
        unreduced[rank] += block.numel if s and count else block.table
    if schedule in GROWING:
        live = [m * count for count in blocks]
    else:
        live = _live(schedule, pp, v, tuple(counts), min(m, 2 * pp) if m > 1 else 1)
    found: dict[tuple[Numbers, int, int, int], int] = {}
    for rank in reversed(range(pp)):
        # At each block an input gradient may keep more than it frees; the last block is the peak.
        backward = block.whole
        if schedule in SPLIT:
            split = block.split + max(0, block.more) * (fewest[rank] - 1)
            backward = split if schedule in ALWAYS_SPLIT else min(block.whole, split)
        if schedule == "zb_h1" and steady:  # weight gradients of `rank` micro-batches are deferred
            backward += rank * blocks[rank] * block.deferred
        most = block.part + backward if live[rank] else 0
        found[numbers[rank], live[rank] * block.kept, most, unreduced[rank]] = rank
    return [Alive(rank, *key) for key, rank in found.items()]


def least_bytes(
    alive: Alive, layout: Layout, shards: Numbers, zero: int, again: bool, steady: bool
) -> tuple[float, float]:
    """Two figures for a rank whose weights are sharded over `shards` ranks: the bound, and the part
    of it that is kept (states, gradients and activations). `again`: every stage has whole gradients
    of some micro-batch before any stage reduces those of the last micro-batch."""
    e, master, reduce = layout.compute, layout.master, layout.reduce
    states = alive.numel.over(shards) * (1 + layout.states_per_weight) * master
    gathered = 0
    if zero < 3 and (zero > 0 or e != master):  # unsharded weights of this dtype are not copied
        gathered = alive.numel.total * e
    whole = zero < 2 and again
    summed = reduce * (alive.numel.total if whole else alive.numel.over(shards))
    before = summed if steady else 0.0
    # A stage's last backward frees a block's gathered weights before it reduces the gradients.
    end = summed + (gathered if again else 0)
    kept = states + max(gathered + alive.kept + before, end)
    if not alive.kept:
        return kept, kept
    besides = alive.backward + (layout.smallest_block * e if zero == 3 else 0)
    if steady and zero >= 2:
        besides += alive.unreduced * reduce
    return states + max(gathered + alive.kept + besides + before, end), kept


@lru_cache(maxsize=1024)
def where(schedule: str, pp: int, v: int) -> list[int]:
    """The pipeline rank of each stage."""
    return list(stage_ranks(build_schedule(schedule, pp, v, 2 * pp)))


@lru_cache(maxsize=4096)
def _live(schedule: str, pp: int, v: int, counts: tuple[int, ...], m: int) -> list[int]:
    """For each rank, the maximum over time of its blocks times the micro-batches alive in them,
    counted in the schedule for `m` micro-batches. With more micro-batches it is not lower."""
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
