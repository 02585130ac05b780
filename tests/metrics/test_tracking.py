"""A run's metrics reach metrics.jsonl, wandb and TensorBoard, as read by each format's own
reader."""

import functools
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import psutil
import pytest

from runtime.checkpoint.progress import byte_bar
from runtime.log.events import append_event
from runtime.metrics.trackers import JsonLines, Trackers
from settings.load import load_config
from tests.runs import forget_last, losses, metrics_of, train_run, write_config

SECRET = "0123456789abcdef0123456789abcdef01234567"  # has the length of a wandb key


def tracked(arguments: list[str]) -> str:
    """`train_run` with secrets in the environment. wandb would read them only once per process."""
    with patch.dict(os.environ, WANDB_API_KEY=SECRET, AWS_SECRET_ACCESS_KEY=SECRET):
        try:
            return train_run(arguments)
        finally:
            shut_down_wandb()


@pytest.fixture(scope="module")
def twice(ranks, data, tmp_path_factory):
    """A run with all trackers, in two starts: steps 1 to 4, and again steps 3 and 4 because their
    checkpoint was deleted."""
    folder = tmp_path_factory.mktemp("tracked")
    config = write_config(
        folder, data, model={"num_layers": 2}, checkpoint={"interval": 2},
        train={"steps": 4, "micro_batch_size": 8, "eval_interval": 2, "eval_samples": 8},
        run={"wandb": "offline", "tensorboard": True},
    )  # fmt: skip
    assert ranks.run(tracked, 1, [config]) == [""]
    forget_last(folder)
    assert ranks.run(tracked, 1, [config]) == [""]
    return folder


def shut_down_wandb() -> None:
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


@pytest.fixture
def trackers(data, tmp_path):
    """Makes the trackers of a run whose folder exists."""
    (tmp_path / "run").mkdir()
    yield lambda **run: Trackers(load_config(write_config(tmp_path, data, run=run), []), 0, {})
    shut_down_wandb()


def log_steps(tracker: Trackers, *steps: int) -> None:
    for step in steps:
        tracker.log({"step": step, "eval_loss": 1.0})


def wandb_files(folder: Path) -> list[Path]:
    shut_down_wandb()  # its process may still be writing
    return sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, True), (False, True), (True, False)])
def test_bars_are_for_terminals(is_terminal, shown):
    """And not of another rank than the first."""
    with redirect_stderr(io.StringIO()) as said:
        said.isatty = lambda: is_terminal
        with byte_bar("loading", 10, shown) as bar:
            bar.update(10)
    assert ("loading:" in said.getvalue()) == (is_terminal and shown)


@functools.cache
def wandb_records(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a .wandb file by type, as wandb's own inspector reads them (the program behind
    `wandb leet inspect`)."""
    from wandb.util import get_core_path

    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", str(file), str(file.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["type"], []).append(record.get(record["type"]) or {})
    return found


def test_two_starts_are_one_run_of_wandb(twice):
    known = json.loads((twice / "run" / "wandb-run.json").read_text())
    assert known["repeated"] == 2
    files = wandb_files(twice)
    assert [file.name for file in files] == [f"run-{known['id']}.wandb"] * 2
    starts = [wandb_records(file) for file in files]
    for start in starts:
        (about,) = start["run"]
        assert about["run_id"] == known["id"]
        assert about["resume"] is True, "so `wandb sync` adds to what is there"
        assert about["config"]["update"]["model"]["dim"] == 32, "nested, not text"
        assert about["config"]["update"]["system"]["world_size"] == 1
        assert start["exit"][0].get("exit_code", 0) == 0
    history = [[item["item"] for item in start["history"]] for start in starts]
    assert [[item["step"] for item in items] for items in history] == [[1, 2, 3, 4], [3, 4]]
    steps = [item["_step"] for items in history for item in items]
    assert steps == [1, 2, 3, 4, 5, 6], "nothing is dropped"
    assert {item["step"]: item["loss"] for items in history for item in items} == losses(twice)
    assert "eval_loss" in history[0][1]
    assert {"glob_name": "*", "step_metric": "step"}.items() <= starts[0]["metric"][1].items()


def test_no_secret_is_written(twice):
    files = [path for path in (twice / "run").rglob("*") if path.is_file()]
    assert len(files) > 15
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def tensorboard(folder: Path, purge: bool = True) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), purge_orphaned_data=purge)
    found.Reload()
    return [(scalar.step, scalar.value) for scalar in found.Scalars("loss")]


def test_tensorboard_reads_every_step_once(twice):
    folder = twice / "run" / "tensorboard"
    once = tensorboard(folder)
    assert [step for step, _ in once] == [1, 2, 3, 4]
    assert dict(once) == pytest.approx(losses(twice), rel=1e-6), "TensorBoard stores float32"
    assert len(tensorboard(folder, purge=False)) == 6, "control: steps 3 and 4 were written twice"


@pytest.mark.parametrize("key", [SECRET, pytest.param("", marks=pytest.mark.thorough)])
def test_without_a_server_wandb_writes_to_the_folder(trackers, tmp_path, monkeypatch, capsys, key):
    """With a key, wandb finds out only from the server; without one, before."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("runtime.metrics.trackers.WANDB_START_SECONDS", 0.5)
    online = trackers(wandb="online")
    log_steps(online, 1, 2)
    online.close(failed=False)
    said = capsys.readouterr().err
    assert said.count("warning") == 1, said
    command = f"wandb sync {tmp_path}/run/wandb/offline-run-*"
    assert f"warning: wandb cannot go online; to upload later: {command} (" in said
    (file,) = wandb_files(tmp_path)
    assert [item["item"]["step"] for item in wandb_records(file)["history"]] == [1, 2]


