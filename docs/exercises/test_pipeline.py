"""Two exercises for docs/pipeline.md: complete the functions, then run `.venv/bin/python -m
pytest docs/exercises/test_pipeline.py`."""

import pytest

from costs.timeline import Timeline
from parallel.pipeline.actions import Action, stage_ranks
from parallel.pipeline.check import check
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, simulate


def idle_fraction(schedule: str, p: int, m: int) -> float:
    """Compute the idle share of a step of a pipeline of p ranks, averaged over ranks.

    `schedule` is `gpipe`, `1f1b` or `zb_h1`. There are m ≥ p micro-batches; a forward, an input
    gradient and a weight gradient take 1 each. Use a formula, not a simulation. How long is the
    step, and how much of it is work?
    """
    raise NotImplementedError("yours to write")


def my_1f1b(p: int, m: int) -> list[list[Action]]:
    """Return each rank's list of actions: forwards as a warm-up, then one forward and one backward
    in turn, then the remaining backwards.

    Rank r has stage r, and may never hold more than p − r micro-batches. An action is
    `Action(FORWARD, stage, microbatch)`, with FORWARD and BACKWARD from parallel.pipeline.actions.
    Do not look into schedules.py.
    """
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 32)])
def test_idle(schedule: str, p: int, m: int) -> None:
    timeline = Timeline(simulate(build_schedule(schedule, p, 1, m), Costs.equal(p)))
    assert idle_fraction(schedule, p, m) == pytest.approx(timeline.bubble_fraction)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (4, 8), (4, 3), (8, 16)])
def test_1f1b(p: int, m: int) -> None:
    schedule = my_1f1b(p, m)
    check(schedule)  # complete, in order, and free of deadlock
    assert stage_ranks(schedule) == list(range(p))
    timeline = Timeline(simulate(schedule, Costs.equal(p)))
    assert timeline.step_time == (m + p - 1) * 3
    assert all(timeline.peak_live(rank) <= p - rank for rank in range(p))
