"""Predicts the whole job's step from the measured actions of its ranks."""

from collections.abc import Sequence
from typing import Any

from parallel.pipeline.simulate import Costs, simulate
from tools.plan.hardware import Device
from tools.plan.layout import Layout
from tools.plan.time import EXPOSED, Part, StepTime
from training.config import Config


def predicted_step(
    config: Config, world: int, reports: list[dict[str, Any]], device: Device
) -> dict[str, float]:
    """Predict the whole job's step from the measured actions of every stage.

    On a fake process group communication takes no time. So the exposed communication of each action
    over tp and the data-parallel axes, and the messages, are added from the planner's model of
    `device`'s links (plan/time.py), and the pipeline's simulator combines the actions.
    `computing_seconds` is the step without communication.
    """
    means: dict[str, dict[str, float]] = {}
    for report in reports:
        means |= report["action_seconds"]
    time = StepTime(Layout(config, world, 0), device)
    computing = [_part(means[str(s)]) for s in range(config.parallel.num_stages)]
    waiting = [
        sum((time.part(u, seconds=EXPOSED) for u in time.layout.units(s)), time.waits(s))
        for s in range(config.parallel.num_stages)
    ]
    schedule = time.layout.schedule
    alone = simulate(schedule, _costs(computing, 0.0))
    late = [gathered - time.costs.forward[s] for s, gathered in enumerate(time.costs.weights_at)]
    together = [mine + theirs for mine, theirs in zip(computing, waiting, strict=True)]
    weights_at = [
        max(0.0, seconds + together[s].forward) if seconds > 0 else 0.0
        for s, seconds in enumerate(late)
    ]
    timeline = simulate(schedule, _costs(together, time.message_seconds, weights_at))
    after = max(report["other_seconds"] for report in reports)
    reductions = max(0.0, time.reductions_end - time.timeline.step_time)
    return {
        "step_seconds": timeline.step_time + after + reductions,
        "computing_seconds": alone.step_time + after,
        "communication_seconds": timeline.step_time + reductions - alone.step_time,
        "bubble_fraction": timeline.bubble_fraction,
    }


def _part(measured: dict[str, float]) -> Part:
    """The measured seconds of a stage's actions. A whole backward is split into two halves, which
    the simulator adds up again."""
    whole = measured.get("B", 0.0) / 2
    return Part(measured["F"], measured.get("I", whole), measured.get("W", whole))


def _costs(parts: list[Part], message: float, weights_at: Sequence[float] = ()) -> Costs:
    return Costs(
        [p.forward for p in parts],
        [p.input_grad for p in parts],
        [p.weight_grad for p in parts],
        message,
        weights_at,
    )
