"""The report page and the picture of the loss: they have the right content, and are safe whatever a
run's files contain; the page loads nothing from elsewhere."""

import json
import random
import re
from collections.abc import Iterable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from prometheus_client import generate_latest

from errors import RunFailed
from runtime.log.events import append_event, read_events
from runtime.log.ledger import Account
from runtime.log.status import read_status
from runtime.monitor.alarms import Series, alarm
from runtime.monitor.prometheus import RunState, families
from tests.runs import evaluations, losses, run, run_log_of, write_config
from tools.report import __main__ as report
from tools.report.charts import BINS, NARROW, Chart, charts, draw, picture_of_loss, thin
from tools.report.page import newest
from tools.report.run import read_run

ADDRESS = "http://127.0.0.1:9/planted.png"
PLANTED = f"</pre><script>console.error(1)</script><img src={ADDRESS}>"


class References(HTMLParser):
    """All addresses that a browser would fetch or follow; not those of parts of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        keys = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        values = [value for key, value in attrs if key in keys and value]
        self.found += [each for each in values if each[0] != "#" and each != "data:,"]


def charts_of(run: Path) -> dict[str, Chart]:
    """The page's charts by title."""
    return {chart.title: chart for chart in charts(read_run(run))}


def written(run: Path, out: Path) -> str:
    """The page's text, outside of styles."""
    assert report.main([str(run), "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert References(page).found == []
    assert "<script" not in page
    assert "<img" not in page
    assert "Content-Security-Policy\" content=\"default-src 'none'" in page
    assert not re.search(r"url\((?!#)|@import", page)
    return unescape(re.sub(r"<style.*?</style>|<[^>]*>", "\n", page, flags=re.DOTALL))


@pytest.fixture(scope="module")
def finished(ranks, data, tmp_path_factory):
    """The folder of a run of 6 steps in two starts, with pp 2; its configuration has PLANTED."""
    folder = tmp_path_factory.mktemp("report")
    config = write_config(
        folder, data, model={"num_layers": 2}, parallel={"pp": 2}, checkpoint={"interval": 3},
        train={"micro_batch_size": 4, "eval_interval": 2, "eval_samples": 8},
        run={"wandb_project": PLANTED},
    )  # fmt: skip
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
    assert "wall clock" in capsys.readouterr().out, "the ledger is still printed"
    shown = charts_of(finished)
    titles = ["Loss", "Gradient norm", "Learning rate", "Speed", "Step time"]
    assert list(shown) == titles, "no MFU on a CPU"
    loss = shown["Loss"].series
    assert dict(loss["training"]) == losses(finished.parent)
    assert dict(loss["held-out"]) == evaluations(finished.parent)
    assert [step for step, _ in loss["held-out"]] == [2, 3, 4, 6], "the first start ended with 3"
    for words in ("finished", "all steps done", "effective training time", "start", "training",
                  "2 ranks = pp 2", f"{losses(finished.parent)[6]:.6g}", *shown):  # fmt: skip
        assert words in found
    assert out.read_text().count("<svg") == len(shown)
    assert report.main([str(finished), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_the_data(finished):
    """In the page's charts and in the picture."""
    for chart in charts_of(finished).values():
        (axes,) = draw(chart, NARROW).axes
        drawn = [[tuple(point) for point in line.get_xydata()] for line in axes.lines]
        assert drawn == [*chart.series.values()]
    (axes,) = picture_of_loss(read_run(finished)).axes
    assert [line.get_label() for line in axes.lines] == ["training", "held-out"]


def test_a_run_that_has_hardly_begun(new, tmp_path):
    (new / "metrics.jsonl").touch()
    assert "No step has been logged yet" in written(new, tmp_path / "page.html")
    (new / "config.yaml").write_text("run: [")
    append_event(new, "start", began=10.0, step=0, world_size=8)
    found = written(new, tmp_path / "page.html")
    for words in ("run: [", "running, or killed", "last line at 20"):
        assert words in found


def test_a_loss_that_is_not_finite_is_shown(new):
    log_steps(new, [{"loss": 2.5}, {"loss": float("nan")}])
    assert newest(read_run(new)) == {"step": "2", "loss": "nan"}


ODD = (None, True, -1, 1e308, 10**400, 1.5, float("nan"), float("inf"), "x", "\ud800", [], [1], {},
       {"x": 1})  # fmt: skip


def test_entries_that_no_run_has_written_harm_no_reader(new, tmp_path):
    """What readers rely on is checked (test_log_lines.py); every other entry may be anything."""
    draw = random.Random(0)
    append_event(new, "start", began=10.0, step=0, world_size=4)
    append_event(new, "spent", step=4, seconds={"start": 1.0, "steps": 3.0})
    append_event(new, "checkpoint", step=4, bytes=1, stall_seconds=0.5, write_seconds=1.0)
    append_event(new, "slow_rank", step=4, rank=1, node="n1", factor=1.5, since=2)
    append_event(new, "rollback", from_step=4, step=2, left_out=[8, 16])
    append_event(new, "data_stage", step=2, data_stage=1, changes=["x 1 → 2"])
    whole = read_events(new)
    assert "from step 4 to 2, left_out [8, 16]" in written(new, tmp_path / "page.html")
    with open(new / "events.jsonl", "a") as file:
        for event in whole * 30:
            name = draw.choice(sorted(event.keys() - {"event", "time"}))
            file.write(json.dumps(event | {name: draw.choice(ODD)}) + "\n")
    log_steps(new, [{"loss": value} for value in (*ODD, 2.5)])
    found, state = read_events(new), RunState()
    assert len(found) > len(whole) + 30
    for event in found:
        state.note_event(event)
        json.dumps(alarm("r", "f", event), allow_nan=False)
        Series().passes(event, 0.0)
    generate_latest(SimpleNamespace(collect=lambda: families("r", state)))
    written(new, tmp_path / "page.html")
    assert charts_of(new)["Loss"].series == {"training": [(3, -1), (6, 1.5), (15, 2.5)]}
    assert report.main([str(new), "--png", str(tmp_path / "loss.png")]) == 0


def test_a_failure_is_recorded_beside_a_status_that_is_none(new):
    for status in ("[]", '{"state": "failed", "step": null, "reason": []}', "[" * 100_000):
        (new / "status.json").write_text(status)
        with pytest.raises(RunFailed), run_log_of(new):
            raise RunFailed("no data")
        assert read_status(new)["reason"] == "no data"


def test_files_that_cannot_be_read_are_named_and_left_out(new, capsys):
    for name in ("events.jsonl", "metrics.jsonl"):
        (new / name).symlink_to("/proc/self/mem")  # by root neither
    run = read_run(new)
    assert (run.records, run.events) == ([], [])
    assert capsys.readouterr().err.count(".jsonl cannot be read (Input/output error)") == 2
    assert report.main([str(new)]) == 2
    assert "RUN = " in capsys.readouterr().err


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
    append_event(run, "checkpoint", step=2, failed=PLANTED)
    entries = ("layout", "device", "torch", "python", "stacks", "step")
    for kind in ("system", "hang", "started", PLANTED):
        known = {"parameters": 1, "seconds": {}}
        append_event(run, kind, **known, **dict.fromkeys(entries, PLANTED))
    log_steps(run, [{"loss": 3.0, f"task/{PLANTED}/bits_per_byte": 1.0}] * 3)
    found = written(run, tmp_path / "page.html")
    for words in ("1 parameters on", "Tasks: text", "config.yaml",
                  f"could not save the checkpoint of step 2: {PLANTED}"):  # fmt: skip
        assert words in found, "what PLANTED is beside"
    assert found.count(PLANTED) >= 20
    # control: a template that does not escape
    real = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **how: real(**how | {"autoescape": False}))
    report.main([str(run), "--out", str(tmp_path / "bad.html")])
    bad = (tmp_path / "bad.html").read_text()
    assert bad.count("<script") == bad.count("<img") >= 5
    assert {*References(bad).found} == {ADDRESS}


def test_data_stages_of_an_older_version(new, tmp_path):
    """They are no restarts, although it wrote an end and a start: the ledger is that without
    them."""
    seconds = {"start": 5.1, "steps": 2.3, "end": 0.1}
    append_event(new, "start", began=10.0, step=0, world_size=2)
    append_event(new, "spent", step=4, seconds=seconds)
    append_event(new, "end", state="requeue", step=4, reason="data stage 1 begins", stage=1)
    append_event(new, "start", began=17.5, step=4, world_size=2, stage=1)
    append_event(new, "stage", stage=1, step=4, changes=["train.seq_len 8 → 16"])
    append_event(new, "spent", step=9, seconds=seconds)
    events = read_events(new)
    without = [event for event in events if event["event"] in ("start", "spent")]
    assert len(without) == 3
    assert Account(events).seconds == Account(without).seconds
    events[3]["began"] += 1.5  # control: a gap is counted
    assert Account(events).seconds["down"] == pytest.approx(1.5)
    found = written(new, tmp_path / "page.html")
    assert "begins data stage 1 after step 4: train.seq_len 8 → 16" in found
    assert "requeue" not in found


def test_a_long_run_is_thinned_and_loses_no_spike(new, tmp_path):
    noise = random.Random(0)
    norms = [1e4 if step == 3_321 else 1 + noise.random() for step in range(1, 6_001)]
    log_steps(new, ({"loss": 3 + 4 * noise.random(), "grad_norm": norm} for norm in norms))
    out = tmp_path / "page.html"
    written(new, out)
    assert out.stat().st_size < 200_000, "so that eight charts take less than a megabyte"
    chart = charts_of(new)["Gradient norm"]
    (axes,) = draw(chart, NARROW).axes
    assert axes.get_yscale() == "log"
    x, mean, low, high = thin(chart.series["norm"])
    assert len(x) == BINS
    assert (max(high), min(low)) == (1e4, min(norms))
    assert sum(mean) / BINS == pytest.approx(sum(norms) / len(norms))


def test_what_cannot_be_done_is_refused(new, tmp_path, capsys):
    log_steps(new, [{"lr": 3.0}])
    for folder, option, out, said in (
        (tmp_path, "--out", "page.html", "RUN = "),
        (new, "--png", "loss.jpg", "end it in .png"),
        (new, "--out", "page.pdf", "end it in .html"),
        (new, "--png", "loss.png", "it has no logged step with a finite loss yet"),
        (new, "--out", "run/metrics.jsonl/page.html", "cannot be written"),
    ):
        assert report.main([str(folder), option, str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err