def test_wandb_goes_on_when_its_process_is_stopped(trackers, tmp_path, capsys):
    """If wandb's own process is terminated, as by Slurm's SIGTERM two steps before the run ends,
    later steps are still recorded."""

    def processes() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "wandb-core" in child.name()]

    offline = trackers(wandb="offline")
    log_steps(offline, 1)
    (process,) = processes()
    process.terminate()
    process.wait(60)
    step = 1
    while not processes():  # wandb notices it a moment later
        step += 1
        log_steps(offline, step)
    log_steps(offline, step + 1)
    offline.close(failed=False)
    assert "warning" not in capsys.readouterr().err
    files = wandb_files(tmp_path)
    assert len({file.name for file in files}) == 1, "one id"
    recorded = [item["item"]["step"] for item in wandb_records(files[-1])["history"]]
    assert recorded == [step, step + 1]


def test_a_tracker_that_fails_is_left_out_and_it_is_said_once(trackers, tmp_path, capsys):
    (tmp_path / "run" / "tensorboard").write_text("a file where a folder should be")
    some, broken = trackers(tensorboard=True), Mock()
    broken.name, broken.log.side_effect = "broken", [None, RuntimeError("no route to host")]
    some.trackers.insert(0, broken)
    log_steps(some, 1, 2, 3, 4)
    some.close(failed=False)
    said = capsys.readouterr()
    assert broken.log.call_count == 2
    why = "RuntimeError: no route to host"
    assert f"warning: broken failed and is disabled from now on: {why}" in said.err
    assert "warning: TensorBoard failed and is disabled" in said.err
    assert said.err.count("warning") == 2
    assert said.out.count("held-out 1.0000") == 4, "the other trackers continue"
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("full_disk", [False, True])
def test_a_rollback_replaces_lines_and_scalars(trackers, tmp_path, full_disk):
    """Also if the lines cannot be dropped until later: no step is there twice."""
    both = trackers(tensorboard=True)
    del both.trackers[1]  # the console, which wants more of a record
    full = patch("runtime.metrics.trackers.write_whole", side_effect=OSError(28, "No space left"))
    for step in (1, 2, 3):
        both.log({"step": step, "loss": float(step), "mfu": None})
    with full if full_disk else nullcontext():
        both.went_back(1)
        both.log({"step": 2, "loss": 20.0})
    both.log({"step": 3, "loss": 30.0})
    both.close(failed=False)
    assert losses(tmp_path) == {1: 1.0, 2: 20.0, 3: 30.0}
    assert tensorboard(tmp_path / "run" / "tensorboard") == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_lines_wait_while_the_disk_is_full(tmp_path, capsys):
    lines = JsonLines(tmp_path, 0)
    lines.path = tmp_path / "gone" / "metrics.jsonl"  # cannot be written, not even by root
    for step in (1, 2):
        lines.log({"step": step})
    assert capsys.readouterr().err.count("cannot be written; lines wait in memory") == 1
    lines.path.parent.mkdir()
    lines.log({"step": 3})
    assert lines.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert not capsys.readouterr().err
    shutil.rmtree(lines.path.parent)
    lines.log({"step": 4})
    lines.close(failed=False)
    assert "the last 1 lines of" in capsys.readouterr().err
    append_event(lines.path.parent, "checkpoint", step=4, failed="no space")
    said = capsys.readouterr().err
    assert said.startswith("warning: the event checkpoint was not recorded: [Errno 2]")


def test_a_line_that_the_disk_has_no_room_for_is_not_begun(tmp_path):
    (tmp_path / "run").mkdir()
    lines = JsonLines(tmp_path / "run", 0)
    lines.log({"step": 1, "loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a limit on the file size cuts the write short
    resource.setrlimit(resource.RLIMIT_FSIZE, (lines.path.stat().st_size + 5, before[1]))
    try:
        lines.log({"step": 2, "loss": 2.0})
        assert lines.path.read_text() == '{"step": 1, "loss": 1.0}\n'
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        with pytest.raises(OSError, match="File too large"):
            JsonLines(tmp_path / "run", 1)
        assert not (tmp_path / "run" / "metrics.partial").exists(), "it would fill the disk"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.log({"step": 3, "loss": 3.0})
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_run_that_begins_anew_leaves_the_lines_of_the_one_before(tmp_path):
    (tmp_path / "metrics-2.jsonl").write_text("old")
    for text in ('{"step": 1}\n', '{"step": 2}\n'):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert not JsonLines(tmp_path, 2).begins_anew
        assert JsonLines(tmp_path, 0).begins_anew
    said = [(tmp_path / f"metrics-{number}.jsonl").read_text() for number in (1, 2, 3)]
    assert said == ['{"step": 1}\n', "old", '{"step": 2}\n']  # none takes the place of another
