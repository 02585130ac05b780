"""The report page: it has the right content, loads nothing from elsewhere, and is safe whatever a
run's files contain."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from runtime.alerts.alarms import Series, alarm
from runtime.alerts.prometheus import exposition
from runtime.alerts.state import RunState
from runtime.checkpoints.save_interval import measured_saves
from runtime.records.events import FIELDS, append_event, is_whole_event, read_events
from runtime.records.ledger import account
from runtime.records.status import read_status, record_failed_start, record_failure
from tests.report_page import written
from tests.runs import run, write_config
from tools import plot
from tools.goodput.measured import measure
from tools.ranks import Ranks
from tools.report import __main__ as report
from tools.report.charts import BINS, thin, ticks

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PLANTED = '</pre><script>console.error("planted")</script><img src=http://127.0.0.1:9/planted.png>'


@pytest.fixture(scope="module")
def finished(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_the_page_has_everything_and_needs_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = written(finished, tmp_path / "page.html")
    assert "repeated steps" in capsys.readouterr().out, "the ledger is still printed"
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    charts = found.charts()
    assert list(charts) == ["training", "norm", "rate", "all devices", "step", "peak"], (
        "no MFU on a CPU"
    )
    (_, _, steps, losses), (_, _, at, heldout) = charts["training"]["series"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx([line["loss"] for line in lines], rel=1e-5)
    assert at == [2, 3, 4, 6], "the first start ended with step 3 and an evaluation"
    assert heldout == pytest.approx(
        [line["eval_loss"] for line in lines if "eval_loss" in line], rel=1e-5
    )
    assert charts["peak"]["series"][0][2] == [0, 1], "every rank"
    for words in ("finished", "all steps done", "Pipeline timeline", "effective time", "starting",
                  "2 ranks = pp 2"):  # fmt: skip
        assert words in found.text
    assert "2 checkpoints were committed" in found.text
    labels = [attributes.get("aria-label") or "" for _, attributes in found.tags]
    assert sum("rank 1" in label for label in labels) == 1, "a lane of the timeline"
    assert PLANTED in found.text, "as text"
    assert found.count("img") == 0


def test_a_run_that_goes_on_or_was_killed(finished: Path, tmp_path: Path) -> None:
    """Without a status, and with an incomplete last line and a line of nonsense, the page shows
    everything that is complete."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "status.json").unlink()
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(run / name, "a") as file:
            file.write(
                '{"step": 7, "loss": NaN, "event": "hang", "time": Infinity}\n[]\n{"step": 8, "lo'
            )
    found = written(run, tmp_path / "page.html")
    assert "running, or killed" in found.text
    assert "last line at 20" in found.text
    assert found.charts()["training"]["series"][0][2] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_has_hardly_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert "No step has been logged yet" in written(run, tmp_path / "page.html").text
    (run / "config.yaml").write_text("run: [")
    (run / "trace.json").write_text('{"traceEvents": [{"name": "process_name"}]}')
    append_event(run, "start", began=10.0, step=0, world_size=8)
    assert "run: [" in written(run, tmp_path / "page.html").text


ODD = (None, True, -1, 10**400, 1.5, float("nan"), float("inf"), "x", "\ud800", [], [1], {},
       {"x": 1})  # fmt: skip


