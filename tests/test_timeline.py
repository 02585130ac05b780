"""The timeline tool prints and draws schedules, reads back the traces that it writes, and refuses
bad input with a message."""

import json
import random

import pytest

from errors import UserError
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from parallel.pipeline.simulate import Costs, Event, Timeline, simulate
from runtime.profiling.chrome import from_chrome, measured_costs, to_chrome
from tools.timeline.__main__ import main
from tools.timeline.draw import draw, save, shade
from tools.timeline.panels import simulated_panels
from tools.timeline.text import ascii_timeline

SCHEDULE = ["--stages", "2", "--micro-batches", "4"]


def timeline(name, ranks, stages_per_rank, microbatches, *costs):
    schedule = build_schedule(name, ranks, stages_per_rank, microbatches)
    return simulate(schedule, Costs.equal(ranks * stages_per_rank, *costs))


# --- text -----------------------------------------------------------------------------------------


def test_1f1b_as_text():
    assert ascii_timeline(build_schedule("1f1b", 3, 1, 4), Costs.equal(3)) == [
        "rank 0 ▏F0 F1 F2             B0─── F3 B1───    B2───    B3───",
        "rank 1 ▏   F0 F1       B0─── F2 B1─── F3 B2───    B3───",
        "rank 2 ▏      F0 B0─── F1 B1─── F2 B2─── F3 B3───",
    ]


def test_zb_v_as_text():
    assert ascii_timeline(build_schedule("zb_v", 2, 2, 3), Costs.equal(4)) == [
        "rank 0 ▏F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2",
        "rank 1 ▏   F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2",
    ]


def test_text_is_cut_where_told():
    lines = ascii_timeline(build_schedule("1f1b", 2, 1, 3), Costs.equal(2), columns=22)
    assert lines == ["rank 0 ▏F0 F1       B…", "rank 1 ▏   F0 B0─── F…"]
    assert ascii_timeline(build_schedule("1f1b", 2, 1, 3), Costs.equal(2), columns=200)[0].endswith(
        "B2───"
    )


