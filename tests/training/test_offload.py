"""Weights and optimizer states on the host, and in files of a disk."""

import errno
import os
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from errors import UserError
from model.kernels.bit_hash import hash_of
from parallel.axes import MeshSizes
from parallel.disk import DiskMemory
from proofs.parity.cases import Case
from proofs.ranks import RankError, Ranks
from runtime.trainer_state import bytes_of_rank, held_tensors, state_bytes
from settings.config import Config
from tests import ROOT, runs
from tests.health.faulty_runs import run_with_bad_steps
from tests.steps import make_step, rows_of
from training import update


def test_offloaded_runs_clip_resume_and_roll_back(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """From what a resident run saved, they compute and save the same, bit for bit; and what such a
    run does if it goes back."""
    sections = {"optimizer": {"grad_clip": 0.2}, "train": {"steps": 4}, "model": {"num_layers": 2}}
    sections |= {"checkpoint": {"interval": 2}, "guard": {"max_bad_steps": 2}}
    config = runs.write_config(tmp_path, data, **sections)
    runs.run(ranks, 2, config)
    resident, last = runs.losses(tmp_path), runs.checkpoint_of(tmp_path, 4)
    saved = runs.stored_tensors(last)
    on_disk = ["parallel.offload=disk", f"parallel.offload_dir={tmp_path}"]
    for offload in (["parallel.offload=host"], on_disk):
        runs.forget_last(tmp_path)
        runs.run(ranks, 2, config, *offload)
        assert runs.losses(tmp_path) == resident, offload
        assert runs.same_tensors(runs.stored_tensors(last), saved), offload
    found = []
    for offload in (["parallel.offload=none"], ["parallel.offload=host"], on_disk):
        runs.forget_last(tmp_path)
        assert ranks.run(run_with_bad_steps, 2, [config, *offload], 1, {1, 2}) == [""] * 2
        assert [event["step"] for event in runs.events_of(tmp_path / "run", "rollback")][-1] == 2
        found.append((runs.losses(tmp_path), runs.stored_tensors(last)))
    for losses, tensors in found[1:]:
        assert losses == found[0][0]
        assert runs.same_tensors(tensors, found[0][1])


def config_of(case: Case, folder: str) -> Config:
    """With this folder for offloading to a disk; empty: none."""
    config = case.config()
    return replace(config, parallel=replace(config.parallel, offload_dir=folder))


def trained(
    case: Case, folder: str, removed: bool = False
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """This rank's state after three steps, the second of which is skipped, and the weights of each
    group; on a disk one group for about two weights, whose folder may be `removed` before the last
    step."""
    with patch.object(update, "GROUP_BYTES", 30_000):
        step = make_step(config_of(case, folder))
    traffic = step.optimizer.traffic
    assert (traffic is None) == (case.offload != "disk")
    if traffic is not None:
        assert len(traffic.files) > 4
        assert all(file.is_full for file in traffic.files)
    for index in range(3):
        if removed and index == 2:
            shutil.rmtree(folder, ignore_errors=True)
        _, norm = step.forward_backward(*rows_of(step, index))
        skipped = torch.full_like(norm, torch.inf)
        step.optimizer.step(1e-2, skipped if index == 1 else norm, 1.0)
    assert step.optimizer.updates == 2
    state = {held.name: held.tensor.to_local().clone() for held in held_tensors(step)}
    return state, [[each.global_name for each in group.weights] for group in step.optimizer.groups]


@pytest.mark.parametrize(
    "case",
    [
        # not divided evenly: FSDP pads, and beside the last rank's rows another weight would fit
        Case(MeshSizes(dp_shard=4), vocab_size=234),
        Case(MeshSizes(dp_shard=2), optimizer="muon"),  # groups of hidden matrices alone
        Case(MeshSizes(dp_shard=2, tp=2), zero_stage=3, router="softmax"),
    ],
    ids=str,
)
def test_groups_of_a_disk_are_updated_alike(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Weights and states have the same bits as in memory, and no folder is needed but to begin. An
    optimizer may communicate in each group, so all ranks have the same, whatever their parts."""
    expected = ranks.run(trained, case.world, case, "")
    (tmp_path / "scratch").mkdir()
    on_disk = replace(case, offload="disk")
    found = ranks.run(trained, case.world, on_disk, str(tmp_path / "scratch"), True)
    for (one, groups), (other, _) in zip(found, expected, strict=True):
        assert runs.same_tensors(one, other)
        assert groups == found[0][1]
    assert not any(tmp_path.iterdir())


def bits_within(limit: int, offload: str, folder: str) -> int:
    """A hash of the weights and states of 20 million parameters after two steps, during which the
    process may have `limit` more bytes of private memory; 0: no limit."""
    case = Case(MeshSizes(), dtype="float32", zero_stage=3, offload=offload, vocab_size=40_000)
    case = replace(case, num_microbatches=1)  # of several, FSDP adds the sums
    config = config_of(case, folder)
    config = replace(config, model=replace(config.model, dim=256))
    told = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in told.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + limit, before[1]))
    try:
        step = make_step(config)
        for index in range(2):
            _, norm = step.forward_backward(*rows_of(step, index))
            step.optimizer.step(1e-2, norm, 1.0)
        held = [each.tensor.to_local() for each in held_tensors(step)]
        return int(hash_of(held, "torch"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="limits of private memory are Linux's")
def test_what_memory_does_not_hold() -> None:
    """82 MB of weights and 164 MB of states do not fit 300 MB with gradients and gathered weights,
    in memory; in a file they do, with the same bits. (In a process of its own: one that has done
    more before has memory to use again.)"""
    with Ranks(1) as ranks:
        expected = ranks.run(bits_within, 1, 0, "none", "")
        assert ranks.run(bits_within, 1, 300_000_000, "disk", str(ROOT)) == expected
        for offload in ("none", "host"):
            with pytest.raises(RankError, match=r"can't allocate memory|Cannot allocate memory"):
                ranks.run(bits_within, 1, 300_000_000, offload, "")


def io_bytes() -> tuple[int, int]:
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    told = dict(line.split(": ") for line in lines)
    return int(told["read_bytes"]), int(told["write_bytes"])


def test_a_file_is_read_and_written_once_a_cycle() -> None:
    """Each update reads and writes as many bytes of the disk as the states have, and leaves none of
    them in memory."""
    size = 8 << 20
    file = DiskMemory(str(ROOT), size)  # temporary folders may be in memory
    states = file.new_zeros(torch.zeros(()), (size // 4,))
    states.fill_(1.0)
    file.write()
    for cycle in range(2):
        before = io_bytes()
        file.read()
        states += 1
        file.write()
        read, wrote = (now - then for now, then in zip(io_bytes(), before, strict=True))
        if (read, wrote) == (0, 0):
            pytest.skip("this file system is in memory")
        assert (read, wrote) == (size, size), cycle
    assert states.eq(3).all()


def test_a_disk_that_fails(tmp_path: Path) -> None:
    """Too little space, or no folder to write in: the key, before anything is trained. Bytes that
    cannot be read, or written: the update ends with an error that names the key."""
    for folder, size in ((str(tmp_path), 1 << 60), ("/proc", 1), (str(tmp_path / "none"), 1)):
        with pytest.raises(UserError, match=r"parallel\.offload_dir = .* cannot be reserved"):
            DiskMemory(folder, size)
    file = DiskMemory(str(tmp_path), 1 << 20)
    said = r"parallel\.offload_dir = .*: a file there cannot be"
    full = OSError(errno.EIO, "")
    with patch("os.fsync", side_effect=full), pytest.raises(OSError, match=f"{said} written"):
        file.write()
    traffic = update.Traffic([file])
    with patch("os.fsync", side_effect=full):
        with traffic.using(0):
            pass
        with pytest.raises(OSError, match=f"{said} written"):
            traffic.wait()
    os.ftruncate(file._file.fileno(), 0)
    with pytest.raises(OSError, match=f"{said} read .Input/output error"):
        file.read()


@pytest.mark.skipif(sys.platform != "linux", reason="refused as a whole elsewhere")
def test_what_a_start_refuses(data: Path, tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, data)
    for key, why in (
        ("parallel.offload=disk", r"goes together with parallel\.offload=disk"),
        (f"parallel.offload_dir={tmp_path}", r"goes together with parallel\.offload=disk"),
        ("parallel.cpu_offload=true", r"^parallel\.offload = True: "),
    ):
        with pytest.raises(UserError, match=why):
            runs.load_config(config, [key])


def test_what_a_rank_holds_of_whole_copies(data: Path, tmp_path: Path) -> None:
    """With zero_stage 0, cp ranks hold copies. Control: they share with zero_stage 1."""
    config = runs.write_config(tmp_path, data)
    for stage, share in ((0, 1.0), (1, 0.5)):
        found = runs.load_config(config, ["parallel.cp=2", f"parallel.zero_stage={stage}"])
        assert bytes_of_rank(found, 2) == share * state_bytes(found)
    experts = runs.write_config(tmp_path, data, model=runs.EXPERTS)
    found = runs.load_config(experts, ["parallel.cp=2", "parallel.ep=2", "parallel.zero_stage=0"])
    assert bytes_of_rank(found, 2) == state_bytes(found) / 2
