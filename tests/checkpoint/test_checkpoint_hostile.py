"""Malicious checkpoints are refused. Checksums do not help here, because an attacker who writes the
manifest also writes matching checksums."""

import contextlib
import io
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from errors import UserError
from runtime.checkpoint.manifest import (
    PLACES,
    Damaged,
    Manifest,
    Stored,
    fingerprint,
    read_manifest,
    write_manifest,
)
from runtime.checkpoint.verify import verify_checkpoint
from tests.runs import FIXTURE, names, train_run, write_config
from tools import export, verify
from tools.generate.load_model import load_model

SHAPES = {
    "an absurd shape": (1 << 40, 1 << 20),
    "a negative shape": (-1, -4),
    "an endless shape": (math.inf, 4),
}
TRAINERS = {  # case → (key of trainer.json, value planted there)
    "too many steps": ("step", 10**15),
    "a step of another kind": ("step", True),
    "a sample that is no number": ("data", {"checksum": "x", "next_sample": "x", "skipped": []}),
    "no model": ("model", {"dim": 10**30}),
}
HOSTILE = ["pickle for tensors", "a path for a name", "two files exchanged", "a file too many",
           "a shard and its entry lost", "truncated", "a piece outside of its tensor",
           "a piece twice and another not at all", "a header that is too long",
           *SHAPES, *TRAINERS]  # fmt: skip


class Exploding:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, how: str, harm: Path) -> None:
    """Make a checkpoint hostile in the way `how`, with a manifest whose checksum is right."""
    manifest = read_manifest(folder)
    files, tensors = dict(manifest.files), dict(manifest.tensors)
    shards = sorted(folder.glob("*.safetensors"))
    victim, content = shards[0], shards[0].read_bytes()
    if how == "pickle for tensors":
        victim.write_bytes(pickle.dumps(Exploding(harm)))
    elif how == "a path for a name":
        (folder.parent / "outside.safetensors").write_bytes(content)
        files["../outside.safetensors"] = files[victim.name]
    elif how in SHAPES:
        name = next(iter(tensors))
        tensors[name] = Stored(tensors[name].dtype, SHAPES[how])
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
        key, value = TRAINERS[how]
        victim = folder / "trainer.json"
        victim.write_text(json.dumps(json.loads(victim.read_text()) | {key: value}))
    else:
        assert how == "a piece outside of its tensor"
        name = next(iter(load_file(victim)))
        tensors[name] = Stored(tensors[name].dtype, tuple(n // 2 for n in tensors[name].shape))
    if victim.name in files and how != "two files exchanged":
        files[victim.name] = fingerprint(victim)
    write_manifest(folder, Manifest.model_construct(files=files, tensors=tensors))


def place_everything_first(file: Path) -> None:
    """Change a file so that its pieces claim to be the first of their tensors."""
    with safe_open(file, framework="pt") as opened:
        places = json.loads(opened.metadata()[PLACES])
    moved = {
        name: {"saved_offsets": [0] * len(place["saved_offsets"])} for name, place in places.items()
    }
    assert moved != places
    save_file(load_file(file), file, metadata={PLACES: json.dumps(moved)})


def said_in(main: Callable[..., object], *arguments: object) -> tuple[object, str]:
    """What a program returns and prints; a message of UserError is printed, too."""
    text, returned = io.StringIO(), None
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            returned = main(*arguments)
        except UserError as error:
            print(f"error: {error}")
    return returned, text.getvalue()


def refused_on_ranks(cases: dict[str, tuple[Path, list[str]]]) -> dict[str, tuple[str, str]]:
    """What generation and training say of each checkpoint."""
    return {
        how: (said_in(load_model, bad, torch.float32, "cpu")[1], train_run(arguments))
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
def test_a_hostile_checkpoint_is_refused(judged, how):
    """Training and every tool refuse a hostile checkpoint with one message, execute nothing from
    it, and write nothing."""
    folder, answers = judged[0] / how, [of_rank[how] for of_rank in judged[1]]
    bad = folder / FIXTURE.name
    with pytest.raises(Damaged):
        verify_checkpoint(bad)
    verified = said_in(verify.main, [str(bad)])
    exported = said_in(export.main, ["--checkpoint", str(bad), "--out", str(folder / "out")])
    assert (verified[0], exported[0]) == (1, 2)
    for text in (verified[1], exported[1], *(text for text, _ in answers)):
        assert "Traceback" not in text
        assert text.count("is not a valid checkpoint: ") + text.count("damaged: ") == 1, text
    assert all(said.startswith(f"checkpoint.{key_of(how)} = ") for _, said in answers), answers
    assert {*names(folder)} <= {FIXTURE.name, "outside.safetensors"}, "nothing is written"
