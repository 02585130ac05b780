"""Malicious checkpoints are refused. Checksums do not help here, because an attacker who writes the
manifest also writes matching checksums."""

import contextlib
import io
import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from errors import UserError
from proofs.ranks import Ranks
from runtime.checkpoint import manifest
from runtime.checkpoint.manifest import Damaged, Manifest, read_manifest, write_manifest
from runtime.checkpoint.verify import verify_checkpoint
from tests.runs import copy_of, train_run
from tools import export, verify
from tools.generate.load_model import load_model

HOSTILE = ["pickle for tensors", "a path for a name", "an absurd shape", "a negative shape",
           "two files exchanged", "a file too many", "a shard and its entry lost", "truncated",
           "a piece outside of its tensor", "a piece twice and another not at all",
           "an endless shape", "a header that is too long", "too many steps",
           "a step of another kind", "a sample that is no number", "no model"]  # fmt: skip
TRAINERS = {  # case → (key of trainer.json, value planted there)
    "too many steps": ("step", 10**15),
    "a step of another kind": ("step", True),
    "a sample that is no number": ("data", {"checksum": "x", "next_sample": "x", "skipped": []}),
    "no model": ("model", {"dim": 10**30}),
}


class Exploding:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, manifest_of: Manifest, how: str, harm: Path) -> None:
    """Make a checkpoint hostile in the way `how`, with a manifest whose checksum is right."""
    files, tensors = dict(manifest_of.files), dict(manifest_of.tensors)
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    victim = folder / shards[0]
    if how == "pickle for tensors":
        victim.write_bytes(pickle.dumps(Exploding(harm)))
        files[victim.name] = manifest.fingerprint(victim)
    elif how == "a path for a name":
        (folder.parent / "outside.safetensors").write_bytes(victim.read_bytes())
        files["../outside.safetensors"] = files[victim.name]
    elif how == "an absurd shape":
        name = next(iter(tensors))
        tensors[name] = manifest.Stored(tensors[name][0], (1 << 40, 1 << 20))
    elif how == "a negative shape":
        name = next(iter(tensors))
        tensors[name] = manifest.Stored(tensors[name][0], (-1, -4))
    elif how == "two files exchanged":
        first, second = (folder / name for name in shards[:2])
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif how == "a file too many":
        save_file(
            {"model.norm.weight": torch.zeros(4)},
            folder / "shard-99999-model-00001-of-00001.safetensors",
        )
    elif how == "a shard and its entry lost":
        victim.unlink()
        del files[victim.name]
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-8])
        files[victim.name] = manifest.fingerprint(victim)
    elif how == "a piece twice and another not at all":  # the total size is still right
        victim = folder / shards[-1]  # not the first shard, whose pieces are at the beginning
        place_everything_first(victim)
        files[victim.name] = manifest.fingerprint(victim)
    elif how == "an endless shape":
        name = next(iter(tensors))
        tensors[name] = manifest.Stored(tensors[name][0], (math.inf, 4))
    elif how == "a header that is too long":
        victim.write_bytes((1 << 30).to_bytes(8, "little") + victim.read_bytes()[8:])
        files[victim.name] = manifest.fingerprint(victim)
    elif how in TRAINERS:
        key, value = TRAINERS[how]
        path = folder / "trainer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        files[path.name] = manifest.fingerprint(path)
    else:
        assert how == "a piece outside of its tensor"
        name = next(name for name in load_file(victim))
        tensors[name] = manifest.Stored(tensors[name][0], tuple(n // 2 for n in tensors[name][1]))
    write_manifest(folder, Manifest.model_construct(files=files, tensors=tensors))


def refused_by_tools(checkpoint: Path, out: Path) -> list[str]:
    """The output of `tools.verify` and `tools.export`, which must refuse the checkpoint."""
    said = []
    for main, arguments, status in (
        (verify.main, [str(checkpoint)], 1),
        (export.main, ["--checkpoint", str(checkpoint), "--out", str(out)], 2),
    ):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            assert main(arguments) == status
        said.append(text.getvalue())
    return said


def refused_by_generate(checkpoint: Path) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            load_model(checkpoint, torch.float32, "cpu")
        except UserError as error:
            print(f"error: {error}")
    return text.getvalue()


def place_everything_first(file: Path) -> None:
    """Change a file so that its pieces claim to be the first of their tensors."""
    with safe_open(file, framework="pt") as opened:
        places = json.loads(opened.metadata()[manifest.PLACES])
    moved = {
        name: {"saved_offsets": [0] * len(place["saved_offsets"])} for name, place in places.items()
    }
    assert moved != places
    save_file(load_file(file), file, metadata={manifest.PLACES: json.dumps(moved)})


def refused_on_ranks(cases: dict[str, tuple[Path, list[str]]]) -> dict[str, tuple[str, str]]:
    """What generation and training say of each checkpoint."""
    return {
        how: (refused_by_generate(bad), train_run(arguments))
        for how, (bad, arguments) in cases.items()
    }


@pytest.fixture(scope="module")
def judged(
    ranks: Ranks, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    """A folder with a hostile copy of a run for each case, and what each rank said of them."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = {}
    for how in HOSTILE:
        (folder / how).mkdir()
        config, checkpoints = copy_of(saved, folder / how)
        bad = checkpoints / "step-00000006"
        hostile(bad, read_manifest(bad), how, folder / how / "harm")
        other = f"run.dir={folder / how / 'other'}"
        cases[how] = bad, [config, f"checkpoint.resume={bad}", other, "parallel.pp=1"]
    return folder, ranks.run(refused_on_ranks, 2, cases)


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_checkpoint_is_refused(
    judged: tuple[Path, list[dict[str, tuple[str, str]]]], how: str
) -> None:
    """Training and every tool refuse a hostile checkpoint with one message, execute nothing from
    it, and write nothing."""
    folder, answers = judged[0] / how, [of_rank[how] for of_rank in judged[1]]
    bad = folder / "run" / "checkpoints" / "step-00000006"
    with pytest.raises(Damaged):
        verify_checkpoint(bad)
    for text in (*refused_by_tools(bad, folder / "out"), *(text for text, _ in answers)):
        assert "Traceback" not in text
        assert text.count("is not a valid checkpoint: ") + text.count("damaged: ") == 1, text
    assert all(message.startswith("checkpoint.resume = ") for _, message in answers), answers
    assert not (folder / "harm").exists()
    assert not (folder / "other").exists(), "nothing is written"
