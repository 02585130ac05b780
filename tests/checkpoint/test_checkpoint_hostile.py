"""Changed checkpoints are refused with one message by every start and tool that reads them, or load
as what was saved. Checksums do not help here: whoever writes the manifest also writes matching
ones."""

import copy
import json
import os
import pickle
import shutil
from collections.abc import Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from errors import UserError
from runtime.checkpoint import manifest
from runtime.checkpoint.manifest import MANIFEST, Damaged, fingerprint
from runtime.checkpoint.tensor_files import PLACES
from runtime.checkpoint.verify import parse_trainer, verify_checkpoint
from runtime.trainer_state import FILE
from tests.runs import FIXTURE, names, said_by, stored_tensors, train_run, write_config
from tools import export, verify
from tools.generate.load_model import load_model
from tools.huggingface.checkpoint_reader import CheckpointReader


def sign(folder: Path, content: dict[str, Any], changed: Sequence[str]) -> None:
    """Write a manifest with this content, the checksums of the `changed` files, and its own."""
    for name in changed:
        size, digest = fingerprint(folder / name)
        content["files"][name] = {"bytes": size, "sha256": digest}
    content.pop("sha256", None)
    content["sha256"] = manifest._digest(content)
    (folder / MANIFEST).write_text(json.dumps(content))


# --- by intent ------------------------------------------------------------------------------------

TRAINERS = {"too many steps": {"step": 10**15}, "no model": {"model": {"dim": 10**30}}}
HOSTILE = ["pickle for tensors", "a path for a name", "two files exchanged", "a file too many",
           "a shard and its entry lost", "truncated", "a piece outside of its tensor",
           "a piece twice and another not at all", "a header that is too long",
           "an absurd shape", *TRAINERS]  # fmt: skip


