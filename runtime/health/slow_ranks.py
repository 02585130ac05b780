"""Slow ranks are named while a run trains (`guard.slow_ranks`).

A slow machine makes all ranks slow, because each waits for the others; the time of a step does not
show which one it is. So each rank measures what it computes without waiting: the time of each
product of its linear layers (products.py), by events in the device's stream on a GPU, by the clock
on a CPU. Of each product of each layer the median counts, so that a moment's disturbance does not,
and their sum is the rank's time of the interval.

    steps before a logged one   the first CALLS calls of each product are timed, in the last STEPS
    logged step                 the device has been waited for: each rank sums its medians, and puts
                                them in the all-reduce of stop requests (stop.py), in its own slot
    one step later              rank 0 reads all ranks' times, and judges them (straggler.py)

Evaluation, saving and waiting for data, for messages or in collectives are not in these times.
Uneven stages are not compared with each other.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from runtime.device import seconds_between, time_mark
from runtime.health.excluded import exclude, include, node_name
from runtime.health.products import Compute, Inputs, linear_layers, wrap
from runtime.health.straggler import Judge, Slow
from runtime.listener import Listener, Run
from runtime.output import log
from runtime.trainer_state import Start
from training.step import TrainStep

AFTER = 2  # first steps of a start, which are not timed: they allocate and connect
STEPS = 4  # last steps of an interval, in which products are timed
CALLS = 8  # timed calls of each product in an interval
# With guard.slow_ranks=exclude, a node is excluded once a rank has been slow for so long.
EXCLUDE_SECONDS = 300.0
MOST = 2**31 - 1  # microseconds, in the int32 of the all-reduce


class ProductTimes:
    """The times of this rank's products since the last call of `take`, while it is on."""

    def __init__(self, train: TrainStep) -> None:
        self.device, self.layers = train.mesh.device, linear_layers(train)
        # (layer, product) → begin and end of each call: events, or seconds
        self.marks: dict[tuple[str, str], list[tuple[Any, Any]]] = defaultdict(list)
        self._unwrap: Callable[[], None] | None = None

    def turn(self, on: bool) -> None:
        if self._unwrap is not None:
            self._unwrap()
        self._unwrap = wrap(self.layers, self._timed) if on else None

    def take(self) -> int:
        """The sum over all products of the median of a call's time, in microseconds, at least 1.
        On a GPU, waits for the calls."""
        seconds = sum(
            statistics.median(seconds_between(begin, end) for begin, end in calls)
            for calls in self.marks.values()
        )
        self.marks.clear()
        return max(1, min(round(seconds * 1e6), MOST))

    def _timed(self, name: str, kind: str, compute: Compute, inputs: Inputs) -> Tensor:
        calls = self.marks[name, kind]
        if len(calls) >= CALLS:
            return compute()
        begin = time_mark(self.device)
        result = compute()
        calls.append((begin, time_mark(self.device)))
        return result


class SlowRanks(Listener):
    """Times this rank; on rank 0, names the ranks that are slow. It comes after `metrics`,
    so that what the other listeners compute is not timed."""

    def __init__(self, train: TrainStep) -> None:
        config = train.config
        self.policy, self.folder = config.guard.slow_ranks, Path(config.run.dir)
        self.times = ProductTimes(train)
        self.nodes = [""] * dist.get_world_size()
        dist.all_gather_object(self.nodes, node_name())
        stages = [train.mesh.sizes.coordinates(rank)["pp"] for rank in range(len(self.nodes))]
        self.judge = Judge(stages, config.guard.slow_factor)
        self.named: dict[int, float] = {}  # when each slow rank was named, by the monotonic clock
        self.excluded: dict[str, str] = {}  # nodes that this start has excluded, each with why
        self._is_timed = False  # this step, on all ranks
        # the logged step, and this rank's time, that are to be posted
        self._ready: tuple[int, int] | None = None
        self._posted_at = 0  # the logged step whose times are being exchanged

    def begins(self, run: Run) -> None:
        run.stop.carry(self._post, lambda times: self._judge(run, times))

    def before_step(self, run: Run) -> None:
        left = -(run.step + 1) % run.config.run.log_interval  # steps until a logged one
        self._is_timed = left < STEPS and run.step >= run.first_step + AFTER
        self.times.turn(on=self._is_timed)

    def after_step(self, run: Run) -> None:
        self.times.turn(on=False)
        if run.step_seconds is not None and self._is_timed:
            self._ready = (run.step, self.times.take())

    def went_back(self, run: Run, start: Start) -> None:
        self.times.marks.clear()

    def closes(self, run: Run, error: BaseException | None) -> None:
        self.times.turn(on=False)

    def _post(self) -> list[int]:
        """Called by `stop` at each boundary between steps: after a logged step, this rank's time in
        its slot of zeros; else nothing."""
        if self._ready is None:
            return []
        slots = [0] * len(self.nodes)
        (self._posted_at, slots[dist.get_rank()]), self._ready = self._ready, None
        return slots

    def _judge(self, run: Run, times: list[int]) -> None:
        """Called by `stop`, with the times of all ranks, before the next ones are posted."""
        if dist.get_rank() == 0:
            self._report(run, *self.judge.add(self._posted_at, times))

    def _report(self, run: Run, began: list[Slow], ended: list[Slow]) -> None:
        """On rank 0: tell what has changed, and keep metrics.jsonl and status.json up to date."""
        slow = self.judge.slow
        run.noted = {"slowest_rank_factor": self.judge.slowest, "slow_ranks": [*slow]}
        if slow or ended:
            run.for_status["slow"] = [self._about(each) for each in slow.values()]
        for each in began:
            where = f"rank {each.rank} on {self.nodes[each.rank]}"
            log(f"warning: {where} is slow: {_how_slow(each)}")
            run.log.event("slow_rank", step=self._posted_at, **self._about(each))
            self.named[each.rank] = time.monotonic()
        for each in ended:
            log(f"rank {each.rank} on {self.nodes[each.rank]} is no longer slow")
            about = {**self._about(each), "ended": True}
            run.log.event("slow_rank", step=self._posted_at, **about)
            del self.named[each.rank]
        if self.policy == "exclude":
            self._exclude()

    def _exclude(self) -> None:
        """On rank 0: exclude nodes that stay slow, and take that back once they no longer are."""
        lasting = time.monotonic() - EXCLUDE_SECONDS
        for rank, slow in self.judge.slow.items():
            node, reason = self.nodes[rank], f"slow: rank {rank} took {_how_slow(slow)}"
            if self.named[rank] <= lasting and node not in self.excluded:
                self.excluded[node] = reason
                if exclude(self.folder, node, reason):
                    log(f"{node} is excluded from the next start: {reason}")
        for node in self.excluded.keys() - {self.nodes[rank] for rank in self.judge.slow}:
            if include(self.folder, node, self.excluded.pop(node)):
                log(f"{node} is no longer excluded")

    def _about(self, slow: Slow) -> dict[str, Any]:
        return {"node": self.nodes[slow.rank], **asdict(slow), "factor": round(slow.factor, 3)}


def _how_slow(slow: Slow) -> str:
    return f"{slow.factor:.2f} times its peers since step {slow.since:,}"