def test_text_of_micro_batches_with_two_digits_and_of_short_actions():
    assert ascii_timeline([[Action(FORWARD, 0, 10), Action(BACKWARD, 0, 10)]], Costs.equal(1)) == [
        "rank 0 ▏F10B10──"
    ]
    assert ascii_timeline(
        [[Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)]], Costs.equal(1, 1 / 3, 1 / 3, 0)
    ) == ["rank 0 ▏FB"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_shows_every_action_of_every_rank(name):
    schedule = build_schedule(name, 3, 2 if name.endswith("_v") else 1, 6)
    for line, actions in zip(ascii_timeline(schedule, Costs.equal(6)), schedule, strict=True):
        labels = line.split("▏")[1].replace("─", "").split()
        assert [label.upper() for label in labels] == [
            f"{a.kind.value}{a.microbatch}" for a in actions
        ]
        assert any(label.islower() for label in labels) == name.endswith("_v")


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_trace_comes_back_as_it_was_written(name):
    written = timeline(name, 3, 1, 5, 1.2345, 0.7, 1 / 3, 0.1)
    trace = json.loads(json.dumps(to_chrome(written)))
    read = from_chrome(trace)
    assert [[e.action for e in lane] for lane in read.ranks] == [
        [e.action for e in lane] for lane in written.ranks
    ]
    for lane, expected in zip(read.ranks, written.ranks, strict=True):
        for event, other in zip(lane, expected, strict=True):
            assert event.start == pytest.approx(other.start, abs=2e-6)
            assert event.end == pytest.approx(other.end, abs=2e-6)
    assert from_chrome(to_chrome(read)) == read


def test_what_a_trace_looks_like():
    trace = to_chrome(Timeline([[Event(Action(FORWARD, 0, 3), 2.0, 2.5)]]))
    assert trace["traceEvents"][1:] == [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {
            **{"ph": "X", "name": "F0.3", "cat": "forward", "pid": 0, "tid": 0, "ts": 2000.0,
               "dur": 500.0},
            "args": {"kind": "F", "stage": 0, "microbatch": 3},
        },
    ]  # fmt: skip


def test_measured_costs_are_means_and_halves_of_whole_backwards():
    lane = [
        Event(Action(FORWARD, 0, 0), 0, 1),
        Event(Action(FORWARD, 0, 1), 1, 4),
        Event(Action(BACKWARD, 0, 0), 4, 8),
    ]
    lane += [Event(Action(BACKWARD_INPUT, 0, 1), 8, 9), Event(Action(BACKWARD_WEIGHT, 0, 1), 9, 13)]
    costs = measured_costs(Timeline([lane]))
    assert (costs.forward, costs.input_grad, costs.weight_grad) == ([2.0], [1.5], [3.0])
    assert sum(costs.of(event.action.kind, 0) for event in lane) == pytest.approx(13)


@pytest.mark.parametrize(("name", "stages_per_rank"), [("1f1b", 1), ("zb_v", 2), ("dualpipe_v", 2)])
def test_a_simulation_from_measured_costs_is_the_measured_step(name, stages_per_rank):
    step = timeline(name, 2, stages_per_rank, 4, 3.0, 2.0, 2.0)
    again = simulate(
        [[event.action for event in lane] for lane in step.ranks], measured_costs(step)
    )
    assert again.step_time == pytest.approx(step.step_time)


def broken(change):
    """A trace broken by one change."""
    trace = to_chrome(timeline("1f1b", 2, 1, 2))
    change(trace["traceEvents"])
    return trace


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([1, 2], r"trace = \[1, 2\]: has no list traceEvents"),
        ({"traceEvents": [7]}, r"traceEvents\[0\] = 7: is not an event"),
        ({"traceEvents": []}, "there is no event of rank 0"),
        (broken(lambda events: events[3].pop("ts")), r"traceEvents\[3\].ts = None: is missing"),
        (broken(lambda events: events[3].update(dur=-1)),
         r"traceEvents\[3\].dur = -1: must be microseconds, 0 or more"),
        (broken(lambda events: events[3].update(ts=float("nan"))),
         r"traceEvents\[3\].ts = nan: must be a time"),
        (broken(lambda events: events[3]["args"].update(kind="X")),
         r"traceEvents\[3\].args.kind = 'X': must be one of"),
        (broken(lambda events: events[3]["args"].update(stage="0")),
         r"traceEvents\[3\].args.stage = '0': must be"),
        (broken(lambda events: events.append(events[3])), "F0.0': occurs more than once"),
        (
            broken(
                lambda events: [event.update(tid=2) for event in events if event.get("tid") == 1]
            ),
            "there is no event of rank 1",
        ),
        (broken(lambda events: [event.update(dur=0, ts=0) for event in events if "ts" in event]),
         "the events take no time"),
    ],
)  # fmt: skip
def test_a_broken_trace_is_refused(trace, message):
    with pytest.raises(UserError, match=message):
        from_chrome(trace)


# --- pictures -------------------------------------------------------------------------------------


def test_pictures_are_the_same_bytes_each_time(tmp_path):
    for name in ("a.svg", "b.svg", "c.png"):
        save(draw(simulated_panels(["1f1b", "zb_v"], 2, 4)), tmp_path / name)
    svg = (tmp_path / "a.svg").read_bytes()
    assert svg == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in svg
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_schedules_are_compared_on_the_same_model():
    """Schedules are drawn for the same model: with half as many stages per rank, each stage takes
    twice as long, so that every rank has the same work."""
    panels = simulated_panels(["1f1b", "zb_v"], 2, 4, costs=(1, 2, 1))
    assert {panel.timeline.busy(rank) for panel in panels for rank in range(2)} == {4 * 2 * 4}


def test_shades_differ():
    colours = [shade(kind, chunk, 3) for kind in Kind for chunk in range(3)]
    assert len(set(colours)) == len(colours)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_text_and_figures(capsys):
    assert main(["--schedule", "1f1b", "--stages", "4", "--micro-batches", "8"]) == 0
    said = capsys.readouterr().out
    assert "rank 3 ▏         F0 B0─── F1" in said
    assert "step time 33 · bubble 9 · idle 27.3% · holds at most 4, 3, 2, 1 micro-batches" in said


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_command_draws_every_schedule(name, tmp_path, capsys):
    out = tmp_path / "new" / "picture.svg"
    assert main(["--schedule", name, *SCHEDULE, "--out", str(out)]) == 0
    assert out.read_text().startswith("<?xml")
    assert "wrote" in capsys.readouterr().out


