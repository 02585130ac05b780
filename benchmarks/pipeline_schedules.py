"""Compares pipeline schedules with their simulation and with torch's schedules:
`python -m benchmarks.pipeline_schedules`

Four processes form a pipeline of four ranks with eight micro-batches. A stage computes nothing: its
forward, its input gradient and its weight gradient *wait*, each for a given time. So four ranks do
not compete for the cores of a small machine, and every schedule has the same work: a rank's forward
of one micro-batch, and each of its two gradients, takes `SECONDS`, and each of its v stages takes
1/v of that. The rest of a step is the schedule itself and the overhead of executing it. As in
training with pp alone, `PipelineRunner` executes the lowered program, sends messages, sums
gradients (parallel/whole.py) and defers weight gradients. This takes a millisecond or two per
action on a core that has just slept, so the waiting times are long.

(1) Measured compared with simulated (parallel/pipeline/simulate.py). The simulator does not model
    the time of a message or the work of the host; measured / simulated shows what these add.
    aim: within 5 %, and the bubbles in order: 1f1b >= interleaved_1f1b >= zb_h1 >= zb_v
(2) The same schedules in torch.distributed.pipelining with the same waiting stages (there with
    plain parameters), alternating with ours in the same processes and process group; ratios are
    computed within a round.
    aim: median ours / theirs <= 1.02

The time of a step is that of the slowest rank, from a barrier to the end of its last action, when
everything it sent has left. A busy core wakes a waiting rank late, so this benchmark needs a quiet
machine.
"""

import os
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.compare import alternate, parser, ratio, write
from costs.timeline import Timeline
from parallel.axes import MeshSizes
from parallel.data import check_reduced, data_parallel
from parallel.deferred import Job
from parallel.expert import WHOLE
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
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, Event, simulate
from parallel.pipeline.transfer import Transfers
from proofs.ranks import Ranks
from runtime.profiling.trace import ActionRecorder
from tools.command import run_command

RANKS = 4
SECONDS = 0.12
HIDDEN_SHAPE = (4, 1, 8)  # [S, B, D]
# our schedule → (stages per rank, the schedule's name in torch.distributed.pipelining)
PAIRS = {
    "gpipe": (1, "ScheduleGPipe"),
    "1f1b": (1, "Schedule1F1B"),
    "interleaved_1f1b": (2, "ScheduleInterleaved1F1B"),
    "breadth_first": (2, "ScheduleLoopedBFS"),
    "zb_h1": (1, "ScheduleInterleavedZeroBubble"),
    "zb_v": (2, "ScheduleZBVZeroBubble"),
    "dualpipe_v": (2, "ScheduleDualPipeV"),
}


class WaitingStage(Layer):
    """Computes y [S, B, D] = x · weight, with a scalar weight (with `loss`, the sum of y), and
    waits `seconds` in the forward and in each of the two gradients."""

    def __init__(self, seconds: float, loss: bool = False, tp: TensorParallel = WHOLE) -> None:
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
        weight = self.local_weight() if isinstance(self.weight, DTensor) else self.weight
        self.wait(FORWARD)
        y = InputGradient.apply(x, self) * WeightGradient.apply(weight, self)
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
    """One schedule and its sizes."""

    name: str
    seconds: float  # for each of a rank's forward, input and weight gradient of one micro-batch
    microbatches: int = 8

    @property
    def stages_per_rank(self) -> int:
        return PAIRS[self.name][0]

    @property
    def schedule(self) -> list[list[Action]]:
        return build_schedule(self.name, RANKS, self.stages_per_rank, self.microbatches)

    @property
    def stage_seconds(self) -> float:
        return self.seconds / self.stages_per_rank

    def simulate(self) -> Timeline:
        costs = Costs.equal(RANKS * self.stages_per_rank, *[self.stage_seconds] * 3)
        return Timeline(simulate(self.schedule, costs))


def our_stage(seconds: float, mesh: Mesh, loss: bool) -> WaitingStage:
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


