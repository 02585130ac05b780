"""The schedules' own actions, simulated, as data for the page's stepped timeline (timeline.js)."""

from collections.abc import Sequence
from typing import Any

from parallel.pipeline.actions import NAMES, stage_ranks
from parallel.pipeline.lower import result_of
from tools.timeline.draw import chunk_of_stage, shade
from tools.timeline.panels import simulated_panels, stages_needed

RANKS, MICRO_BATCHES = 4, 8


def timelines(names: Sequence[str]) -> list[dict[str, Any]]:
    """One timeline for each schedule: four ranks, eight micro-batches; the unit of time is the
    forward of all of a rank's layers."""
    per_rank = [stages_needed(name, RANKS, MICRO_BATCHES) for name in names]
    cost = 1 / max(per_rank)
    panels = simulated_panels(names, RANKS, MICRO_BATCHES, per_rank, (cost, cost, cost))
    rows = []
    for name, v, panel in zip(names, per_rank, panels, strict=True):
        timeline = panel.timeline
        where = stage_ranks([[event.action for event in lane] for lane in timeline.ranks])
        ranks = []
        for rank, lane in enumerate(timeline.ranks):
            chunks = chunk_of_stage(lane)
            live = timeline.live(rank)
            actions = []
            for (action, start, end), held in zip(lane, live, strict=True):
                message = result_of(action, len(where))
                to = where[message.stage] if message else rank
                actions.append(
                    {
                        "kind": NAMES[action.kind],
                        "microbatch": action.microbatch,
                        "stage": action.stage,
                        "start": start,
                        "end": end,
                        "colour": shade(action.kind, chunks[action.stage], len(chunks)),
                        "held": held / v,
                        "sends_to": to if to != rank else None,
                    }
                )
            ranks.append(actions)
        rows.append(
            {"name": name, "caption": panel.caption, "span": timeline.step_time, "ranks": ranks}
        )
    return rows
