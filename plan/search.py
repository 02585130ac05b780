"""All layouts of a model on a number of GPUs, by the time of their step.

Every combination is estimated from the same parts as `plan.time`: the work of the slowest rank, the schedule's bubble, what
data parallelism has to wait for. Those that cannot fit, by a bound on their memory, are dropped. The fastest are then
simulated and their memory counted exactly, until enough of them are known to fit.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from errors import UserError
from parallel.pipeline.balance import even_split
from plan.hardware import Device
from plan.layout import Layout, Sizes
from plan.memory import Memory
from plan.time import Part, StepTime
from training.config import Config

FIXED = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}  # stages per rank
INTERLEAVED = ("interleaved_1f1b", "breadth_first")
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
EXACT = 48  # candidates that are simulated


@dataclass
class Found:
    """A layout; `config` has it, the rest says what it would be like."""

    config: Config
    world: int
    device: Device
    estimate: float

    @cached_property
    def time(self) -> StepTime:
        return StepTime(Layout(self.config, self.world, 0), self.device)

    @property
    def seconds(self) -> float:
        return self.time.step_seconds

    @cached_property
    def peak(self) -> int:
        """Of the ranks that may hold most: the first, which has most micro-batches in flight, and the one with the head."""
        ranks = {0, self.config.parallel.ranks_of_stages[-1]}
        return max(Memory(Layout(self.config, self.world, rank)).peak for rank in ranks)

    def describe(self) -> str:
        p, t = self.config.parallel, self.config.train
        stages = f"×{p.stages_per_rank}" if p.stages_per_rank > 1 else ""
        cut = ", whole sequence" if p.tp > 1 and not p.sequence_parallel else ""
        return (
            f"tp {p.tp} pp {p.pp} dp_shard {p.dp_shard} dp_replicate {p.dp_replicate} · {p.schedule}{stages} · "
            f"micro-batch {t.micro_batch_size} · zero {p.zero_stage} · {t.activation_checkpointing} checkpointing{cut}"
        )

    def overrides(self) -> str:
        p, t = self.config.parallel, self.config.train
        keys = ("tp", "pp", "dp_shard", "dp_replicate", "schedule", "stages_per_rank", "zero_stage")
        text = [f"parallel.{key}={getattr(p, key)}" for key in keys]
        text += [f"parallel.sequence_parallel={str(p.sequence_parallel).lower()}"]
        text += [f"train.{key}={getattr(t, key)}" for key in ("micro_batch_size", "activation_checkpointing")]
        return " ".join(text)


def search(config: Config, world: int, device: Device, wanted: int = 10) -> tuple[list[Found], int, list[Found]]:
    """The `wanted` fastest that fit, best first; how many combinations were looked at; and the frontier of time and memory.

    Raises:
        UserError: none fits.
    """
    room = device.memory_bytes - device.reserved_bytes
    possible: list[tuple[float, Found]] = []
    seen = 0
    for candidate, bound in candidates(config, world, device):
        seen += 1
        if bound <= room:
            possible.append((bound, candidate))
    possible.sort(key=lambda one: one[1].estimate)
    slower = sorted(possible[4 * EXACT :], key=lambda one: one[0])[:EXACT]  # the smallest of them: where no fast one fits
    fitting: list[Found] = []
    for _, found in possible[: 4 * EXACT] + slower:
        if len(fitting) == EXACT:
            break
        try:
            if found.peak <= room:
                fitting.append(found)
        except UserError:  # a schedule that does not take these sizes
            continue
    if not fitting:
        raise UserError("--gpus", world, f"no layout fits {room / 1e9:.0f} GB a GPU", "take more GPUs, or larger ones")
    fitting.sort(key=lambda found: found.seconds)
    frontier: list[Found] = []
    for found in fitting:
        if not frontier or found.peak < frontier[-1].peak:
            frontier.append(found)
    return fitting[:wanted], seen, frontier


def candidates(config: Config, world: int, device: Device) -> Iterator[tuple[Found, float]]:
    """Every layout with whole numbers everywhere, with a lower bound of its memory."""
    model, batch = config.model, config.train.global_batch_size
    for tp in _powers_of_two(min(device.gpus_per_node, world)):
        if model.num_heads % tp or model.ffn_dim % tp or (model.num_kv_heads % tp and tp % model.num_kv_heads):
            continue
        for cut, size, mode in itertools.product((True, False), (1, 2, 4, 8), MODES):
            if (tp == 1 and not cut) or (cut and config.train.seq_len % tp):
                continue
            parallel = replace(config.parallel, tp=tp, pp=1, dp_shard=1, dp_replicate=1, schedule="1f1b", stages_per_rank=1,
                               layers_per_stage=None, sequence_parallel=cut, zero_stage=1)  # fmt: skip
            train = replace(config.train, micro_batch_size=size, activation_checkpointing=mode, compile=False)
            alike = replace(config, parallel=parallel, train=train)
            one = StepTime(Layout(alike, tp, 0), device)
            for pp in _divisors(world // tp, model.num_layers):
                dp = world // (tp * pp)
                if batch % (dp * size):
                    continue
                yield from _of_pipeline(alike, one, world, pp, batch // (dp * size), dp)


def _of_pipeline(alike: Config, one: StepTime, world: int, pp: int, m: int, dp: int) -> Iterator[tuple[Found, float]]:
    model, device = alike.model, one.device
    sizes, block, tp = Sizes(one.layout), one.layout.block.numel, one.layout.tp
    whole = [one.part(unit) for unit in (one.layout.units(0)[0], one.layout.units(0)[-1])]
    table = one.layout.vocabulary * model.dim
    message = _message_seconds(one, pp, world)
    for schedule, v in _schedules(pp, m, model.num_layers // pp):
        if schedule in INTERLEAVED and m > pp and m % pp and schedule == "interleaved_1f1b":
            continue
        blocks = max(even_split(model.num_layers, pp * v)) * v
        work = one.block * blocks
        slowest = max(_sum(work + whole[0]), _sum(work + whole[1])) if pp > 1 else _sum(work + whole[0] + whole[1])
        lost = _bubble(schedule, pp, v, work) + 2 * (pp - 1) * message
        numel = blocks * block + table * (2 if pp == 1 else 1)
        summing = (
            one.memory(numel * (one.layout.compute + 2 * one.layout.reduce)) if one.layout.compute < one.layout.reduce else 0.0
        )
        kept = _in_flight(schedule, pp, v, m) / v * blocks * (sizes.kept + sizes.part)
        for shard in _divisors(dp, dp):
            if shard < dp and shard * tp < min(device.gpus_per_node, dp * tp):  # smaller than a node: memory for nothing
                continue
            for zero in (1, 2, 3) if shard > 1 else (0,):
                e, master, reduce = one.layout.compute, one.layout.master, one.layout.reduce
                states = numel / shard * 3 * master + numel / shard * reduce
                states += numel * e * (zero < 3) + numel * reduce * (zero < 2 and m > 1)
                parallel = replace(alike.parallel, pp=pp, dp_shard=shard, dp_replicate=dp // shard, schedule=schedule,
                                   stages_per_rank=v, zero_stage=zero)  # fmt: skip
                config = replace(alike, parallel=parallel)
                probe = StepTime(Layout(config, world, 0), device)
                gather = probe.collective("dp_shard", numel * e)
                scatter = probe.collective("dp_shard", numel * reduce)
                replicas = probe.collective("dp_replicate", numel * reduce / shard, 2)
                forward, backward = work.forward, work.input_grad + work.weight_grad
                step = m * (slowest + summing) + lost
                if zero == 3:
                    step += m * (max(0.0, gather - forward) + max(0.0, gather + scatter - backward))
                else:
                    step += max(0.0, gather - forward) + (m if zero == 2 else 1) * max(0.0, scatter - backward)
                step += max(0.0, replicas - (backward if zero == 3 else 0.0))
                yield Found(config, world, device, step), states + kept


def _message_seconds(one: StepTime, pp: int, world: int) -> float:
    """Seconds of a message, if there were `pp` ranks."""
    if pp == 1:
        return 0.0
    parallel = replace(one.layout.config.parallel, pp=pp)
    return StepTime(Layout(replace(one.layout.config, parallel=parallel), one.layout.tp * pp, 0), one.device).message_seconds


def _schedules(pp: int, m: int, layers: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for name, v in FIXED.items():
        if v <= layers and not (name == "dualpipe_v" and m < 2 * pp):
            yield name, v
    for v in (2, 3, 4, 5, 6, 7, 8):
        if v <= layers and m >= pp:
            for name in INTERLEAVED:
                yield name, v


def _sum(part: Part) -> float:
    return part.forward + part.input_grad + part.weight_grad


def _bubble(schedule: str, pp: int, v: int, work: Part) -> float:
    """Seconds that a rank waits, by the papers' formulas (parallel/pipeline/schedules.py)."""
    f, i, w = work.forward, work.input_grad, work.weight_grad
    if schedule == "zb_h1":
        return (pp - 1) * max(0.0, f + i - w)
    if schedule == "zb_v":
        return (pp - 1) * max(0.0, i - w)
    if schedule == "dualpipe_v":
        return (pp - 1) * max(0.0, f + i - w) / 2
    return (pp - 1) * (f + i + w) / v


