"""tools.objects: an incomplete checkpoint in an object store is never taken for complete, whichever
requests fail. (tests/monitor/alerts_scenarios.py has an S3 server.)"""

import shutil
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.dirfs import DirFileSystem

from runtime.checkpoint.folder import MANIFEST
from runtime.checkpoint.manifest import Damaged, fingerprint, read_manifest, write_manifest
from tests.data_samples import flip_a_bit
from tests.runs import FIXTURE, contents, names
from tools.objects import FETCHING, PARTIAL, complete, fetch, main, open_store, push

NAME = FIXTURE.name


class Dropped(Exception):
    """A request that the store did not carry out."""


class Flaky(DirFileSystem):
    """A store in memory that carries out only the first `allowed` writes and deletions."""

    cachable = False  # each counts by itself

    def __init__(self, url: str, allowed: int) -> None:
        store = open_store(url)
        super().__init__(store.path, store.fs)
        self.allowed, self.made = allowed, 0

    def _request(self) -> None:
        self.made += 1
        if self.made > self.allowed:
            raise Dropped

    def pipe_file(self, path: str, value: bytes) -> None:
        self._request()
        super().pipe_file(path, value)

    def rm(self, path: list[str]) -> None:
        for each in path:
            self._request()
            super().rm([each])

    def put(self, lpath: list[str], rpath: list[str]) -> None:
        for local, there in zip(lpath, rpath, strict=True):
            self._request()
            super().put([local], [there])


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.mark.parametrize("replaces", [False, True])
def test_every_interruption_leaves_nothing_that_only_looks_complete(url, tmp_path, replaces):
    """Neither a part of a checkpoint, nor a mixture with the one that it replaces: after a rollback
    a step is saved again, with files of the same names and sizes."""
    new = Path(shutil.copytree(FIXTURE, tmp_path / "new" / NAME))
    trainer, manifest = new / "trainer.json", read_manifest(new)
    trainer.write_text(trainer.read_text().replace('"seed": 0', '"seed": 1'))
    before, manifest.files[trainer.name] = manifest.files[trainer.name], fingerprint(trainer)
    assert before.bytes == manifest.files[trainer.name].bytes
    write_manifest(new, manifest)
    total = Flaky(f"{url}-total", 10**6)
    if replaces:
        push(open_store(f"{url}-total"), FIXTURE)
    push(total, new)
    assert total.made > 5
    for allowed in range(total.made):
        place, back = f"{url}-{allowed}", tmp_path / str(allowed)
        if replaces:
            push(open_store(place), FIXTURE)
        with pytest.raises(Dropped):
            push(Flaky(place, allowed), new)
        is_last = allowed == total.made - 1  # only PARTIAL is still to be removed
        found = complete(open_store(place))
        assert replaces or found == [NAME] * is_last
        if found:
            fetch(open_store(place), NAME, back)  # verifies: the old one or the new one
            shutil.rmtree(back)
        else:
            with pytest.raises(Damaged, match="incomplete"):
                fetch(open_store(place), NAME, back)
            assert not (back / NAME).exists()
        again = Flaky(place, allowed=10**6)
        push(again, new)
        assert replaces or again.made <= total.made - allowed + 1  # it continued
        fetch(open_store(place), NAME, back)
        assert contents(back / NAME) == contents(new)
    begun = shutil.copytree(FIXTURE, tmp_path / "begun" / f"{NAME}{FETCHING}")
    (begun / "shard-00009-model-00001-of-00001.safetensors").touch()  # of the older one
    fetch(open_store(place), NAME, begun.parent)
    assert contents(begun.parent / NAME) == contents(new)


@pytest.mark.parametrize("victim", ["trainer.json", MANIFEST])
@pytest.mark.parametrize("how", ["lost", "changed"])
def test_damage_in_the_store_is_found_before_anything_has_its_name(url, tmp_path, victim, how):
    store = open_store(url)
    push(store, FIXTURE)
    place, whole = f"{NAME}/{victim}", (FIXTURE / victim).read_bytes()
    store.rm(place) if how == "lost" else store.pipe_file(place, whole[::-1])
    with pytest.raises(Damaged):
        fetch(store, NAME, tmp_path)
    assert not (tmp_path / NAME).exists()
    push(store, FIXTURE) if how == "lost" else store.pipe_file(place, whole)
    fetch(store, NAME, tmp_path)  # continues with the files that are right


def test_the_command(tmp_path, capsys, monkeypatch):
    """A checkpoint is pushed under its name and nowhere else; other files in the store stay."""
    store = tmp_path / "archive" / "run[1]"  # no pattern
    (store / NAME / "other").mkdir(parents=True)
    (store / "metrics.jsonl").write_text("mine")
    (store / NAME / "other" / "file").write_text("mine, too")

    def run(*arguments: Any) -> tuple[int, str]:
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    monkeypatch.chdir(FIXTURE)
    status, said = run("push", store, ".", FIXTURE / MANIFEST)  # as after_commit calls it
    assert (status, " files, " in said) == (0, True)
    assert names(store) == ["metrics.jsonl", NAME]
    assert (store / NAME / "other" / "file").read_text() == "mine, too"
    assert not (store / NAME / PARTIAL).exists()
    assert run("list", store) == (0, f"{NAME}\n")
    status, said = run("fetch", store, tmp_path / "back")
    assert (status, "every sha256 is right" in said) == (0, True)
    assert contents(tmp_path / "back" / NAME) == contents(FIXTURE)
    assert run("fetch", f"{store}/{NAME}", tmp_path / "back")[1].endswith("there already\n")
    flip_a_bit(min((tmp_path / "back" / NAME).glob("*.safetensors")))
    status, said = run("fetch", store, tmp_path / "back")
    assert (status, "is damaged: its file" in said) == (2, True)
    assert run("push", tmp_path / "empty", tmp_path / "back" / NAME)[0] == 1
    assert run("push", store, shutil.copytree(FIXTURE, tmp_path / "best"))[0] == 2
    (tmp_path / NAME).symlink_to(tmp_path / "best")
    assert run("push", store, tmp_path / NAME)[1].endswith("there already\n")
    denied = PermissionError(13, "Access Denied")  # not an empty store
    with patch.object(DirFileSystem, "ls", side_effect=denied):
        assert run("list", store)[0] == 1
    (store / "step-00000008").touch()  # no checkpoint
    (store / "step-00000009").symlink_to("step-00000009")  # cannot be read (ELOOP; NFS: ESTALE)
    assert run("fetch", store, tmp_path / "older")[0] == 1
    (store / "step-00000009").unlink()
    (store / NAME / MANIFEST).unlink()
    status, said = run("fetch", store, tmp_path / "third")
    assert (status, "holds no complete checkpoint" in said) == (2, True)
    assert run("push", "nosuch://x", FIXTURE)[0] == 2
    assert run("push", store, tmp_path)[0] == 1
