"""Import and export of Hugging Face folders: our model computes the logits of transformers', and
tensors survive a round trip bit for bit."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from model.transformer import Batch, Transformer
from parallel.axes import MeshSizes
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from runtime.checkpoints.manifest import verify
from tests.data_samples import tokenizer
from tests.huggingface_models import CASES, SMALL, VOCAB, make_model, same_bits, save, stored
from tests.runs import LAYOUT_3D, train_run, write_config
from tools import export, import_hf
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.huggingface.config import HuggingFaceConfig, parameters
from tools.huggingface.tensor_files import INDEX, SINGLE, FolderTensors
from tools.ranks import Ranks

# Controls: for each case, a change of the model that must change its logits.
CONTROLS = {
    "Llama 3, sharded": {"rope_theta": 10_000.0},
    "Llama 3.2: scaled rope, tied": {"rope_scaling_factor": 1.0},
    "Mistral, another width of attention": {"norm_eps": 1e-2},
    "Qwen3, padded vocabulary": {"rope_theta": 10_000.0},
}


def our_logits(checkpoint: str, tokens: Tensor, changes: dict[str, Any]) -> Tensor:
    """Logits [B, S, V] for tokens [B, S] with the checkpoint's weights, in float32 on one rank."""
    reader = CheckpointReader(Path(checkpoint))
    config = ModelConfig(**(reader.trainer.model | changes))
    mesh = build_mesh(MeshSizes(), "cpu")
    tp = TensorParallel.of(mesh.tp, sequence_parallel=False)
    model = Transformer(config, range(config.num_layers), True, True, tp).to_empty(device="cpu")
    positions = torch.arange(tokens.shape[1]).unsqueeze(1)
    with torch.no_grad():
        for weight in weights_of(model):
            weight.sharded.to_local().copy_(reader.weight(weight.global_name))
        return model(None, Batch(tokens.T, None, positions)).transpose(0, 1).clone()


