"""How often to save, and what failures cost: the closed form, what a plan says of it, and what is
read from a run's ledger."""

import random
from typing import Any

import pytest

from hardware import FAILURES_PER_GPU_DAY, H100
from runtime.checkpoint.save_interval import DAY, best_interval, mtbf_of
from runtime.log.ledger import Account
from settings.load import load_config
from tools.plan.goodput import Shares, describe_goodput, goodput, shares, spares_needed
from tools.report import run as report


def test_published_figures():
    """Where failures are rare, Young's interval is near Daly's optimum of higher order (captions of
    his figures 3 and 4: saves of 5 minutes); and Llama 3's mean time between failures."""
    for mtbf, best in ((24 * 60, 117), (6 * 60, 57)):
        assert best_interval(5, mtbf) == pytest.approx(best, rel=0.06)
    assert mtbf_of(FAILURES_PER_GPU_DAY, 16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert mtbf_of(0.0, 8) == float("inf")


def simulated(interval: float, save: float, commit: float, restart: float, mtbf: float) -> Shares:
    """The same shares in a run that 20,000 failures interrupt, also while it restarts:

    train τ │s│ train τ │s│ train … ✗ restart R │ train τ │s│ …
                        └ commit w ┘            └ from the last save that was committed
    """
    draw = random.Random(1)
    total = saving = repeated = restarting = 0.0
    cycle = interval + save
    for _ in range(20_000):
        ran = draw.expovariate(1 / mtbf)
        total += ran
        if ran < restart:  # begins anew
            restarting += ran
            continue
        restarting += restart
        ran -= restart
        trained = ran // cycle * interval + min(ran % cycle, interval)
        # save n begins n intervals and n − 1 saves after the start, and counts w later
        committed = max(0.0, (ran - commit + save) // cycle)
        repeated += trained - min(trained, committed * interval)
        saving += ran - trained
    return Shares(saving / total, repeated / total, restarting / total)


@pytest.mark.parametrize(
    ("gpus", "save", "commit", "restart"), [(256, 2.0, 60.0, 60.0), (1024, 0.5, 30.0, 300.0)]
)
def test_the_closed_form_agrees_with_a_simulation(gpus, save, commit, restart):
    """Where M ≫ τ, each share is within 5% of s/τ, (τ/2 + w)/M and R/M, and so is their sum. 20,000
    failures leave a standard error below 1%. And no other interval costs less."""
    mtbf = mtbf_of(FAILURES_PER_GPU_DAY, gpus)
    interval = best_interval(save, mtbf)
    assert mtbf > 100 * interval
    found, expected = (of(interval, save, commit, restart, mtbf) for of in (simulated, shares))
    assert found == pytest.approx(expected, rel=0.05)
    assert 1 - found.effective == pytest.approx(1 - expected.effective, rel=0.05)
    for factor in (0.8, 1.25):
        other = shares(interval * factor, save, commit, restart, mtbf)
        assert other.effective < expected.effective
    # control: saves that count half an interval later are noticed
    late = simulated(interval, save, commit + interval / 2, restart, mtbf)
    assert late.repeated != pytest.approx(expected.repeated, rel=0.05)


def test_spare_nodes():
    """By hand: with a mean of 1, 0, 1, 2, 3 and 4 nodes are missing with probabilities .3679,
    .3679, .1839, .0613 and .0153."""
    assert spares_needed(0.0) == 0
    assert [spares_needed(1.0, enough) for enough in (0.73, 0.74, 0.98)] == [1, 2, 3]
    assert spares_needed(1.0) == 4
    # of a large mean, about mean + 2.33 √mean, although exp(−mean) is 0
    assert spares_needed(10_000.0) == pytest.approx(10_000 + 2.326 * 100, abs=2)


def test_what_a_run_measured():
    """Of 20 steps of 2 s on 4 ranks, with a save every 5 steps, of which the first fails, and one
    failure, after step 13."""
    events: list[dict[str, Any]] = []
    clock = 1000.0

    def add(event: str, **about: Any) -> None:
        events.append({"event": event, "time": clock, **about})

    for first, last in ((0, 13), (10, 20)):
        add("start", began=clock, step=first, world_size=4)
        clock += 6.0
        for step in range(first + 1, last + 1):
            clock += 2.0
            spent = {"steps": 2.0} | ({"start": 6.0} if step == first + 1 else {})
            add("spent", step=step, seconds=spent)
            if step % 5 == 0:
                clock += 0.5
                saved = {"bytes": 1, "stall_seconds": 0.4, "write_seconds": 1.0}
                add("checkpoint", step=step, **({"failed": "why"} if step == 5 else saved))
                add("spent", step=step, seconds={"saving": 0.5})
        clock += 9.0
    add("end", state="finished", step=20)
    rate = DAY / 4 / 400.0  # one failure in 400 s
    effective, best, took = report.goodput(events, rate)
    # 20 of 23 steps count; 2 s of saves, 2 × 6 s of starts, 9 s down
    assert effective == f"effective training time {40 / (46 + 2 + 12 + 9):.1%}; 1 failures"
    assert "best interval between saves: 10 steps (20.0 s)" in best
    assert took == "measured: a save 0.5 s, its writing 1.0 s, a start 6.0 s"
    assert len(report.goodput(events, 0.0)) == 2, "nothing fails"
    again = {"event": "spent", "time": clock, "step": 20, "seconds": {"start": 6.0}}
    *_, took = report.goodput([*events, again], rate)  # a later data stage of the same process
    assert took.endswith("a start 6.0 s")
    # nothing was down between the end of the training and a later start with more steps
    later = {**events[0], "began": clock + 1e6, "time": clock + 1e6, "step": 20}
    assert report.goodput([*events, later], rate)[0] == effective
    failed = [{"event": "end", "time": clock + 1e6, "state": "failed", "step": 20}]
    down = Account([*events, *failed, {**later, "began": clock + 1e6 + 60.0}]).seconds["down"]
    assert down == 9.0 + 60.0
    for event in events:  # a GPU copies while the host goes on
        event |= {"stall_seconds": 2.0} if "stall_seconds" in event else {}
    _, best, took = report.goodput(events, rate)
    assert "best interval between saves: 20 steps (40.0 s)" in best
    assert "a save 2.0 s" in took


def test_a_planned_stop_is_no_failure():
    start = {"event": "start", "time": 1.0, "began": 0.0, "step": 0, "world_size": 1}
    for state, failures in (("requeue", 0), ("failed", 1)):
        end = {"event": "end", "time": 2.0, "state": state, "step": 0}
        for ends in (1, 4):  # a start that ends before its first step has no `start`
            for events in ([start, *[end] * ends], [start, *[end] * ends, start]):  # it may train
                told, *_ = report.goodput(events, 0.0)
                assert told.endswith(f"; {failures * ends} failures")


def planned(gpus: int, *overrides: str) -> dict[str, Any]:
    return goodput(load_config("configs/llama3_70b.yaml", list(overrides)), gpus, H100, 10.0)


def test_the_plan():
    """With Llama 3's failure rate on 16,384 GPUs."""
    large = planned(16_384, "checkpoint.interval=auto")
    assert large["mtbf_seconds"] / 3600 == pytest.approx(3.09, abs=0.01)
    assert large["checkpoint_bytes"] == 12 * 70_553_706_496
    assert large["interval_steps"] == large["best_interval_steps"] < 100
    assert large["spare_nodes"] == spares_needed(419 / 54 * 0.78)
    small = planned(256, "checkpoint.interval=auto")
    assert large["effective_training_time"] < 0.98 < small["effective_training_time"]
    # the stated rate and interval are used
    stated = ("checkpoint.interval=500", "checkpoint.failures_per_gpu_day=1e-5")
    rare = planned(16_384, *stated)
    assert rare["interval_steps"] == 500
    assert rare["best_interval_steps"] > large["interval_steps"]
    # a run saves at least once an hour
    hourly = planned(256, "checkpoint.interval=auto", "checkpoint.failures_per_gpu_day=1e-7")
    assert hourly["interval_steps"] == 360 < hourly["best_interval_steps"]
    assert describe_goodput(planned(256, "checkpoint.failures_per_gpu_day=0")) == []
    # training waits for the copy to the host, or until all is written
    slow = planned(16_384, "checkpoint.interval=auto", "checkpoint.async_save=false")
    written = (large["restart_seconds"] - H100.restart_seconds) / 2
    assert slow["save_seconds"] == pytest.approx(large["save_seconds"] + written)
    assert slow["best_interval_steps"] > large["best_interval_steps"]
    # without saves a failure costs all steps
    never = planned(16_384, "checkpoint.interval=never")
    assert (never["interval_steps"], never["effective_training_time"]) == (None, 0.0)
    assert "nothing is saved before the last step (best: " in describe_goodput(never)[0]
