"""A run folder has one writer at a time, whichever runs are paused, killed or started twice."""

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

import training.step
from errors import UserError
from proofs.ranks import RankError
from runtime.checkpoint import lease
from runtime.checkpoint.folder import complete_checkpoints, has_command
from runtime.checkpoint.lease import Holder, Lease, newest_lease
from tests.planted import planted
from tests.runs import losses, names, train_run, write_config


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hold(run: Path, about: dict[str, object] | str) -> Path:
    """Write a lease of another run, or this text in its place; return its path."""
    holder, path = Holder.this_process("00000003-0000"), run / "lease" / "00000003.json"
    if isinstance(about, dict):
        about = holder.model_copy(update={"host": "n17", **about}).model_dump_json()
    path.parent.mkdir(parents=True)
    path.write_text(about)
    return path


ELSEWHERE = {"machine": "another"}


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Let leases expire soon, and let a displaced run raise Ended instead of exiting."""

    def refuse(error: UserError) -> None:
        raise Ended(str(error))

    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.1)
    monkeypatch.setattr(lease, "refuse", refuse)


def test_it_is_taken_renewed_and_released(tmp_path):
    run = tmp_path / "run"
    with patch.object(lease, "RENEW_SECONDS", 0.01), Lease(run):
        path = run / "lease" / "00000001.json"
        assert json.loads(path.read_text())["pid"] == os.getpid()
        os.utime(path, (1000, 1000))
        while path.stat().st_mtime == 1000:
            time.sleep(0.01)
        (run / "metrics.jsonl").touch()
    assert path.stat().st_mtime == 0
    with Lease(run):
        assert names(run / "lease") == ["00000002.json"]


def test_a_slower_newcomer_leaves_the_winners_lease(tmp_path):
    """It fails after it has lost: the file that it tried to write is the winner's."""
    path = tmp_path / "run" / "lease" / "00000001.json"
    path.parent.mkdir(parents=True)
    path.touch()
    looks = patch.object(lease, "newest_lease", side_effect=[None, OSError("stale handle")])
    with looks, pytest.raises(UserError, match="stale handle"):
        Lease(tmp_path / "run").__enter__()
    assert path.stat().st_mtime > 0


def test_a_living_holder_is_named_and_nothing_is_written(ranks, data, tmp_path):
    with patch.object(lease, "RENEW_SECONDS", 0.1), Lease(tmp_path / "run") as held:
        first, second = ranks.run(train_run, 2, [write_config(tmp_path, data)])
        assert [file for file in (tmp_path / "run").rglob("*") if file.is_file()] == [held._path]
    assert first == second
    holder = f"process {os.getpid()} on host {socket.gethostname()}, since 20"
    for part in ("run.dir = ", holder, "has just renewed its lease", str(held._path)):
        assert part in first


def test_any_name_of_a_host_will_do(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Anna's Mac² " + "x" * 200)
    monkeypatch.setattr(os, "readlink", Mock(side_effect=OSError))  # as off Linux
    holder = Holder.this_process("")
    assert holder.host == holder.machine == "Anna-s-Mac--" + "x" * 188


def hold_one_of_many(folder: Path) -> str:
    """On each rank: why the lease of a folder that each has for itself is refused."""
    own = folder / str(dist.get_rank()) / "run"
    with patch.object(lease, "SEEN_SECONDS", 0.1), pytest.raises(UserError) as refused:
        Lease(own).__enter__()
    return refused.value.why


def test_a_folder_that_the_nodes_do_not_share_is_refused(ranks, tmp_path):
    found = ranks.run(hold_one_of_many, 2, tmp_path)
    assert found[0] == found[1]
    assert "it is another folder than rank 0's" in found[0]
    assert names(tmp_path) == []  # nothing is left


@pytest.mark.parametrize(
    "left",
    [
        {"pid": 999_999_999},  # dead
        {"process_began": "1"},  # another process of that number
        ELSEWHERE | {"job": "77", "restart": 1},  # the same job, requeued
    ],
    ids=str,
)
def test_it_is_taken_over_at_once(tmp_path, monkeypatch, left):
    hold(tmp_path / "run", left)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with patch.object(time, "sleep", side_effect=AssertionError("it waits")):
        Lease(tmp_path / "run")._try_to_take()
    assert names(tmp_path / "run" / "lease") == ["00000004.json"]


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (ELSEWHERE, "process .* on host n17, since .* has just renewed its lease"),
        ({}, "on host n17"),  # here, perhaps paused
        ({"job": "77", "restart": 1}, "of Slurm job 77"),  # this start of this job
        ({"job": "78"}, "of Slurm job 78"),
        ("", "its lease cannot be read yet"),
        ('{"token": 3}', "its lease cannot be read yet"),
        ('{"host": "\\u001b[2J"}', "its lease cannot be read yet"),
    ],
    ids=str,
)
def test_a_holder_is_watched(tmp_path, monkeypatch, capsys, left, said):
    """If it renews its lease within the time it stays; otherwise it is displaced."""
    path = hold(tmp_path / "run", left)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    renews = patch.object(time, "sleep", lambda _: os.utime(path))
    with renews, pytest.raises(UserError, match=said):
        Lease(tmp_path / "run")._try_to_take()
    assert "to see whether that process is alive and renews its lease" in capsys.readouterr().err
    with patch.object(time, "sleep"), Lease(tmp_path / "run"):
        assert names(tmp_path / "run" / "lease") == ["00000004.json"]


