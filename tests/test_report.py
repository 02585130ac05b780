"""The report page: it has the right content, loads nothing from elsewhere, and is safe whatever a
run's files contain."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from runtime.alerts.alarms import Series, alarm
from runtime.alerts.prometheus import exposition
from runtime.alerts.state import RunState
from runtime.checkpoints.save_interval import measured_saves
from runtime.records.events import FIELDS, append_event, is_whole_event, read_events
from runtime.records.ledger import account
from runtime.records.status import read_status, record_failed_start, record_failure
from tests.report_page import written
from tests.runs import evaluations, losses, run, write_config
from tools import plot
from tools.report import __main__ as report
from tools.report.charts import BINS, thin, ticks
from tools.report.ledger import measure

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
PLANTED = '</pre><script>console.error("planted")</script><img src=http://127.0.0.1:9/planted.png>'


@pytest.fixture(scope="module")
def finished(ranks, data, tmp_path_factory):
    """The folder of a traced run of 6 steps in two starts, on 2 ranks with pp 2; its configuration
    contains PLANTED."""
    folder = tmp_path_factory.mktemp("report")
    config = write_config(
        folder,
        data,
        parallel={"pp": 2},
        train={"eval_interval": 2, "eval_samples": 8},
        checkpoint={"interval": 3},
        run={"trace": True, "wandb_project": PLANTED},
    )
    for steps in (3, 6):
        run(ranks, 2, config, f"train.steps={steps}")
    return folder / "run"


@pytest.fixture
def new(tmp_path):
    """The empty folder of a run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def log_steps(run: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = (json.dumps({"step": step} | record) for step, record in enumerate(records, 1))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_page_has_everything_and_needs_nothing(finished, tmp_path, capsys):
    found = written(finished, tmp_path / "page.html")
    assert "repeated steps" in capsys.readouterr().out, "the ledger is still printed"
    charts = found.charts()
    no_mfu = ["training", "norm", "rate", "all devices", "step", "peak"]  # on a CPU
    assert list(charts) == no_mfu
    drawn = [dict(zip(*series[2:], strict=True)) for series in charts["training"]["series"]]
    logged = [losses(finished.parent), evaluations(finished.parent)]
    assert drawn == [pytest.approx(each, rel=1e-5) for each in logged]
    assert list(drawn[1]) == [2, 3, 4, 6], "the first start ended with step 3 and an evaluation"
    assert charts["peak"]["series"][0][2] == [0, 1], "every rank"
    for words in ("finished", "all steps done", "Pipeline timeline", "effective time", "starting",
                  "2 ranks = pp 2", "2 checkpoints were committed"):  # fmt: skip
        assert words in found.text
    labels = [attributes.get("aria-label") or "" for _, attributes in found.tags]
    assert sum("rank 1" in label for label in labels) == 1, "a lane of the timeline"
    assert PLANTED in found.text, "as text"
    assert found.count("img") == 0


def test_a_run_that_has_hardly_begun(new, tmp_path):
    (new / "metrics.jsonl").touch()
    assert "No step has been logged yet" in written(new, tmp_path / "page.html").text
    (new / "config.yaml").write_text("run: [")
    (new / "trace.json").write_text('{"traceEvents": [{"name": "process_name"}]}')
    append_event(new, "start", began=10.0, step=0, world_size=8)
    found = written(new, tmp_path / "page.html").text
    for words in ("run: [", "running, or killed", "last line at 20"):
        assert words in found


ODD = (None, True, -1, 10**400, 1.5, float("nan"), float("inf"), "x", "\ud800", [], [1], {},
       {"x": 1})  # fmt: skip


def test_lines_that_no_run_has_written_harm_no_reader(new, tmp_path, capsys):
    """Every reader takes the events that are whole, whatever else is in the file, and says so."""
    draw = random.Random(0)
    append_event(new, "start", began=10.0, step=0, world_size=4)
    append_event(new, "spent", step=4, seconds={"start": 1.0, "steps": 3.0})
    for step in (2, 4):
        about = {"bytes": 1, "stall_seconds": 0.5, "write_seconds": 1.0}
        append_event(new, "checkpoint", step=step, **about)
    append_event(new, "slow_rank", step=4, rank=1, node="n1", factor=1.5, since=2)
    append_event(new, "rollback", from_step=4, step=2, left_out=[8, 16])
    append_event(new, "stage", step=2, stage=1, changes=["x 1 → 2"])
    whole = read_events(new)
    lines = ['{"event": "start", "time": 1, "step": 0}', "[1]", "[" * 100_000, "\0", "1" * 5000]
    lines += ["x", '{"step": 7, "loss": NaN, "event": "hang", "time": Infinity}']
    for event in whole * 30:
        # an event that readers rely on, with an entry that is wrong or missing
        name = draw.choice([*FIELDS.get(event["event"], {}), "event", "time"])
        wrong = [value for value in ODD if not is_whole_event(event | {name: value})]
        rest = {key: value for key, value in event.items() if key != name}
        lines.append(json.dumps(draw.choice([rest, *(rest | {name: each} for each in wrong)])))
    for name in ("events.jsonl", "metrics.jsonl"):
        with open(new / name, "a") as file:
            file.write("\n".join(lines) + '\n{"step": 3, "loss": 2.5}\n{"event": "spent", "ti')
    assert read_events(new) == whole
    assert capsys.readouterr().err.count("lines that are no whole records") == 1
    # entries that no reader relies on may be anything
    with open(new / "events.jsonl", "a") as file:
        for event in whole * 30:
            name = draw.choice(sorted(event.keys() - {"event", "time"}))
            odd = event | {name: draw.choice(ODD)}
            if is_whole_event(odd):
                file.write("\n" + json.dumps(odd))
    found, state = read_events(new), RunState()
    assert len(found) > len(whole) + 30
    for event in found:
        state.note_event(event)
        json.dumps(alarm("r", "f", event), allow_nan=False)
        Series().passes(event, 0.0)
    exposition("r", state, {}).encode(errors="replace")
    for reads in (account, measure, measured_saves):
        reads(found)
    assert written(new, tmp_path / "page.html").charts()["training"]["series"][0][2] == [3]
    assert plot.main([str(new), "--out", str(tmp_path / "loss.svg")]) == 0


def test_a_failure_is_recorded_beside_a_status_that_is_none(new):
    for status in ("[]", '{"state": "failed", "step": null, "reason": []}', "[" * 100_000):
        (new / "status.json").write_text(status)
        assert record_failure(new, "rank 1 was killed") == "rank 1 was killed"
        record_failed_start(new, "no data")
        assert read_status(new)["reason"] == "no data"


def test_files_that_cannot_be_read(new, tmp_path, capsys):
    (new / "metrics.jsonl").write_text('{"step": 3, "loss": 2.5}\n')
    for name in ("events.jsonl", "metrics.jsonl"):
        (new / name).unlink(missing_ok=True)
        (new / name).symlink_to("/proc/self/mem")  # by root neither
        assert plot.main([str(new), "--out", str(tmp_path / "loss.svg")]) == 2
        assert f"{name} cannot be read (Input/output error)" in capsys.readouterr().err
    assert (report.read_run(new).records, report.read_run(new).events) == ([], [])
    assert report.main([str(new)]) == 2


def test_what_went_wrong_is_told(new, tmp_path):
    append_event(new, "start", began=10.0, step=0, world_size=2)
    append_event(new, "checkpoint", step=4, failed="No space left on device <b>")
    append_event(new, "rollback", from_step=9, step=4, left_out=[32, 72])
    append_event(new, "hang", step=11, ranks=[1], stacks=PLANTED)
    (new / "status.json").write_text(json.dumps({"state": "failed", "step": 11, "reason": PLANTED}))
    log_steps(new, ({"loss": 3.0, "skipped_updates": n} for n in (0, 0, 0, 0, 0, 0, 1, 2, 3)))
    found = written(new, tmp_path / "page.html")
    for words in ("No space left on device <b>", "back from step 9, skipping samples 32 to 71",
                  f"stacks {PLANTED}", "The updates of 3 steps were skipped; "
                  "this was logged at step 7, 8, 9."):  # fmt: skip
        assert words in found.text
    assert found.text.count(PLANTED) == 2
    assert (found.count("b"), found.count("img")) == (1, 0), "only one chart's title is bold"


def test_stages_are_marked(new, tmp_path, capsys):
    """In the page's charts and in the picture of the loss; and they are no restarts."""
    log_steps(new, [{"loss": 3.0, "lr": 1e-3}] * 9)
    page, picture = tmp_path / "page.html", tmp_path / "loss.svg"
    written(new, page)
    assert 'class="boundary"' not in page.read_text(), "control: without events"
    append_event(new, "start", began=10.0, step=0, world_size=2)
    append_event(new, "end", state="requeue", step=4, reason="stage 1 begins", stage=1)
    append_event(new, "start", began=11.0, step=4, world_size=2, stage=1)
    append_event(new, "stage", stage=1, step=4, changes=[f"train.seq_len 8 → {PLANTED}"])
    found = written(new, page)
    boundary = 'class="boundary" d="M375.0 0V100"><title>stage 1: train.seq_len 8'
    assert page.read_text().count(boundary) == 2
    assert "requeue" not in found.text
    assert found.count("img") == 0
    assert plot.main([str(new), "--out", str(picture)]) == 0
    assert "stage 1" in picture.read_text()
    assert report.main([str(new)]) == 0
    assert "1 starts, 0 checkpoints" in capsys.readouterr().out


def test_a_long_run_is_thinned_and_loses_no_spike(new, tmp_path):
    noise = random.Random(0)
    norms = [1e4 if step == 16_321 else 1 + noise.random() for step in range(1, 30_001)]
    log_steps(new, ({"loss": 3 + 4 * noise.random(), "grad_norm": norm} for norm in norms))
    out = tmp_path / "page.html"
    found = written(new, out)
    assert out.stat().st_size < 200_000, "so that eight charts take less than a megabyte"
    assert len(found.charts()["norm"]["series"][0][2]) == BINS
    assert "logarithmic" in found.text
    bins = thin(list(enumerate(norms, 1)))
    assert max(one.high for one in bins) == 1e4
    assert min(one.low for one in bins) == min(norms)


def test_ticks_are_round():
    assert ticks(0, 100) == [0, 50, 100]
    assert ticks(2.9, 7.6) == [4, 6]
    assert ticks(5, 5) == [5]
    assert ticks(0, 3e-4) == pytest.approx([0, 1e-4, 2e-4, 3e-4])


def test_what_cannot_be_done_is_refused(new, tmp_path, capsys):
    log_steps(new, [{"loss": 3.0}])
    for folder, out, said in (
        (tmp_path, "page.html", "RUN = "),
        (new, "page.pdf", "end it in .html"),
        (new, "run/metrics.jsonl/page.html", "cannot be written"),
    ):
        assert report.main([str(folder), "--out", str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err


# --- in a browser ---------------------------------------------------------------------------------


def opened(page: Path, folder: Path) -> tuple[Path, list[str], list[str]]:
    """Open `page` in a headless Chromium; return a screenshot, the addresses that the page
    requested, and the messages in its console.

    No flag stops all requests that the browser makes itself. They do not have a page as initiator,
    which excludes them here, and no host name is resolved.
    """
    folder.mkdir()
    quiet = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync hide-scrollbars enable-logging=stderr"
    )
    flags = [
        *quiet.split(), "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "window-size=1200,1800", f"user-data-dir={folder / 'profile'}",
        f"screenshot={folder / 'page.png'}", f"log-net-log={folder / 'net.json'}",
    ]  # fmt: skip
    command = [BROWSER, *(f"--{flag}" for flag in flags), page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    events = json.loads((folder / "net.json").read_text())["events"]
    asked = [event.get("params", {}) for event in events]
    none = "not an origin"
    urls = [one["url"] for one in asked if "url" in one and one.get("initiator", none) != none]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return folder / "page.png", urls, console


@pytest.mark.skipif(not BROWSER, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_shows_it_and_asks_for_nothing(finished, tmp_path):
    page = tmp_path / "page.html"
    written(finished, page)
    picture, asked, console = opened(page, tmp_path / "good")
    assert asked == []
    assert console == []
    assert picture.stat().st_size > 50_000, "something is drawn"

    # control: the same page with PLANTED unescaped and without its security policy
    bad = tmp_path / "bad.html"
    unprotected = re.sub("<meta http-equiv[^>]*>", "", page.read_text())
    bad.write_text(unprotected.replace("<footer>", PLANTED))
    _, asked, console = opened(bad, tmp_path / "bad")
    assert set(asked) == {"http://127.0.0.1:9/planted.png"}
    assert any("planted" in line for line in console)
