"""The pipeline runner takes as long as the simulator predicts: on four ranks over gloo, with
eight micro-batches.

A stage computes nothing: its forward, its input gradient and its weight gradient *wait*. So four
ranks do not compete for the cores of a small machine, and every schedule has the same work: a
rank's forward of one micro-batch, and each of its two gradients, takes `seconds`, and each of its v
stages takes 1/v of that. The rest of a step is the schedule itself, and what the runner adds."""

import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from costs.timeline import Timeline
from parallel.axes import MeshSizes
from parallel.data import check_reduced, data_parallel
from parallel.layer import Layer, TensorParallel
from parallel.mesh import Mesh, build_mesh
from parallel.parameter import NORM, Constant, WeightSpec
from parallel.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
    stage_ranks,
)
from parallel.pipeline.lower import lower
from parallel.pipeline.runner import PipelineRunner
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from parallel.pipeline.simulate import Costs, Event, simulate
from parallel.pipeline.transfer import Transfers
from parallel.weight_gradient import Job
from proofs.ranks import Ranks
from runtime.profiling.trace import ActionRecorder
from tests.proofs.parity_tiers import thorough_but
from tools.plan.candidates import FIXED

RANKS, MICROBATCHES = 4, 8
HIDDEN_SHAPE = (4, 1, 8)  # [S, B, D]
STAGES_PER_RANK = {name: FIXED.get(name, 2) for name in SCHEDULES}


class WaitingStage(Layer):
    """Computes y [S, B, D] = x · weight, with a scalar weight (with `loss`, the sum of y), and
    waits `seconds` in the forward and in each of the two gradients."""

    def __init__(self, seconds: float, loss: bool, tp: TensorParallel) -> None:
        super().__init__(tp)
        self.seconds, self.loss = seconds, loss  # weight: [1], given by the caller
        self.waited: Counter[Kind] = Counter()

    def wait(self, kind: Kind) -> None:
        time.sleep(self.seconds)
        self.waited[kind] += 1

    def forward(self, hidden: Tensor | None, batch: Tensor | None = None) -> Tensor:
        x = batch if hidden is None else hidden
        assert x is not None
        if not x.requires_grad:  # so that the first stage too has an input gradient that waits
            x = x.detach().requires_grad_()
        self.wait(FORWARD)
        y = InputGradient.apply(x, self) * WeightGradient.apply(self.local_weight(), self)
        return y.sum() if self.loss else y


class InputGradient(torch.autograd.Function):
    """The identity; its backward waits as long as an input gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: WaitingStage) -> Tensor:
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.stage.wait(BACKWARD_INPUT)
        return dx, None


class WeightGradient(torch.autograd.Function):
    """The identity; its backward waits as long as a weight gradient takes, or defers this to a job,
    as the linear layers do."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: WaitingStage) -> Tensor:
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, None]:
        def form(dw: Tensor) -> Tensor | None:
            ctx.stage.wait(BACKWARD_WEIGHT)
            return ctx.stage.gradient.add(dw)

        if ctx.stage.gradient.is_deferred:
            ctx.stage.gradient.defer(Job(form, [dw]))
            return None, None
        return form(dw), None


class Case(NamedTuple):
    """One schedule."""

    name: str
    seconds: float  # for each of a rank's forward, input and weight gradient of one micro-batch

    @property
    def schedule(self) -> list[list[Action]]:
        return build_schedule(self.name, RANKS, STAGES_PER_RANK[self.name], MICROBATCHES)

    @property
    def stage_seconds(self) -> float:
        return self.seconds / STAGES_PER_RANK[self.name]

    def simulate(self) -> Timeline:
        stages = RANKS * STAGES_PER_RANK[self.name]
        return Timeline(simulate(self.schedule, Costs.equal(stages, *[self.stage_seconds] * 3)))


def waiting_stage(seconds: float, mesh: Mesh, loss: bool) -> WaitingStage:
    """A stage whose weight no other rank has."""
    stage = WaitingStage(seconds, loss, TensorParallel.of(mesh, True))
    one = WeightSpec(
        shape=(1,),
        placement=Replicate(),
        initial=Constant(1.0),
        group=NORM,
        gradient_is_partial=False,
    )
    stage.add_weight(one)
    nn.init.ones_(stage.to_empty(device=mesh.device).weight)
    return stage


def run_steps(case: Case, steps: int) -> list[tuple[float, list[Event]]]:
    """Runs on each of 4 ranks, assembled as in training (training/build.py, training/step.py): one
    step to warm up, then `steps`; returns the seconds of each and what it executed."""
    mesh, where = build_mesh(MeshSizes(pp=RANKS), "cpu"), stage_ranks(case.schedule)
    stages = {
        s: waiting_stage(case.stage_seconds, mesh, loss=s == len(where) - 1)
        for s, rank in enumerate(where)
        if rank == mesh.pp.rank
    }
    parameters = [stage.weight for stage in stages.values()]
    batches = [torch.ones(HIDDEN_SHAPE) for _ in range(MICROBATCHES)]
    transfers = Transfers(mesh.pp.group, HIDDEN_SHAPE, torch.float32, mesh.device)
    sums = data_parallel(stages.values(), 1, torch.float32, torch.float32)
    runner, program = PipelineRunner(stages, len(where), transfers, sums), lower(case.schedule)
    found = []
    for _ in range(1 + steps):
        recorder = ActionRecorder("cpu")
        dist.barrier()
        start = time.perf_counter()
        runner.run(program[mesh.pp.rank], batches, recorder)
        seconds = time.perf_counter() - start
        check_reduced(parameters)
        for stage in stages.values():
            agreed = dict.fromkeys((FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), MICROBATCHES)
            assert stage.waited == agreed, f"not the expected work: {stage.waited}"
            stage.waited.clear()
        for parameter in parameters:
            parameter.grad = None
        found.append((seconds, recorder.events(offset=0.0)))  # one machine's processes: one clock
    return found[1:]


def measure(ranks: Ranks, case: Case, steps: int) -> tuple[float, float]:
    """The median step of the slowest rank over the simulated one, and the median bubble."""
    of_steps = [*zip(*ranks.run(run_steps, RANKS, case, steps), strict=True)]
    seconds = statistics.median(max(taken for taken, _ in step) for step in of_steps)
    bubbles = [Timeline([events for _, events in step]).bubble_fraction for step in of_steps]
    return seconds / case.simulate().step_time, statistics.median(bubbles)


@pytest.mark.parametrize(
    "name", thorough_but(["1f1b", "interleaved_1f1b", "zb_v"], STAGES_PER_RANK)
)
def test_no_step_is_shorter_than_simulated(ranks, name):
    """A real step is never shorter than simulated, on any machine, so the runner skips nothing and
    the simulation counts nothing twice."""
    over_simulated, _ = measure(ranks, Case(name, seconds=0.002), steps=1)
    assert over_simulated > 0.999


@pytest.mark.slow  # needs an otherwise idle machine
def test_steps_are_as_long_as_simulated_and_bubbles_in_order(ranks):
    bubbles = {}
    for name in STAGES_PER_RANK:
        over_simulated, bubbles[name] = measure(ranks, Case(name, seconds=0.12), steps=3)
        assert over_simulated == pytest.approx(1, rel=0.05), name
    in_order = [bubbles[name] for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")]
    assert in_order == sorted(in_order, reverse=True)
