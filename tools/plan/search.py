"""Finds the fastest layouts of a model on a number of GPUs.

The search lists all layouts (plan/candidates.py), drops those whose lower bound exceeds the memory,
and estimates the time of the others. It takes them in the order of their estimates, until enough of
them fit or none is left: it counts their memory on every pipeline rank, checks those that fit as a
run would check them (both in a shortened step: plan/memory.py), and simulates their step.

If nothing fits, the error says how far it is from that: the least number of GPUs whose memory holds
weights, gradients and optimizer state (found without a search), or what the smallest layout needs.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from costs.parameters import num_parameters
from errors import UserError
from parallel.axes import AXES
from runtime.trainer_state import state_bytes
from settings.checks import check_lengths, validate
from settings.config import Config
from settings.layouts import OF_TRAIN
from tools.command import table
from tools.plan.candidates import candidates
from tools.plan.hardware import GB, Device
from tools.plan.layout import PLAIN, Layout, check_gpus
from tools.plan.memory import CHECKED, peaks, shortened
from tools.plan.time import StepTime

SHOWN = 10  # layouts
ENOUGH = 2 * SHOWN  # layouts that fit; estimates may swap neighbours
SEARCHED = ("schedule", "stages_per_rank", "layers_per_stage", "zero_stage")


@dataclass
class Found:
    """A layout, which is in `config`, with its time and memory."""

    config: Config
    world: int
    device: Device
    estimate: float = 0.0  # seconds of a step; the search examines layouts in this order

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.config, self.world, 0)

    @cached_property
    def step(self) -> dict[str, float]:
        """The figures of a step. Its timeline is not kept, because the timelines of all layouts
        found would fill the memory."""
        time = StepTime(self.layout, self.device)
        return {
            "step_seconds": time.step_seconds,
            "mfu": time.mfu(),
            "bubble_fraction": time.timeline.bubble_fraction,
        }

    @property
    def seconds(self) -> float:
        return self.step["step_seconds"]

    @cached_property
    def peak(self) -> int:
        """Bytes on the pipeline rank that needs the most."""
        return max(peaks(self.layout))

    def fits(self, room: float) -> bool:
        """Whether every pipeline rank fits into `room` bytes."""
        highest = 0
        for highest in accumulate(peaks(self.layout), max):
            if highest > room:
                return False
        self.peak = highest
        return True

    def overrides(self) -> str:
        """The overrides that turn the searched configuration into this one, without its list of
        layouts, from which a run would choose another."""
        p, train = self.config.parallel, self.config.train
        experts = ["ep"] if self.config.model.has_experts else []
        given = {f"parallel.{key}": getattr(p, key) for key in (*AXES, *experts, *SEARCHED)}
        given |= {f"train.{key}": getattr(train, key) for key in OF_TRAIN}
        given |= {"parallel.layouts": []} if p.layouts else {}
        return " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            for key, value in given.items()
        )

    def __str__(self) -> str:
        p, train = self.config.parallel, self.config.train
        layers = {type(None): "even", str: "balanced", list: "light ends"}[type(p.layers_per_stage)]
        return (
            f"{self.layout.sizes} · {p.schedule} × {p.stages_per_rank}, layers {layers} · "
            f"micro-batch {train.micro_batch_size} · zero {p.zero_stage} · "
            f"{train.activation_checkpointing} checkpointing"
        )


@dataclass
class Result:
    """The result of a search."""

    best: list[Found]  # layouts that fit, fastest first
    layouts: int  # the number of layouts that obey the configuration's rules
    counted: int  # the number of layouts whose memory was counted exactly, not only bounded

    def as_dict(self) -> dict[str, Any]:
        best = [
            {"overrides": one.overrides(), **one.step, "peak_memory_bytes": one.peak}
            for one in self.best[:SHOWN]
        ]
        return vars(self) | {"best": best}


def describe_search(result: Result) -> str:
    shown: dict[tuple[object, ...], Found] = {}  # by what a rank computes
    for one in result.best:
        p, t = one.config.parallel, one.config.train
        work = (p.tp, p.cp, p.ep, p.pp, p.schedule, t.micro_batch_size, t.activation_checkpointing)
        shown.setdefault(work, one)
    rows = [["step s", "MFU", "peak GB", "layout"]]
    for one in [*shown.values()][:SHOWN]:
        figures = f"{one.seconds:.3f}", f"{one.step['mfu']:.1%}", f"{one.peak / GB:.2f}"
        rows.append([*figures, str(one)])
    return "\n".join(
        [
            f"{result.layouts:,} layouts, of which {result.counted:,} were counted exactly; the "
            "fastest that fit, fastest first, and of those that differ only in ZeRO stage or in "
            "how layers and data-parallel ranks are divided, the first:",
            table(rows, left=[3]),
            f"the first: {result.best[0].overrides()}",
        ]
    )


def search(config: Config, world: int, device: Device) -> Result:
    """Find the fastest layouts that fit.

    Raises:
        UserError: none fits, no layout divides the batch, or the configuration is invalid in every
            layout.
    """
    check_gpus("--gpus", world)
    check_before_search(config)
    room = device.room
    _check_states_fit(config, world, room)
    everything = list(candidates(config, world, device))
    if not everything:
        why = f"no layout of {world} GPUs divides the batch, the layers and the heads evenly"
        remedy = "choose numbers with more divisors"
        raise UserError("train.global_batch_size", config.train.global_batch_size, why, remedy)
    possible = sorted((c for c in everything if c.bound <= room), key=lambda c: c.estimate)
    fitting: list[Found] = []
    counted, refused, too_large = 0, None, 0
    for one in possible:
        if len(fitting) == ENOUGH:
            break
        found = Found(one.config(), world, device, one.estimate)
        counted += 1
        if not found.fits(room):
            too_large += 1
        elif error := _error(found):
            refused = error
        else:
            fitting.append(found)
    if not fitting:
        if refused is not None and not too_large:
            raise refused
        each = sorted(everything, key=lambda one: one.bound)
        plans = (Found(one.config(), world, device) for one in each)
        least = next(plan for plan in plans if plan.peak > room)  # those that fit are refused
        why = f"none of {len(everything):,} layouts fits {room / GB:.0f} GB a GPU; about "
        why += f"{least.peak / GB:.1f} GB are needed ({counted:,} were counted exactly)"
        remedy = "take more GPUs, or larger ones (--device), or a smaller model or train.seq_len; "
        remedy += f"to see the memory of the smallest, plan without --search: {least.overrides()}"
        raise UserError("--gpus", world, why, remedy)
    fitting.sort(key=lambda found: (found.seconds, found.peak))
    return Result(fitting, len(everything), counted)


def _error(found: Found) -> UserError | None:
    """Why a run with this layout would not start; None if it would."""
    try:
        check_lengths(found.config, found.layout.sizes)  # a shortened step always passes it
        validate(shortened(found.layout, CHECKED).config, found.world)
    except UserError as error:
        return error
    return None


def check_before_search(config: Config) -> None:
    """Raise UserError for what is wrong in every layout."""
    # Settings that are wrong only in some layouts are replaced by ones that are valid on one rank.
    # The batch is checked with each layout.
    parallel = replace(config.parallel, **PLAIN, zero_stage=2)
    train = replace(config.train, micro_batch_size=1, global_batch_size=1)
    run = replace(config.run, profile_ranks=[0])
    validate(replace(config, parallel=parallel, train=train, run=run), 1)


def _check_states_fit(config: Config, world: int, room: float) -> None:
    """Raise UserError if weights, optimizer state and gradients do not fit in any layout."""
    if config.parallel.offload != "none":  # they are elsewhere
        return
    # weights and states, and the gradients, of which each rank holds at least its share
    parameters = num_parameters(config.model)
    states = state_bytes(config) + parameters * config.precision.reduce.itemsize
    if states > room * world:
        why = f"weights, moments and gradients take {states / parameters:.3g} bytes a parameter, "
        why += f"{states / GB:,.0f} GB: {states / world / GB:,.0f} GB on each GPU, however they "
        why += f"are cut, and there are {room / GB:.0f}"
        remedy = f"take more than {math.ceil(states / room):,} GPUs, for activations come on top, "
        raise UserError("--gpus", world, why, remedy + "or larger ones (--device)")
