"""Checkpoints that are damaged, incomplete or written late: damage is found, and good checkpoints
are kept and used."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystem

import runtime.checkpoint.save
from proofs.ranks import Ranks
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import MANIFEST, Damaged, Manifest, read_manifest
from runtime.checkpoint.save import Saver
from runtime.checkpoint.verify import verify_checkpoint
from runtime.log.events import read_events
from runtime.log.run_log import RunLog
from runtime.trainer_state import DataState
from tests.planted import planted
from tests.runs import (
    checkpoint_of,
    copy_of,
    heard,
    losses,
    messages,
    names,
    run,
    same_tensors,
    status_of,
    step_of,
    stored_tensors,
    write_config,
)
from tools import verify

ONE_RANK = ["parallel.tp=1", "parallel.pp=1"]


def flip_a_bit(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    file.write_bytes(content)


def test_a_good_checkpoint_is_good(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(saved / "run")]) == 0
    assert capsys.readouterr().out.count(": good, ") == 3
    newest = saved / "run" / "checkpoints" / "step-00000006"
    tensors = [name for file in newest.glob("*.safetensors") for name in load_file(file)]
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}
    trainer = json.loads((newest / "trainer.json").read_text())
    assert (trainer["step"], trainer["updates"]) == (6, 6)
    events = [event for event in read_events(saved / "run") if event["event"] == "checkpoint"]
    assert [event["step"] for event in events] == [2, 4, 6]
    assert all(event["bytes"] > 0 and event["write_seconds"] > 0 for event in events)
    assert all(event["stall_seconds"] >= 0 for event in events)


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_file_is_found(saved: Path, tmp_path: Path, at: float) -> None:
    """In the first, the middle or the last byte of any file of a checkpoint."""
    good, bad = checkpoint_of(saved, 6), tmp_path / "step-00000006"
    for name in names(good):
        shutil.copytree(good, bad)
        flip_a_bit(bad / name, at)
        with pytest.raises(Damaged):
            verify_checkpoint(bad)
        shutil.rmtree(bad)


LOST = "no manifest"


@pytest.mark.parametrize(
    ("newest", "before"),
    [
        (LOST, "tensors"),
        pytest.param("tensors", "manifest.json", marks=pytest.mark.thorough),
        pytest.param("trainer.json", "tokenizer.model", marks=pytest.mark.thorough),
    ],
)
def test_the_newest_good_one_is_used_and_it_is_said_once(
    ranks: Ranks, saved: Path, tmp_path: Path, newest: str, before: str
) -> None:
    """If the two newest checkpoints are damaged or incomplete, the run resumes from the third, here
    in another layout, reaches the same losses, and saves good ones under the same names; one
    message for each is printed."""
    config, checkpoints = copy_of(saved, tmp_path)
    warnings = []
    for name, what in (("step-00000006", newest), ("step-00000004", before)):
        if what == LOST:
            (checkpoints / name / MANIFEST).unlink()
            warnings.append(f"{name} has no manifest.json: it is put aside")
            continue
        shard = max((checkpoints / name).glob("*.safetensors"))
        flip_a_bit(shard if what == "tensors" else checkpoints / name / what)
        warnings.append(f"{name} is damaged")
    results = ranks.run(heard, 2, [config, "parallel.pp=1"])
    assert [refusal for refusal, _ in results] == ["", ""]
    said = "".join(said for _, said in results)
    assert [said.count(warning) for warning in warnings] == [1, 1]
    after, expected = losses(tmp_path), losses(saved)
    assert all(after[step] == expected[step] for step in (1, 2))
    assert after == pytest.approx(expected, rel=1e-4)
    saved_names = [f"step-0000000{step}" for step in (2, 4, 6)]
    put_aside = [f"{name}.damaged" for name in saved_names[1:]]
    assert names(checkpoints) == sorted(["latest", *saved_names, *put_aside])
    assert (checkpoints / "latest").read_text() == "step-00000006"
    assert verify.main([str(checkpoints)]) == 0
    assert status_of(tmp_path)["state"] == "finished"


def test_a_named_checkpoint_must_be_good(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    config, _ = copy_of(saved, tmp_path)
    named, other = checkpoint_of(tmp_path, 6), f"run.dir={tmp_path / 'other'}"
    flip_a_bit(min(named.glob("*.safetensors")))
    keys = ("checkpoint.resume", "checkpoint.load_weights_only")
    cases = {key: [config, f"{key}={named}", other, *ONE_RANK] for key in keys}
    said = ranks.run(messages, 2, cases)[1]
    for key in keys:
        assert said[key].startswith(f"{key} = ")
        assert "sha256 differs" in said[key]


FOLDERS = [("resume", "run", 7), ("resume", "run/checkpoints", 7), ("load_weights_only", "run", 1)]


def test_a_run_folder_stands_for_its_newest_checkpoint(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """A run folder given as a checkpoint means its newest checkpoint, in the configuration as in
    the tools."""
    config, more = str(saved / "config.yaml"), ["checkpoint.interval=never", *ONE_RANK]
    cases = {
        str(n): [config, *more, f"run.dir={tmp_path}/{n}/run", f"checkpoint.{key}={saved / folder}",
                 f"train.steps={step}"]
        for n, (key, folder, step) in enumerate(FOLDERS)
    }  # fmt: skip
    assert set(ranks.run(messages, 1, cases)[0].values()) == {""}
    assert [set(losses(tmp_path / n)) for n in cases] == [{step} for _, _, step in FOLDERS]


def test_manifests_that_are_none(tmp_path: Path) -> None:
    other = json.dumps({"format": "x", "version": 1, "files": {}})
    for content in ("", "[]", "{}", '{"files": 3}', "[" * 100_000, other):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(Damaged):
            read_manifest(tmp_path)


def test_keeping(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Kept are the last two checkpoints and that of every fourth step. Partial checkpoints of a
    killed run are removed."""
    kept = {"interval": 1, "keep_last": 2, "keep_every": 4}
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (2, 3):
        (checkpoints / f"partial-00000001-0000/step-0000000{step}").mkdir(parents=True)
    sections = {"model": {"num_layers": 1}, "train": {"steps": 7}}
    run(ranks, 1, write_config(tmp_path, data, checkpoint=kept, **sections))
    assert names(checkpoints) == ["latest", "step-00000004", "step-00000006", "step-00000007"]
    assert (checkpoints / "latest").read_text() == "step-00000007"


