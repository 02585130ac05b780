"""Checkpoints that are damaged, incomplete or written late: damage is found, and good checkpoints
are kept and used."""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import runtime.checkpoint.save
from data.dataset import open_data
from data.prepare import prepare
from data.tokenizer import GENERATION, MODEL, Tokenizer, tokenizer_files
from errors import UserError
from runtime.checkpoint.folder import checkpoints_of
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import MANIFEST, Damaged, Manifest, read_manifest, write_manifest
from runtime.checkpoint.save import Saver
from runtime.checkpoint.verify import parse_trainer, verify_checkpoint
from runtime.evaluation.rows import read_task, read_tasks
from runtime.log.run_log import RunLog
from runtime.metrics.trackers import JsonLines
from runtime.start.checks import check_writable, open_train_and_heldout
from runtime.trainer_state import DataState
from settings.config import Config
from settings.load import load_config
from tests import runs
from tests.data_samples import SOURCE, flip_a_bit, other_tokenizer, tokenizer
from tests.planted import planted
from tests.runs import STALE
from tools import verify


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_file_is_found(saved, tmp_path, at):
    """In the first, the middle or the last byte of any file of a checkpoint."""
    copy = Path(shutil.copytree(runs.checkpoint_of(saved, 6), tmp_path / "step-00000006"))
    for file in copy.iterdir():
        place = int(at * (file.stat().st_size - 1))
        flip_a_bit(file, place)
        with pytest.raises(Damaged):
            verify_checkpoint(copy)
        flip_a_bit(file, place)  # back
    verify_checkpoint(copy)


def test_the_newest_good_one_is_used_and_it_is_said_once(ranks, saved, tmp_path):
    """If the two newest checkpoints are damaged or incomplete, the run resumes from the third, here
    in another layout, reaches the same losses, and saves good ones under the same names; one
    message for each is printed."""
    config, checkpoints = runs.copy_of(saved, tmp_path)
    (checkpoints / "step-00000006" / MANIFEST).unlink()
    flip_a_bit(max((checkpoints / "step-00000004").glob("*.safetensors")))
    results = ranks.run(runs.heard, 2, [config, "parallel.pp=1"])
    assert [refusal for refusal, _ in results] == ["", ""]
    said = "".join(said for _, said in results)
    assert said.count("step-00000006 has no manifest.json: it is put aside") == 1
    assert said.count("step-00000004 is damaged") == 1
    after, expected = runs.losses(tmp_path), runs.losses(saved)
    assert all(after[step] == expected[step] for step in (1, 2))
    assert after == pytest.approx(expected, rel=1e-4)
    saved_names = [f"step-0000000{step}" for step in (2, 4, 6)]
    put_aside = [f"{name}.damaged" for name in saved_names[1:]]
    assert runs.names(checkpoints) == sorted(["latest", *saved_names, *put_aside])
    assert (checkpoints / "latest").read_text() == "step-00000006"
    assert verify.main([str(checkpoints)]) == 0
    assert runs.status_of(tmp_path)["state"] == "finished"


def test_a_run_folder_stands_for_its_newest_checkpoint(ranks, saved, tmp_path):
    """In the configuration as in the tools. Of weights only, a run starts anew."""
    cases = {}
    for key, folder, steps in ("resume", "run/checkpoints", 7), ("load_weights_only", "run", 1):
        more = [f"checkpoint.{key}={saved / folder}", f"run.dir={tmp_path / key / 'run'}"]
        more += [f"train.steps={steps}", "parallel.tp=1", "parallel.pp=1"]
        cases[key] = [str(saved / "config.yaml"), "checkpoint.interval=never", *more]
    # which a resume would refuse
    cases["load_weights_only"] += ["train.seq_len=16", "model.rope_theta=1e6"]
    cases["load_weights_only"] += ["model.rope_scaling_factor=2"]
    assert set(ranks.run(runs.messages, 1, cases)[0].values()) == {""}
    assert [[*runs.losses(tmp_path / key)] for key in cases] == [[7], [1]]
    assert runs.losses(tmp_path / "load_weights_only")[1] < runs.losses(saved)[2]


def test_a_checkpoint_of_another_format(tmp_path):
    with patch("runtime.checkpoint.manifest.VERSION", 1):
        write_manifest(tmp_path, Manifest(files={}, tensors={}))
    with pytest.raises(Damaged, match="but this program reads only"):
        read_manifest(tmp_path)


