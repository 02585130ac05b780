"""checkpoint.after_commit: run for each committed checkpoint until it succeeds, newest first. No
checkpoint is deleted while it runs."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from runtime.checkpoint.folder import AFTER_COMMIT, MANIFEST, has_command
from runtime.checkpoint.save import Saver
from runtime.monitor import after_commit
from runtime.monitor.after_commit import Commands, progress
from tests.monitor.alert_helpers import settings_of, wait_until
from tests.runs import STALE, names, run, status_of, write_config


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

    def succeeds_for(self, step: int) -> None:
        """Wait until the command has succeeded for everything, last for this step; end."""
        wait_until(lambda: progress(self.checkpoints) == ([], step))
        self.commands.finish(30)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(after_commit, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(after_commit, "RETRY_SECONDS", 0.02)


def test_each_checkpoint_once_and_the_newest_first(tmp_path):
    """A checkpoint that is deleted before its turn is reported as failed."""
    says = "until [ -e go ]; do sleep 0.02; done; "
    says += 'echo "$1 $2 $3 $LATTICE_STEP $LATTICE_CHECKPOINT" >> said'
    folder = Folder(tmp_path, says, "'an argument'")
    paths = {step: folder.commit(step) for step in (5, 10, 20)}
    (folder.checkpoints / "step-00000030").mkdir()  # incomplete: it has no manifest
    (folder.checkpoints / "step-00000040.damaged").mkdir()
    folder.start()
    wait_until(lambda: has_command(paths[20]))
    shutil.rmtree(paths[5])  # as checkpoint.keep_last does while the command is slow
    (tmp_path / "go").touch()
    wait_until(lambda: len(folder.events) == 3)
    shutil.rmtree(paths[10])
    paths[30] = folder.commit(30)
    folder.succeeds_for(30)
    assert (tmp_path / "said").read_text().splitlines() == [
        f"an argument {paths[step]} {paths[step] / MANIFEST} {step} {paths[step]}"
        for step in (20, 10, 30)
    ]
    found = [(event["step"], "failed" in event) for event in folder.events]
    assert found == [(20, False), (10, False), (5, True), (30, False)]
    # A step that is saved again, after a rollback, is another checkpoint.
    folder.commit(20, sha="b")
    assert progress(folder.checkpoints) == ([paths[20]], 30)


def test_a_failure_is_reported_and_tried_again(tmp_path):
    third = "echo x >> tries; [ $(wc -l < tries) = 3 ] || { echo why; exit 4; }"
    folder = Folder(tmp_path, third)
    folder.commit(10)
    folder.start(events=3)
    folder.succeeds_for(10)
    failed = "it ended with status 4: why"
    assert [event.get("failed") for event in folder.events] == [failed, failed, None]
    assert [event["attempts"] for event in folder.events] == [1, 2, 3]


def test_a_command_that_hangs_is_ended(tmp_path):
    folder = Folder(tmp_path, "sleep 600", after_commit_seconds=0.1)
    folder.commit(10)
    folder.start(events=1)
    assert "was ended after 0 s" in folder.events[0]["failed"]
    folder.commands.finish(0.0)


def test_the_next_start_waits_for_the_monitor_before_and_runs_what_was_interrupted(tmp_path):
    """That monitor may still be ending: the command never runs twice at the same time."""
    waits = "until [ -e go ]; do sleep 0.1; done"
    script = f"trap 'rmdir busy; exit 1' TERM; mkdir busy || touch twice; {waits}; rmdir busy"
    first, second = Folder(tmp_path, script), Folder(tmp_path, script)
    path = first.commit(10)
    first.start()
    wait_until(lambda: has_command(path))
    # as a monitor that was killed would leave it
    (first.checkpoints / AFTER_COMMIT / "step-00000005.a5.running").touch()
    second.start()
    time.sleep(0.3)
    assert has_command(path)  # so that it is not deleted
    first.commands.finish(0.0)
    assert progress(first.checkpoints) == ([path], None)
    (tmp_path / "go").touch()
    second.succeeds_for(10)
    assert names(second.checkpoints / AFTER_COMMIT) == ["step-00000010.a10.done"]
    third = Folder(tmp_path, script)
    third.start()
    third.commands.finish(30)  # nothing is left to do
    events = [[event["step"] for event in folder.events] for folder in (first, second, third)]
    assert events == [[], [10], []]
    assert not (tmp_path / "twice").exists()


def test_what_fails_for_a_moment_is_tried_again(tmp_path):
    """Without a marker it does not begin: the saver would not know that it runs, and might delete
    the checkpoint. One whose manifest a shared file system fails to read is not taken for
    deleted; nor does a folder that it cannot read when the commands begin end them."""
    folder = Folder(tmp_path, "echo x >> tries")
    blocked = folder.checkpoints / AFTER_COMMIT
    blocked.touch()  # so that nothing can be written there, as on a full disk
    path = folder.commit(10)
    whole = (path / MANIFEST).read_text()
    told = itertools.chain([STALE], itertools.repeat(progress(folder.checkpoints)))
    with patch.object(after_commit, "progress", side_effect=told):
        folder.start(events=1)
    assert f"{path.name}.a10.running cannot be written: " in folder.events[0]["failed"]
    (path / MANIFEST).write_text(whole[:-1])
    blocked.unlink()
    wait_until(lambda: folder.events[-1].get("failed") == "its manifest cannot be read")
    assert not (tmp_path / "tries").exists()
    (path / MANIFEST).write_text(whole)
    with patch.object(os.path, "isfile", return_value=False):  # as on an error, it never raises
        folder.succeeds_for(10)
    assert (tmp_path / "tries").read_text() == "x\n"


@pytest.mark.parametrize("begins", ["before", "meanwhile", "never"])
def test_no_checkpoint_is_deleted_while_its_command_runs(tmp_path, begins):
    """If the command begins between the saver's look and its rename, that is taken back. Control:
    without a command, it is deleted."""
    folder = Folder(tmp_path, "true")
    old = folder.commit(10)
    running = folder.checkpoints / AFTER_COMMIT / f"{old.name}.a10.running"
    running.parent.mkdir()

    def move(source: Path, target: Path) -> None:
        source.rename(target)
        if begins == "meanwhile":
            running.touch()

    if begins == "before":
        running.touch()
    work = tmp_path / "partial-1"
    work.mkdir()
    saver = Mock(**{"lease.work": work, "lease.move": move})
    if begins == "never":  # a link to one elsewhere is deleted, too
        link = folder.checkpoints / "step-00000009"
        link.symlink_to(tmp_path)
        Saver._delete(saver, link)
        assert not os.path.lexists(link)
    Saver._delete(saver, old)
    assert (old / MANIFEST).exists() == (begins != "never")
    assert names(work) == []


@pytest.mark.thorough
def test_a_run_ends_when_its_last_checkpoint_is_done(ranks, data, tmp_path):
    """What never succeeds, here for the checkpoint before it, is in the events, and training is
    not at fault."""
    Folder(tmp_path, f'[ $LATTICE_STEP = 6 ] && sleep 1 && cp -r "$1" {tmp_path}/store')
    checkpoint = {"interval": 3, "after_commit": str(tmp_path / "command")}
    checkpoint |= {"after_commit_minutes": 0.1}
    run(ranks, 2, write_config(tmp_path, data, checkpoint=checkpoint))
    status = status_of(tmp_path)
    assert status["state"] == "finished"
    assert status["after_commit"] == {"done_step": 6, "pending": ["step-00000003"]}
    assert (tmp_path / "store" / MANIFEST).is_file()
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"failed": "it ended with status 1' in events
