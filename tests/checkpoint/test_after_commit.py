"""checkpoint.after_commit: run for each committed checkpoint until it succeeds, newest first. No
checkpoint is deleted while it runs."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proofs.ranks import Ranks
from runtime.checkpoint.folder import AFTER_COMMIT, MANIFEST, has_command
from runtime.checkpoint.save import Saver
from runtime.monitor import after_commit
from runtime.monitor.after_commit import Commands, progress
from tests.monitor.alert_helpers import settings_of, wait_until
from tests.runs import fresh, losses, names, run, status_of, write_config


class Folder:
    """A run folder with checkpoints, and the command for them: a shell script, and arguments."""

    def __init__(self, run: Path, script: str, arguments: str = "", **settings: Any) -> None:
        command = run / "command"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        self.run, self.checkpoints = run, run / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.events: list[dict[str, Any]] = []
        self.has_begun = False
        told = settings_of(run, cwd=str(run), after_commit=f"{command} {arguments}", **settings)
        self.commands = Commands(told, lambda **about: self.events.append(about))

    def commit(self, step: int, sha: str = "a") -> Path:
        """Save a checkpoint, of which the commands are told once they have begun."""
        path = self.checkpoints / f"step-{step:08d}"
        path.mkdir(exist_ok=True)
        written = self.run / "manifest"  # renamed, as the saver does: it is never seen half written
        written.write_text(json.dumps({"sha256": f"{sha}{step}"}))
        written.rename(path / MANIFEST)
        if self.has_begun:
            self.commands.committed(step)
        return path

    def start(self, events: int = 0) -> None:
        """Start the commands; wait until there have been `events`."""
        self.commands.start()
        self.has_begun = True
        wait_until(lambda: len(self.events) >= events)

    def markers(self) -> list[str]:
        return names(self.checkpoints / AFTER_COMMIT)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_commit, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(after_commit, "RETRY_SECONDS", 0.02)


def test_each_checkpoint_once_and_the_newest_first(tmp_path: Path) -> None:
    says = 'echo "$1 $2 $3 $LATTICE_STEP $LATTICE_CHECKPOINT" >> said'
    folder = Folder(tmp_path, says, "'an argument'")
    paths = [folder.commit(step) for step in (10, 20)]
    (folder.checkpoints / "step-00000030").mkdir()  # incomplete: it has no manifest
    (folder.checkpoints / "step-00000040.damaged").mkdir()
    folder.start(events=2)
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
    third = "echo x >> tries; [ $(wc -l < tries) = 3 ] || { echo why; exit 4; }"
    folder = Folder(tmp_path, third)
    folder.commit(10)
    folder.start(events=3)
    folder.commands.finish(30)
    failed = "it ended with status 4: why"
    assert [event.get("failed") for event in folder.events] == [failed, failed, None]
    assert [event["attempts"] for event in folder.events] == [1, 2, 3]
    assert progress(folder.checkpoints) == ([], 10)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "sleep 600", after_commit_seconds=0.1)
    folder.commit(10)
    folder.start(events=1)
    assert "was ended after 0 s" in folder.events[0]["failed"]
    began = time.monotonic()
    folder.commands.finish(0.2)
    assert time.monotonic() - began < 10


def test_two_monitors_of_a_run_never_run_it_at_the_same_time(tmp_path: Path) -> None:
    """That of the start before may still be ending when the next start begins."""
    waits = "until [ -e go ]; do sleep 0.1; done"
    first, second = (
        Folder(tmp_path, f"mkdir busy || touch twice; {waits}; rmdir busy") for _ in range(2)
    )
    path = first.commit(10)
    first.start()
    wait_until(lambda: has_command(path))
    second.start()
    time.sleep(0.5)
    assert has_command(path)  # so that it is not deleted
    (tmp_path / "go").touch()
    first.commands.finish(30)
    newer = second.commit(20)
    wait_until(lambda: second.events)
    second.commands.finish(30)
    assert [event["step"] for event in (*first.events, *second.events)] == [10, 20]
    assert newer.is_dir()
    assert not (tmp_path / "twice").exists()


def test_an_interrupted_command_is_run_by_the_next_start(tmp_path: Path) -> None:
    first, second = (
        Folder(tmp_path, "echo x >> tries; [ -e ready ] || sleep 600") for _ in range(2)
    )
    path = first.commit(10)
    first.start()
    wait_until(lambda: has_command(path))
    first.commands.finish(0.0)
    assert progress(first.checkpoints) == ([path], None)
    (tmp_path / "ready").touch()
    # as a monitor that was killed would leave it
    (first.checkpoints / AFTER_COMMIT / "step-00000005.a5.running").touch()
    second.start(events=1)
    second.commands.finish(30)
    assert progress(first.checkpoints) == ([], 10)
    assert second.markers() == ["step-00000010.a10.done"]


def test_a_checkpoint_that_is_deleted_too_early_is_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "while [ ! -e go ]; do sleep 0.02; done")
    old, new = folder.commit(10), folder.commit(20)
    folder.start()
    wait_until(lambda: has_command(new))
    (old / MANIFEST).unlink()
    old.rmdir()  # as checkpoint.keep_last does while the command is slow
    (tmp_path / "go").touch()
    wait_until(lambda: len(folder.events) == 2)
    folder.commands.finish(30)
    assert {event["step"]: "failed" in event for event in folder.events} == {20: False, 10: True}


def test_a_manifest_that_cannot_be_read_for_a_moment(tmp_path: Path) -> None:
    """A shared file system may fail to read it. The checkpoint is not taken for deleted."""
    folder = Folder(tmp_path, "true")
    path = folder.commit(10)
    whole = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(whole[:-1])
    folder.start(events=1)
    assert folder.events[0]["failed"] == "its manifest cannot be read"
    (path / MANIFEST).write_text(whole)
    wait_until(lambda: progress(folder.checkpoints) == ([], 10))
    folder.commands.finish(30)


def test_without_a_marker_it_does_not_begin(tmp_path: Path) -> None:
    """The saver would not know that it runs, and might delete the checkpoint."""
    folder = Folder(tmp_path, "echo x >> tries")
    blocked = folder.checkpoints / AFTER_COMMIT
    blocked.touch()  # so that nothing can be written there, as on a full disk
    path = folder.commit(10)
    folder.start(events=1)
    assert f"{path.name}.a10.running cannot be written: " in folder.events[0]["failed"]
    assert not (tmp_path / "tries").exists()
    blocked.unlink()
    wait_until(lambda: progress(folder.checkpoints) == ([], 10))
    folder.commands.finish(30)
    assert (tmp_path / "tries").read_text() == "x\n"


def test_what_is_recorded_of_deleted_checkpoints_is_removed_but_for_the_newest(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path, "rm -rf checkpoints/step-00000020")
    for step in (10, 20, 30):
        folder.commit(step)
    folder.start(events=3)
    folder.commands.finish(30)
    assert folder.markers() == ["step-00000010.a10.done", "step-00000030.a30.done"]


@pytest.mark.parametrize(
    ("older", "left"),
    [
        ({"running": None, "done": {"step-00000010": "a10", "x": "y"}}, [20]),
        ({"running": None, "done": {"step-00000010": "of another"}}, [20, 10]),
        ({"done": {"step-00000010": []}}, [20, 10]),
        ({"done": 3}, [20, 10]),
    ],
)
def test_what_an_older_version_recorded_counts(tmp_path: Path, older: Any, left: Any) -> None:
    folder = Folder(tmp_path, "true")
    for step in (10, 20):
        folder.commit(step)
    (folder.checkpoints / "after_commit.json").write_text(json.dumps(older))
    folder.start(events=len(left))
    folder.commands.finish(30)
    assert [event["step"] for event in folder.events] == left
    assert progress(folder.checkpoints) == ([], 20)


# --- deletion while the command runs --------------------------------------------------------------


@pytest.mark.parametrize("begins", ["before", "meanwhile", "never"])
def test_no_checkpoint_is_deleted_while_its_command_runs(tmp_path: Path, begins: str) -> None:
    """If the command begins between the saver's look and its rename, that is taken back. Control:
    without a command, it is deleted."""
    folder = Folder(tmp_path, "true")
    old = folder.commit(10)

    def begin() -> None:
        running = folder.checkpoints / AFTER_COMMIT / f"{old.name}.a10.running"
        running.parent.mkdir(exist_ok=True)
        running.touch()

    def move(source: Path, target: Path) -> None:
        source.rename(target)
        if begins == "meanwhile":
            begin()

    if begins == "before":
        begin()
    saver = Saver.__new__(Saver)
    saver.folder = folder.checkpoints
    saver.lease = SimpleNamespace(work=tmp_path / "partial-1", move=move)  # type: ignore[assignment]
    saver.lease.work.mkdir()
    config = SimpleNamespace(checkpoint=SimpleNamespace(after_commit="x"))
    saver.train = SimpleNamespace(config=config)  # type: ignore[assignment]
    saver._delete(old)
    assert (old / MANIFEST).exists() == (begins != "never")
    assert names(saver.lease.work) == []


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_finished_run_has_done_its_last_checkpoint(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    Folder(tmp_path, f'sleep 1; cp -r "$1" {tmp_path}/store-$LATTICE_STEP')
    saves, losses_of = {"interval": 3, "keep_last": 1}, []
    for after in ({}, {"after_commit": str(tmp_path / "command")}):
        fresh(tmp_path)
        run(ranks, 2, write_config(tmp_path, data, checkpoint=saves | after))
        losses_of.append(losses(tmp_path))
    assert losses_of[0] == losses_of[1]
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
    run(ranks, 2, config)
    status = status_of(tmp_path)
    assert status["state"] == "finished"  # training is not at fault
    assert status["after_commit"] == {"done_step": None, "pending": ["step-00000006"]}
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"failed": "it ended with status 1' in events