def test_keeping(ranks, data, tmp_path):
    """Kept are the last two checkpoints and that of every fourth step. Partial checkpoints of a
    killed run are removed."""
    kept = {"interval": 1, "keep_last": 2, "keep_every": 4}
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (2, 3):
        (checkpoints / f"partial-00000001-0000/step-0000000{step}").mkdir(parents=True)
    sections = {"model": {"num_layers": 1}, "train": {"steps": 7}}
    runs.run(ranks, 1, runs.write_config(tmp_path, data, checkpoint=kept, **sections))
    assert runs.names(checkpoints) == ["latest", "step-00000004", "step-00000006", "step-00000007"]
    assert (checkpoints / "latest").read_text() == "step-00000007"


FAULTS = [  # where a save fails, at which step, with which error, from which rank on
    ("write_pieces", 2, errno.ENOSPC, 1),
    ("fingerprint", 4, errno.EDQUOT, 1),
    ("cover", 6, errno.EIO, 0),
    ("write_durably", 8, errno.ENOSPC, 0),
    ("write_manifest", 10, errno.EROFS, 0),
    ("fingerprint", 12, errno.ENOSPC, 1),
]


def failing(where: str, step: int, error: int, first_rank: int) -> Any:
    """Calls of `where` for the checkpoint of `step` fail on `first_rank` and all ranks after it."""

    @planted(runtime.checkpoint.save, where)
    def fails(honest: Any, *given: object, **options: object) -> object:
        if dist.get_rank() >= first_rank and f"step-{step:08d}" in " ".join(map(str, given)):
            raise OSError(error, os.strerror(error))
        return honest(*given, **options)

    return fails()


def train_with_faults(arguments: list[str]) -> tuple[str, str]:
    with contextlib.ExitStack() as stack:
        for fault in FAULTS:
            stack.enter_context(failing(*fault))
        return runs.heard(arguments)


@pytest.fixture(scope="module")
def spoilt(ranks, data, tmp_path_factory):
    """The folder of a run on 2 ranks that saves after each of 12 steps, and of which every second
    save fails; how it ended on each rank, and the lines it wrote to standard error."""
    folder, saves = tmp_path_factory.mktemp("spoilt"), {"interval": 1, "keep_last": 5}
    sections = {"model": {"num_layers": 1}, "parallel": {"tp": 2}, "train": {"steps": 12}}
    config = runs.write_config(folder, data, checkpoint=saves, **sections)
    results = ranks.run(train_with_faults, 2, [config])
    said = "".join(said for _, said in results).splitlines()
    return folder, [why for why, _ in results], said


@pytest.mark.parametrize(("place", "step", "kind", "rank"), FAULTS[:5])
def test_a_save_that_some_rank_cannot_finish(spoilt, place, step, kind, rank):
    """If a rank cannot write its part, no checkpoint is committed, all ranks continue training
    after one warning, with the error of the lowest such rank, and the next save works."""
    folder, _, lines = spoilt
    assert [runs.checkpoint_of(folder, at).exists() for at in (step, step + 1)] == [False, True]
    warning = f"warning: the checkpoint of step {step} was not saved"
    (line,) = (line for line in lines if warning in line)
    assert f"on rank {rank}: {os.strerror(kind)}: {folder / 'run' / 'checkpoints'}" in line
    assert ("; a checkpoint needs 0.7 MB, and " in line) == (kind in (errno.ENOSPC, errno.EDQUOT))
    saves = runs.events_of(folder / "run", "checkpoint")
    assert step in [each["step"] for each in saves if "failed" in each]


def test_a_last_save_that_fails_is_no_success(spoilt):
    folder, ends, lines = spoilt
    assert "Traceback" not in "".join(lines)
    assert all("step 12 was not saved" in why for why in ends)
    status = runs.status_of(folder)
    assert (status["state"], "step 12 was not saved" in status["reason"]) == ("failed", True)


def train_on_a_full_disk(arguments: list[str]) -> tuple[str, str]:
    """While step 4 is there, nothing can be written. Step 2 cannot be deleted, nor step 7 named."""

    @planted(runtime.checkpoint.save, "write_pieces")
    def full(honest: Any, folder: Path, *given: Any) -> Any:
        if (folder.parents[1] / "step-00000004").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(folder, *given)

    @planted(Saver, "_delete")
    def denied(honest: Any, saver: Saver, old: Path) -> None:
        if old.name == "step-00000002":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        honest(saver, old)

    @planted(Lease, "name_latest")
    def unnamed(honest: Any, lease: Lease) -> None:
        if (lease.checkpoints / "step-00000007").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        honest(lease)

    with full(), denied(), unnamed():
        return runs.heard(arguments)


