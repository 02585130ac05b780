"""Averaging of checkpoints: the float64 mean, from any layout, and the same bits of equal ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from proofs.ranks import Ranks
from runtime.checkpoint.manifest import Manifest, fingerprint, read_manifest, write_manifest
from tests.data_samples import MANY, flip_a_bit, tokenizer
from tests.huggingface.huggingface_models import change, write_checkpoint
from tests.runs import EXPERTS, checkpoint_of, same_tensors, train_run, write_config
from tests.runs import run as train_to_the_end
from tools import average, export, verify
from tools.huggingface.checkpoint_reader import CheckpointReader

STEPS = (2, 4, 6)


def tensors(folder: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.weight(name) for name in reader.tensors}


def run(*arguments: Path | str) -> int:
    return average.main([str(argument) for argument in arguments])


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@pytest.fixture(scope="module")
def checkpoints(saved: Path) -> list[Path]:
    """Of one run, on 8 ranks (pp 2 × dp_shard 2 × tp 2)."""
    return [checkpoint_of(saved, step) for step in STEPS]


def check_mean(out: Path, folders: list[Path], shares: list[float]) -> None:
    found, sources = tensors(out), [tensors(folder) for folder in folders]
    assert found.keys() == sources[0].keys()
    for name, tensor in found.items():
        wanted = sum(s * each[name].double() for s, each in zip(shares, sources, strict=True))
        # to the last bit of float32, in which it is stored
        assert torch.allclose(tensor.double(), wanted, rtol=2**-23, atol=1e-30), name


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ([], [1 / 3, 1 / 3, 1 / 3]),
        (["--kind", "exponential", "--decay", "0.75"], [0.5625, 0.1875, 0.25]),
        (["--last", "2"], [0, 1 / 2, 1 / 2]),
    ],
)
def test_the_average_is_the_mean_in_float64(
    saved: Path, checkpoints: list[Path], tmp_path: Path, options: list[str], shares: list[float]
) -> None:
    out = tmp_path / "average"
    assert run(saved / "run", "--out", out, "--file-bytes", "100000", *options) == 0
    assert verify.main([str(out)]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    check_mean(out, checkpoints, shares)
    newest = tensors(checkpoints[-1])
    for name, tensor in tensors(out).items():
        assert not torch.equal(tensor, newest[name]), "control: it is not only the newest"
    about = json.loads((out / "average.json").read_text())["checkpoints"]
    used = [share for share in shares if share]
    assert [each["weight"] for each in about] == pytest.approx(used)
    assert [each["step"] for each in about] == list(STEPS[-len(used) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", average.KINDS)
def test_the_average_of_identical_checkpoints_has_the_same_bits(
    checkpoints: list[Path], tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    weights = tensors(checkpoints[-1])
    named = {name: weight.to(dtype).clone() for name, weight in weights.items()}
    for tensor in named.values():
        tensor.flatten()[0] = -0.0
    trainer = json.loads((checkpoints[-1] / "trainer.json").read_text())
    copies = [write_checkpoint(tmp_path / str(n), named, trainer) for n in range(7)]
    out = tmp_path / "average"
    assert run(*copies, "--out", out, "--kind", kind, "--decay", "0.9") == 0
    found, wanted = tensors(out), tensors(copies[0])
    for name, tensor in wanted.items():
        assert tensor.dtype == dtype
        assert torch.equal(bits(found[name]), bits(tensor)), name
    # Control: bits do show a difference. (A sum of seven divided by seven has other bits.)
    weight = wanted["norm.weight"].double() * torch.pi
    assert (bits(sum([weight] * 7) / 7) != bits(weight)).any()


@pytest.mark.thorough
def test_checkpoints_with_experts_are_averaged(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Of two layouts; the biases of routers too."""
    folders = []
    for name, world, layout in (("one", 1, {}), ("other", 4, {"pp": 2, "ep": 2})):
        (tmp_path / name).mkdir()
        sections = {"model": EXPERTS, "parallel": layout, "train": {"steps": 1}}
        config = write_config(tmp_path / name, data, checkpoint={"interval": 1}, **sections)
        train_to_the_end(ranks, world, config)
        folders.append(checkpoint_of(tmp_path / name, 1))
    counts = [len(list(folder.glob("*.safetensors"))) for folder in folders]
    assert counts[0] < counts[1]
    out = tmp_path / "average"
    assert run(*folders, "--out", out) == 0
    check_mean(out, folders, [1 / 2, 1 / 2])
    assert any(name.endswith("router.bias") for name in tensors(out))


def test_an_average_is_used_like_a_checkpoint(
    ranks: Ranks, data: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
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
    check_mean(tmp_path / "mixed", [again, checkpoints[-1]], [1 / 2, 1 / 2])
    assert export.main(["--checkpoint", str(out), "--out", str(tmp_path / "exported")]) == 0
    (message, *_) = ranks.run(
        train_run, 2, [config, f"checkpoint.resume={out}", f"run.dir={tmp_path / 'other'}"]
    )
    assert "the run to resume read other data" in message


def other_tokenizer(folder: Path) -> None:
    text = Path(MANY, "message.py").read_text()
    (folder / "tokenizer.model").write_bytes(Tokenizer.train([text], tokenizer().vocab_size).model)


def other_model(folder: Path) -> None:
    model = json.loads((folder / "trainer.json").read_text())["model"]
    change(folder, "trainer.json", model=model | {"norm_eps": 1e-3})


CHANGES = {
    "another tokenizer": (other_tokenizer, True, "its tokenizer.model="),
    "another model": (other_model, True, "its model.norm_eps=0.001 differs"),
    "damaged": (lambda f: flip_a_bit(min(f.glob("*.safetensors"))), False, "sha256 differs"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_belong_together_is_refused(
    checkpoints: list[Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    make_other, signed, said = CHANGES[name]
    copy = Path(shutil.copytree(checkpoints[1], tmp_path / "copy"))
    make_other(copy)
    if signed:
        manifest = read_manifest(checkpoints[1])
        files = {file: fingerprint(copy / file) for file in manifest.files}
        write_manifest(copy, Manifest(files=files, tensors=manifest.tensors))
    assert run(checkpoints[0], copy, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--last", "0"], "--last = 0: it must be at least 1"),
        (["--decay", "1"], "--decay = 1.0: it must be at least 0 and less than 1"),
        (["--last", "1"], "there is only this one"),
        (["{saved}/run/checkpoints/step-00000002"], "it is named twice"),
    ],
)
def test_wrong_arguments_are_refused(
    saved: Path, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    words = [word.format(saved=saved) for word in arguments]
    assert run(*words, saved / "run", "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
