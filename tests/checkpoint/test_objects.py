"""tools.objects: an incomplete checkpoint in an object store is never taken for complete, whichever
requests fail. (tests/monitor/alerts_scenarios.py does the same with an S3 server.)"""

import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem

from runtime.checkpoint.folder import MANIFEST
from runtime.checkpoint.manifest import Damaged, fingerprint
from runtime.checkpoint.verify import verify_checkpoint
from tools.objects import PARTIAL, complete, fetch, main, open_store, push, read, sizes

NAME = "step-00000006"


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
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def checkpoint(saved: Path) -> Path:
    return saved / "run" / "checkpoints" / NAME


def test_there_and_back(url: str, checkpoint: Path, tmp_path: Path) -> None:
    store = open_store(url)
    assert "files" in push(store, checkpoint)
    assert push(store, checkpoint) == "was there already"
    assert complete(store) == [NAME]
    assert PARTIAL not in sizes(store, NAME)
    fetch(store, NAME, tmp_path)
    assert fetch(store, NAME, tmp_path) == "was there already"
    verify_checkpoint(tmp_path / NAME)
    for file in checkpoint.iterdir():
        assert fingerprint(file) == fingerprint(tmp_path / NAME / file.name)


def test_what_else_is_there_stays(url: str, checkpoint: Path) -> None:
    store = open_store(url)
    store.makedirs(f"{NAME}/other")
    store.pipe_file(f"{NAME}/other/file", b"x")
    push(store, checkpoint)
    assert complete(store) == [NAME]
    assert read(store, f"{NAME}/other/file") == b"x"


def test_every_interruption_leaves_nothing_that_looks_complete(
    url: str, checkpoint: Path, tmp_path: Path
) -> None:
    everything = Flaky(f"{url}-whole", allowed=10**6)
    push(everything, checkpoint)
    assert everything.made > 5
    for allowed in range(everything.made):
        place = f"{url}-{allowed}"
        with pytest.raises(Dropped):
            push(Flaky(place, allowed), checkpoint)
        is_last = allowed == everything.made - 1  # only PARTIAL is still to be removed
        assert complete(open_store(place)) == ([NAME] if is_last else [])
        if not is_last:
            with pytest.raises(Damaged, match="incomplete"):
                fetch(open_store(place), NAME, tmp_path / str(allowed))
            assert not (tmp_path / str(allowed) / NAME).exists()
        again = Flaky(place, allowed=10**6)
        push(again, checkpoint)
        assert again.made <= everything.made - allowed + 1  # it continued
        fetch(open_store(place), NAME, tmp_path / str(allowed))


def test_another_checkpoint_of_the_same_step_is_replaced(
    url: str, checkpoint: Path, tmp_path: Path
) -> None:
    """After a rollback a step is saved again, with files of the same names and sizes. Interrupted
    at any request, the store never has a mixture that is complete."""
    other = tmp_path / "other" / NAME
    shutil.copytree(checkpoint, other)
    rewrite(other)
    sizes = [{file.name: file.stat().st_size for file in path.iterdir()}
             for path in (checkpoint, other)]  # fmt: skip
    assert sizes[0] == sizes[1]
    total = Flaky(f"{url}-total", 10**6)
    push(open_store(f"{url}-total"), checkpoint)
    push(total, other)
    for allowed in range(total.made):
        place, back = f"{url}-{allowed}", tmp_path / f"back-{allowed}"
        push(open_store(place), checkpoint)
        with pytest.raises(Dropped):
            push(Flaky(place, allowed), other)
        if complete(open_store(place)):
            fetch(open_store(place), NAME, back)  # verifies: the old one or the new one
            shutil.rmtree(back)
        push(open_store(place), other)
        fetch(open_store(place), NAME, back)
        assert fingerprint(back / NAME / MANIFEST) == fingerprint(other / MANIFEST)


def rewrite(path: Path) -> None:
    """Change a checkpoint's trainer.json without its length, and its manifest accordingly."""
    from runtime.checkpoint.manifest import read_manifest, write_manifest

    manifest = read_manifest(path)
    text = (path / "trainer.json").read_text()
    assert '"seed": 0' in text
    (path / "trainer.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    manifest.files["trainer.json"] = fingerprint(path / "trainer.json")
    write_manifest(path, manifest)


@pytest.mark.parametrize("how", ["lost", "changed", "truncated", "no manifest"])
def test_damage_in_the_store_is_found_before_anything_has_its_name(
    url: str, checkpoint: Path, tmp_path: Path, how: str
) -> None:
    store = open_store(url)
    push(store, checkpoint)
    victim = MANIFEST if how == "no manifest" else "trainer.json"
    content = read(store, f"{NAME}/{victim}")
    assert content is not None
    if how in ("lost", "no manifest"):
        store.rm(f"{NAME}/{victim}")
    else:
        bad = content[:-1] if how == "truncated" else content[::-1]
        store.pipe_file(f"{NAME}/{victim}", bad)
    with pytest.raises(Damaged):
        fetch(store, NAME, tmp_path)
    assert not (tmp_path / NAME).exists()
    again = f"{NAME}/{victim}"
    push(store, checkpoint) if how != "changed" else store.pipe_file(again, content)
    fetch(store, NAME, tmp_path)  # continues with the files that are right


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "archive" / "run")

    def run(*arguments: Any) -> tuple[int, str]:
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    assert run("push", url, checkpoint, checkpoint / MANIFEST)[0] == 0  # as after_commit calls it
    assert run("list", url) == (0, f"{NAME}\n")
    status, said = run("fetch", url, tmp_path / "back")
    assert status == 0
    assert "every sha256 is right" in said
    assert run("fetch", f"{url}/{NAME}", tmp_path / "back")[1].endswith("there already\n")
    (tmp_path / "archive/run" / NAME / MANIFEST).unlink()
    status, said = run("fetch", url, tmp_path / "third")
    assert status == 2
    assert "holds no complete checkpoint" in said
    assert run("push", "nosuch://x", checkpoint)[0] == 2
    assert run("push", url, tmp_path)[0] == 1
