"""A rank that computes slower than its peers is named, with its node and since when; noise, uneven
stages, evaluation, saving and waiting for data name nobody."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from data.loader import BatchLoader
from model.matmul import Matmul
from runtime.health import slow_ranks
from runtime.health.excluded import exclude, excluded_nodes
from runtime.health.straggler import Judge
from tests import ROOT, runs

NOISE = ROOT / "tests/fixtures" / "product_times.json"
PRODUCT_SECONDS = 4e-3


def steady(ranks: int) -> Any:
    generator = random.Random(0)
    while True:
        yield [1000 * math.exp(generator.gauss(0, 0.01)) for _ in range(ranks)]


def test_a_slow_rank_is_named_after_three_intervals_until_it_recovers():
    judge, times = Judge([0] * 8, 1.15), steady(8)
    heard = []
    for step in range(1, 31):
        found = next(times)
        found[5] *= 1.3 if 11 <= step <= 20 else 1.0
        began, ended = judge.add(step, found)
        heard += [(step, "slow", each.rank, each.since) for each in began]
        heard += [(step, "well", each.rank, each.since) for each in ended]
        for each in began:
            assert each.factor == pytest.approx(1.3, rel=0.05)
    assert heard == [(13, "slow", 5, 11), (23, "well", 5, 11)]


@pytest.mark.parametrize(
    ("peers", "slow"), [(2, [1]), (3, [1]), (16, [1]), (16, list(range(8)))], ids=str
)
def test_it_is_named_at_once_among_few_and_many_peers(peers, slow):
    """From the first interval on. Half of the peers may be slow."""
    judge, times = Judge([0] * peers, 1.15), steady(peers)
    for step in range(1, 4):
        judge.add(step, [t * (1.3 if rank in slow else 1.0) for rank, t in enumerate(next(times))])
    assert [*judge.slow] == slow


def test_uneven_stages_and_short_disturbances_name_nobody():
    """Nor does what makes all ranks slower, as from step 50 on. The last rank has no peers."""
    judge, times = Judge([0, 0, 1, 1, 2], 1.15), steady(5)
    for step in range(1, 100):
        found = next(times)
        found[step % 4] *= 3.0 if step % 10 < 2 else 1.0
        every = 1.0 if step < 50 else 2.0
        judge.add(step, [t * every * (1.0 if r < 2 else 1.4) for r, t in enumerate(found)])
        assert not judge.slow


def test_a_thousand_intervals_of_measured_noise_name_nobody():
    """Their times are drawn from those of a real run, ten consecutive ones at a time."""
    measured = json.loads(NOISE.read_text())
    times, generator = measured["times"], random.Random(1)
    judge = Judge(measured["roles"], 1.15)
    for first in range(0, 1000, 10):
        at = generator.randrange(len(times) - 10)
        for step in range(10):
            judge.add(first + step, times[at + step])
            assert not judge.slow


def test_one_long_call_of_a_product_does_not_count():
    times = slow_ranks.ProductTimes.__new__(slow_ranks.ProductTimes)
    times.marks = {name: [(0.0, 1e-3), (0.0, 1.0), (0.0, 1e-3)] for name in ("one", "other")}
    assert times.take() == 2000, "microseconds"


def run_with_timed_products(arguments: list[str], factor: float) -> str:
    """Train with products that take a set time, because two cores cannot time four busy ranks: they
    only move a clock of this rank's own, whatever else the machine does. Rank 3 may be slow."""
    seconds = PRODUCT_SECONDS * (factor if dist.get_rank() == 3 else 1.0)
    generator, clock = random.Random(dist.get_rank()), [0.0]

    def timed(compute: Any) -> Any:
        def product(*inputs: Any, **more: Any) -> torch.Tensor:
            clock[0] += seconds * math.exp(generator.gauss(0, 0.05))
            result: torch.Tensor = compute(*inputs, **more)
            return result

        return product

    kinds = ("forward", "input_gradient", "weight_gradient", "add_weight_gradient")
    replaced = {kind: timed(getattr(Matmul, kind)) for kind in kinds}
    read = BatchLoader.__next__

    def stalls(self: BatchLoader) -> Any:
        clock[0] += dist.get_rank() == 2
        return read(self)

    with (
        patch.multiple(Matmul, **replaced),
        patch.object(BatchLoader, "__next__", stalls),
        patch.object(slow_ranks, "time_mark", lambda _: clock[0]),
        patch.object(slow_ranks, "EXCLUDE_SECONDS", 0.0),
    ):
        return runs.train_run(arguments)