class OurSteps:
    """Steps of our runner, assembled as in training (training/build.py, training/step.py)."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        where = stage_ranks(case.schedule)
        mine = [s for s, rank in enumerate(where) if rank == mesh.pp.rank]
        self.stages = {
            s: our_stage(case.stage_seconds, mesh, loss=s == len(where) - 1) for s in mine
        }
        self.parameters = [stage.weight for stage in self.stages.values()]
        self.batches = [torch.ones(HIDDEN_SHAPE) for _ in range(case.microbatches)]
        self.program = lower(case.schedule)[mesh.pp.rank]
        transfers = Transfers(mesh.pp.group, HIDDEN_SHAPE, torch.float32, mesh.device)
        self.runner = PipelineRunner(
            self.stages,
            len(where),
            transfers,
            data_parallel(self.stages.values(), 1, torch.float32, torch.float32),
        )
        self.events: list[Event] = []  # of the last step

    def __call__(self) -> None:
        recorder = ActionRecorder("cpu")
        self.runner.run(self.program, self.batches, recorder)
        self.events = recorder.events(offset=0.0)  # processes of one machine share a clock
        check_reduced(self.parameters)


class TheirSteps:
    """Steps of torch.distributed.pipelining, which splits a backward by traversing autograd's graph
    (but computes both gradients of the first stage in W)."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        from torch.distributed import pipelining  # slow to import, and not needed for ours

        where = stage_ranks(case.schedule)  # theirs are placed the same way
        mine = [s for s, rank in enumerate(where) if rank == mesh.pp.rank]
        self.stages = {s: WaitingStage(case.stage_seconds) for s in mine}
        self.parameters = [nn.Parameter(torch.ones(1)) for _ in mine]
        for stage, weight in zip(self.stages.values(), self.parameters, strict=True):
            stage.use_weight(weight)
        x, cpu = torch.ones(HIDDEN_SHAPE, requires_grad=True), torch.device("cpu")
        group = mesh.pp.group
        stages: Any = [
            pipelining.PipelineStage(self.stages[s], s, len(where), cpu, x, x, group=group)
            for s in mine
        ]
        schedule_class = getattr(pipelining, PAIRS[case.name][1])
        if issubclass(schedule_class, pipelining.schedules.PipelineScheduleSingle):
            (stages,) = stages
        self.schedule = schedule_class(
            stages, case.microbatches, loss_fn=lambda y, target: y.sum(), scale_grads=False
        )
        batch = torch.ones(case.microbatches * HIDDEN_SHAPE[0], *HIDDEN_SHAPE[1:])
        self.inputs = [batch] if 0 in mine else []
        self.events: list[Event] = []  # none: torch's schedule records no actions
        self.targets = batch if len(where) - 1 in mine else None

    def __call__(self) -> None:
        self.schedule.step(*self.inputs, target=self.targets, return_outputs=False)


Rounds = dict[str, list[tuple[float, list[Event]]]]  # "ours", "theirs" → seconds, events by round


def run_rounds(case: Case, rounds: int, beside: bool) -> Rounds:
    """Runs on each of 4 ranks: one round to warm up, then `rounds` rounds with one step of ours
    and, if `beside`, one of torch's."""
    mesh = build_mesh(MeshSizes(pp=RANKS), "cpu")

    def timed(side: OurSteps | TheirSteps) -> tuple[float, list[Event]]:
        dist.barrier()
        start = time.perf_counter()
        side()
        seconds = time.perf_counter() - start
        for stage in side.stages.values():
            agreed = dict.fromkeys((FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), case.microbatches)
            assert stage.waited == agreed, f"not the expected work: {stage.waited}"
            stage.waited.clear()
        for parameter in side.parameters:
            parameter.grad = None
        return seconds, side.events

    sides = {"ours": OurSteps(case, mesh)} | ({"theirs": TheirSteps(case, mesh)} if beside else {})
    found = alternate({name: partial(timed, side) for name, side in sides.items()}, 1 + rounds)
    return {name: of_rounds[1:] for name, of_rounds in found.items()}


def compare(pool: Ranks, case: Case, rounds: int, beside: bool = True) -> dict[str, Any]:
    """Compares our schedule with its simulation and, if `beside`, with torch's."""
    of_ranks = pool.run(run_rounds, RANKS, case, rounds, beside)
    # by side and round: what every rank found
    rounds_of = {
        side: [*zip(*(of_rank[side] for of_rank in of_ranks), strict=True)] for side in of_ranks[0]
    }
    seconds = {
        side: [max(taken for taken, _ in ranks) for ranks in found]
        for side, found in rounds_of.items()
    }
    bubbles = [
        Timeline([events for _, events in ranks]).bubble_fraction for ranks in rounds_of["ours"]
    ]
    ours, simulated = statistics.median(seconds["ours"]), case.simulate()
    found = {
        "stages_per_rank": case.stages_per_rank,
        "theirs": PAIRS[case.name][1],
        "measured_seconds": ours,
        "simulated_seconds": simulated.step_time,
        "measured_over_simulated": ours / simulated.step_time,
        "measured_bubble_fraction": statistics.median(bubbles),
        "simulated_bubble_fraction": simulated.bubble_fraction,
    }
    return found | ({"ours_over_theirs": ratio(*seconds.values())} if beside else {})


def main() -> None:
    options = parser("pipeline_schedules", __doc__, rounds=5)
    options.add_argument("--seconds", type=float, default=SECONDS, help="for each action of a rank")
    chosen = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the ranks, which are started later
    with Ranks(RANKS, timeout=60 + 12 * chosen.rounds) as pool:
        schedules = {
            name: compare(pool, Case(name, chosen.seconds), chosen.rounds) for name in PAIRS
        }
    sizes = {"ranks": RANKS, "seconds": chosen.seconds, "rounds": chosen.rounds}
    write(chosen.json, {**sizes, "schedules": schedules})


if __name__ == "__main__":
    run_command(main)