@pytest.mark.parametrize("case", CASES)
def test_round_trip(ranks: Ranks, data: Path, tmp_path: Path, case: str) -> None:
    """An imported model has the logits of transformers'. Exported again, directly or after a run
    with a learning rate of zero, it has the same bits."""
    from transformers import AutoModelForCausalLM

    hf = save(make_model(case), tmp_path / "hf", CASES[case][2])
    assert len(list(hf.glob("*.safetensors"))) == (
        1 if CASES[case][2] == "1GB" else pytest.approx(9, abs=6)
    )
    checkpoint = tmp_path / "imported"
    import_hf.import_hf(hf, checkpoint, file_bytes=200_000)
    assert verify(checkpoint)

    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(tokens).logits
    ours = ranks.run(our_logits, 1, str(checkpoint), tokens, {})[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.1, "logits worth comparing"
    wrong = ranks.run(our_logits, 1, str(checkpoint), tokens, CONTROLS[case])[0]
    assert (wrong - theirs).abs().max() > 1e-2, "control: a wrong setting must show"

    # a real run on (2, 2, 2) with one step and a learning rate of zero
    sections = {
        "model": import_hf.said(HuggingFaceConfig(hf).model),
        "parallel": LAYOUT_3D,
        "train": {"steps": 1},
        "optimizer": {"lr": 0.0, "warmup_steps": 0},
        "checkpoint": {"interval": 1, "load_weights_only": str(checkpoint)},
    }
    assert ranks.run(train_run, 8, [write_config(tmp_path, data, **sections)]) == [""] * 8
    dtype = "bfloat16" if CASES[case][3] == torch.bfloat16 else "float32"
    for name, saved in (("straight", checkpoint), ("trained", newest(tmp_path / "run"))):
        out = tmp_path / name
        export.export(saved, out, dtype, file_bytes=100_000)
        assert same_bits(stored(out), stored(hf)), name
        assert (out / INDEX).exists()
        assert (out / "tokenizer.model").read_bytes() == tokenizer().model
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
        assert torch.equal(again(tokens).logits, theirs)
    assert again.config.max_position_embeddings == 32  # the sequence length of our run


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the format of transformers 4, written without transformers."""
    folder = tmp_path_factory.mktemp("hf") / "llama"
    folder.mkdir()
    content = {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10_000.0,
        "torch_dtype": "float32",
        **SMALL,
    }
    (folder / "config.json").write_text(json.dumps(content))
    generator = torch.Generator().manual_seed(2)
    wanted = parameters(HuggingFaceConfig(folder).model)
    tensors = {p.theirs: torch.randn(p.shape, generator=generator) for p in wanted}
    names = list(tensors)
    file_of = {
        name: f"model-0000{1 + i * 2 // len(names)}-of-00002.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return folder


# --- folders --------------------------------------------------------------------------------------


def change_tensors(
    folder: Path, name: str, tensor: Tensor | None, index: str | None = None
) -> None:
    """Replace or remove the tensor `name` in the first file, and in the index set its file to
    `index`, or remove its entry."""
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].pop(name, None)
    if index is not None:
        content["weight_map"][name] = index
    (folder / INDEX).write_text(json.dumps(content))


def only_pickles(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


FIRST, EMBEDDING = "model-00001-of-00002.safetensors", "model.embed_tokens.weight"
DAMAGE = {
    "missing tensor": (lambda f: change_tensors(f, EMBEDDING, None), f"{EMBEDDING} is missing"),
    "extra tensor": (
        lambda f: change_tensors(f, "model.layers.0.self_attn.q_proj.bias", torch.zeros(64), FIRST),
        "q_proj.bias is not a tensor",
    ),
    "extra tensor the index does not name": (lambda f: change_tensors(f, "x", torch.zeros(1)),
                                             "x is not a tensor"),
    "other shape": (lambda f: change_tensors(f, EMBEDDING, torch.zeros(VOCAB, 32), FIRST),
                    f"(800, 32), but by config.json it has ({VOCAB}"),
    "codes": (
        lambda f: change_tensors(f, EMBEDDING, torch.zeros(VOCAB, 64, dtype=torch.int8), FIRST),
        "has dtype I8",
    ),
    "index that lies": (lambda f: change_tensors(f, EMBEDDING, None, FIRST),
                        f"has no tensor {EMBEDDING}"),
    "index that leaves": (lambda f: change_tensors(f, EMBEDDING, None, "../secret.safetensors"),
                          "has no weight_map"),
    "truncated": (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-1]),
                  "is not a readable safetensors file"),
    "missing file": (lambda f: (f / FIRST).unlink(), "is not a readable safetensors file"),
    "pickles": (only_pickles, "pytorch_model.bin would have to be unpickled"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot be read"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(),
                     "neither tokenizer.model nor tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused(
    hf: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    damage, said = DAMAGE[name]
    copy = tmp_path / "copy"
    shutil.copytree(hf, copy)
    damage(copy)
    assert import_hf.main(["--hf", str(copy), "--out", str(tmp_path / "new" / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "remedy: " in error
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_what_older_folders_have_beside_is_left_out(hf: Path, tmp_path: Path) -> None:
    """Import ignores the rotary frequencies and the copy of a tied head that older folders store as
    tensors. A head that differs from the embedding is refused."""
    folder = tmp_path / "copy"
    shutil.copytree(hf, folder)
    change_tensors(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8), FIRST)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"lm_head\.weight is not a tensor of this model"):
        import_hf.import_hf(folder, tmp_path / "out")
    change_tensors(folder, EMBEDDING, FolderTensors(folder).tensor("lm_head.weight").clone(), FIRST)
    assert import_hf.import_hf(folder, tmp_path / "out").tie_embeddings
    assert "head.weight" not in CheckpointReader(tmp_path / "out").weights()


def test_commands(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The commands import and export, print what they did, overwrite nothing and leave nothing
    incomplete."""
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert import_hf.main(["--hf", str(hf), "--out", str(imported)]) == 0
    said = capsys.readouterr()
    assert f"checkpoint.load_weights_only={imported}" in said.out
    assert said.err == "", "no progress bar where there is no terminal"
    assert "num_kv_heads: 2" in (imported / "model.yaml").read_text()
    assert export.main(["--checkpoint", str(imported), "--out", str(out)]) == 0
    assert SINGLE in capsys.readouterr().out
    assert same_bits(stored(out), stored(hf))
    assert (
        json.loads((out / "config.json").read_text())["max_position_embeddings"]
        == SMALL["max_position_embeddings"]
    )
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for again in ([*("--hf", str(hf))], [*("--checkpoint", str(imported))]):
        command = import_hf.main if again[0] == "--hf" else export.main
        assert command([*again, "--out", str(out)]) == 2
        assert "--out = " in capsys.readouterr().err
    assert export.main(["--checkpoint", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    file = imported / SINGLE
    file.write_bytes(file.read_bytes()[:-4] + b"flip")
    assert export.main(["--checkpoint", str(imported), "--out", str(tmp_path / "none")]) == 2
    assert "sha256 differs" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "out"]


def test_the_model_is_never_whole_in_memory(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversion never holds more than the tensors of one file and one more. Control: with a single
    file it holds all of them."""
    alive: dict[int, tuple[weakref.ref, int]] = {}
    most = 0

    def watched(original: Any) -> Any:
        def load(*args: Any) -> Tensor:
            nonlocal most
            tensor = original(*args)
            alive[len(alive)] = weakref.ref(tensor), tensor.nbytes
            most = max(most, sum(size for ref, size in alive.values() if ref() is not None))
            return tensor

        return load

    monkeypatch.setattr(FolderTensors, "tensor", watched(FolderTensors.tensor))
    monkeypatch.setattr(CheckpointReader, "weight", watched(CheckpointReader.weight))
    whole = sum(tensor.nbytes for tensor in stored(hf).values())
    largest, size = VOCAB * 64 * 4, 60_000
    for convert, given in ((import_hf.import_hf, hf), (export.export, tmp_path / "imported")):
        name = "imported" if given == hf else "exported"
        most = 0
        convert(given, tmp_path / name, file_bytes=size)
        assert 0 < most <= size + largest < whole / 2
        most = 0
        convert(given, tmp_path / f"{name} in one", file_bytes=whole)
        assert most == whole