@pytest.mark.parametrize("factor", [1.3, pytest.param(1.0, marks=pytest.mark.thorough)])
def test_the_slow_rank_is_named_within_three_intervals(ranks, data, tmp_path, factor):
    """7 logged steps, of which 5 are timed, on 4 ranks. There are evaluations, saves, a rank that
    waits for its data, and stages of 1 and 3 blocks. Control: if no rank is slow, none is named."""
    config = runs.write_config(
        tmp_path, data, parallel={**runs.LAYOUT_3D, "layers_per_stage": [1, 3]},
        train={"steps": 7, "eval_interval": 3, "eval_samples": 8, "micro_batch_size": 4},
        checkpoint={"interval": 3}, run={"log_interval": 1}, guard={"slow_ranks": "exclude"},
    )  # fmt: skip
    assert ranks.run(run_with_timed_products, 4, [config], factor) == [""] * 4
    folder, slow = tmp_path / "run", [3] if factor > 1 else []
    events, status = runs.events_of(folder, "slow_rank"), runs.status_of(tmp_path)
    last = runs.metrics_of(tmp_path)[-1]
    assert [each["rank"] for each in events] == slow
    assert status["state"] == "finished"
    assert [each["rank"] for each in status.get("slow", [])] == slow
    assert last["slow_ranks"] == slow
    assert (last["slowest_rank_factor"] > 1.15) == (factor > 1)
    for event in events:
        first = 1 + slow_ranks.AFTER  # the first logged step whose products were timed
        assert (event["since"], event["step"]) == (first, first + 2)
        assert event["factor"] == pytest.approx(1.3, abs=0.12)
        assert status["slow"][0]["node"] == event["node"]
        assert "slow: rank 3 took 1." in excluded_nodes(folder)[event["node"]]["reason"]


def judged(folder: Path, after: float) -> list[tuple[int, list[str]]]:
    """The excluded nodes after each logged step, where rank 1 of n0 is slow in steps 4 to 20 and
    rank 3 of n1 in steps 10 to 12, by a clock that ticks once a step; `after`: EXCLUDE_SECONDS."""
    clock, seen = [0.0], []
    listener = slow_ranks.SlowRanks.__new__(slow_ranks.SlowRanks)
    listener.policy, listener.folder = "exclude", folder
    listener.nodes, listener.judge = ["n0", "n0", "n1", "n1"], Judge([0] * 4, 1.15)
    run = SimpleNamespace(for_status={}, log=runs.run_log_of(folder))
    listener.named, listener.excluded = {}, {}
    slow = {1: range(4, 21), 3: range(10, 13)}
    with (
        patch.object(slow_ranks, "EXCLUDE_SECONDS", after),
        patch.object(slow_ranks, "time", SimpleNamespace(monotonic=lambda: clock[0])),
    ):
        for step in range(1, 31):
            clock[0], listener._posted_at = float(step), step
            times = [1.3 if step in slow.get(rank, ()) else 1.0 for rank in range(4)]
            listener._report(run, *listener.judge.add(step, times))
            now = [*excluded_nodes(folder)]
            seen += [(step, now)] if not seen or seen[-1][1] != now else []
    return seen


def test_a_node_is_excluded_while_it_stays_slow(tmp_path):
    # named after step 6, well after step 23
    assert judged(tmp_path, after=5.0) == [(1, []), (11, ["n0"]), (23, [])]
    # control: without patience, three slow steps are enough, until they are over
    assert judged(tmp_path, after=0.0) == [
        (1, []), (6, ["n0"]), (12, ["n0", "n1"]), (15, ["n0"]), (23, []),
    ]  # fmt: skip
    # what another start, or an operator, has excluded stays
    exclude(tmp_path, "n0", "computes wrongly")
    assert judged(tmp_path, after=5.0) == [(1, ["n0"])]
