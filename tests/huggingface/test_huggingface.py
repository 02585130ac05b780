"""Import and export of Hugging Face folders: our model computes the logits of transformers', and
tensors survive a round trip bit for bit. Errors about unsupported formats name the format."""

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.tokenizer import Tokenizer
from errors import UserError
from model.router import routers_of
from model.transformer import Batch
from proofs.ranks import Ranks
from runtime.checkpoint.verify import verify_checkpoint
from tests.data_samples import POINTER, flip_a_bit, tokenizer, write
from tests.huggingface.huggingface_models import (
    CASES,
    SMALL,
    VOCAB,
    change,
    load_whole,
    random_folder,
    same_bits,
    stored,
    write_theirs,
)
from tests.proofs.parity_tiers import thorough_but
from tests.runs import names, run, write_config
from tools import export, import_hf
from tools.huggingface.checkpoint_reader import CheckpointReader, WeightReader, newest
from tools.huggingface.config import HuggingFaceConfig
from tools.huggingface.folder_reader import INDEX, SINGLE
from tools.huggingface.new_folder import new_folder

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def their_logits(
    folder: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, S, V] in float64, and the experts [B·S, k] that each layer with experts chooses.

    Their code converts to float32 what should be more exact than bfloat16; that is float64 here.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    chosen: list[Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        rotary = model.model.rotary_emb
        of_kind = ROPE_INIT_FUNCTIONS.get(rotary.rope_type, rotary.compute_default_rope_parameters)
        rotary.inv_freq = of_kind(model.config)[0]
        return model(tokens).logits, chosen


def our_logits(
    checkpoint: Path, tokens: Tensor, changes: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The same of the checkpoint's weights, on one rank."""
    model = load_whole(checkpoint, torch.float64, changes)
    chosen: list[Tensor] = []
    for _, router in routers_of(model):
        router.register_forward_hook(lambda *call: chosen.append(call[2][0].experts))
    positions = torch.arange(tokens.shape[1]).unsqueeze(1)
    with torch.no_grad():
        logits = model(None, Batch(tokens.T, None, positions)).transpose(0, 1).clone()
    length, rows = tokens.T.shape
    return logits, [c.unflatten(0, (length, rows)).transpose(0, 1).flatten(0, 1) for c in chosen]


@pytest.mark.parametrize(
    "case",
    thorough_but({"Llama 3.2: scaled rope, tied", "Qwen3, padded vocabulary", "Mixtral"}, CASES),
)
def test_round_trip(
    ranks: Ranks, data: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported model has the logits of transformers' and chooses the same experts. Exported
    again, directly or after a run with a learning rate of zero, it has the same bits."""
    trip = CASES[case]
    hf = write_theirs(trip, tmp_path / "hf")
    files = len(list(hf.glob("*.safetensors")))
    assert files == 1 if trip.file_size == "1GB" else files > 2
    checkpoint = tmp_path / "imported"
    import_hf.import_hf(hf, checkpoint, file_bytes=150_000)
    assert verify_checkpoint(checkpoint)

    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    theirs, they_chose = their_logits(hf, tokens, monkeypatch)
    ours, we_chose = ranks.run(our_logits, 1, checkpoint, tokens, {})[0]
    assert ours.dtype == theirs.dtype == torch.float64
    assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()
    assert theirs.std() > 0.1, "logits worth comparing"
    wrong, _ = ranks.run(our_logits, 1, checkpoint, tokens, trip.control)[0]
    assert (wrong - theirs).abs().max() > 1e-2, "control: a wrong setting must show"
    assert len(we_chose) == len(they_chose)
    assert bool(we_chose) == trip.has_experts
    for mine, other in zip(we_chose, they_chose, strict=True):
        assert torch.equal(mine.sort(1).values, other.sort(1).values)
        assert len(other.unique()) > 2, "choices worth comparing"

    sections = {
        "model": import_hf.said(HuggingFaceConfig(hf).model),
        "parallel": trip.layout,
        "train": {"steps": 1},
        "optimizer": {"lr": 0.0, "warmup_steps": 0},
        "checkpoint": {"interval": 1, "load_weights_only": str(checkpoint)},
    }
    run(ranks, trip.world, write_config(tmp_path, data, **sections))
    dtype = "bfloat16" if trip.dtype == torch.bfloat16 else "float32"
    for name, saved in (("straight", checkpoint), ("trained", newest(tmp_path / "run"))):
        out = tmp_path / name
        export.export(saved, out, dtype, file_bytes=100_000)
        assert same_bits(stored(out), stored(hf)), name
        assert (out / INDEX).exists()
        assert (out / "tokenizer.model").read_bytes() == tokenizer().model
    again, _ = their_logits(out, tokens, monkeypatch)
    assert torch.equal(again, theirs)
    length = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    assert length == 32, "the sequence length of our run"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two files of tensors."""
    folder = tmp_path_factory.mktemp("hf")
    tensors = random_folder(folder, "LlamaForCausalLM", rope_theta=10_000.0, **SMALL)
    half = len(tensors) // 2
    save_file(dict([*tensors.items()][:half]), folder / FIRST)
    save_file(dict([*tensors.items()][half:]), folder / SECOND)
    return folder


def change_tensors(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace or remove the tensor `name` in the first file."""
    tensors = load_file(folder / FIRST)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / FIRST)


def only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


EMBEDDING = "model.embed_tokens.weight"
DAMAGE = {
    "missing tensor": (lambda f: change_tensors(f, EMBEDDING, None), f"{EMBEDDING} is missing"),
    "extra tensor": (
        lambda f: change_tensors(f, "model.layers.0.self_attn.q_proj.bias", torch.zeros(64)),
        "q_proj.bias is not a tensor",
    ),
    "other shape": (lambda f: change_tensors(f, EMBEDDING, torch.zeros(VOCAB, 32)),
                    f"(800, 32), but by config.json it has ({VOCAB}"),
    "codes": (
        lambda f: change_tensors(f, EMBEDDING, torch.zeros(VOCAB, 64, dtype=torch.int8)),
        "has dtype I8",
    ),
    "truncated": (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-1]),
                  "is not a readable safetensors file"),
    "missing file": (lambda f: (f / FIRST).unlink(), f"{EMBEDDING} is missing"),
    "pointer": (lambda f: (f / FIRST).write_text(POINTER), "run `git lfs pull`"),
    "older weights": (lambda f: shutil.copyfile(f / FIRST, f / SINGLE), "two sets of weights"),
    "a shard of another set": (
        lambda f: (f / FIRST).rename(f / "model-00001-of-00003.safetensors"),
        "remove the files that are out of date",
    ),
    "tensor in two files": (
        lambda f: save_file(load_file(f / FIRST) | load_file(f / SECOND), f / SECOND),
        f"{FIRST} has {EMBEDDING} too",
    ),
    "pickles": (only_pickles, "*.bin would have to be unpickled"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused(
    hf: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    damage, said = DAMAGE[name]
    copy = Path(shutil.copytree(hf, tmp_path / "copy"))
    damage(copy)
    assert import_hf.main(["--hf", str(copy), "--out", str(tmp_path / "new" / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "remedy: " in error
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_what_older_folders_have_beside_is_left_out(hf: Path, tmp_path: Path) -> None:
    """Import ignores the rotary frequencies and the copy of a tied head that older folders store as
    tensors. A head that differs from the embedding is refused."""
    folder = Path(shutil.copytree(hf, tmp_path / "copy"))
    change_tensors(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    change(folder, "config.json", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight is not a tensor of this model"):
        import_hf.import_hf(folder, tmp_path / "out")
    change_tensors(folder, EMBEDDING, stored(hf)["lm_head.weight"])
    assert import_hf.import_hf(folder, tmp_path / "out").tie_embeddings
    assert "head.weight" not in CheckpointReader(tmp_path / "out").tensors


def test_commands(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The commands import and export, print what they did, overwrite nothing and leave nothing
    incomplete."""
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert import_hf.main(["--hf", str(hf), "--out", str(imported)]) == 0
    printed = capsys.readouterr()
    assert f"checkpoint.load_weights_only={imported}" in printed.out
    assert printed.err == "", "no progress bar where there is no terminal"
    assert "num_kv_heads: 2" in (imported / "model.yaml").read_text()
    assert export.main(["--checkpoint", str(imported), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert SINGLE in said
    assert "--override-kv" not in said, "a hint for llama.cpp, of Qwen3"
    assert same_bits(stored(out), stored(hf))
    assert (out / SINGLE).stat().st_mode == (out / "config.json").stat().st_mode, "by the umask"
    stated = json.loads((out / "config.json").read_text())
    assert stated["max_position_embeddings"] == SMALL["max_position_embeddings"]
    ends = json.loads((out / "generation_config.json").read_text())
    assert ends == {"bos_token_id": 1, "eos_token_id": 2}
    flip_a_bit(imported / SINGLE)
    none = str(tmp_path / "none")
    for command, option, given, to, why in (
        (import_hf, "--hf", hf, str(out), "--out = "),
        (export, "--checkpoint", imported, str(out), "--out = "),
        (export, "--checkpoint", tmp_path, none, "holds no complete checkpoint"),
        (export, "--checkpoint", imported, none, "sha256 differs"),
    ):
        assert command.main([option, str(given), "--out", to]) == 2
        assert why in capsys.readouterr().err
    assert names(tmp_path) == ["imported", "out"]


def test_the_model_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversion never holds more than the tensors of one file and one more, and an export reads
    experts one by one. Control: with a single file, all are held. One expert has another dtype at
    first, which our tensor of all of them cannot."""
    hf, imported, size = tmp_path / "hf", tmp_path / "imported", 800_000
    hf.mkdir()
    config = CASES["Mixtral"].config | {"intermediate_size": 384}
    tensors = random_folder(hf, "MixtralForCausalLM", **config)
    name = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, hf / SINGLE)
    with pytest.raises(UserError, match=f"{name} has another dtype"):
        import_hf.import_hf(hf, imported)
    save_file(tensors, hf / SINGLE)
    alive: list[weakref.ref[Tensor]] = []
    held: list[int] = []  # bytes, after each tensor was loaded
    weight = WeightReader.weight

    def watched(*args: Any) -> Tensor:
        tensor = weight(*args)
        alive.append(weakref.ref(tensor))
        held.append(sum(each.nbytes for ref in alive if (each := ref()) is not None))
        return tensor

    monkeypatch.setattr(WeightReader, "weight", watched)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    for convert, given, out, largest in (
        (import_hf.import_hf, hf, imported, 8 * tensors[name].nbytes),
        (export.export, imported, tmp_path / "exported", VOCAB * 64 * 4),
    ):
        held.clear()
        convert(given, out, file_bytes=size)
        assert 0 < max(held) <= size + largest < whole / 2
        held.clear()
        convert(given, out.with_name(f"{out.name} in one"), file_bytes=whole)
        assert max(held) == whole
    assert same_bits(stored(tmp_path / "exported"), tensors)


# what is given → what the message says
GIVEN = {
    "--hf=meta-llama/Llama-3.2-1B": "nothing is downloaded from the Hugging Face hub",
    "--hf=./nowhere": "it cannot be read (No such file",
    "--hf=model.gguf": "it cannot be read (Not a directory)",
    "--hf=adapter": "it has an adapter, which changes another model's weights",
    "--tokenizer=./nowhere": "--tokenizer = 'nowhere': it cannot be read (No such file",
    "--tokenizer=pointer.json": "a Git LFS pointer",
    "--tokenizer=vocab.json": "this is not a readable tokenizer.json",
    "--tokenizer=broken.model": "this is not a SentencePiece model",
    "--tokenizer=adapter": "it contains neither tokenizer.model nor tokenizer.json",
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_no_model_or_no_tokenizer_is_called_what_it_is(
    hf: Path,
    tmp_path: Path,
    given: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    files = {"pointer.json": POINTER, "vocab.json": '{"a": 0, "b": 1}', "broken.model": "junk"}
    empty = ("model.gguf", "adapter/adapter_config.json", "adapter/config.json")
    write(tmp_path, files | dict.fromkeys(empty, "{}"))
    monkeypatch.chdir(tmp_path)
    assert import_hf.main(["--hf", str(hf), "--out", "out", given]) == 2
    said = capsys.readouterr().err
    assert GIVEN[given] in said
    if "meta-llama" in given:
        assert "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`" in said


def test_a_model_without_a_tokenizer_is_imported_with_one(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = str(shutil.copytree(hf, tmp_path / "copy"))
    shutil.move(f"{copy}/tokenizer.model", tmp_path / "elsewhere.model")
    arguments = ["--hf", copy, "--out", str(tmp_path / "out")]
    assert import_hf.main(arguments) == 2
    assert f"--tokenizer = '{copy}': it contains neither" in capsys.readouterr().err
    assert import_hf.main([*arguments, "--tokenizer", str(tmp_path / "elsewhere.model")]) == 0
    assert Tokenizer.load(tmp_path / "out").sha256 == tokenizer().sha256


def test_what_another_process_writes_is_left(tmp_path: Path) -> None:
    """Its number may be ours, on another machine or in another container."""
    other = tmp_path / f"out.partial-{os.getpid()}"
    other.mkdir()
    with pytest.raises(UserError, match="it was not written"), new_folder(tmp_path / "out"):
        pass
    assert other.is_dir()