def test_lines_that_no_run_has_written_harm_no_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every reader takes the events that are whole, whatever else is in the file, and says so."""
    run, draw = tmp_path / "run", random.Random(0)
    run.mkdir()
    append_event(run, "start", began=10.0, step=0, world_size=4)
    append_event(run, "spent", step=4, seconds={"start": 1.0, "steps": 3.0})
    for step in (2, 4):
        about = {"bytes": 1, "stall_seconds": 0.5, "write_seconds": 1.0}
        append_event(run, "checkpoint", step=step, **about)
    append_event(run, "slow_rank", step=4, rank=1, node="n1", factor=1.5, since=2)
    append_event(run, "rollback", from_step=4, step=2, left_out=[8, 16])
    append_event(run, "stage", step=2, stage=1, changes=["x 1 → 2"])
    whole = read_events(run)
    expected = account(whole), measure(whole), measured_saves(whole)
    lines = [
        '{"event": "start", "time": 1, "step": 0}',
        "[1]",
        "[" * 100_000,
        "x",
        "\0",
        "1" * 5000,
    ]
    for event in whole * 30:
        # an event that readers rely on, with an entry that is wrong or missing
        fields = [*FIELDS.get(event["event"], {}), "event", "time"]
        name = draw.choice(fields)
        wrong = [value for value in ODD if not is_whole_event(event | {name: value})]
        rest = {key: value for key, value in event.items() if key != name}
        lines.append(json.dumps(draw.choice([rest, *(rest | {name: each} for each in wrong)])))
    for name in ("events.jsonl", "metrics.jsonl"):
        with open(run / name, "a") as file:
            file.write("\n".join(lines) + '\n{"step": 3, "loss": 2.5}\n{"event": "spent", "ti')
    assert read_events(run) == whole
    assert (account(whole), measure(whole), measured_saves(read_events(run))) == expected
    assert capsys.readouterr().err.count("lines that are no whole records") == 1
    # entries that no reader relies on may be anything
    for event in whole * 30:
        name = draw.choice(sorted(event.keys() - {"event", "time"}))
        odd = event | {name: draw.choice(ODD)}
        if is_whole_event(odd):
            with open(run / "events.jsonl", "a") as file:
                file.write("\n" + json.dumps(odd))
    state = RunState()
    for event in read_events(run):
        state.note_event(event)
        json.dumps(alarm("r", "f", event), allow_nan=False)
        Series().passes(event, 0.0)
    exposition("r", state, {}).encode(errors="replace")
    assert len(read_events(run)) > len(whole) + 30
    assert len(written(run, tmp_path / "page.html").charts()["training"]["series"][0][2]) == 1
    assert plot.main([str(run), "--out", str(tmp_path / "loss.svg")]) == 0
    # a status that is none, and a failure that is recorded beside all that
    for status in ("[]", '{"state": "failed", "step": null, "reason": []}', "[" * 100_000):
        (run / "status.json").write_text(status)
        assert record_failure(run, "rank 1 was killed") == "rank 1 was killed"
        record_failed_start(run, "no data")
        assert read_status(run)["reason"] == "no data"
    # files that cannot be read
    for name in ("events.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to("/proc/self/mem")  # by root neither
        assert plot.main([str(run), "--out", str(tmp_path / "loss.svg")]) == 2
        assert f"{name} cannot be read (Input/output error)" in capsys.readouterr().err
    assert (report.read_run(run).records, report.read_run(run).events) == ([], [])
    assert report.main([str(run)]) == 2


def test_what_went_wrong_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    append_event(run, "start", began=10.0, step=0, world_size=2)
    append_event(run, "checkpoint", step=4, failed="No space left on device <b>")
    append_event(run, "rollback", from_step=9, step=4, left_out=[32, 72])
    append_event(run, "hang", step=11, ranks=[1], stacks=PLANTED)
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 11, "reason": PLANTED}))
    lines = [
        {"step": step, "loss": 3.0, "skipped_updates": max(0, step - 6)} for step in range(1, 10)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = written(run, tmp_path / "page.html")
    for words in ("No space left on device <b>", "back from step 9, skipping samples 32 to 71",
                  f"stacks {PLANTED}"):  # fmt: skip
        assert words in found.text
    assert "The updates of 3 steps were skipped; this was logged at step 7, 8, 9." in found.text
    assert found.text.count(PLANTED) == 2
    assert (found.count("b"), found.count("img")) == (1, 0), "only one chart's title is bold"


def test_stages_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the page's charts and in the picture of the loss; and they are no restarts."""
    run = tmp_path / "run"
    run.mkdir()
    append_event(run, "start", began=10.0, step=0, world_size=2)
    append_event(run, "end", state="requeue", step=4, reason="stage 1 begins", stage=1)
    append_event(run, "start", began=11.0, step=4, world_size=2, stage=1)
    append_event(run, "stage", stage=1, step=4, changes=[f"train.seq_len 8 → {PLANTED}"])
    lines = [{"step": step, "loss": 3.0, "lr": 1e-3} for step in range(1, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = written(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="boundary" d="M375.0 0V100"><title>stage 1: train.seq_len 8') == 2
    assert "requeue" not in found.text
    assert found.count("img") == 0
    (run / "events.jsonl").rename(run / "other")  # control
    written(run, tmp_path / "page.html")
    assert 'class="boundary"' not in (tmp_path / "page.html").read_text()
    (run / "other").rename(run / "events.jsonl")
    assert plot.main([str(run), "--out", str(tmp_path / "loss.svg")]) == 0
    assert "stage 1" in (tmp_path / "loss.svg").read_text()
    assert report.main([str(run)]) == 0
    assert "1 starts, 0 checkpoints" in capsys.readouterr().out


def test_a_long_run_is_thinned_and_loses_no_spike(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    noise = random.Random(0)
    norms = [(step, 1e4 if step == 16_321 else 1 + noise.random()) for step in range(1, 30_001)]
    with open(run / "metrics.jsonl", "w") as file:
        for step, norm in norms:
            file.write(
                f'{{"step": {step}, "loss": {3 + 8 / step + noise.random()}, '
                f'"grad_norm": {norm}}}\n'
            )
    out = tmp_path / "page.html"
    found = written(run, out)
    assert out.stat().st_size < 200_000, "so that eight charts take less than a megabyte"
    assert len(found.charts()["norm"]["series"][0][2]) == BINS
    bins = thin(norms)
    assert max(bins, key=lambda one: one.high).high == 1e4
    assert min(one.low for one in bins) == min(norm for _, norm in norms)
    assert "logarithmic" in found.text


def test_ticks_are_round() -> None:
    assert ticks(0, 100) == [0, 50, 100]
    assert ticks(2.9, 7.6) == [4, 6]
    assert ticks(5, 5) == [5]
    assert ticks(0, 3e-4) == pytest.approx([0, 1e-4, 2e-4, 3e-4])


def test_what_cannot_be_done_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, out, said in (
        (tmp_path, tmp_path / "page.html", "RUN = "),
        (finished, tmp_path / "page.pdf", "end it in .html"),
        (finished, finished / "config.yaml" / "page.html", "cannot be written"),
    ):
        assert report.main([str(folder), "--out", str(out)]) == 2
        assert said in capsys.readouterr().err


# --- in a browser ---------------------------------------------------------------------------------


def opened(page: Path, folder: Path) -> tuple[Path, list[str], list[str]]:
    """Open `page` in a headless Chromium; return a screenshot, the addresses that the page
    requested, and the messages in its console.

    No flag stops all requests that the browser makes itself. They do not have a page as initiator,
    which excludes them here, and no host name is resolved.
    """
    assert BROWSER is not None
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


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_shows_it_and_asks_for_nothing(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    written(finished, page)
    picture, asked, console = opened(page, tmp_path / "good")
    assert asked == []
    assert console == []
    assert picture.stat().st_size > 50_000, "something is drawn"

    # control: the same page with PLANTED unescaped and without its security policy
    bad = tmp_path / "bad.html"
    bad.write_text(
        re.sub("<meta http-equiv[^>]*>", "", page.read_text()).replace("<footer>", PLANTED)
    )
    _, asked, console = opened(bad, tmp_path / "bad")
    assert set(asked) == {"http://127.0.0.1:9/planted.png"}
    assert any("planted" in line for line in console)