def _in_flight(schedule: str, pp: int, v: int, m: int) -> float:
    """Stages' micro-batches that the first rank holds at once."""
    if schedule in ("gpipe", "breadth_first"):
        return m * v
    if schedule == "interleaved_1f1b":
        return min(m * v, (v - 1) * min(pp, m) + 2 * (pp - 1) + 1)
    return min(m * v, {"zb_v": 2 * pp, "dualpipe_v": 2 * pp + 1}.get(schedule, pp))


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def why_not(best: Found, other: Found) -> str:
    """What the runner-up loses on."""
    a, b = best.time, other.time
    work = [sum(_sum(Part(f, i, w)) for f, i, w in zip(t.costs.forward, t.costs.input_grad, t.costs.weight_grad, strict=True))
            * t.layout.num_microbatches / t.layout.mesh_shape[0] for t in (a, b)]  # fmt: skip
    idle = [t.timeline.bubble_fraction * t.timeline.step_time for t in (a, b)]
    tail = [t.step_seconds - t.timeline.step_time for t in (a, b)]
    reasons = {
        "in the actions themselves (computing, tp, gathers that do not hide)": work[1] - work[0],
        "waiting in the pipeline": idle[1] - idle[0],
        "after the last action (reductions, optimizer)": tail[1] - tail[0],
    }
    text = ", ".join(f"{seconds:+.3f} s {what}" for what, seconds in reasons.items() if abs(seconds) >= 5e-4)
    return f"{other.seconds - best.seconds:+.3f} s: {text or 'they are alike'}"