class Exploding:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, how: str, harm: Path) -> None:
    """Make a checkpoint hostile in the way `how`, with a manifest whose checksum is right."""
    about = json.loads((folder / MANIFEST).read_text())
    files, tensors = about["files"], about["tensors"]
    shards = sorted(folder.glob("*.safetensors"))
    victim, content = shards[0], shards[0].read_bytes()
    if how == "pickle for tensors":
        victim.write_bytes(pickle.dumps(Exploding(harm)))
    elif how == "a path for a name":
        (folder.parent / "outside.safetensors").write_bytes(content)
        files["../outside.safetensors"] = files[victim.name]
    elif how == "an absurd shape":
        next(iter(tensors.values()))["shape"] = [1 << 40, 1 << 20]
    elif how == "two files exchanged":
        victim.write_bytes(shards[1].read_bytes())
        shards[1].write_bytes(content)
    elif how == "a file too many":
        stranger = folder / "shard-99999-model-00001-of-00001.safetensors"
        save_file({"model.norm.weight": torch.zeros(4)}, stranger)
    elif how == "a shard and its entry lost":
        victim.unlink()
        del files[victim.name]
    elif how == "truncated":
        victim.write_bytes(content[:-8])
    elif how == "a piece twice and another not at all":  # the total size is still right
        victim = shards[-1]  # not the first shard, whose pieces are at the beginning
        place_everything_first(victim)
    elif how == "a header that is too long":
        victim.write_bytes((1 << 30).to_bytes(8, "little") + content[8:])
    elif how in TRAINERS:
        victim = folder / FILE
        victim.write_text(json.dumps(json.loads(victim.read_text()) | TRAINERS[how]))
    else:
        assert how == "a piece outside of its tensor"
        tensor = tensors[next(iter(load_file(victim)))]
        tensor["shape"] = [n // 2 for n in tensor["shape"]]
    signs = victim.name in files and how != "two files exchanged"
    sign(folder, about, [victim.name] if signs else [])


def place_everything_first(file: Path) -> None:
    """Change a file so that its pieces claim to be the first of their tensors."""
    with safe_open(file, framework="pt") as opened:
        places = json.loads(opened.metadata()[PLACES])
    moved = {
        name: {"saved_offsets": [0] * len(place["saved_offsets"])} for name, place in places.items()
    }
    assert moved != places
    save_file(load_file(file), file, metadata={PLACES: json.dumps(moved)})


def refused_on_ranks(cases: dict[str, tuple[Path, list[str]]]) -> dict[str, tuple[str, str]]:
    """What generation and training say of each checkpoint."""
    return {
        how: (said_by(load_model, bad, torch.float32, "cpu"), train_run(arguments))
        for how, (bad, arguments) in cases.items()
    }


@pytest.fixture(scope="module")
def judged(ranks, data, tmp_path_factory):
    """A folder with a hostile checkpoint for each case, and what each rank said of them."""
    folder = tmp_path_factory.mktemp("hostile")
    config, cases = write_config(folder, data), {}
    for how in HOSTILE:
        bad = Path(shutil.copytree(FIXTURE, folder / how / FIXTURE.name))
        hostile(bad, how, folder / how / "harm")
        cases[how] = bad, [config, f"checkpoint.{key_of(how)}={bad}", f"run.dir={folder / how}/run"]
    return folder, ranks.run(refused_on_ranks, 2, cases)


def key_of(how: str) -> str:
    return "load_weights_only" if HOSTILE.index(how) % 2 else "resume"


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_checkpoint_is_refused(judged, capsys, how):
    """Training and every tool refuse a hostile checkpoint with one message, execute nothing from
    it, and write nothing."""
    folder, answers = judged[0] / how, [of_rank[how] for of_rank in judged[1]]
    bad = folder / FIXTURE.name
    with pytest.raises(Damaged):
        verify_checkpoint(bad)
    assert verify.main([str(bad)]) == 1
    verified = capsys.readouterr()
    assert export.main(["--checkpoint", str(bad), "--out", str(folder / "out")]) == 2
    for text in ("".join(verified), "".join(capsys.readouterr()), *(text for text, _ in answers)):
        assert "Traceback" not in text
        assert text.count("is not a valid checkpoint: ") + text.count("damaged: ") == 1, text
    assert all(said.startswith(f"checkpoint.{key_of(how)} = ") for _, said in answers), answers
    assert {*names(folder)} <= {FIXTURE.name, "outside.safetensors"}, "nothing is written"


# --- at random ------------------------------------------------------------------------------------

ODD_NUMBERS = [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 10**15, 10**400, -0.0, 0.5, 1e308,
               float("inf"), float("nan"), True]  # fmt: skip
ODD_WORDS = ["", "x", "..", "../a", "/etc/passwd", "a" * 300, "\ud800", "\x00", "\x1b[2J", "F32",
             MANIFEST, FILE]  # fmt: skip
ODD = [*ODD_NUMBERS, *ODD_WORDS, None, [], {}, [[]], [1, 2], {"a": 1}, [0, float("inf")], [[5, 3]],
       [[0, 2**62]]]  # fmt: skip

ODD_BYTES = [b"", b"NaN", b"-Infinity", b"1e999", b'"', b"{", b"[" * 100_000, b"\xff", b"9" * 5000]


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
        parent = reduce(getitem, path, document)
        how = data.draw(st.sampled_from(["odd", "odd", "near", "remove", "copy", "rename"]))
        if how == "near" and isinstance(parent[last], int):
            parent[last] += data.draw(st.sampled_from([-8, -1, 1, 8]))
        elif how == "remove":
            del parent[last]
        elif how == "copy":
            source = data.draw(st.sampled_from(places(document)[1:]))
            parent[last] = copy.deepcopy(reduce(getitem, source, document))
        elif how == "rename" and isinstance(parent, dict):
            parent[data.draw(st.sampled_from([*map(str, ODD_WORDS), *parent]))] = parent.pop(last)
        else:
            # the next one may change what is in it
            parent[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    return document


def change(folder: Path, data: DataObject) -> str:
    """Change the manifest, trainer.json or the header of a safetensors file, in its values or its
    text. Recompute the checksums, and return which of them was changed."""
    what = data.draw(st.sampled_from([MANIFEST, FILE, "header"]))
    shards = sorted(folder.glob("*.safetensors"))
    victim = data.draw(st.sampled_from(shards)) if what == "header" else folder / what
    content, rest = victim.read_bytes(), b""
    if what == "header":  # its length in 8 bytes, then JSON, with the pieces' places as nested JSON
        end = 8 + int.from_bytes(content[:8], "little")
        content, rest = content[8:end], content[end:]
    document, how = json.loads(content), data.draw(st.sampled_from(["values", "values", "text"]))
    if how == "values" and what == "header" and data.draw(st.booleans()):
        about = document["__metadata__"]
        about[PLACES] = json.dumps(mutate(json.loads(about[PLACES]), data))
    elif how == "values":
        document = mutate(document, data)
    text = json.dumps(document).encode()
    if how == "text":
        at, dropped = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(0, 4))
        text = text[:at] + data.draw(st.sampled_from(ODD_BYTES)) + text[at + dropped :]
    if what == "header":
        odd = [0, 1, len(text) - 1, len(text) + 8, 2**27, 2**40, 2**63, 2**64 - 1]
        length = data.draw(st.sampled_from([len(text)] * len(odd) + odd))
        text = length.to_bytes(8, "little") + text + rest
    victim.write_bytes(text)
    if what != MANIFEST:
        document = json.loads((folder / MANIFEST).read_text())
    if what != MANIFEST or how == "values":
        sign(folder, document, [victim.name] if what != MANIFEST else [])
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
    for name in kept if what != "header" else ():
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
