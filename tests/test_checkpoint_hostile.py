"""Checkpoints that somebody meant harm with: whoever writes a manifest can make its checksums right."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import copy_of, train_run
from tools.ranks import Ranks
from training import manifest
from training.manifest import Damaged, Manifest, read_manifest, write_manifest

HOSTILE = [
    "pickle for tensors",
    "a path for a name",
    "an absurd shape",
    "a negative shape",
    "two files exchanged",
    "a file too many",
    "a shard and its entry lost",
    "truncated",
    "a piece outside of its tensor",
]


class Exploding:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, manifest_of: Manifest, how: str, harm: Path) -> None:
    """Make a checkpoint hostile, with a manifest whose own checksums are right."""
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
        tensors[name] = tensors[name][0], (1 << 40, 1 << 20)
    elif how == "a negative shape":
        name = next(iter(tensors))
        tensors[name] = tensors[name][0], (-1, -4)
    elif how == "two files exchanged":
        first, second = (folder / name for name in shards[:2])
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif how == "a file too many":
        save_file({"model.norm.weight": torch.zeros(4)}, folder / "shard-99999-model-00001-of-00001.safetensors")
    elif how == "a shard and its entry lost":
        victim.unlink()
        del files[victim.name]
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-8])
        files[victim.name] = manifest.fingerprint(victim)
    else:
        assert how == "a piece outside of its tensor"
        name = next(name for name in load_file(victim))
        tensors[name] = tensors[name][0], tuple(n // 2 for n in tensors[name][1])
    write_manifest(folder, Manifest(files, tensors))


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_checkpoint_is_refused(ranks: Ranks, saved: Path, tmp_path: Path, how: str) -> None:
    """What the manifest describes must make sense, and nothing is run."""
    config, checkpoints = copy_of(saved, tmp_path)
    bad = checkpoints / "step-00000006"
    hostile(bad, read_manifest(bad), how, tmp_path / "harm")
    with pytest.raises(Damaged):
        manifest.verify(bad)
    other = f"run.dir={tmp_path / 'other'}"
    messages = ranks.run(train_run, 2, [config, f"checkpoint.resume={bad}", other, "parallel.pp=1"])
    assert all(message.startswith("checkpoint.resume = ") for message in messages), messages
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "other").exists(), "nothing is written"
