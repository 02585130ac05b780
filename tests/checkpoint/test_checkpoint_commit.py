"""A checkpoint that a run reports as saved exists and is good, even if another folder had its name
or its files disappeared."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import runtime.checkpoint.save
from proofs.ranks import Ranks
from runtime.checkpoint.manifest import MANIFEST, Manifest
from runtime.checkpoint.save_errors import SaveFailed, agree
from runtime.log.events import read_events
from tests.planted import planted
from tests.runs import copy_of, heard, names, train_run, write_config


def test_what_comes_in_the_way_meanwhile_is_put_aside(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """Someone copies two checkpoint folders into a running run, one without a manifest and one
    complete. The run renames both, and saves its own checkpoints."""
    config, checkpoints = copy_of(saved, tmp_path)
    shutil.move(checkpoints, tmp_path / "others")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "others" / "step-00000002" / MANIFEST).unlink()
    (refusal, said), *_ = ranks.run(train_with_strangers, 1, config, tmp_path / "others")
    assert (refusal, said.count("already existed; it is put aside")) == ("", 2)
    assert names(checkpoints)[1:] == [
        "step-00000002", "step-00000002.damaged", "step-00000004", "step-00000004.abandoned",
        "step-00000006",
    ]  # fmt: skip
    assert len(list((checkpoints / "step-00000004").glob("*.safetensors"))) == 1, (
        "the file of this run's one rank, not those of eight ranks"
    )


def train_with_strangers(config: str, others: Path) -> tuple[str, str]:
    # Train while folders from `others` appear under the names of checkpoints about to be committed.
    honest = runtime.checkpoint.save.write_manifest

    def after_a_copy(folder: Path, about: Manifest) -> None:
        honest(folder, about)
        if folder.name != "step-00000006":
            shutil.copytree(others / folder.name, folder.parent.parent / folder.name)

    with patch.object(runtime.checkpoint.save, "write_manifest", after_a_copy):
        return heard([config, "parallel.pp=1", "parallel.tp=1"])


def test_a_checkpoint_that_is_not_found_again_is_not_called_saved(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, checkpoint={"interval": 2})
    (_, said), _ = ranks.run(train_with_a_thief, 2, config)
    assert said.count("warning: the checkpoint of step 4 was not saved: ") == 1
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "checkpoint"]
    assert [event["step"] for event in events if "failed" not in event] == [2, 6]
    assert names(tmp_path / "run" / "checkpoints")[2:] == ["step-00000004.damaged", "step-00000006"]


def train_with_a_thief(config: str) -> tuple[str, str]:
    """Train while a file of step 4's checkpoint is deleted as soon as it is committed."""
    honest = runtime.checkpoint.save.sync

    def steal(folder: Path) -> None:
        honest(folder)
        for file in (folder / "step-00000004").glob("trainer.json"):
            file.unlink()

    with patch.object(runtime.checkpoint.save, "sync", steal):
        return heard([config])


def test_the_error_of_a_save_is_everyones(ranks: Ranks) -> None:
    """The lowest rank's, and how many more have one."""
    expected = "on rank 1 (and on 1 more): No space left on device: /of/1"
    assert ranks.run(_disagree, 3) == [expected] * 3


def _disagree() -> str:
    def mine() -> None:
        if rank := dist.get_rank():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/of/{rank}")

    try:
        agree(mine, dist.new_group(backend="gloo"), Path("/"))
    except SaveFailed as failed:
        return str(failed)
    return ""


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """A machine that loses power never leaves a checkpoint with parts missing: every file, and the
    names of all, are flushed before the rename; and the rename before the save is reported."""
    config = write_config(tmp_path, data, train={"steps": 1}, checkpoint={"interval": 1})
    ((refusal, order),) = ranks.run(train_and_note_flushes, 1, config)
    assert refusal == ""
    final = tmp_path / "run" / "checkpoints" / "step-00000001"
    committed = order.index(f"move {final}")
    partial = next(line.removeprefix("sync ") for line in order if line.endswith("/manifest.json"))
    expected = {f"sync {Path(partial).parent / name}" for name in names(final)}
    assert {f"sync {Path(partial).parent}", *expected} <= {*order[:committed]}
    assert f"sync {final.parent}" in order[committed:]


def train_and_note_flushes(config: str) -> tuple[str, list[str]]:
    order = []

    @planted(os, "fsync")
    def flushed(honest: Any, handle: int) -> None:
        order.append("sync " + os.readlink(f"/proc/self/fd/{handle}"))
        honest(handle)

    @planted(os, "replace")
    def moved(honest: Any, source: Path, target: Path) -> None:
        honest(source, target)
        order.append(f"move {target}")

    with flushed(), moved():
        return train_run([config]), order
