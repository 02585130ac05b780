"""How often to save, and what failures cost: the closed forms, the simulator, and what is read from
a run's ledger."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware import FAILURES_PER_GPU_DAY, H100
from runtime.checkpoints.goodput import (
    DAY,
    Interruptions,
    best_interval,
    best_interval_daly,
    effective_exactly,
    mtbf_of,
    shares,
    spares_needed,
)
from runtime.records.events import append_event, read_events
from tools.goodput import __main__ as command
from tools.goodput.simulate import Job, simulate
from tools.plan.goodput import describe_goodput, goodput
from tools.report.goodput import effective_lines
from tools.report.ledger import measure
from training.load_config import load_config


def job(gpus: int, save: float, commit: float, restart: float, **more: Any) -> Job:
    rate = FAILURES_PER_GPU_DAY * 8
    made = Job(nodes=gpus // 8, failures_per_node_day=rate, save=save, commit=commit,
               restart=restart, **more)  # fmt: skip
    return replace(made, interval=best_interval(save, made.mtbf))


# --- closed forms ---------------------------------------------------------------------------------


def test_published_figures():
    """Daly's optimal intervals (captions of his figures 3 to 5: saves of 5 minutes), and Llama 3's
    mean time between failures."""
    for mtbf, best in ((24 * 60, 117), (6 * 60, 57), (15, 9.1)):
        assert best_interval_daly(5, mtbf) == pytest.approx(best, abs=0.5)
    assert best_interval_daly(5, 2.5) == 2.5, "a save takes as long as two failures: equation 37"
    assert mtbf_of(FAILURES_PER_GPU_DAY, 16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert mtbf_of(0.0, 8) == float("inf")


def test_youngs_interval_is_the_best():
    costs = Interruptions(save=2.0, commit=60.0, restart=300.0, mtbf=DAY)
    best = best_interval(costs.save, costs.mtbf)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert shares(costs, best * factor).effective < shares(costs, best).effective


def test_spare_nodes():
    """By hand: with a mean of 1, 0, 1, 2, 3 and 4 nodes are missing with probabilities .3679,
    .3679, .1839, .0613 and .0153."""
    assert spares_needed(0.0) == 0
    assert spares_needed(1.0, 0.73) == 1
    assert spares_needed(1.0, 0.74) == 2
    assert spares_needed(1.0) == 4
    assert spares_needed(1.0, 0.98) == 3
    # of a large mean, about mean + 2.33 √mean, although exp(−mean) is 0
    assert spares_needed(10_000.0) == pytest.approx(10_000 + 2.326 * 100, abs=2)


# --- the simulator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "save", "commit", "restart"),
    [(256, 2.0, 2.0, 120.0), (256, 2.0, 60.0, 60.0), (1024, 0.5, 30.0, 300.0), (64, 60, 300, 600)],
)
def test_the_simulator_agrees_with_the_closed_form(gpus, save, commit, restart):
    """Where M ≫ τ, the simulated losses are within 5% of s/τ + (τ/2 + w)/M + R/M, in all and in
    each part. 20,000 failures leave a standard error below 1%."""
    made = job(gpus, save, commit, restart)
    assert made.mtbf > 100 * made.interval
    found = simulate(made, 20_000 * made.mtbf, seed=1)
    expected = shares(made.costs, made.interval)
    parts = found.shares()
    for part in ("repeated", "saving", "restarting"):
        assert parts[part] == pytest.approx(getattr(expected, part), rel=0.05)
    assert 1 - found.effective == pytest.approx(1 - expected.effective, rel=0.05)
    assert sum(parts.values()) == pytest.approx(1.0)
    # control: a save that counts at once although it takes a minute is noticed
    at_once = simulate(replace(made, commit=save + made.interval / 2), 20_000 * made.mtbf, seed=1)
    assert at_once.shares()["repeated"] != pytest.approx(expected.repeated, rel=0.05)


def test_it_agrees_where_failures_are_frequent():
    """At 16,384 GPUs the first order is off, and the simulator agrees with the exact expectation,
    in which restarts fail too."""
    made = job(16_384, 60.0, 60.0, 900.0)
    found = simulate(made, 20_000 * made.mtbf, seed=2)
    assert found.effective == pytest.approx(effective_exactly(made.costs, made.interval), abs=3e-3)
    assert abs(found.effective - shares(made.costs, made.interval).effective) > 1e-2


@pytest.mark.parametrize(
    ("seconds", "gaps", "expected"),
    [
        # trains 10 + 10 + 1.5 s, of which 10 count; after the restart 12 s, with a save in them
        (39.5, [23.5], {"repeated": 11.5, "restarting": 4.0, "steps": 21.0, "saving": 3.0}),
        (28.0, [24.0], {"repeated": 2.0}),  # half a second later, the second save counts
        # the restart fails twice, and begins anew
        (35.0, [23.5, 1.0, 3.0], {"restarting": 1.0 + 3.0 + 4.0, "failures": 3}),
    ],
    ids=["before the second save counts", "after it", "while it restarts"],
)
def test_given_failures(seconds, gaps, expected):
    """By hand. Saves begin at 10, 21, 32, … s and count 3 s later."""
    made = Job(interval=10.0, save=1.0, commit=3.0, restart=4.0)
    found = simulate(made, seconds, gaps=iter([*gaps, 1e9]))
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_save_waits_for_the_one_before():
    """A checkpoint that takes 10 s to write cannot be saved every 3 s."""
    found = simulate(Job(interval=3.0, save=1.0, commit=10.0), 100.0)
    assert found.steps == 30.0
    assert found.effective == pytest.approx(0.3)


def test_spares_replace_nodes():
    """Without a spare the job waits; with the number that closed form names it waits less than 1%
    of the time; a shrinking job goes on, slower."""
    made = job(1024, 1.0, 1.0, 60.0, node_lost_share=0.78, repair_days=1.0)
    waits = simulate(made, 2000 * DAY)
    spares = spares_needed(DAY / made.mtbf * 0.78)
    enough = simulate(replace(made, spares=spares), 2000 * DAY)
    assert waits.shares()["waiting"] > 0.2
    assert 0 < enough.shares()["waiting"] < 0.01
    shrunk = simulate(replace(made, shrinks=True), 2000 * DAY)
    assert shrunk.waiting == 0
    assert 0 < shrunk.shares()["slower"] < 0.01
    assert waits.effective < shrunk.effective


def test_lemons_fail_more_often():
    made = job(1024, 1.0, 1.0, 60.0, lemons=4, lemon_factor=20.0)
    rate = FAILURES_PER_GPU_DAY * 8 * (124 + 4 * 20)
    assert simulate(made, 2000 * DAY).failures == pytest.approx(2000 * rate, rel=0.1)


def test_a_stop_that_comes_due_during_a_restart():
    """It happens after the restart: time does not go back, and no part is negative."""
    found = simulate(Job(interval=10.0, restart=3600.0, stops_per_day=100.0), 10 * DAY)
    assert min(found.shares().values()) >= 0
    assert found.total == pytest.approx(10 * DAY)
    assert found.restarting > 0.5 * found.total


def test_the_order_of_random_numbers_is_fixed():
    made = job(1024, 1.0, 1.0, 60.0)
    assert simulate(made, 100 * DAY, 3) == simulate(made, 100 * DAY, 3)
    assert simulate(made, 100 * DAY, 3) != simulate(made, 100 * DAY, 4)


# --- a run's ledger -------------------------------------------------------------------------------


def write_run(folder: Path) -> Path:
    """The events of a run of 20 steps of 2 s on 4 ranks that saves every 5 steps and fails once,
    after step 13."""
    folder.mkdir()
    add = functools.partial(append_event, folder)
    clock = 1000.0
    for first, last in ((0, 13), (10, 20)):
        add("start", time=clock, began=clock, step=first, world_size=4)
        clock += 6.0
        for step in range(first + 1, last + 1):
            clock += 2.0
            spent = {"steps": 2.0} | ({"start": 6.0} if step == first + 1 else {})
            add("spent", time=clock, step=step, seconds=spent)
            if step % 5 == 0:
                clock += 0.5
                save = {"bytes": 1, "stall_seconds": 0.4, "write_seconds": 1.0}
                add("checkpoint", time=clock, step=step, **save)
                add("spent", time=clock, step=step, seconds={"saving": 0.5})
        clock += 9.0
    add("end", time=clock, state="finished", step=20)
    return folder


def test_what_a_run_measured(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    found = measure(read_events(folder))
    assert (found.world_size, found.failures) == (4, 1)
    assert found.step == 2.0
    assert found.interval == 10.0
    assert (found.save, found.commit) == (0.5, 1.0)
    assert found.restart == 9.0 + 6.0
    # 20 of 23 steps count; 2 s of saves, 2 × 6 s of starts, 9 s down
    assert found.effective == pytest.approx(40.0 / (46 + 2 + 12 + 9))
    rate = DAY / 4 / 400.0  # one failure in 400 s
    assert found.best_interval(rate) == (pytest.approx(20.0), 10)
    assert found.best_interval(0.0) is None
    assert "best interval between saves: 10 steps (20.0 s)" in effective_lines(found, rate)[1]
    assert command.main(["--run", str(folder), "--gpus", "1024", "--days", "10"]) == 0
    said = capsys.readouterr().out
    assert "a save costs 0.5 s (s) and counts after 1.5 s; a restart takes 15 s" in said
    assert "√(2sM)" in said


def test_waiting_in_a_queue_is_no_restart():
    """An hour after a planned stop does not count, even if the next start fails at once, or before
    its first step."""
    events = [
        {"event": "start", "time": 0.0, "began": 0.0, "step": 0, "world_size": 1},
        {"event": "spent", "time": 10.0, "step": 1, "seconds": {"start": 4.0, "steps": 6.0}},
        {"event": "end", "time": 11.0, "state": "requeue", "step": 1},
        {"event": "start", "time": 3611.0, "began": 3610.0, "step": 1, "world_size": 1},
        {"event": "start", "time": 3641.0, "began": 3640.0, "step": 1, "world_size": 1},
        {"event": "spent", "time": 3651.0, "step": 2, "seconds": {"start": 5.0, "steps": 6.0}},
    ]
    assert measure(events).restart == 3645.0 - 3610.0
    events[3] = {"event": "end", "time": 3620.0, "state": "failed", "step": 1}
    assert measure(events).restart is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--gpus 8", "--save"),
        ("--save 2", "--gpus"),
        ("--gpus 12 --save 2", "is not a multiple of 8"),
        ("--run nothing", "events.jsonl cannot be read (No such file or directory)"),
        ("--gpus 8 --save 2 --days 10 --json /none/x", "--json = '/none/x': it cannot be written"),
        ("--gpus 8 --save 2 --lemons 3", "--lemons"),
        ("--gpus 8 --save 2 --failures-per-gpu-day 0", "--interval"),
        ("--gpus 8 --save 0 --interval 0", "--interval"),
        ("--gpus 8 --save 2 --gpus-per-node 0", "--gpus-per-node"),
        ("--gpus 2147483647 --save 2", "--gpus"),
        ("--gpus 8 --save 2 --days 1e12", "--days"),
        ("--gpus 8 --save 2 --lemons 1 --lemon-factor 1e12", "--days"),
        ("--gpus 8 --save 2 --stops-per-day 1e12", "--days"),
        ("--gpus 8 --save 2 --repair-days 1e12", "--repair-days"),
    ],
)
def test_what_the_command_refuses(arguments, why, capsys):
    assert command.main(arguments.split()) == 2
    assert why in capsys.readouterr().err


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
    assert describe_goodput(planned(256, "checkpoint.failures_per_gpu_day=0")) == []


@pytest.mark.parametrize("interval", ["0", "never"])
def test_without_saves_a_failure_costs_all_steps(interval):
    found = planned(16_384, f"checkpoint.interval={interval}")
    assert (found["interval_steps"], found["effective_training_time"]) == (None, 0.0)
    assert "nothing is saved before the last step (best: " in describe_goodput(found)[0]
