"""checkpoint.after_commit: run for each committed checkpoint until it succeeds, newest first. No
checkpoint is deleted while it runs."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.alerts import after_commit
from runtime.alerts.after_commit import RECORD, Commands, is_running, progress, read_record
from runtime.alerts.settings import Settings
from runtime.checkpoints.names import MANIFEST
from runtime.checkpoints.save import Saver
from tests.alert_helpers import wait_until
from tests.runs import fresh, losses, status_of, train_run, write_config
from tools.ranks import Ranks


class Folder:
    """A run folder with checkpoints, and the commands for it."""

    def __init__(self, run: Path, command: str, **settings: Any) -> None:
        self.run, self.checkpoints = run, run / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.events: list[dict[str, Any]] = []
        told = Settings(str(run), "x", str(run), 0, after_commit=command, **settings)
        self.commands = Commands(told, lambda **about: self.events.append(about))

    def commit(self, step: int, sha: str = "a") -> Path:
        path = self.checkpoints / f"step-{step:08d}"
        path.mkdir(exist_ok=True)
        (path / MANIFEST).write_text(json.dumps({"sha256": f"{sha}{step}"}))
        return path

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir())


def script(folder: Path, text: str) -> str:
    path = folder / "command"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_commit, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(after_commit, "RETRY_SECONDS", 0.02)


def test_each_checkpoint_once_and_the_newest_first(tmp_path: Path) -> None:
    command = script(tmp_path, 'echo "$1 $2 $3 $LATTICE_STEP $LATTICE_CHECKPOINT" >> said')
    folder = Folder(tmp_path, f"{command} 'an argument'")
    paths = [folder.commit(step) for step in (10, 20)]
    (folder.checkpoints / "step-00000030").mkdir()  # incomplete: it has no manifest
    (folder.checkpoints / "step-00000040.damaged").mkdir()
    folder.commands.start()
    wait_until(lambda: len(folder.events) == 2)
    paths += [folder.commit(30)]
    wait_until(lambda: len(folder.events) == 3)
    folder.commands.finish(30)
    assert (tmp_path / "said").read_text().splitlines() == [
        f"an argument {path} {path / MANIFEST} {step} {path}"
        for path, step in ((paths[1], 20), (paths[0], 10), (paths[2], 30))
    ]
    assert [event["step"] for event in folder.events] == [20, 10, 30]
    assert progress(folder.checkpoints) == ([], 30)
    # A step that is saved again, after a rollback, is another checkpoint.
    folder.commit(20, sha="b")
    assert progress(folder.checkpoints) == ([paths[1]], 30)


def test_a_failure_is_reported_and_tried_again(tmp_path: Path) -> None:
    command = script(tmp_path, "echo x >> tries; [ $(wc -l < tries) = 3 ] || { echo why; exit 4; }")
    folder = Folder(tmp_path, command)
    folder.commit(10)
    folder.commands.start()
    wait_until(lambda: len(folder.events) == 3)
    folder.commands.finish(30)
    failed = "it ended with status 4: why"
    assert folder.events[:2] == [
        {"step": 10, "attempts": attempt, "failed": failed} for attempt in (1, 2)
    ]
    assert folder.events[2]["attempts"] == 3
    assert progress(folder.checkpoints) == ([], 10)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = Folder(tmp_path, script(tmp_path, "sleep 600"), after_commit_seconds=0.1)
    folder.commit(10)
    folder.commands.start()
    wait_until(lambda: folder.events)
    assert "was ended after 0 s" in folder.events[0]["failed"]
    began = time.monotonic()
    folder.commands.finish(0.2)
    assert time.monotonic() - began < 10


def test_two_companions_of_a_run_never_run_it_at_the_same_time(tmp_path: Path) -> None:
    """That of the start before may still be ending when the next start begins."""
    waits = "until [ -e go ]; do sleep 0.1; done"
    command = script(tmp_path, f"mkdir busy || touch twice; {waits}; rmdir busy")
    first, second = Folder(tmp_path, command), Folder(tmp_path, command)
    path = first.commit(10)
    first.commands.start()
    wait_until(lambda: is_running(first.checkpoints, path.name))
    second.commands.start()
    time.sleep(0.5)
    assert is_running(first.checkpoints, path.name)  # so that it is not deleted
    (tmp_path / "go").touch()
    first.commands.finish(30)
    newer = second.commit(20)
    wait_until(lambda: second.events)
    second.commands.finish(30)
    assert [event["step"] for event in (*first.events, *second.events)] == [10, 20]
    assert newer.is_dir()
    assert not (tmp_path / "twice").exists()


def test_an_interrupted_command_is_run_by_the_next_start(tmp_path: Path) -> None:
    command = script(tmp_path, "echo x >> tries; [ -e ready ] || sleep 600")
    first = Folder(tmp_path, command)
    path = first.commit(10)
    first.commands.start()
    wait_until(lambda: is_running(first.checkpoints, path.name))
    first.commands.finish(0.0)
    assert progress(first.checkpoints) == ([path], None)
    (tmp_path / "ready").touch()
    # as a companion that was killed would leave it
    stale = {"running": "step-00000005", "done": {}}
    (first.checkpoints / RECORD).write_text(json.dumps(stale))
    second = Folder(tmp_path, command)
    second.commands.start()
    wait_until(lambda: second.events)
    second.commands.finish(30)
    assert progress(first.checkpoints) == ([], 10)
    assert read_record(first.checkpoints)["running"] is None


def test_a_checkpoint_that_is_deleted_too_early_is_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path, script(tmp_path, "while [ ! -e go ]; do sleep 0.02; done"))
    old = folder.commit(10)
    folder.commit(20)
    folder.commands.start()
    wait_until(lambda: is_running(folder.checkpoints, "step-00000020"))
    (old / MANIFEST).unlink()
    old.rmdir()  # as checkpoint.keep_last does while the command is slow
    (tmp_path / "go").touch()
    wait_until(lambda: len(folder.events) == 2)
    folder.commands.finish(30)
    assert {(event["step"], "failed" in event) for event in folder.events} == {
        (20, False),
        (10, True),
    }


def test_without_a_record_it_does_not_begin(tmp_path: Path) -> None:
    """The saver would not know that it runs, and might delete the checkpoint."""
    folder = Folder(tmp_path, script(tmp_path, "echo x >> tries"))
    blocked = folder.checkpoints / f"{RECORD}.tmp"
    blocked.mkdir()  # so that it cannot be written, as on a full disk
    path = folder.commit(10)
    folder.commands.start()
    wait_until(lambda: folder.events)
    assert f"{RECORD} cannot be written: Is a directory" in folder.events[0]["failed"]
    assert not (tmp_path / "tries").exists()
    blocked.rmdir()
    wait_until(lambda: progress(folder.checkpoints) == ([], 10))
    folder.commands.finish(30)
    assert (tmp_path / "tries").read_text() == "x\n"
    assert not is_running(folder.checkpoints, path.name)


def test_a_success_that_cannot_be_recorded_is_neither_repeated_nor_called_a_failure(
    tmp_path: Path,
) -> None:
    blocks = f"mkdir checkpoints/{RECORD}.tmp; echo x >> tries"
    folder = Folder(tmp_path, script(tmp_path, blocks))
    path = folder.commit(10)
    folder.commands.start()
    wait_until(lambda: folder.events)
    assert is_running(folder.checkpoints, path.name)  # as the record says
    (path / MANIFEST).unlink()
    path.rmdir()
    time.sleep(0.2)
    (folder.checkpoints / f"{RECORD}.tmp").rmdir()
    wait_until(lambda: not is_running(folder.checkpoints, path.name))
    folder.commands.finish(30)
    assert (tmp_path / "tries").read_text() == "x\n"
    assert ["failed" in event for event in folder.events] == [False]
    assert progress(folder.checkpoints) == ([], 10)


# --- deletion while the command runs --------------------------------------------------------------


class OneSaver:
    """A Saver of which only `_delete` is used, with a lease whose renames can be interrupted."""

    def __init__(self, folder: Path, between: Callable[[], None] = lambda: None) -> None:
        self.folder, self.work, self.between = folder, folder / "partial-1", between
        self.work.mkdir()
        saver = Saver.__new__(Saver)
        saver.folder, saver.lease = folder, self  # type: ignore[assignment]
        has = type("C", (), {"after_commit": "x"})()
        saver.train = type("T", (), {"config": type("F", (), {"checkpoint": has})()})()  # type: ignore[assignment]
        self.saver = saver

    def move(self, source: Path, target: Path) -> None:
        source.rename(target)
        self.between()


def test_no_checkpoint_is_deleted_while_its_command_runs(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "true")
    old = folder.commit(10)

    def begin() -> None:
        (folder.checkpoints / RECORD).write_text(json.dumps({"running": old.name, "done": {}}))

    begin()
    saver = OneSaver(folder.checkpoints)
    saver.saver._delete(old)
    assert (old / MANIFEST).exists()
    # The command begins between the saver's look and its rename: the rename is taken back.
    (folder.checkpoints / RECORD).unlink()
    saver.between = begin
    saver.saver._delete(old)
    assert (old / MANIFEST).exists()
    # Control: without a command, it is deleted.
    saver.between = lambda: None
    (folder.checkpoints / RECORD).unlink()
    saver.saver._delete(old)
    assert folder.names() == ["partial-1"]


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_finished_run_has_done_its_last_checkpoint(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    copy = script(tmp_path, f'sleep 1; cp -r "$1" {tmp_path}/store-$LATTICE_STEP')
    sections = {"checkpoint": {"interval": 3, "keep_last": 1}, "train": {"steps": 6}}
    plain = write_config(tmp_path, data, **sections)
    assert ranks.run(train_run, 2, [plain]) == [""] * 2
    expected = losses(tmp_path)
    fresh(tmp_path)
    sections["checkpoint"]["after_commit"] = copy
    assert ranks.run(train_run, 2, [write_config(tmp_path, data, **sections)]) == [""] * 2
    assert losses(tmp_path) == expected
    status = status_of(tmp_path)
    assert status["state"] == "finished"
    assert status["after_commit"] == {"done_step": 6, "pending": []}
    assert (tmp_path / "store-6" / MANIFEST).is_file()


@pytest.mark.thorough
def test_a_command_that_never_succeeds_is_said_in_the_status(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    checkpoint = {"interval": 6, "after_commit": "false", "after_commit_minutes": 0.02}
    config = write_config(tmp_path, data, checkpoint=checkpoint)
    assert ranks.run(train_run, 2, [config]) == [""] * 2
    status = status_of(tmp_path)
    assert status["state"] == "finished"  # training is not at fault
    assert status["after_commit"] == {"done_step": None, "pending": ["step-00000006"]}
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"failed": "it ended with status 1' in events
