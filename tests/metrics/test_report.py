"""The report page and the picture of the loss: they have the right content, and are safe whatever a
run's files contain; the page loads nothing from elsewhere."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from prometheus_client import generate_latest

from errors import RunFailed
from runtime.log.events import FIELDS, append_event, is_whole_event, read_events
from runtime.log.ledger import account
from runtime.log.status import read_status, record_failure
from runtime.monitor.alarms import Series, alarm
from runtime.monitor.prometheus import families
from runtime.monitor.state import RunState
from tests.metrics.report_page import Parsed, charts_of, written
from tests.runs import evaluations, losses, run, run_log_of, write_config
from tools.report import __main__ as report
from tools.report.charts import BINS, NARROW, draw, picture_of_loss, thin
from tools.report.ledger import measure
from tools.report.run import read_run, unigram_loss

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
    out, png = tmp_path / "page.html", tmp_path / "new" / "loss.png"
    found = written(finished, out)
    assert "repeated steps" in capsys.readouterr().out, "the ledger is still printed"
    charts = charts_of(finished)
    assert list(charts) == ["Loss", "Gradient norm", "Learning rate", "Speed", "Step time",
                            "Peak memory by rank"], "no MFU on a CPU"  # fmt: skip
    loss = charts["Loss"].series
    assert dict(loss["training"]) == losses(finished.parent)
    assert dict(loss["held-out"]) == evaluations(finished.parent)
    assert [step for step, _ in loss["held-out"]] == [2, 3, 4, 6], "the first start ended with 3"
    assert [rank for rank, _ in charts["Peak memory by rank"].series["peak"]] == [0, 1]
    for words in ("finished", "all steps done", "Pipeline timeline", "effective time", "starting",
                  "2 ranks = pp 2", "2 checkpoints were committed", *charts):  # fmt: skip
        assert words in found.text
    assert found.count("svg") == len(charts) + 1
    assert re.search(r">\s*rank 1\s*<", out.read_text()), "a lane of the timeline"
    assert report.main([str(finished), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_the_data(finished, tmp_path):
    """In the page's charts and in the picture, which also has the unigram model's loss."""
    for chart in charts_of(finished).values():
        (axes,) = draw(chart, NARROW, {}).axes
        drawn = [[tuple(point) for point in line.get_xydata()] for line in axes.lines]
        bars = [(bar.get_center()[0], bar.get_height()) for bar in axes.patches]
        assert (drawn or [bars]) == [*chart.series.values()]
    (axes,) = picture_of_loss(read_run(finished), 6.35).axes
    names = [line.get_label() for line in axes.lines]
    assert names == ["training", "held-out", "a unigram model on held-out text: 6.35"]
    assert unigram_loss(finished) > 0
    assert unigram_loss(tmp_path) is None


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
    append_event(new, "data_stage", step=2, data_stage=1, changes=["x 1 → 2"])
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
    assert capsys.readouterr().err.count("no whole record") == 1
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
    generate_latest(SimpleNamespace(collect=lambda: families("r", state, {})))
    for reads in (account, measure):
        reads(found)
    written(new, tmp_path / "page.html")
    assert charts_of(new)["Loss"].series == {"training": [(3, 2.5)]}
    assert report.main([str(new), "--png", str(tmp_path / "loss.png")]) == 0


def test_a_failure_is_recorded_beside_a_status_that_is_none(new):
    for status in ("[]", '{"state": "failed", "step": null, "reason": []}', "[" * 100_000):
        (new / "status.json").write_text(status)
        assert record_failure(new, "rank 1 was killed", launched=0.0) == "rank 1 was killed"
        with pytest.raises(RunFailed), run_log_of(new):
            raise RunFailed("no data")
        assert read_status(new)["reason"] == "no data"


def test_files_that_cannot_be_read(new, tmp_path, capsys):
    """They are named, and left out."""
    for name in ("events.jsonl", "metrics.jsonl"):
        (new / name).symlink_to("/proc/self/mem")  # by root neither
    run, said = read_run(new), capsys.readouterr().err
    assert (run.records, run.events) == ([], [])
    for name in ("events.jsonl", "metrics.jsonl"):
        assert f"{name} cannot be read (Input/output error)" in said
    assert report.main([str(new)]) == 2
    assert "RUN = " in capsys.readouterr().err


def test_what_went_wrong_is_told(new, tmp_path):
    append_event(new, "start", began=10.0, step=0, world_size=2)
    append_event(new, "checkpoint", step=4, failed="No space left on device <b>")
    append_event(new, "rollback", from_step=9, step=4, left_out=[32, 72])
    log_steps(new, ({"loss": 3.0, "skipped_updates": n} for n in (0, 0, 0, 0, 0, 0, 1, 2, 3)))
    found = written(new, tmp_path / "page.html")
    for words in ("No space left on device <b>",
                  "went back from step 9 to 4, samples left out (begin, end) [32, 72]",
                  "The updates of 3 steps were skipped; "
                  "this was logged at step 7, 8, 9."):  # fmt: skip
        assert words in found.text


def test_nothing_from_a_run_is_markup(tmp_path, monkeypatch):
    """Wherever it is in the run's files, and in the run's name."""
    run = tmp_path / PLANTED.replace("/", "∕")
    run.mkdir()
    (run / "config.yaml").write_text(PLANTED)
    status = {"state": PLANTED, "step": 1, "reason": PLANTED}
    (run / "status.json").write_text(json.dumps(status))
    append_event(run, "start", began=10.0, step=0, world_size=2)
    append_event(run, "spent", step=3, seconds={"steps": 3.0})
    append_event(run, "data_stage", step=2, data_stage=PLANTED, changes=[PLANTED])
    entries = ("layout", "device", "torch", "python", "stacks", "step")
    for kind in ("system", "memory", "hang", "started", PLANTED):
        known = {"parameters": 1, "peak_bytes": [1], "seconds": {}}
        append_event(run, kind, **known, **dict.fromkeys(entries, PLANTED))
    log_steps(run, [{"loss": 3.0, f"task/{PLANTED}/bits_per_byte": 1.0}] * 3)
    pipeline = {"name": "process_name", "args": {"name": PLANTED}}
    action = {"kind": "F", "stage": 0, "microbatch": 0}
    events = [pipeline, {"ph": "X", "tid": 0, "ts": 0, "dur": 1, "args": action}]
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = written(run, tmp_path / "page.html")
    for words in ("1 parameters on", "Tasks: text", "Pipeline timeline", "GiB, up to step",
                  "from step", "config.yaml"):  # fmt: skip
        assert words in found.text, "what PLANTED is beside"
    assert found.text.count(PLANTED) >= 20
    assert found.count("img") == 0
    # control: a template that does not escape
    real = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **how: real(**how | {"autoescape": False}))
    report.main([str(run), "--out", str(tmp_path / "bad.html")])
    assert Parsed((tmp_path / "bad.html").read_text()).count("img") >= 5


@pytest.mark.parametrize("key", ["data_stage", "stage"])  # as in runs of older versions
def test_data_stages_are_marked(key, new, tmp_path, capsys):
    """In the page's charts and in the picture of the loss; and they are no restarts."""
    log_steps(new, [{"loss": 3.0, "lr": 1e-3}] * 9)
    page = tmp_path / "page.html"
    written(new, page)
    assert 'id="data_stage"' not in page.read_text(), "control: without events"
    append_event(new, "start", began=10.0, step=0, world_size=2)
    append_event(new, "end", state="requeue", step=4, reason="data stage 1 begins", **{key: 1})
    append_event(new, "start", began=11.0, step=4, world_size=2, **{key: 1})
    append_event(new, key, **{key: 1}, step=4, changes=["train.seq_len 8 → 16"])
    found = written(new, page)
    assert page.read_text().count('id="data_stage"') == 2
    assert "train.seq_len 8 → 16" in found.text
    assert "requeue" not in found.text
    (axes,) = picture_of_loss(read_run(new), None).axes
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("data stage 1", 4)]
    assert axes.lines[-1].get_xdata() == [4, 4]
    assert report.main([str(new)]) == 0
    assert "1 starts, 0 checkpoints" in capsys.readouterr().out


