"""The layouts of a model on a number of GPUs that take least time, and those that take least memory
for their time.

All are estimated (plan/candidates.py), and those dropped whose bound says that they cannot fit. The
others are taken in the order of their estimates: their memory is counted on every pipeline rank,
those that fit are checked as a run would check them (both in a shortened step: plan/peaks.py), and
their step is simulated, until enough fit or none is left. The frontier adds the layouts that keep
less than every faster one, examined in the same way.

Where nothing fits, the search says what is nearest: how many GPUs the weights and the optimizer
need at least, which takes no time at all, or the layout that needs least.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from errors import UserError
from model.transformer import num_parameters
from tools.plan.candidates import Candidate, Part, candidates, space
from tools.plan.check import check_before_search
from tools.plan.hardware import GB, Device
from tools.plan.layout import Layout
from tools.plan.peaks import CHECKED, peaks, shared, shortened
from tools.plan.time import StepTime
from training.config import Config
from training.optimizers import state_bytes

ENOUGH = 20  # that fit, twice what is shown: estimates may put neighbours in the wrong order
ALIKE = 0.01  # of a step's seconds: two that differ by less may well be in the other order
NEAREST = 20  # layouts with the lowest bounds, of which one that a run would start is the nearest
SEARCHED = ("tp", "pp", "dp_shard", "dp_replicate", "schedule", "stages_per_rank",
            "layers_per_stage", "zero_stage")  # fmt: skip


@dataclass
class Found:
    """A layout; `config` has it, the rest says what it would be like."""

    config: Config
    world: int
    device: Device
    fullest: int = 0  # the pipeline rank that probably needs most
    estimate: float = 0.0  # seconds, by which the search ordered it

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.config, self.world, 0)

    @cached_property
    def _simulated(self) -> tuple[float, float]:
        """Seconds of a step, and its bubble. The timeline is not kept: those of all that are found
        would fill the memory."""
        time = StepTime(shared(self.layout), self.device)
        return time.step_seconds, time.timeline.bubble_fraction

    @property
    def seconds(self) -> float:
        return self._simulated[0]

    @property
    def bubble_fraction(self) -> float:
        return self._simulated[1]

    @property
    def time(self) -> StepTime:
        """Everything else about the step. Its `timeline` is simulated again for who asks."""
        time = StepTime(self.layout, self.device)
        vars(time)["step_seconds"] = self.seconds
        return time

    @cached_property
    def peak(self) -> int:
        """Bytes on the pipeline rank that needs most."""
        return max(self._peaks())

    def fits(self, room: float) -> bool:
        """Whether every pipeline rank does."""
        peaks = []
        for peak in self._peaks():
            if peak > room:
                return False
            peaks.append(peak)
        self.peak = max(peaks)
        return True

    def _peaks(self) -> Iterator[int]:
        """Of each pipeline rank, first of those that often need most: the second may have a block
        more than the first."""
        pp = self.config.parallel.pp
        ranks = [rank for rank in (self.fullest, 1, 0, pp - 1, pp // 2) if rank < pp]
        return peaks(self.layout, ranks)

    def describe(self) -> str:
        return describe([self])

    def overrides(self) -> str:
        """What makes the searched configuration this one."""
        p, t = self.config.parallel, self.config.train
        text = [
            f"parallel.{key}={_value(getattr(p, key))}" for key in (*SEARCHED, "sequence_parallel")
        ]
        text += [
            f"train.{key}={_value(getattr(t, key))}"
            for key in ("micro_batch_size", "activation_checkpointing")
        ]
        return " ".join(text)


@dataclass
class Result:
    """Of a search."""

    best: list[Found]  # that fit, fastest first
    also: list[Found]  # further ones that were found to fit, slower than the best
    layouts: int  # that keep the configuration's rules
    counted: int  # whose memory was counted and not bounded
    frontier: list[Found]  # slower and slower, with less and less memory
    space: list[str]  # what was searched, in words


def search(config: Config, world: int, device: Device, wanted: int = 10) -> Result:
    """The `wanted` fastest that fit.

    Raises:
        UserError: none fits, no layout divides the batch, or the configuration is at fault whatever
            its layout.
    """
    check_before_search(config)
    room = device.memory_bytes - device.reserved_bytes
    _check_states_fit(config, world, room)
    everything = list(candidates(config, world, device))
    if not everything:
        why = f"no layout of {world} GPUs cuts the batch, the layers and the heads into equal parts"
        remedy = "choose numbers with more divisors"
        raise UserError("train.global_batch_size", config.train.global_batch_size, why, remedy)
    possible = sorted((c for c in everything if c.bound <= room), key=lambda c: c.estimate)
    examine = Examiner(world, device, room)
    fitting: list[Found] = []
    for candidate in possible:
        if len(fitting) == ENOUGH:
            break
        if (found := examine(candidate)) is not None:
            fitting.append(found)
    if not fitting:
        if examine.refused is not None and not examine.too_large:
            raise examine.refused
        why = (
            f"none of {len(everything):,} layouts fits {room / GB:.0f} GB a GPU "
            f"({len(examine.known):,} were counted exactly)"
        )
        nearest = examine.nearest(everything)
        if nearest is not None:
            why += f"; the nearest needs {nearest.peak / GB:.1f} GB: {nearest.describe()}"
        remedy = "take more GPUs, or larger ones (--device), or a smaller model or train.seq_len"
        if nearest is not None:
            remedy += (
                "; to see where the nearest one's bytes are, plan it without --search: "
                f"{nearest.overrides()}"
            )
        raise UserError("--gpus", world, why, remedy)
    on_frontier = [found for one in _lowest(possible) if (found := examine(one)) is not None]
    frontier: list[Found] = []
    for found in sorted([*fitting, *on_frontier], key=_order):
        if not frontier or found.peak < frontier[-1].peak:
            frontier.append(found)
    fitting.sort(key=_order)
    best, also = fitting[:wanted], fitting[wanted:]
    return Result(
        best, also, len(everything), len(examine.known), frontier, space(config, world, device)
    )


def _check_states_fit(config: Config, world: int, room: float) -> None:
    """Raises UserError where no layout can fit, whatever it does: states alone are too large."""
    one = Layout(config, world, 0)
    # weights, states; gradients, of which no rank holds less than its share
    each = state_bytes(config) + one.reduce
    states = num_parameters(config.model) * each
    if states <= room * world:
        return
    why = (
        f"weights, moments and gradients take {each} bytes a parameter, {states / GB:,.0f} GB: "
        f"{states / world / GB:,.0f} GB on each GPU, however they are cut, and there are "
        f"{room / GB:.0f}"
    )
    least = math.ceil(states / room)
    remedy = (
        f"take more than {least:,} GPUs, for activations come on top, or larger ones (--device)"
    )
    raise UserError("--gpus", world, why, remedy)


class Examiner:
    """Says of candidates whether they are valid and fit, each once."""

    def __init__(self, world: int, device: Device, room: float) -> None:
        self.world, self.device, self.room = world, device, room
        self.known: dict[int, Found | None] = {}  # by identity: a search keeps its candidates
        self.refused: UserError | None = None  # the last that a run would not start
        self.too_large = 0

    def __call__(self, candidate: Candidate) -> Found | None:
        if id(candidate) not in self.known:
            self.known[id(candidate)] = self._examine(candidate)
        return self.known[id(candidate)]

    def _examine(self, candidate: Candidate) -> Found | None:
        found = self._found(candidate)
        if not found.fits(self.room):
            self.too_large += 1
            return None
        return found if self._valid(found) else None

    def nearest(self, everything: list[Candidate]) -> Found | None:
        """The valid layout with the lowest bound; bounds are a few percent below what is
        counted."""
        lowest = heapq.nsmallest(NEAREST, everything, key=lambda candidate: candidate.bound)
        return next(filter(self._valid, map(self._found, lowest)), None)

    def _found(self, candidate: Candidate) -> Found:
        return Found(
            candidate.config(), self.world, self.device, candidate.fullest, candidate.estimate
        )

    def _valid(self, found: Found) -> bool:
        """Whether a run with it would start."""
        try:
            shortened(found.layout, CHECKED).config.validate(self.world)
        except UserError as error:
            self.refused = error
            return False
        return True


def _order(found: Found) -> tuple[float, int]:
    return found.seconds, found.peak


def _lowest(possible: list[Candidate]) -> Iterator[Candidate]:
    """Those of which no faster one keeps less."""
    lowest = float("inf")
    for candidate in possible:
        if candidate.kept < lowest:
            lowest = candidate.kept
            yield candidate


def _value(value: object) -> str:
    """As a configuration's override writes it, without spaces."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def rows(found: Sequence[Found]) -> list[list[Found]]:
    """Layouts in the order of their seconds, those that hardly differ together.

    They compute the same (tp, pp, schedule, micro-batch, recomputation) and take at most 1% longer
    than the first. They may differ in how layers and data-parallel ranks are cut, and in the ZeRO
    stage.
    """
    together: dict[tuple[object, ...], list[list[Found]]] = {}
    ordered: list[list[Found]] = []
    for one in found:
        p, t = one.config.parallel, one.config.train
        work = (p.tp, p.pp, p.schedule, p.sequence_parallel, t.micro_batch_size,
                t.activation_checkpointing)  # fmt: skip
        alike = together.setdefault(work, [])
        row = next((row for row in alike if one.seconds <= (1 + ALIKE) * row[0].seconds), None)
        if row is None:
            row = []
            alike.append(row)
            ordered.append(row)
        row.append(one)
    return ordered


