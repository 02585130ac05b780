"""`run.trace=true` records every action of every rank in one real step, on a common clock."""

import json
import time

import torch.distributed as dist

from parallel.pipeline.actions import Action, stage_ranks
from parallel.pipeline.schedules import build_schedule
from runtime.profiling.chrome import from_chrome
from runtime.profiling.trace import clock_offset
from tests.data_samples import prepared
from tests.runs import train_run, write_config


def trace_of(ranks, folder, data, *overrides):
    messages = ranks.run(train_run, 8, [write_config(folder, data), *overrides])
    assert not any(messages), messages
    return json.loads((folder / "run" / "trace.json").read_text())


def test_every_action_of_every_rank_is_there_in_order(ranks, tmp_path):
    overrides = [
        "parallel.pp=2",
        "parallel.tp=2",
        "parallel.schedule=zb_v",
        "parallel.stages_per_rank=2",
        "run.trace=true",
    ]
    overrides.append("train.micro_batch_size=1")
    trace = trace_of(ranks, tmp_path, prepared(tmp_path), *overrides)
    # 8 sequences, two data-parallel ranks, micro-batches of 1
    schedule = build_schedule("zb_v", 2, 2, 4)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"dp_replicate 0 dp_shard {d} cp 0 tp {t}" for d in (0, 1) for t in (0, 1)]
    for pipeline in range(4):
        timeline = from_chrome(trace, pipeline=pipeline)
        assert [[event.action for event in lane] for lane in timeline.ranks] == schedule
        ended = {event.action: event.end for lane in timeline.ranks for event in lane}
        started = {event.action: event.start for lane in timeline.ranks for event in lane}
        # Milliseconds. All ranks have the same clock here, but on two cores some leave the barrier
        # that aligns the clocks late.
        slack = 50.0
        for (kind, stage, m), begin in started.items():
            below = Action(kind, stage - 1, m)
            if kind.value == "F" and stage:
                assert ended[below] <= begin + slack
        assert stage_ranks(schedule) == [0, 1, 1, 0]


def offsets_of_skewed_clocks():
    """The clock offset of this rank, when each rank's clock is an hour ahead of the previous
    rank's."""
    honest = time.perf_counter
    time.perf_counter = lambda: honest() + 3600.0 * dist.get_rank()
    try:
        return clock_offset("cpu")
    finally:
        time.perf_counter = honest


def test_clocks_are_aligned(ranks):
    for rank, offset in enumerate(ranks.run(offsets_of_skewed_clocks, 4)):
        assert abs(offset - 3600.0 * rank) < 1.0
