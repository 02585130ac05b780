"""Averaging of checkpoints: the float64 mean, from any layout, and the same bits of equal ones."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.checkpoint.manifest import fingerprint, read_manifest, write_manifest
from tests.huggingface.huggingface_models import write_checkpoint
from tests.runs import checkpoint_of, same_tensors, train_run, write_config
from tests.runs import run as train_to_the_end
from tools import average, export, verify
from tools.huggingface.checkpoint_reader import CheckpointReader


def tensors(folder: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.weight(name) for name in reader.tensors}


def run(*arguments: Path | str) -> int:
    return average.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoints(saved):
    return complete_checkpoints(saved / "run" / "checkpoints")


def check_mean(out: Path, folders: list[Path]) -> None:
    found, sources = tensors(out), [tensors(folder) for folder in folders]
    assert found.keys() == sources[0].keys()
    for name, tensor in found.items():
        wanted = sum(each[name].double() for each in sources) / len(sources)
        # to the last bit of float32, in which it is stored
        assert torch.allclose(tensor.double(), wanted, rtol=2**-23, atol=1e-30), name


@pytest.mark.parametrize("name", ["saved", "saved_experts"])
def test_the_average_is_the_mean_in_float64(request, tmp_path, name):
    """Of weights, and of routers' biases. A checkpoint that is named twice counts once."""
    folder, out = request.getfixturevalue(name) / "run", tmp_path / "average"
    sources = complete_checkpoints(folder / "checkpoints")[-2:]
    with patch.object(average, "FILE_BYTES", 100_000):
        assert run(folder, sources[-1], "--last", "2", "--out", out) == 0
    assert verify.main([str(out)]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    check_mean(out, sources)
    newest, found = tensors(sources[-1]), tensors(out)
    weights = [each for each in found if not each.endswith("router.bias")]
    assert (weights != [*found]) == (name == "saved_experts")
    for each in weights:
        assert not torch.equal(found[each], newest[each]), "control: it is not only the newest"
    about = json.loads((out / "average.json").read_text())["checkpoints"]
    assert [each["step"] for each in about] == [*map(step_of, sources)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_identical_checkpoints_has_the_same_bits(checkpoints, tmp_path, dtype):
    weights = tensors(checkpoints[-1])
    named = {name: weight.to(dtype).clone() for name, weight in weights.items()}
    for tensor in named.values():
        tensor.flatten()[0] = -0.0
    trainer = json.loads((checkpoints[-1] / "trainer.json").read_text())
    copies = [write_checkpoint(tmp_path / str(n), named, trainer) for n in range(7)]
    out = tmp_path / "average"
    assert run(*copies, "--out", out) == 0
    found, wanted = tensors(out), tensors(copies[0])
    for name, tensor in wanted.items():
        assert tensor.dtype == dtype
        # as bytes, in which -0.0 is not 0.0
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # Control: a sum of seven divided by seven has other bits.
    weight = wanted["norm.weight"].double() * torch.pi
    assert not torch.equal(sum([weight] * 7) / 7, weight)


def test_an_average_is_used_like_a_checkpoint(ranks, data, checkpoints, tmp_path):
    """A run starts from its weights, in another layout, and what that saves is averaged with what
    the first layout saved. It is exported. It has no state of an optimizer, so no run resumes from
    it."""
    out = tmp_path / "average"
    assert run(*checkpoints, "--out", out) == 0
    assert not [name for name in read_manifest(out).tensors if name.startswith("optimizer.")]
    config = write_config(tmp_path, data, train={"steps": 1}, optimizer={"lr": 0.0})
    start = f"checkpoint.load_weights_only={out}"
    train_to_the_end(ranks, 2, config, start, "checkpoint.interval=1")
    again = checkpoint_of(tmp_path, 1)
    assert same_tensors(tensors(again), tensors(out))
    counts = [len(list(folder.glob("*.safetensors"))) for folder in (again, checkpoints[-1])]
    assert counts[0] < counts[1], "other pieces"
    assert run(again, checkpoints[-1], "--out", tmp_path / "mixed") == 0
    check_mean(tmp_path / "mixed", [again, checkpoints[-1]])
    assert export.main(["--checkpoint", str(out), "--out", str(tmp_path / "exported")]) == 0
    (message, *_) = ranks.run(
        train_run, 2, [config, f"checkpoint.resume={out}", f"run.dir={tmp_path / 'other'}"]
    )
    assert "the run to resume read other data" in message


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("tokenizer.model", b"the", b"eht", "tokenizer.model="),
        ("trainer.json", b'eps": 0.00001', b'eps": 0.001', "model.norm_eps=0.001 differs"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    checkpoints, tmp_path, capsys, name, old, new, said
):
    copy = Path(shutil.copytree(checkpoints[1], tmp_path / "copy"))
    content = (copy / name).read_bytes()
    assert old in content
    (copy / name).write_bytes(content.replace(old, new))
    manifest = read_manifest(copy)
    manifest.files[name] = fingerprint(copy / name)
    write_manifest(copy, manifest)
    assert run(checkpoints[0], copy, "--out", tmp_path / "out") == 2
    assert f"its {said}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_too_few_and_a_wrong_name_are_refused(saved, tmp_path, capsys):
    assert run(saved / "run", "--out", tmp_path / "step-00001000") == 2  # it would be of step 0
    assert run(saved / "run", "--last", "1", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "a folder of this name is that of a run's step" in said
    assert "there is only this one" in said