def test_a_save_makes_up_for_deletions_that_were_missed(ranks, saved, tmp_path):
    """Of a killed start, or of one that kept more: before it writes, because it may need the room.
    One that fails stops neither the others nor the save."""
    config, checkpoints = runs.copy_of(saved, tmp_path)
    more = ["parallel.tp=1", "parallel.pp=1", "train.steps=7", "checkpoint.keep_last=1"]
    ((refusal, said),) = ranks.run(train_on_a_full_disk, 1, [config, *more])
    assert refusal == ""
    assert runs.names(checkpoints) == ["latest", "step-00000002", "step-00000007"]
    assert f"step-00000002 is not deleted: [Errno 13] {os.strerror(errno.EACCES)}" in said
    assert "`latest` is left as it was: " in said


def saved_while_training(config_path: str) -> bool:
    """Save, train one step before anything is written, then let the writing proceed. Returns
    whether the saved copies are those from before the step, which moved the weights."""
    train = runs.step_of([config_path])
    tokens = torch.arange(8 * 32).view(8, 32) % train.config.model.vocab_size
    train(0, tokens, tokens)  # so that there are moments
    go = threading.Event()

    @planted(Saver, "_write_partial")
    def later(honest: Any, *about: object) -> Manifest:
        go.wait()
        return honest(*about)

    small = patch("runtime.checkpoint.tensor_files.FILE_BYTES", 5_000)
    with later(), small, Lease(train.config.run.dir) as lease:
        saver = Saver(train, open_data(train.config.data, "train"), lease, RunLog(train.config))
        before = {name: tensor.to_local().clone() for name, tensor in saver.tensors.items()}
        saver.save(1, 0, DataState(checksum="none", next_sample=0, skipped=[]))
        train(1, tokens, tokens)
        now = {name: tensor.to_local() for name, tensor in saver.tensors.items()}
        go.set()
        saver.close()
    return runs.same_tensors(saver.copies, before) and not runs.same_tensors(now, before)


def test_what_is_saved_is_what_was_there_and_training_goes_on(ranks, data, tmp_path):
    config = runs.write_config(tmp_path, data, model={"num_layers": 1}, parallel={"tp": 2})
    assert ranks.run(saved_while_training, 2, config) == [True, True]
    verify_checkpoint(runs.checkpoint_of(tmp_path, 1))
    files = sorted(path.name for path in runs.checkpoint_of(tmp_path, 1).glob("shard-*"))
    assert {f"shard-0000{rank}-model-0000{n}" for rank in (1, 2) for n in (1, 2, 3)} <= {
        name.partition("-of-")[0] for name in files
    }


def saved_after_a_silence(config_path: str) -> list[bool]:
    """Whether a save succeeds in which a rank is silent for longer than its process group waits;
    and the next one."""
    train, new_group = runs.step_of([config_path]), dist.new_group
    data, found = DataState(checksum="none", next_sample=0, skipped=[]), []

    @planted(Saver, "_write_partial")
    def late(honest: Any, saver: Saver, partial: Path) -> Manifest:
        time.sleep(9 * dist.get_rank() if partial.name == "step-00000001" else 0)
        return honest(saver, partial)

    with late(), Lease(train.config.run.dir) as lease:
        with patch.object(dist, "new_group", partial(new_group, timeout=timedelta(seconds=4))):
            saver = Saver(train, open_data(train.config.data, "train"), lease, RunLog(train.config))
        for step in 1, 2:
            saver.save(step, 0, data)
            saver.wait()
            found.append(saver.failed is None)
    return found


def test_the_next_save_can_succeed_after_a_rank_was_silent(ranks, data, tmp_path):
    """gloo closes the connections of a group whose collective has timed out."""
    config = runs.write_config(tmp_path, data, model={"num_layers": 1}, parallel={"tp": 2})
    assert ranks.run(saved_after_a_silence, 2, config) == [[False, True]] * 2
    verify_checkpoint(runs.checkpoint_of(tmp_path, 2))