def paused(run: Path) -> Lease:
    """A run with one checkpoint to commit and one to delete, which no longer renews its lease."""
    first = Lease(run).__enter__()
    first._closed.set()
    first._thread.join()
    (first.work / "step-00000040").mkdir(parents=True)
    (run / "checkpoints" / "step-00000020").mkdir()
    return first


MOVES = {
    "commit": lambda run: (run.work / "step-00000040", run.checkpoints / "step-00000040"),
    "delete": lambda run: (run.checkpoints / "step-00000020", run.work / "step-00000020"),
}


@pytest.mark.parametrize("what", MOVES)
@pytest.mark.parametrize("when", ["before its check", "between check and rename"])
def test_a_displaced_run_changes_nothing(tmp_path, what, when):
    first = paused(tmp_path / "run")
    require = first._require

    def take_over() -> None:
        with Lease(tmp_path / "run"):
            (tmp_path / "run" / "metrics.jsonl").touch()

    checks = iter([take_over, require])  # the other run takes the lease after the check
    if when == "before its check":
        take_over()
        checks = iter([require])
    displaced = pytest.raises(Ended, match="was displaced by process")
    with patch.object(first, "_require", lambda: next(checks)()), displaced:
        first.move(*MOVES[what](first))
    assert names(first.checkpoints) == ["step-00000020"]


def test_the_fence_test_can_fail(tmp_path):
    """Control: if the new run does not clear the displaced run's work folder, that run's rename
    succeeds."""
    with patch.object(Lease, "_clear", lambda self: None):
        first = paused(tmp_path / "run")
        with Lease(tmp_path / "run"), patch.object(first, "_require", lambda: None):
            first.move(*MOVES["commit"](first))
    assert (tmp_path / "run" / "checkpoints" / "step-00000040").exists()


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    """Else a run would begin anew, and a running one would take its lease for deleted."""
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    fails = patch.multiple(os, scandir=Mock(side_effect=denied), listdir=Mock(side_effect=denied))
    with Lease(tmp_path / "run") as held:
        held.make_work()
        with fails:
            for look in complete_checkpoints, newest_lease:
                with pytest.raises(PermissionError):
                    look(held.checkpoints)
            assert has_command(held.checkpoints / "step-00000001"), "its upload may still run"
            held._looked = -60.0
            held.check()  # Ended is not raised


def test_what_a_save_commits_while_its_run_fails_stays_whole(tmp_path):
    """Its thread renames the folder while the lease is released."""
    held = Lease(tmp_path / "run").__enter__()
    partial, final = held.make_work() / "step-00000040", held.checkpoints / "step-00000040"
    partial.mkdir()
    for name in "a", "b":
        (partial / name).touch()

    @planted(os, "unlink")
    def meanwhile(honest, *about: object, **more: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(partial, final)
        honest(*about, **more)

    with meanwhile():
        held.__exit__(None, None, None)
    assert names(final if final.exists() else partial) == ["a", "b"]


def test_what_was_being_put_aside_is_not_swept_away(tmp_path):
    first = paused(tmp_path / "run")
    (first.work / "partial-00000001-9" / "step-00000060.damaged").mkdir(parents=True)
    (first.work / "step-00000020.abandoned-2").mkdir()
    with Lease(tmp_path / "run"):
        left = names(first.checkpoints)
    assert left == ["step-00000020", "step-00000020.abandoned-2", "step-00000060.damaged"]


def test_a_run_whose_lease_is_deleted_ends_with_status_2(ranks, data, tmp_path):
    config = write_config(tmp_path, data, checkpoint={"interval": 2})
    with pytest.raises(RankError, match="rank 0: died with exit code 2"):
        ranks.run(train_until_deleted, 2, [config])
    assert sorted(losses(tmp_path)) == [1, 2, 3], "nothing was written after it"
    assert not (tmp_path / "run" / "status.json").exists()


def train_until_deleted(arguments: list[str]) -> str:
    """Train; a person deletes the lease in step 4, which this run notices when it writes that
    step's line."""

    @planted(training.step, "learning_rate")
    def deleted(honest, step: int, *about: object) -> float:
        if step == 3 and dist.get_rank() == 0:
            (Path(arguments[0]).parent / "run" / "lease" / "00000001.json").unlink()
        return honest(step, *about)

    with deleted(), patch.object(lease, "TRUST_SECONDS", 0.0):
        return train_run(arguments)
