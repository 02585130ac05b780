"""An odd line in events.jsonl or metrics.jsonl harms no reader: each goes on as without it, after
one warning that names the file and the line."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from runtime.health import examine
from runtime.log import log_lines
from runtime.log.events import append_event
from runtime.log.status import read_status, record_failure, record_missing_end
from runtime.metrics.trackers import JsonLines
from runtime.monitor.prometheus import RunState
from tools.report.run import read_run

FILES = ("events.jsonl", "metrics.jsonl")
ODD = {
    "a number": b"3",
    "an empty object": b"{}",
    "half a line": b'{"event": "rollback", "time": 1.0, "st',
    "not UTF-8": b'{"event": "end", "time": 1.0, "step": 1, "reason": "\xff"}',
    "zeros of a lost page": bytes(64),
    "too deep": b"[" * 10_000,
    "a number too long": b"1" * 5000,
    "a known key changed": b'{"event": "start", "time": 1.0, "began": "today", "step": "four"}',
}
# of a newer version: what it adds is nobody's business, and odd to nobody
NEWER = (
    b'{"event": "teleport", "time": 1.0, "where": {"to": [1, null]}, "step": 3}',
    b'{"event": "spent", "time": 1.0, "step": 0, "seconds": {}, "joules": {"cpu": 1}}',
)
NOW = time.time()  # when the ranks were started
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "began": NOW, "step": 0, "world_size": 1},
    {"event": "spent", "step": 2, "seconds": {"start": 1.0, "steps": 2.0}},
    {"event": "checkpoint", "step": 1, "bytes": 1, "stall_seconds": 1.0, "write_seconds": 1.0},
    {"event": "checkpoint", "step": 2, "bytes": 1, "stall_seconds": 2.0, "write_seconds": 2.0},
    {"event": "rollback", "from_step": 2, "step": 1},
    {"event": "spent", "step": 3, "seconds": {"steps": 2.0}},
    {"event": "examining", "step": 3, "cause": "a spike"},
]
RECORDS = [{"step": step, "loss": 9 / step} for step in (1, 2, 3)]
LOGS = dict(zip(FILES, (EVENTS, RECORDS), strict=True))


def write_logs(folder: Path) -> None:
    """The logs of a run that was killed after step 3."""
    shutil.rmtree(folder, ignore_errors=True)
    for step in (1, 2):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for name, objects in LOGS.items():
        lines = (json.dumps({"time": NOW, **each}) + "\n" for each in objects)
        (folder / name).write_text("".join(lines))


def insert(path: Path, place: int, *lines: bytes) -> None:
    """Insert lines before the line with index `place`."""
    there = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*there[:place], *(line + b"\n" for line in lines), *there[place:]]))


def by_monitor(folder: Path) -> Any:
    """What it knows of earlier starts for Prometheus."""
    state, until = RunState(), (folder / FILES[0]).stat().st_size
    append_event(folder, "hang", step=9)  # of this start
    state.read_past(folder, until)
    assert not state.events["hang"]
    return state.state, state.account.seconds, state.record["step"], state.checkpoint["step"]


def by_metrics(folder: Path) -> Any:
    """What a start from step 2 keeps of metrics.jsonl."""
    lines = JsonLines(folder, 2)
    return lines.reached, [json.loads(line)["loss"] for line in lines.path.open()]


def by_launcher(folder: Path) -> Any:
    """What it records of a killed rank."""
    return record_failure(folder, "rank 1 was killed", NOW), read_status(folder)["step"]


def by_report(folder: Path) -> Any:
    """The losses, the ledger and the sentences about goodput of the report."""
    found = read_run(folder)
    return found.points("loss"), found.seconds, found.goodput


# each returns all that it has learnt
READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "the next start": (lambda run: {**(record_missing_end(run) or {}), "time": NOW}, FILES[:1]),
    "its metrics": (by_metrics, FILES[1:]),
    "its examinations": (lambda run: examine._did_not_end(run, 3), FILES[:1]),
    "the monitor": (by_monitor, FILES[:1]),
    "the launcher": (by_launcher, FILES[:1]),
    "the report": (by_report, FILES),
}


def check(reader: str, odd: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the beginning, in the middle and at the end of each file."""
    reads, files = READERS[reader]
    write_logs(folder / "without")
    expected = reads(folder / "without")
    for name, objects in LOGS.items():
        for place in (0, 1, len(objects)):
            spoiled = folder / f"{name}, {place}"
            write_logs(spoiled)
            insert(spoiled / name, place, *(ODD[each] for each in odd))
            capsys.readouterr()
            assert reads(spoiled) == expected, (name, place)
            said = capsys.readouterr().err.splitlines()
            warning = f"warning: {spoiled / name}: line {place + 1} is no whole record"
            assert [line.startswith(warning) for line in said] == [True] * (name in files), said


@pytest.mark.parametrize(
    ("reader", "odd"),
    [*((reader, [*ODD]) for reader in READERS), *(("the report", [odd]) for odd in ODD)],
)
def test_a_reader_goes_on(
    reader: str, odd: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of line in both files, and each reader with all of them."""
    check(reader, odd, tmp_path, capsys)


@pytest.mark.parametrize("odd", ODD)
def test_controls(odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader that checks no line is caught, and so is one that says nothing."""

    def by_hand(folder: Path) -> int:
        return max(json.loads(line)["step"] for line in (folder / FILES[0]).open("rb"))

    wrong = (KeyError, TypeError, ValueError, RecursionError)
    with patch.dict(READERS, {"by hand": (by_hand, ())}), pytest.raises(wrong):
        check("by hand", [odd], tmp_path, capsys)
    silent = pytest.raises(AssertionError, match=r"\[\] == \[True\]")
    with patch.object(log_lines, "log", lambda text: None), silent:
        check("the launcher", [odd], tmp_path / "silent", capsys)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_odd(reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Events of a newer version; and an unfinished line at the end, which may be in writing."""
    found, reads = [], READERS[reader][0]
    for last in ("", '{"event": "spent", "step": 4, "ti'):
        write_logs(tmp_path / "run")
        insert(tmp_path / "run" / FILES[0], 1, *(NEWER if last else ()))
        for name in FILES:
            with (tmp_path / "run" / name).open("a") as file:
                file.write(last)
        found.append(reads(tmp_path / "run"))
    assert found[0] == found[1]
    assert not capsys.readouterr().err