READERS: dict[str, tuple[Callable[[Config], object], str]] = {  # what reads or writes; what fails
    "a checkpoint's file": (
        lambda _: verify_checkpoint(runs.FIXTURE), "runtime.checkpoint.verify.fingerprint"),
    "its pieces": (lambda _: verify_checkpoint(runs.FIXTURE), "pathlib.Path.open"),
    "its sizes": (lambda _: verify_checkpoint(runs.FIXTURE), "runtime.checkpoint.manifest.is_file"),
    "its manifest": (lambda _: read_manifest(runs.FIXTURE), "pathlib.Path.read_text"),
    "its state": (lambda _: parse_trainer(runs.FIXTURE), "pathlib.Path.read_text"),
    "checkpoints": (
        lambda config: checkpoints_of(Path(config.run.dir), "key"), "pathlib.Path.stat"),
    "the lease": (
        lambda config: Lease(config.run.dir)._take(),
        "runtime.checkpoint.lease.newest_lease"),
    "the run folder": (check_writable, "tempfile.TemporaryFile"),
    "the data": (lambda config: open_data(config.data, "train"), "pathlib.Path.read_text"),
    "the tokenizer": (lambda _: tokenizer_files(Path(__file__)), "builtins.open"),
    "the data's": (
        lambda config: open_data(config.data, "train").read_tokenizer(), "pathlib.Path.read_bytes"),
    "its name": (
        lambda config: tokenizer_files(Path(config.data.path)), "data.tokenizer.is_file"),
    "a task": (lambda _: read_task(Path(__file__), "key"), "pathlib.Path.read_text"),
    "a task's name": (
        lambda _: read_tasks(["a.jsonl"], "key"), "runtime.evaluation.rows.is_file"),
    "metrics": (
        lambda config: JsonLines(Path(config.run.dir), 0), "runtime.metrics.trackers.exists"),
    "the configuration": (lambda _: load_config(__file__, []), "builtins.open"),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_an_error_that_may_pass_is_neither_a_refusal_nor_damage(data, tmp_path, reader):
    """The start fails, and another may succeed: no checkpoint is put aside for it."""
    config = load_config(runs.write_config(tmp_path, data), [])
    action, fails = READERS[reader]
    with patch(fails, side_effect=STALE), pytest.raises(OSError) as raised:  # noqa: PT011
        action(config)
    assert raised.value is STALE


def train_while_prepared_anew(arguments: list[str], folder: Path) -> tuple[str, str]:
    """Train while the data's folder gets another tokenizer, only until step 2 is saved, and then a
    file for other tools."""
    own = (folder / MODEL).read_bytes()

    @planted(Saver, "_commit")
    def meanwhile(honest: Any, saver: Saver, partial: Path, *about: object) -> None:
        is_second = partial.name == "step-00000002"
        (folder / MODEL).write_bytes(other_tokenizer().model if is_second else own)
        if partial.name == "step-00000003":
            (folder / GENERATION).write_text('{"eos_token_id": 2}')
        honest(saver, partial, *about)

    with meanwhile():
        return runs.heard(arguments)


def test_a_checkpoint_has_the_tokenizer_of_its_data(ranks, data, tmp_path):
    """The folder may be prepared anew while a run reads what it has mapped. A run whose tokenizer
    is not its data's, or is missing, does not start."""
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    sections = {"train": {"steps": 3}, "checkpoint": {"interval": 1, "keep_last": 3}}
    config = runs.write_config(tmp_path, folder, **sections)
    ((refusal, said),) = ranks.run(train_while_prepared_anew, 1, [config], folder)
    assert (refusal, runs.saved_steps(tmp_path)) == ("", [1, 2, 3])
    assert said.count("warning: the checkpoint gets the tokenizer that was read before") == 1
    assert f"prepared with another tokenizer (sha256 {tokenizer().sha256[:12]}…, this one" in said
    assert "remedy: put the data's own back" in said
    before, last = (runs.checkpoint_of(tmp_path, step) for step in (2, 3))
    assert {Tokenizer.load(each).sha256 for each in (before, last)} == {tokenizer().sha256}
    assert (last / GENERATION).read_text() == '{"eos_token_id": 2}'
    (folder / MODEL).write_bytes(other_tokenizer().model)
    start = load_config(config, ["train.eval_interval=0"])
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        open_train_and_heldout(start)
    (folder / MODEL).unlink()
    with pytest.raises(UserError, match="should be the data's tokenizer, and it cannot be read"):
        open_train_and_heldout(start)


def test_weights_with_another_tokenizer_than_the_data_are_warned_of(ranks, saved, data, tmp_path):
    """They are used: a vocabulary may be replaced on purpose. So may the rotation."""
    prepare(SOURCE, other_tokenizer(), tmp_path / "data", workers=1)
    start = [str(saved / "config.yaml"), f"checkpoint.load_weights_only={saved / 'run'}"]
    start += ["checkpoint.interval=never", "train.steps=1", "parallel.tp=1", "parallel.pp=1"]
    for folder, count in (data, 0), (tmp_path / "data", 1):
        more = [f"data.path={folder}", f"run.dir={tmp_path / str(count)}"]
        more += ["model.rope_theta=500"] * count
        ((refusal, said),) = ranks.run(runs.heard, 1, [*start, *more])
        assert (refusal, said.count("were trained with")) == ("", 2 * count)
    path = runs.checkpoint_of(saved, 6)
    assert f"{path} were trained with another tokenizer (sha256 {tokenizer().sha256[:12]}" in said
    assert f"{tmp_path / 'data' / MODEL} ({other_tokenizer().sha256[:12]}…)" in said
    assert f"model.rope_theta=500.0, and the weights in {path} were trained with 500000.0" in said


def train_among_others(arguments: list[str]) -> tuple[str, str]:
    """Train while others work in the folder: before steps 2 and 6 are saved, they put a folder in
    the place, the second one with a manifest; of step 4 they delete a file once it is committed."""

    @planted(runtime.checkpoint.save, "sync")
    def disturbed(honest: Any, path: Path) -> None:
        honest(path)
        if path.name in ("step-00000002", "step-00000006") and path.parent.name != "checkpoints":
            theirs = "theirs" if path.name == "step-00000002" else MANIFEST
            (path.parents[1] / path.name / theirs).mkdir(parents=True)
        for file in (path / "step-00000004").glob("trainer.json"):
            file.unlink()

    with disturbed():
        return runs.heard(arguments)


def test_what_is_in_the_way_is_put_aside_and_what_is_lost_is_not_called_saved(
    ranks, data, tmp_path
):
    sizes = {"train": {"steps": 6}, "checkpoint": {"interval": 2, "keep_last": 3}}
    config = runs.write_config(tmp_path, data, **sizes)
    ((refusal, said),) = ranks.run(train_among_others, 1, [config])
    assert (refusal, said.count("already existed; it is put aside")) == ("", 2)
    assert said.count("warning: the checkpoint of step 4 was not saved: ") == 1
    assert runs.names(tmp_path / "run" / "checkpoints")[1:] == [
        "step-00000002", "step-00000002.damaged", "step-00000004.damaged", "step-00000006",
        "step-00000006.abandoned",
    ]  # fmt: skip
    assert runs.names(tmp_path / "run/checkpoints/step-00000002.damaged") == ["theirs"]


def train_and_note_flushes(arguments: list[str]) -> tuple[str, list[str]]:
    order = []

    @planted(os, "fsync")
    def flushed(honest: Any, handle: int) -> None:
        order.append("sync " + os.readlink(f"/proc/self/fd/{handle}"))
        honest(handle)

    @planted(os, "replace")
    def moved(honest: Any, source: Path, target: Path) -> None:
        honest(source, target)
        order.append(f"move {target}")

    before = os.umask(0o077)
    try:
        with flushed(), moved():
            return runs.train_run(arguments), order
    finally:
        os.umask(before)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(ranks, data, tmp_path):
    """A machine that loses power never leaves a checkpoint with parts missing: every file, and the
    names of all, are flushed before the rename; and the rename before the save is reported. All
    have the permissions of the umask."""
    config = runs.write_config(tmp_path, data, train={"steps": 1}, checkpoint={"interval": 1})
    ((refusal, order),) = ranks.run(train_and_note_flushes, 1, [config])
    assert refusal == ""
    final = runs.checkpoint_of(tmp_path, 1)
    committed = order.index(f"move {final}")
    partial = next(line.removeprefix("sync ") for line in order if line.endswith("/manifest.json"))
    expected = {f"sync {Path(partial).parent / name}" for name in runs.names(final)}
    assert {f"sync {Path(partial).parent}", *expected} <= {*order[:committed]}
    assert f"sync {final.parent}" in order[committed:]
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(paths) > 8
    assert [str(path) for path in paths if path.stat().st_mode & 0o077] == []


def test_verify_says_what_is_wrong(saved, tmp_path, capsys, monkeypatch):
    _, checkpoints = runs.copy_of(saved, tmp_path)
    trainer = checkpoints / "step-00000004" / "trainer.json"
    trainer.unlink()
    (checkpoints / "step-00000006" / "manifest.json").unlink()
    assert verify.main([str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [": good" in line for line in lines] == [True, False, False]
    assert "'trainer.json' is missing or truncated" in lines[1]
    assert "damaged: " in lines[2]

    def verify_too_late(path: Path) -> None:
        shutil.rmtree(path)
        raise Damaged("its file x cannot be read")

    monkeypatch.setattr(verify, "verify_checkpoint", verify_too_late)
    assert verify.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count(": gone: ") == 3
    for other in "nothing", "x" * 300:  # of which the second is no name of a file
        assert verify.main([str(tmp_path / other)]) == 2
