"""Checkpoints that are damaged, incomplete or written late: damage is found, and good checkpoints
are kept and used."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystem

import runtime.checkpoints.save
from parallel.mesh import build_mesh
from runtime.checkpoints import manifest
from runtime.checkpoints.lease import Lease
from runtime.checkpoints.manifest import MANIFEST, Damaged, Manifest, read_manifest
from runtime.checkpoints.save import Saver
from runtime.listener import Run
from runtime.records.events import read_events
from tests.runs import (
    LAYOUT_3D,
    copy_of,
    fresh,
    global_state,
    heard,
    losses,
    names,
    status_of,
    train_run,
    write_config,
)
from tools import verify
from tools.ranks import Ranks
from training.build import build_stages
from training.load_config import load_config
from training.step import TrainStep


def flip_a_bit(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    file.write_bytes(content)


def test_a_good_checkpoint_is_good(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(saved / "run")]) == 0
    assert capsys.readouterr().out.count(": good, ") == 3
    newest = saved / "run" / "checkpoints" / "step-00000006"
    tensors = [name for file in newest.glob("*.safetensors") for name in load_file(file)]
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}, (
        "the safetensors library can read it"
    )
    trainer = json.loads((newest / "trainer.json").read_text())
    assert (trainer["step"], trainer["updates"]) == (6, 6)
    events = [event for event in read_events(saved / "run") if event["event"] == "checkpoint"]
    assert [event["step"] for event in events] == [2, 4, 6]
    assert all(
        event["bytes"] > 0 and event["stall_seconds"] >= 0 and event["write_seconds"] > 0
        for event in events
    )


def test_a_flipped_bit_in_any_file_is_found(saved: Path, tmp_path: Path) -> None:
    """Verification finds a flipped bit in the first, the middle or the last byte of any file of a
    checkpoint."""
    good = saved / "run" / "checkpoints" / "step-00000006"
    for name in names(good):
        for at in (0.0, 0.5, 1.0):
            bad = tmp_path / "step-00000006"
            shutil.copytree(good, bad, dirs_exist_ok=True)
            flip_a_bit(bad / name, at)
            with pytest.raises(Damaged):
                manifest.verify(bad)
            shutil.rmtree(bad)


@pytest.mark.parametrize(
    "kinds",
    [
        ("tensors", "manifest.json"),
        pytest.param(("trainer.json", "tokenizer.model"), marks=pytest.mark.thorough),
    ],
)
def test_the_newest_good_one_is_used_and_it_is_said_once(
    ranks: Ranks, saved: Path, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """If the two newest checkpoints are damaged, the run resumes from the third, here in another
    layout, and reaches the same losses; one message for each damaged checkpoint is printed."""
    config, checkpoints = copy_of(saved, tmp_path)
    for step, what in zip(("step-00000006", "step-00000004"), kinds, strict=True):
        file = checkpoints / step / what
        if what == "tensors":
            file = sorted((checkpoints / step).glob("*.safetensors"))[-1]
        flip_a_bit(file)
    before = losses(saved)
    results = ranks.run(heard, 4, [config, "parallel.pp=1"])
    assert [refusal for refusal, _ in results] == [""] * 4
    after = losses(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[step] == before[step] for step in (1, 2))
    assert all(after[step] == pytest.approx(before[step], rel=1e-4) for step in before)
    assert {"step-00000004.damaged", "step-00000006.damaged", "step-00000006"} <= set(
        names(checkpoints)
    )
    said = "".join(said for _, said in results)
    assert said.count("step-00000006 is damaged") == said.count("step-00000004 is damaged") == 1
    assert verify.main([str(checkpoints)]) == 0


def test_a_named_checkpoint_must_be_good(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    config, checkpoints = copy_of(saved, tmp_path)
    flip_a_bit(sorted((checkpoints / "step-00000006").glob("*.safetensors"))[0])
    for key in ("checkpoint.resume", "checkpoint.load_weights_only"):
        other = f"run.dir={tmp_path / 'other'}"
        messages = ranks.run(
            train_run, 4, [config, f"{key}={checkpoints / 'step-00000006'}", other]
        )
        assert all(
            message.startswith(f"{key} = ") and "sha256 differs" in message for message in messages
        )


def test_a_run_folder_stands_for_its_newest_checkpoint(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """A run folder given as a checkpoint means its newest checkpoint, in the configuration as in
    the tools."""
    config, checkpoints = copy_of(saved, tmp_path)
    for number, (named, steps) in enumerate(
        (
            (f"resume={checkpoints.parent}", [7]),
            (f"resume={checkpoints}", [7]),
            (f"load_weights_only={checkpoints.parent}", [1]),
        )
    ):
        folder = tmp_path / f"other-{number}"
        overrides = [f"checkpoint.{named}", f"run.dir={folder}", f"train.steps={steps[-1]}"]
        assert ranks.run(train_run, 4, [config, *overrides]) == [""] * 4
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps


def test_manifests_that_are_none(tmp_path: Path) -> None:
    for content in (
        "",
        "[]",
        "{}",
        '{"files": 3}',
        "[" * 100_000,
        json.dumps({"format": "x", "version": 1, "files": {}}),
    ):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(Damaged):
            read_manifest(tmp_path)


def test_keeping(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Kept are the last two checkpoints and that of every fourth step. Partial checkpoints of a
    killed run are removed."""
    config = write_config(
        tmp_path, data, checkpoint={"interval": 1, "keep_last": 2, "keep_every": 4}
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    for left in ("partial-00000001-0000/step-00000003", "partial-00000001-0000/step-00000002"):
        (checkpoints / left).mkdir(parents=True)
    assert ranks.run(train_run, 2, [config]) == ["", ""]
    assert names(checkpoints) == ["latest", "step-00000004", "step-00000005", "step-00000006"]
    assert (checkpoints / "latest").read_text() == "step-00000006"


def train_with_a_fault(config: str, rank: int, step: int, where: str, kind: int) -> tuple[str, str]:
    """Train with a planted error: `where` fails on one rank, for the checkpoint of one step."""
    place = runtime.checkpoints.save if where != "create_stream" else FileSystem  # DCP's
    honest = getattr(place, where)

    def faulty(*arguments: object, **options: object) -> object:
        about = " ".join(map(str, arguments))
        if dist.get_rank() == rank and f"step-{step:08d}" in about:
            raise OSError(kind, os.strerror(kind))
        return honest(*arguments, **options)

    with patch.object(place, where, faulty):
        return heard([config])


@pytest.mark.parametrize(
    ("where", "kind", "rank"),
    [
        ("create_stream", errno.ENOSPC, 1),
        pytest.param("fingerprint", errno.EDQUOT, 1, marks=pytest.mark.thorough),
        pytest.param("cover", errno.EIO, 3, marks=pytest.mark.thorough),
        pytest.param("write_durably", errno.ENOSPC, 0, marks=pytest.mark.thorough),
        ("write_manifest", errno.EROFS, 0),
    ],
)
def test_a_save_that_one_rank_cannot_finish(
    ranks: Ranks, data: Path, tmp_path: Path, where: str, kind: int, rank: int
) -> None:
    """If one rank cannot write its part, no checkpoint is committed, all ranks continue training
    after one warning, and the next save works."""
    config = write_config(
        tmp_path, data, parallel={"tp": 2}, checkpoint={"interval": 2, "keep_last": 3}
    )
    results = ranks.run(train_with_a_fault, 4, config, rank, 4, where, kind)
    assert [refusal for refusal, _ in results] == [""] * 4
    assert names(tmp_path / "run" / "checkpoints") == ["latest", "step-00000002", "step-00000006"]
    said = "".join(said for _, said in results)
    assert said.count("warning: the checkpoint of step 4 was not saved") == 1
    assert f"on rank {rank}: {os.strerror(kind)}: {tmp_path / 'run' / 'checkpoints'}" in said
    assert ("; a checkpoint needs 1.2 MB, and " in said) == (kind in (errno.ENOSPC, errno.EDQUOT))
    assert "the newest is step-00000002" in said
    assert "Traceback" not in said


def test_a_last_save_that_fails_is_no_success(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, checkpoint={"interval": 3})
    results = ranks.run(train_with_a_fault, 2, config, 1, 6, "fingerprint", errno.ENOSPC)
    assert all("step 6 was not saved" in why for why, _ in results)
    status = status_of(tmp_path)
    assert (status["state"], "step 6 was not saved" in status["reason"]) == ("failed", True)


def test_a_full_disk(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """On a file system with room for one checkpoint only, the first checkpoint stays good and the
    run reports that the last one was not saved."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.decode().strip()}")
    try:
        config = write_config(
            tmp_path,
            data,
            checkpoint={"interval": 2, "keep_last": 3},
            run={"dir": str(small / "run")},
        )
        results = ranks.run(heard, 2, [config])  # the last save fails too
        assert "Traceback" not in "".join(said for _, said in results)
        failed = [one["failed"] for one in read_events(small / "run") if "failed" in one]
        status = status_of(small)
        for said in (*failed, status["reason"], results[0][1]):
            assert f"No space left on device: {small / 'run' / 'checkpoints'}" in said
            assert re.search("; a checkpoint needs 1.1 MB, and 0.[89] MB are free", said)
        good = [path for path in (small / "run" / "checkpoints").iterdir() if path.is_dir()]
        assert [path.name for path in good] == ["step-00000002"]
        manifest.verify(good[0])
    finally:
        subprocess.run(["umount", small], check=False)


def saved_while_training(config_path: str) -> tuple[bool, float]:
    """Save, train one step before anything is written, then let the writing proceed. Returns
    whether the saved copies are those from before the step, and how far the weights moved."""
    config = load_config(config_path, [])
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    train = TrainStep(config, mesh, build_stages(config, mesh))
    tokens = (
        torch.arange(8 * 32).view(8, 32).chunk(mesh.dp_size)[mesh.dp_rank] % config.model.vocab_size
    )
    train(0, tokens, tokens)
    go = threading.Event()
    honest = Saver._write_partial

    def later(self: Saver, *arguments: object) -> Manifest:
        go.wait()
        return honest(self, *arguments)

    with patch.object(Saver, "_write_partial", later), Lease(config.run.dir, "cpu") as lease:
        saver = Saver(train, Path(__file__), lease)
        saver.save(1, 0, {"next_sample": 0, "skipped": []})
        before = {name: tensor.to_local().clone() for name, tensor in saver.tensors.items()}
        train(1, tokens, tokens)
        moved = max(
            float((tensor.to_local() - before[name]).abs().max())
            for name, tensor in saver.tensors.items()
        )
        go.set()
        saver.close()
    same = all(torch.equal(saver.copies[name], tensor) for name, tensor in before.items())
    return same, moved


def test_what_is_saved_is_what_was_there_and_training_goes_on(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, parallel=LAYOUT_3D)
    for same, moved in ranks.run(saved_while_training, 8, config):
        assert same
        assert moved > 0, "a step was trained in between"
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    manifest.verify(path)
    one_step = {**ranks.run(global_state, 8, [config], str(path))[0]}
    assert all(torch.isfinite(tensor).all() for tensor in one_step.values())


@pytest.mark.thorough  # test_twice_to_another_layout saves synchronously too
def test_saving_at_once_leaves_the_same(
    ranks: Ranks, saved: Path, data: Path, tmp_path: Path
) -> None:
    """`checkpoint.async_save=false` writes the same pieces, bit for bit. (Their order within a file
    may differ.)"""
    sections = {
        "parallel": LAYOUT_3D,
        "checkpoint": {"interval": 2, "keep_last": 3, "async_save": False},
    }
    config = write_config(tmp_path, data, **sections)
    assert ranks.run(train_run, 8, [config]) == [""] * 8
    for step in (2, 4, 6):
        name = f"run/checkpoints/step-{step:08d}"
        mine, theirs = tmp_path / name, saved / name
        assert names(mine) == names(theirs)
        assert read_manifest(mine).tensors == read_manifest(theirs).tensors
        for shard in mine.glob("*.safetensors"):
            pieces, others = load_file(shard), load_file(theirs / shard.name)
            assert pieces.keys() == others.keys()
            assert all(torch.equal(pieces[name], others[name]) for name in pieces)


@pytest.mark.thorough
def test_twice_to_another_layout(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A run moves from layout (2, 2, 2) to one rank and then to (1, 4, 2), in the middle of the
    data: each load restores equal tensors, and losses match an undisturbed run's to 1e-4."""
    # synchronous, so that the checkpoint is complete when the run dies
    saves = {"interval": 2, "keep_last": 3, "async_save": False}
    whole = write_config(tmp_path, data, parallel=LAYOUT_3D, checkpoint=saves)
    assert ranks.run(train_run, 8, [whole]) == [""] * 8
    undisturbed = losses(tmp_path)
    fresh(tmp_path)
    layouts = (
        (8, []),
        (1, ["parallel.tp=1", "parallel.pp=1"]),
        (8, ["parallel.pp=1", "parallel.dp_shard=4"]),
    )
    states = []
    for part, (world, layout) in enumerate(layouts):
        stop = _train_until(2 * part + 2)
        assert ranks.run(stop, world, [whole, *layout]) == [""] * world
        path = str(tmp_path / "run" / "checkpoints" / f"step-{2 * part + 2:08d}")
        here_and_next = layouts[part : part + 2]
        states.append(
            [ranks.run(global_state, w, [whole, *lay], path)[0] for w, lay in here_and_next]
        )
    for same in states:
        assert all(
            torch.equal(same[0][name], other[name]) for other in same[1:] for name in same[0]
        )
    after = losses(tmp_path)
    assert all(after[step] == pytest.approx(undisturbed[step], rel=1e-4) for step in undisturbed)


class _train_until:
    """A run that dies after the save of `step`, with the learning-rate schedule of the whole
    run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, arguments: list[str]) -> str:
        honest = Run.is_due

        def is_due(run: Run, interval: int) -> bool:
            if run.step == self.step + 1:
                raise StopEarly
            return honest(run, interval)

        with patch.object(Run, "is_due", is_due):
            try:
                return train_run(arguments)
            except StopEarly:
                dist.barrier()
                return ""


class StopEarly(Exception):
    pass


def test_verify_says_what_is_wrong(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoints = copy_of(saved, tmp_path)
    (checkpoints / "step-00000004" / "trainer.json").unlink()
    assert verify.main([str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [": good" in line for line in lines] == [True, False, True]
    assert "'trainer.json' is missing or truncated" in lines[1]
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (checkpoints / "step-00000004" / "trainer.json").write_text(pointer)
    assert verify.main([str(tmp_path / "run")]) == 1
    assert "'trainer.json' is a Git LFS pointer, not the file: run `git" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "nothing")]) == 2
    command = [sys.executable, "-m", "tools.verify", str(checkpoints / "step-00000006")]
    root = Path(__file__).parent.parent
    assert subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0
