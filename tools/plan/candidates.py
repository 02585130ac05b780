"""Lists every layout of a model on a number of GPUs, each with a lower bound on its bytes (the
largest of its ranks' bounds) and, if the bound fits, an estimate of its step's seconds
(plan/estimate.py).
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, get_args

from costs.parameters import check_tp
from errors import UserError
from model.experts import Experts
from parallel.activation import Mode
from parallel.pipeline.balance import LayerCosts, balanced_split, even_split
from settings.checks import cuts_of_sequence, sides_that_cannot_be_cut
from settings.config import Config
from tools.plan.estimate import SPLIT, Pipeline, Stage
from tools.plan.hardware import Device
from tools.plan.layout import Layout, Numbers, ranks_of_stages
from tools.plan.time import StepTime

# Stages per rank of schedules that take no other number; the others take two or more.
FIXED = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}
INTERLEAVED = ("interleaved_1f1b", "breadth_first")
MODES = get_args(Mode)
MICRO_BATCHES = (1, 2, 4, 8)  # sequences
CP_TOKENS = 8192  # of a sequence; a cp rank keeps at least as many, which fill its kernels
VIRTUAL = 8  # stages per rank of interleaved schedules: all up to this; more only if even

balanced_layers = lru_cache(maxsize=4096)(balanced_split)


class Candidate(NamedTuple):
    """A layout, with its estimate and its bound."""

    estimate: float  # seconds of a step; infinite if the bound does not fit, as it is not needed
    bound: float  # bytes; the layout needs no less
    fullest: int  # the pipeline rank with the largest bound
    alike: Config  # the part of the configuration that concerns the inside of a stage
    rest: dict[str, Any]  # the other settings of `parallel`

    def config(self) -> Config:
        return replace(self.alike, parallel=replace(self.alike.parallel, **self.rest))


def candidates(config: Config, world: int, device: Device) -> Iterator[Candidate]:
    """Yield every layout that obeys the configuration's rules."""
    batch, seq_len = config.train.global_batch_size, config.train.seq_len
    longest = max(1, seq_len // CP_TOKENS)
    experts = config.model.find(Experts) or Experts(count=1)
    axes = itertools.product(
        _tp_sizes(config, world, device),
        [cp for cp in _divisors(world) if cp <= longest],
        _divisors(math.gcd(world, experts.count)),
    )
    micro_batches = sorted({*MICRO_BATCHES, config.train.micro_batch_size})
    for tp, cp, ep in axes:
        # the fewest data-parallel ranks with which ep has its ranks
        dp_shard = ep // math.gcd(ep, tp * cp)
        if world % (tp * cp * dp_shard):
            continue
        for cut, size, mode in itertools.product((True, False), micro_batches, MODES):
            if tp == 1 and cut != config.parallel.sequence_parallel:
                continue
            if tp > 1 and not cut and config.model.has_experts:  # settings/checks.py
                continue
            parallel = replace(config.parallel, tp=tp, cp=cp, pp=1, dp_shard=dp_shard,
                               dp_replicate=1, ep=ep, schedule="1f1b", stages_per_rank=1,
                               layers_per_stage=None, sequence_parallel=cut,
                               zero_stage=1)  # fmt: skip
            if seq_len % math.prod(cuts_of_sequence(parallel).values()):
                continue
            train = replace(config.train, micro_batch_size=size, activation_checkpointing=mode)
            alike = replace(config, parallel=parallel, train=train)
            layout = Layout(alike, tp * cp * dp_shard, 0)
            stage = Stage(StepTime(layout, device), world)
            for pp in _divisors(world // (tp * cp)):
                dp = world // (tp * cp * pp)
                if pp <= config.model.num_layers + 2 and batch % (dp * size) == 0:
                    for pipe in pipelines(stage, pp, batch // (dp * size)):
                        yield from _data_parallel(pipe, dp)


def _tp_sizes(config: Config, world: int, device: Device) -> list[int]:
    """The sizes of tp that divide the world and the model's layers, and do not exceed a node; if
    there are several nodes, they also divide a node. Compiled blocks run with tp 1 only."""
    node = 1 if config.train.compile else device.gpus_per_node
    found = []
    for tp in _divisors(world):
        if tp <= node and (world <= node or node % tp == 0):
            with contextlib.suppress(UserError):
                check_tp(config.model, tp)
                found.append(tp)
    return found


def pipelines(stage: Stage, pp: int, m: int) -> Iterator[Pipeline]:
    """Yield the schedules and splits of the layers for `m` micro-batches on `pp` ranks."""
    config, costs = stage.alike, stage.alike.layer_costs()
    for schedule, v in _schedules(pp, m, config.model.num_layers):
        if config.train.compile and schedule in SPLIT:
            continue
        for layers_per_stage, counts in _splits(costs, tuple(ranks_of_stages(schedule, pp, v))):
            settings = {"pp": pp, "schedule": schedule, "stages_per_rank": v,
                        "layers_per_stage": layers_per_stage}  # fmt: skip
            yield Pipeline(stage, settings, counts, m)


def _splits(costs: LayerCosts, where: tuple[int, ...]) -> Iterator[tuple[object, list[int]]]:
    """Yield the ways to split the layers over stages, as the configuration has them, and the number
    of layers of each stage."""
    layers, stages = len(costs.blocks), len(where)
    if layers < stages:
        # one layer per stage, but none in the last, which has the head, or in the first and last
        light = [
            int(0 < s < stages - 1 or (s == 0 and layers == stages - 1)) for s in range(stages)
        ]
        if stages - layers <= 2 and stages > 2 and sum(light) == layers:
            yield light, light
        return
    even = even_split(layers, stages)
    yield None, even
    balanced = balanced_layers(costs, where)
    if balanced != even:
        yield "auto", balanced


def _data_parallel(pipe: Pipeline, dp: int) -> Iterator[Candidate]:
    """Yield all ways to shard one pipeline's weights over `dp` ranks."""
    stage, config, m = pipe.stage, pipe.stage.alike, pipe.m
    device, sizes = stage.time.device, stage.layout.sizes
    cp, ep = sizes.cp, sizes.ep
    inner = sizes.tp * cp  # the ranks that share a stage's work on one sequence
    one_dtype = config.parallel.reduce_dtype == config.train.dtype == "bfloat16"
    for shard in _divisors(dp):
        if shard < dp and shard * inner < min(device.gpus_per_node, dp * inner):
            continue
        of_experts = shard * inner // ep
        if shard * inner % ep or sides_that_cannot_be_cut(config.model, ep, of_experts):
            continue
        shards = Numbers(shard * cp, of_experts if config.model.has_experts else 1)
        replicas = Numbers(dp // shard, dp // shard)
        for zero in (1, 2, 3) if max(shards) > 1 else (0,):
            if one_dtype and ((m > 1 and zero < 2) or shard < dp):
                continue
            bound, fullest = pipe.bound(shards, zero)
            fits = bound <= device.room
            seconds = pipe.seconds(shards, replicas, zero) if fits else math.inf
            rest = {"dp_shard": shard, "dp_replicate": dp // shard, "zero_stage": zero}
            yield Candidate(seconds, bound, fullest, config, pipe.settings | rest)


def _schedules(pp: int, m: int, layers: int) -> Iterator[tuple[str, int]]:
    """Yield names and stages per rank of the schedules that accept these sizes."""
    most_stages = (layers + 2) // pp
    if pp == 1:
        yield "1f1b", 1
        return
    for name, v in FIXED.items():
        if v <= most_stages and not (name == "dualpipe_v" and m < 2 * pp):
            yield name, v
    for v, name in itertools.product(range(2, most_stages + 1), INTERLEAVED):
        # either counting layers only, or counting the embedding and the head as a layer each
        even = layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0
        if (v <= VIRTUAL or even) and m >= pp and not (name == "interleaved_1f1b" and m % pp):
            yield name, v


@lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