def test_the_command_draws_two_schedules_below_each_other(tmp_path):
    out = tmp_path / "two.png"
    arguments = ["--schedule", "interleaved_1f1b", "zb_v", *SCHEDULE, "--stages-per-rank", "2",
                 "--costs", "2,1,1"]  # fmt: skip
    assert main([*arguments, "--communication", "0.5", "--out", str(out)]) == 0
    assert out.stat().st_size > 1000


def test_the_command_reads_what_it_writes(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["--schedule", "zb_h1", *SCHEDULE, "--out", str(run / "trace.json")]) == 0
    trace = json.loads((run / "trace.json").read_text())
    noise = random.Random(0)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            event["ts"] += 1e6  # a clock that did not start with the step
            event["dur"] *= 1 - 0.1 * noise.random()
    (run / "trace.json").write_text(json.dumps(trace))
    capsys.readouterr()
    assert main(["--trace", str(run)]) == 0
    said = capsys.readouterr().out
    assert "rank 0 ▏F0 F1" in said
    assert "ms · bubble" in said
    assert (
        main(
            ["--trace", str(run / "trace.json"), "--simulated", "--out", str(tmp_path / "step.svg")]
        )
        == 0
    )
    assert (tmp_path / "step.svg").exists()
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "2f2b", *SCHEDULE], "--schedule = '2f2b': there is no such schedule"),
        (["--schedule", "1f1b", "--stages", "4"], "--micro-batches = None: "),
        (["--schedule", "1f1b", "--stages", "0", "--micro-batches", "1"], "--stages = 0: "),
        (["--schedule", "1f1b", *SCHEDULE, "--stages-per-rank", "2"], "runs one stage per rank"),
        (["--schedule", "1f1b", *SCHEDULE, "--stages-per-rank", "1", "1"],
         "--stages-per-rank = [1, 1]: there are 1"),
        (["--schedule", "interleaved_1f1b", "--stages", "4", "--micro-batches", "6"],
         "in groups of parallel.pp=4"),
        (["--schedule", "1f1b", *SCHEDULE, "--costs", "1,1"],
         "--costs = '1,1': is not three numbers"),
        (["--schedule", "1f1b", *SCHEDULE, "--costs", "1,-1,1"],
         "--costs = '1,-1,1': F must be positive"),
        (["--schedule", "1f1b", *SCHEDULE, "--costs", "nan,1,1"],
         "--costs = 'nan,1,1': F must be positive"),
        (["--schedule", "1f1b", *SCHEDULE, "--communication", "-1"], "--communication = -1.0: "),
        (["--schedule", "1f1b", *SCHEDULE, "--simulated"],
         "--simulated = True: belongs to --trace"),
        (["--schedule", "1f1b", *SCHEDULE, "--out", "timeline.gif"],
         "--out = 'timeline.gif': is neither"),
        (["--schedule", "1f1b", "zb_h1", *SCHEDULE, "--out", "two.json"],
         "--out = 'two.json': a trace holds one timeline"),
        (["--schedule", "1f1b", *SCHEDULE, "--out", "/dev/null/a.svg"],
         "--out = '/dev/null/a.svg': cannot be written"),
        *[(["--schedule", "zb_v", *SCHEDULE, option, size], f"{option} = {size}: there would be up")
          for option in ("--stages", "--micro-batches", "--stages-per-rank")
          for size in (str(2**31 - 1), str(10**30))],
        (["--trace", "/nowhere"],
         "--trace = '/nowhere': cannot be read (No such file or directory)"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_said_so(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert message in said.err
    assert "\n  remedy: " in said.err
    assert said.out == ""


BACKWARD_FIRST = [Event(Action(BACKWARD, 0, 0), 0, 1), Event(Action(FORWARD, 0, 0), 1, 2)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{", [], "is not valid JSON"),
        ("{}", [], "has no list traceEvents"),
        (json.dumps(broken(lambda events: events.pop())), ["--simulated"],
         "is not a complete step: stage 1 runs F for micro-batch 1"),
        (json.dumps(to_chrome(Timeline([[Event(Action(FORWARD, 1, 0), 0, 1)]]))), ["--simulated"],
         "no rank has stage 0"),
        (
            json.dumps(to_chrome(Timeline([BACKWARD_FIRST]))),
            ["--simulated"],
            "ranks cannot continue: rank 0 at B0.0",
        ),
    ],
)  # fmt: skip
def test_a_malformed_trace_is_said_so(text, options, message, tmp_path, capsys):
    (tmp_path / "trace.json").write_text(text)
    assert main(["--trace", str(tmp_path), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "\n  remedy: " in said
