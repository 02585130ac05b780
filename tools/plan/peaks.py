"""The peak of memory of each pipeline rank, counted in a step with few micro-batches.

A schedule such as 1F1B fills the pipeline, then repeats itself, then drains it. The number of
repetitions changes neither what is alive at once nor the order of actions. With 4 · pp
micro-batches every rank's peak is, to the byte, that of a step with any larger number, except for
the batch itself (tests/test_plan_search.py; 3 · pp would suffice). GPipe and breadth-first do not
repeat: they keep all micro-batches, and are counted in full.
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

COUNTED = 4  # micro-batches per pipeline rank of the step in which memory is counted
CHECKED = 2  # of the step in which a schedule is checked: the fewest that all schedules accept


def shortened(layout: Layout, times: int) -> Layout:
    """The same job with at most `times` · pp micro-batches. Every schedule that accepts more also
    accepts that number."""
    config, m = layout.config, layout.num_microbatches
    fewer = times * config.parallel.pp
    if m <= fewer:
        return layout
    train = replace(config.train, global_batch_size=config.train.global_batch_size // m * fewer)
    return replace(layout, config=replace(config, train=train))


def shared(layout: Layout) -> Layout:
    """The same layout with its schedule taken from a cache, because neighbours in the order of
    estimates often have the same schedule."""
    p, copy = layout.config.parallel, replace(layout)
    schedule = _schedule(p.schedule, p.pp, p.stages_per_rank, layout.num_microbatches)
    vars(copy).update(schedule=schedule, where=where(p.schedule, p.pp, p.stages_per_rank))
    return copy


def peaks(layout: Layout, first: Sequence[int] = ()) -> Iterator[int]:
    """Yield the peak bytes of each pipeline rank, starting with the ranks in `first`."""
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