def test_a_long_run_is_thinned_and_loses_no_spike(new, tmp_path):
    noise = random.Random(0)
    norms = [1e4 if step == 16_321 else 1 + noise.random() for step in range(1, 30_001)]
    log_steps(new, ({"loss": 3 + 4 * noise.random(), "grad_norm": norm} for norm in norms))
    out = tmp_path / "page.html"
    found = written(new, out)
    assert out.stat().st_size < 200_000, "so that eight charts take less than a megabyte"
    assert "logarithmic" in found.text
    x, mean, low, high = thin(charts_of(new)["Gradient norm"].series["norm"])
    assert len(x) == BINS
    assert (max(high), min(low)) == (1e4, min(norms))
    assert sum(mean) / BINS == pytest.approx(sum(norms) / len(norms))


def test_axes(new):
    """The beginning is cut off where it hides the rest. What no axis can show is left out."""
    log_steps(new, [{"loss": 1e308}, *({"loss": 100 / step} for step in range(1, 101))])
    loss = charts_of(new)["Loss"]
    assert loss.scale == "the beginning cut off"
    (axes,) = draw(loss, NARROW, {}).axes
    assert axes.get_ylim()[1] == pytest.approx(10, rel=0.5)
    log_steps(new, [{"loss": 3.0, "grad_norm": norm, "lr": 1.0} for norm in (0.0, 1e3)])
    charts = charts_of(new)
    assert [charts[name].scale for name in ("Loss", "Gradient norm")] == ["", ""], "no log of 0"
    (axes,) = draw(charts["Learning rate"], NARROW, {}).axes
    assert axes.get_ylim()[0] == 0


def test_what_cannot_be_done_is_refused(new, tmp_path, capsys):
    log_steps(new, [{"lr": 3.0}])
    for folder, option, out, said in (
        (tmp_path, "--out", "page.html", "RUN = "),
        (new, "--out", "page.pdf", "end it in .html"),
        (new, "--png", "loss.jpg", "end it in .png"),
        (new, "--png", "loss.png", "it has no logged step yet"),
        (new, "--out", "run/metrics.jsonl/page.html", "cannot be written"),
    ):
        assert report.main([str(folder), option, str(tmp_path / out)]) == 2
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