def describe(alike: Sequence[Found]) -> str:
    """Layouts of one row in words: `zero 1/2` where some have the one and some the other."""
    parallel, train = [one.config.parallel for one in alike], alike[0].config.train
    p = parallel[0]
    sizes = " ".join(
        f"{axis} {_each(getattr(q, axis) for q in parallel)}"
        for axis in ("tp", "pp", "dp_shard", "dp_replicate")
    )
    stages = _each(sorted(q.stages_per_rank for q in parallel))
    schedule = p.schedule if stages == "1" else f"{p.schedule}×{stages}"
    cuts = {None: "even", "auto": "balanced"}
    layers = _each(
        "light ends" if isinstance(q.layers_per_stage, list) else cuts[q.layers_per_stage]
        for q in parallel
    )
    cut = ", whole sequence" if p.tp > 1 and not p.sequence_parallel else ""
    return (
        f"{sizes} · {schedule}{'' if layers == 'even' else f', {layers}'} · "
        f"micro-batch {train.micro_batch_size} · "
        f"zero {_each(sorted(q.zero_stage for q in parallel))} · "
        f"{train.activation_checkpointing} checkpointing{cut}"
    )


def _each(values: Iterable[object]) -> str:
    return "/".join(map(str, dict.fromkeys(values)))


def why_not(best: Found, other: Found) -> str:
    """What the runner-up loses on."""
    a, b = best.time, other.time
    work = []  # of a rank, on average
    for time in (a, b):
        parts = map(Part, time.costs.forward, time.costs.input_grad, time.costs.weight_grad)
        work.append(
            sum(part.total for part in parts) * time.layout.num_microbatches / time.layout.sizes.pp
        )
    pipeline = [t.timeline.step_time for t in (a, b)]
    idle = [
        one.bubble_fraction * seconds for one, seconds in zip((best, other), pipeline, strict=True)
    ]
    tail = [one.seconds - seconds for one, seconds in zip((best, other), pipeline, strict=True)]
    reasons = {
        "in the actions themselves (computing, tp, gathers that do not hide)": work[1] - work[0],
        "waiting in the pipeline": idle[1] - idle[0],
        "after the last action (reductions, optimizer)": tail[1] - tail[0],
    }
    text = ", ".join(
        f"{seconds:+.3f} s {what}" for what, seconds in reasons.items() if abs(seconds) >= 5e-4
    )
    return f"{other.seconds - best.seconds:+.3f} s: {text or 'they are alike'}"
