"""The pipeline runner takes as long as the simulator predicts: on four ranks over gloo, with
eight micro-batches.

Each action computes, and then waits until its simulated time is over. So four ranks do not compete
for the cores of a small machine, and every schedule has the same work: a rank's forward of one
micro-batch, and each of its two gradients, takes `seconds`, and each of its v stages takes 1/v of
that. The rest of a step is the schedule itself, and what the runner adds."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from costs.timeline import Timeline
from parallel.axes import MeshSizes
from parallel.pipeline.actions import Action
from parallel.pipeline.schedules import SCHEDULES, STAGES_PER_RANK
from parallel.pipeline.simulate import Costs, Event, simulate
from proofs.parity.cases import Case
from proofs.ranks import Ranks
from runtime.profiling.trace import ActionRecorder
from tests.proofs.parity_tiers import thorough_but
from tests.steps import make_step, rows_of

RANKS = 4
CASES = {
    name: Case(
        MeshSizes(pp=RANKS),
        schedule=name,
        stages_per_rank=STAGES_PER_RANK.get(name, 2),
        num_microbatches=8,
    )
    for name in SCHEDULES
}


class Paced(ActionRecorder):
    """Records actions, each of which takes as long as `costs` say, in milliseconds."""

    def __init__(self, costs: Costs) -> None:
        super().__init__("cpu")
        self.costs = costs

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        with super().__call__(action):
            end = time.perf_counter() + self.costs.of(action.kind, action.stage) / 1e3
            yield
            time.sleep(max(0.0, end - time.perf_counter()))


def run_steps(case: Case, costs: Costs, steps: int) -> list[list[Event]]:
    """What this rank executes in each of `steps`, after one to warm up."""
    step, found = make_step(case), []
    for _ in range(1 + steps):
        step.record = recorder = Paced(costs)
        dist.barrier()
        step.forward_backward(*rows_of(step))
        for weight in step.weights:
            weight.parameter.grad = None
        found.append(recorder.events(offset=0.0))  # one machine's processes: one clock
    return found[1:]


def measure(ranks: Ranks, case: Case, seconds: float, steps: int) -> tuple[float, float]:
    """The median step over the simulated one, and the median bubble."""
    stages, schedule = RANKS * case.stages_per_rank, case.config().schedule(1)
    costs = Costs.equal(stages, *[1e3 * seconds / case.stages_per_rank] * 3)
    of_steps = zip(*ranks.run(run_steps, RANKS, case, costs, steps), strict=True)
    measured = [Timeline(list(lanes)) for lanes in of_steps]
    for timeline in measured:
        assert [[event.action for event in lane] for lane in timeline.ranks] == schedule
    step_time = statistics.median(timeline.step_time for timeline in measured)
    bubble = statistics.median(timeline.bubble_fraction for timeline in measured)
    return step_time / Timeline(simulate(schedule, costs)).step_time, bubble


@pytest.mark.parametrize("name", thorough_but(["1f1b", "interleaved_1f1b", "zb_v"], SCHEDULES))
def test_no_step_is_shorter_than_simulated(ranks: Ranks, name: str) -> None:
    """A real step is never shorter than simulated, on any machine, so the runner skips nothing and
    the simulation counts nothing twice."""
    over_simulated, _ = measure(ranks, CASES[name], seconds=0.03, steps=1)  # more than they compute
    assert over_simulated > 0.999


@pytest.mark.slow  # needs an otherwise idle machine
def test_steps_are_as_long_as_simulated_and_bubbles_in_order(ranks: Ranks) -> None:
    bubbles = {}
    for name, case in CASES.items():
        over_simulated, bubbles[name] = measure(ranks, case, seconds=0.2, steps=3)
        assert over_simulated == pytest.approx(1, rel=0.05), name
    in_order = [bubbles[name] for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")]
    assert in_order == sorted(in_order, reverse=True)
