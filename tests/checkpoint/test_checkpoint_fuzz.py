"""Randomly changed checkpoints with recomputed checksums: each is refused with one message, or
loads as what was saved.

A real checkpoint of four ranks is changed in its manifest, its trainer.json or the header of one of
its files. Then everything that reads checkpoints reads it: the check at the start of a run,
`tools.verify`, and the reader of `tools.export`.
"""

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch.distributed.checkpoint import HuggingFaceStorageReader

from errors import UserError
from runtime.checkpoint import manifest
from runtime.checkpoint.manifest import MANIFEST, PLACES, Damaged, fingerprint
from runtime.checkpoint.verify import parse_trainer, verify_checkpoint
from runtime.trainer_state import FILE
from tests.runs import FIXTURE, stored_tensors
from tools import verify
from tools.huggingface.checkpoint_reader import CheckpointReader

ODD_NUMBERS = [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 10**15, 10**400, -0.0, 0.5, 1e308,
               float("inf"), float("nan"), True]  # fmt: skip
ODD_WORDS = ["", "x", "..", "../a", "/etc/passwd", "a" * 300, "\ud800", "\x00", "\x1b[2J", "F32",
             MANIFEST, FILE]  # fmt: skip
ODD = [*ODD_NUMBERS, *ODD_WORDS, None, [], {}, [[]], [1, 2], {"a": 1}, [0, float("inf")], [[5, 3]],
       [[0, 2**62]]]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path to every value in a JSON document."""
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value)
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def mutate(document: Any, data: DataObject) -> Any:
    """A copy of `document` with one or two values removed, renamed, shifted by a little, or
    replaced by an odd value or by a copy of another."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places(document)[1:] or [(None,)]))
        if last is None:
            break
        parent = document
        for key in path:
            parent = parent[key]
        how = data.draw(st.sampled_from(["odd", "odd", "near", "remove", "copy", "rename"]))
        if how == "near" and isinstance(parent[last], int):
            parent[last] += data.draw(st.sampled_from([-8, -1, 1, 8]))
        elif how == "remove":
            del parent[last]
        elif how == "copy":
            source = document
            for key in data.draw(st.sampled_from(places(document)[1:])):
                source = source[key]
            parent[last] = copy.deepcopy(source)
        elif how == "rename" and isinstance(parent, dict):
            parent[data.draw(st.sampled_from([*map(str, ODD_WORDS), *parent]))] = parent.pop(last)
        else:
            # the next one may change what is in it
            parent[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    return document


def mutate_file(path: Path, data: DataObject) -> None:
    """Change the header of a safetensors file: its length in 8 bytes, then JSON, which contains the
    places of the pieces as nested JSON."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    how = data.draw(st.sampled_from(["places", "places", "header", "length", "bytes"]))
    if how == "places":
        about = header["__metadata__"]
        about[PLACES] = json.dumps(mutate(json.loads(about[PLACES]), data))
    elif how == "header":
        header = mutate(header, data)
    text = json.dumps(header).encode()
    length = len(text)
    if how == "length":
        odd = [0, 1, length - 1, length + 8, 2**27, 2**40, 2**63, 2**64 - 1]
        length = data.draw(st.sampled_from(odd))
    if how == "bytes":
        at = data.draw(st.integers(0, len(text) - 1))
        inserted, dropped = data.draw(st.binary(max_size=4)), data.draw(st.integers(0, 4))
        text = text[:at] + inserted + text[at + dropped :]
    path.write_bytes(length.to_bytes(8, "little") + text + rest)


def change(folder: Path, data: DataObject) -> str:
    """Change something, recompute the checksums, and return what was changed."""
    what = data.draw(st.sampled_from(["manifest", "trainer", "file", "text"]))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    content = json.loads((folder / MANIFEST).read_text())
    if what == "trainer":
        trainer = json.loads((folder / FILE).read_text())
        (folder / FILE).write_text(json.dumps(mutate(trainer, data)))
    elif what == "file":
        mutate_file(folder / data.draw(st.sampled_from(shards)), data)
    elif what == "text":
        name = data.draw(st.sampled_from([MANIFEST, FILE]))
        text = (folder / name).read_bytes()
        at = data.draw(st.integers(0, len(text) - 1))
        odd = [b"NaN", b"-Infinity", b"1e999", b'"', b"{", b"[" * 100_000, b"\xff", b"9" * 5000]
        (folder / name).write_bytes(text[:at] + data.draw(st.sampled_from(odd)) + text[at:])
        if name == MANIFEST:
            return what
    for name in (FILE, *shards):
        size, digest = fingerprint(folder / name)
        content["files"][name] = {"bytes": size, "sha256": digest}
    if what == "manifest":
        content = mutate(content, data)
    content.pop("sha256", None)
    content["sha256"] = manifest._digest(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    return what


def judge(good: Path, tensors: dict[str, torch.Tensor], bad: Path, data: DataObject) -> bool:
    """Change a copy of the checkpoint `good`, which holds `tensors`. Returns whether it is accepted
    all the same."""
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    what = change(bad, data)
    problems = []
    for look in verify_checkpoint, partial(CheckpointReader, verified=True), parse_trainer:
        try:
            look(bad)
            problems.append("")
        except (Damaged, UserError) as problem:
            problems.append(str(problem))
    assert all(text.replace("\n", "").isprintable() and len(text) < 2000 for text in problems)
    assert verify.main([str(bad)]) in ((1, 2) if problems[0] else (0,))
    if problems[0]:
        return False
    assert problems == ["", "", ""], "a checkpoint that passes verification must be readable"
    reader = CheckpointReader(bad, verified=True)
    kept = tensors.keys() & {"model." + name for name in reader.tensors}
    loaded = {name: torch.empty_like(tensors[name]) for name in kept}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(bad)), no_dist=True)
    # A changed file may give its bytes another meaning that is still valid.
    for name in kept if what != "file" else ():
        assert torch.equal(reader.weight(name.removeprefix("model.")), tensors[name])
        assert torch.equal(loaded[name], tensors[name])
    assert parse_trainer(bad).step == 2
    return True


@pytest.mark.parametrize("cases", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changed_at_random(tmp_path, cases):
    accepted, tensors = [], stored_tensors(FIXTURE)

    @settings(max_examples=cases, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(data=st.data())
    def tried(data: DataObject) -> None:
        accepted.append(judge(FIXTURE, tensors, tmp_path / FIXTURE.name, data))

    tried()
    assert 0 < sum(accepted) < len(accepted)
