"""The most bytes that each pipeline rank of a job holds, counted in a step of few micro-batches.

A schedule such as 1F1B fills the pipeline, then repeats itself, then drains it. How often it
repeats itself changes neither what is alive at once nor the order of anything: with 4 · pp
micro-batches every rank's peak is, byte for byte, that of a step with any larger number, but for
the batch itself (tests/test_plan_search.py; 3 · pp would do). GPipe and breadth-first never repeat
themselves: they keep all micro-batches, and are counted in full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from parallel.pipeline.actions import Action
from parallel.pipeline.lower import Program, lower
from parallel.pipeline.schedules import build_schedule
from tools.plan.bounds import GROWING, where
from tools.plan.layout import Layout
from tools.plan.memory import Memory, batch_bytes

COUNTED = 4  # micro-batches for each pipeline rank, in which memory is counted
CHECKED = 2  # and in which a schedule is checked: the fewest that all take


def shortened(layout: Layout, times: int) -> Layout:
    """The same job with at most `times` · pp micro-batches. Every schedule that takes more takes as
    many."""
    config, m = layout.config, layout.num_microbatches
    fewer = times * config.parallel.pp
    if m <= fewer:
        return layout
    train = replace(config.train, global_batch_size=config.train.global_batch_size // m * fewer)
    return replace(layout, config=replace(config, train=train))


def shared(layout: Layout) -> Layout:
    """The same, with a schedule that neighbours in the order of estimates often have too."""
    p, copy = layout.config.parallel, replace(layout)
    schedule = _schedule(p.schedule, p.pp, p.stages_per_rank, layout.num_microbatches)
    vars(copy).update(schedule=schedule, where=where(p.schedule, p.pp, p.stages_per_rank))
    return copy


def peaks(layout: Layout, first: Sequence[int] = ()) -> Iterator[int]:
    """Bytes of each pipeline rank, beginning with those of `first`."""
    p = layout.config.parallel
    short = shared(layout if p.schedule in GROWING else shortened(layout, COUNTED))
    programs = _programs(p.schedule, p.pp, p.stages_per_rank, short.num_microbatches)
    rest = batch_bytes(layout) - batch_bytes(short)
    for rank in dict.fromkeys([*first, *range(p.pp)]):
        yield Memory(short.at(rank), programs[rank]).peak + rest


@lru_cache(maxsize=16)
def _programs(schedule: str, pp: int, v: int, m: int) -> list[Program]:
    return lower(_schedule(schedule, pp, v, m))


@lru_cache(maxsize=2)  # long ones are large
def _schedule(schedule: str, pp: int, v: int, m: int) -> list[list[Action]]:
    return build_schedule(schedule, pp, v, m)