# --- saves that fail ------------------------------------------------------------------------------

FAULTS = [  # where a save fails, at which step, with which error, on which rank
    ("create_stream", 2, errno.ENOSPC, 1),
    ("fingerprint", 4, errno.EDQUOT, 1),
    ("cover", 6, errno.EIO, 1),
    ("write_durably", 8, errno.ENOSPC, 0),
    ("write_manifest", 10, errno.EROFS, 0),
    ("fingerprint", 12, errno.ENOSPC, 1),
]


def train_with_faults(arguments: list[str]) -> tuple[str, str]:
    def faulty(name: str) -> Any:
        @planted(FileSystem if name == "create_stream" else runtime.checkpoint.save, name)
        def failing(honest: Any, *given: object, **options: object) -> object:
            about = " ".join(map(str, given))
            for where, step, kind, rank in FAULTS:
                if (where, rank) == (name, dist.get_rank()) and f"step-{step:08d}" in about:
                    raise OSError(kind, os.strerror(kind))
            return honest(*given, **options)

        return failing()

    with contextlib.ExitStack() as stack:
        for name in {where for where, *_ in FAULTS}:
            stack.enter_context(faulty(name))
        return heard(arguments)


Spoilt = tuple[Path, list[str], list[str]]


@pytest.fixture(scope="module")
def spoilt(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Spoilt:
    """The folder of a run on 2 ranks that saves after each of 12 steps, and of which every second
    save fails; how it ended on each rank, and the lines it wrote to standard error."""
    folder, saves = tmp_path_factory.mktemp("spoilt"), {"interval": 1, "keep_last": 20}
    sections = {"model": {"num_layers": 1}, "parallel": {"tp": 2}, "train": {"steps": 12}}
    config = write_config(folder, data, checkpoint=saves, **sections)
    results = ranks.run(train_with_faults, 2, [config])
    said = "".join(said for _, said in results).splitlines()
    return folder, [why for why, _ in results], said


@pytest.mark.parametrize(("place", "step", "kind", "rank"), FAULTS[:-1])
def test_a_save_that_one_rank_cannot_finish(
    spoilt: Spoilt, place: str, step: int, kind: int, rank: int
) -> None:
    """If one rank cannot write its part, no checkpoint is committed, all ranks continue training
    after one warning, and the next save works."""
    folder, _, lines = spoilt
    assert [checkpoint_of(folder, at).exists() for at in (step, step + 1)] == [False, True]
    warning = f"warning: the checkpoint of step {step} was not saved"
    (line,) = (line for line in lines if warning in line)
    assert f"on rank {rank}: {os.strerror(kind)}: {folder / 'run' / 'checkpoints'}" in line
    assert ("; a checkpoint needs 0.8 MB, and " in line) == (kind in (errno.ENOSPC, errno.EDQUOT))
    assert f"the newest is step-{step - 1:08d}" in line


def test_a_last_save_that_fails_is_no_success(spoilt: Spoilt) -> None:
    folder, ends, lines = spoilt
    assert "Traceback" not in "".join(lines)
    assert all("step 12 was not saved" in why for why in ends)
    status = status_of(folder)
    assert (status["state"], "step 12 was not saved" in status["reason"]) == ("failed", True)


@pytest.mark.thorough
def test_a_full_disk(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The faults above, of a real disk: on a file system with room for one checkpoint only, the
    first checkpoint stays good and the run reports that the last one was not saved."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.decode().strip()}")
    try:
        saves = {"interval": 2, "keep_last": 3}
        config = write_config(tmp_path, data, checkpoint=saves, run={"dir": str(small / "run")})
        results = ranks.run(heard, 2, [config])  # the last save fails too
        assert "Traceback" not in "".join(said for _, said in results)
        failed = [one["failed"] for one in read_events(small / "run") if "failed" in one]
        status = status_of(small)
        for said in (*failed, status["reason"], results[0][1]):
            assert f"No space left on device: {small / 'run' / 'checkpoints'}" in said
            assert re.search("; a checkpoint needs 1.1 MB, and 0.[89] MB are free", said)
        good = [path for path in (small / "run" / "checkpoints").iterdir() if path.is_dir()]
        assert [path.name for path in good] == ["step-00000002"]
        verify_checkpoint(good[0])
    finally:
        subprocess.run(["umount", small], check=False)


def saved_while_training(config_path: str) -> tuple[bool, float]:
    """Save, train one step before anything is written, then let the writing proceed. Returns
    whether the saved copies are those from before the step, and how far the weights moved."""
    train = step_of([config_path])
    tokens = torch.arange(8 * 32).view(8, 32) % train.config.model.vocab_size
    tokens = tokens.chunk(train.mesh.dp_size)[train.mesh.dp_rank]
    train(0, tokens, tokens)
    go = threading.Event()

    @planted(Saver, "_write_partial")
    def later(honest: Any, *about: object) -> Manifest:
        go.wait()
        return honest(*about)

    with later(), Lease(train.config.run.dir, "cpu") as lease:
        saver = Saver(train, Path(__file__), lease, RunLog(train.config))
        saver.save(1, 0, DataState(checksum="none", next_sample=0, skipped=[]))
        before = {name: tensor.to_local().clone() for name, tensor in saver.tensors.items()}
        train(1, tokens, tokens)
        now = {name: tensor.to_local() for name, tensor in saver.tensors.items()}
        moved = max(float((now[name] - before[name]).abs().max()) for name in before)
        go.set()
        saver.close()
    same = all(torch.equal(saver.copies[name], tensor) for name, tensor in before.items())
    return same, moved


def test_what_is_saved_is_what_was_there_and_training_goes_on(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, model={"num_layers": 1}, parallel={"tp": 2})
    for same, moved in ranks.run(saved_while_training, 2, config):
        assert same
        assert moved > 0, "a step was trained in between"
    verify_checkpoint(checkpoint_of(tmp_path, 1))
    assert all(t.isfinite().all() for t in stored_tensors(checkpoint_of(tmp_path, 1)).values())


@pytest.mark.thorough
def test_saving_at_once_leaves_the_same(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    """`checkpoint.async_save=false` writes the same pieces, bit for bit. (Their order within a file
    may differ.)"""
    arguments = [str(saved / "config.yaml"), f"run.dir={tmp_path / 'run'}"]
    run(ranks, 8, *arguments, "checkpoint.async_save=false")
    for step in (2, 4, 6):
        mine, theirs = checkpoint_of(tmp_path, step), checkpoint_of(saved, step)
        assert names(mine) == names(theirs)
        assert read_manifest(mine).tensors == read_manifest(theirs).tensors
        for shard in mine.glob("*.safetensors"):
            assert same_tensors(load_file(shard), load_file(theirs / shard.name))


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
