"""The timeline tool prints and draws schedules, reads back the traces that it writes, and refuses
bad input with a message."""

import contextlib
import json
import random
from typing import Any

import pytest

from costs.timeline import Timeline
from parallel.pipeline.actions import BACKWARD, FORWARD, Action
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, Event, simulate
from runtime.profiling import trace as writer
from tools.timeline.__main__ import main
from tools.timeline.draw import INK, draw, inline
from tools.timeline.panels import ascii_lanes, from_chrome, simulated_panels

SIZES = "--stages 2 --micro-batches 4"


def timeline(name, ranks, stages_per_rank, microbatches, *costs):
    schedule = build_schedule(name, ranks, stages_per_rank, microbatches)
    return Timeline(simulate(schedule, Costs.equal(ranks * stages_per_rank, *costs)))


def to_chrome(step: Timeline) -> dict[str, Any]:
    return writer.to_chrome({"pipeline": step})


@pytest.mark.parametrize(
    ("microbatch", "costs", "line"),
    [(10, Costs.equal(1), "rank 0 ▏F10B10──"), (0, Costs.equal(1, 1 / 3, 1 / 3, 0), "rank 0 ▏FB")],
)
def test_a_label_is_no_wider_than_its_action(microbatch, costs, line):
    one = [[Action(FORWARD, 0, microbatch), Action(BACKWARD, 0, microbatch)]]
    assert ascii_lanes(Timeline(simulate(one, costs))) == [line]


def test_a_trace_comes_back_as_it_was_written():
    written = timeline("zb_h1", 3, 1, 5, 1.2345, 0.7, 1 / 3, 0.1)
    trace = json.loads(json.dumps(to_chrome(written)))
    read = from_chrome(trace)
    for lane, expected in zip(read.ranks, written.ranks, strict=True):
        for (action, *times), (other, *written_times) in zip(lane, expected, strict=True):
            assert action == other
            assert times == pytest.approx(written_times, abs=2e-6)
    assert from_chrome(to_chrome(read)) == read


def test_what_a_trace_looks_like():
    trace = to_chrome(Timeline([[Event(Action(FORWARD, 0, 3), 2.0, 2.5)]]))
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}
    event = {"ph": "X", "name": "F0.3", "cat": "forward", "pid": 0, "tid": 0, "ts": 2000.0,
             "dur": 500.0, "args": {"kind": "F", "stage": 0, "microbatch": 3}}  # fmt: skip
    assert trace["traceEvents"][1:] == [name, event]


def test_a_picture_has_every_action():
    """Each as long as it takes, with its micro-batch, in the lane of its rank. On a page, text has
    the page's colour."""
    (panel,) = simulated_panels(["zb_v"], 2, 4)
    figure = draw([panel])
    (axes,) = figure.axes
    boxes = [path.get_extents() for each in axes.collections for path in each.get_paths()]
    for rank, lane in enumerate(panel.timeline.ranks):
        idle, *found = [box for box in boxes if rank < box.y0 < box.y1 < rank + 1]
        assert (idle.x0, idle.x1) == (0, panel.timeline.step_time)
        assert [box.x0 for box in found] == pytest.approx([event.start for event in lane])
        assert [box.x1 for box in found] == pytest.approx([event.end for event in lane], abs=0.1)
    numbers = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    actions = [event.action for lane in panel.timeline.ranks for event in lane]
    assert numbers == [str(action.microbatch) for action in actions]
    svg = inline(figure)
    assert "currentColor" in svg
    assert INK not in svg


def test_schedules_are_compared_on_the_same_model():
    """Schedules are drawn for the same model: with half as many stages per rank, each stage takes
    twice as long, so that every rank has the same work."""
    panels = simulated_panels(["1f1b", "zb_v"], 2, 4, costs=(1, 2, 1))
    assert {panel.timeline.busy(rank) for panel in panels for rank in range(2)} == {4 * 2 * 4}


def test_the_command_draws_schedules_below_each_other(tmp_path, capsys):
    """The same bytes each time."""
    options = f"{SIZES} --stages-per-rank 2 --costs 2,1,1 --communication 0.5"
    for name in ("a.svg", "b.svg", "c.png"):
        out = f"--out {tmp_path / 'new' / name}"
        assert main(f"--schedule interleaved_1f1b zb_v {options} {out}".split()) == 0
    assert "wrote" in capsys.readouterr().out
    svg, again, png = (path.read_bytes() for path in sorted((tmp_path / "new").iterdir()))
    assert svg == again
    assert svg.startswith(b"<?xml")
    assert png.startswith(b"\x89PNG")


def test_the_command_reads_what_a_run_writes(tmp_path, capsys):
    file, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    trace = to_chrome(timeline("zb_h1", 2, 1, 4))
    noise = random.Random(0)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            event["ts"] += 1e6  # a clock that did not start with the step
            event["dur"] *= 1 - 0.1 * noise.random()
    file.write_text(json.dumps(trace))
    assert main(["--trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 0 ▏F0 F1" in said
    assert "ms · bubble" in said
    assert main(f"--trace {file} --out {picture}".split()) == 0
    assert picture.exists()


def refusal(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that fails, by argparse or by a UserError."""
    with contextlib.suppress(SystemExit):
        assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1 + ("\n  remedy: " in said.err)
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f1b --stages 4", "--schedule needs --stages and --micro-batches"),
        (f"1f1b {SIZES} --stages-per-rank 1 1", "--stages-per-rank has 2 numbers for 1 schedules"),
        (f"1f1b {SIZES} --costs 1,1", "--costs: '1,1' is not F,I,W"),
        (f"1f1b {SIZES} --costs nan,1,1", "--costs: 'nan' is not a time"),
        (f"1f1b {SIZES} --out timeline.gif", "--out: 'timeline.gif' is no picture"),
        (f"1f1b {SIZES} --out /dev/null/a.svg", "--out = '/dev/null/a.svg': it cannot be written"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_said_so(arguments, message, capsys):
    assert message in refusal(f"--schedule {arguments}", capsys)


EVENTS = to_chrome(timeline("1f1b", 2, 1, 2))["traceEvents"]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[1, 2]", "is not the trace of a run"),
        ([7], "traceEvents.0: "),
        ([], "there is no event of rank 0"),
        ([EVENTS[3] | {"ts": float("nan")}], "0.ts: Input should be a finite number"),
        ([e | {"tid": 2 * e.get("tid", 0)} for e in EVENTS], "there is no event of rank 1"),
        ([e | {"dur": 0, "ts": 0} for e in EVENTS], "the events take no time"),
        ([*EVENTS, *EVENTS], "occurs more than once"),
    ],
)
def test_a_malformed_trace_is_said_so(trace, message, tmp_path, capsys):
    text = trace if isinstance(trace, str) else json.dumps({"traceEvents": trace})
    (tmp_path / "trace.json").write_text(text)
    assert message in refusal(f"--trace {tmp_path}", capsys)
