"""Errors about tokenizers and models in unsupported formats name the format; a model's tokenizer
may be given separately from its folder."""

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from data.tokenizer import Tokenizer
from errors import UserError
from tests.data_samples import tokenizer
from tests.huggingface.huggingface_models import make_model, save
from tools import import_hf
from tools.huggingface.config import refuse_foreign
from tools.huggingface.new_folder import new_folder

TEKKEN = json.dumps(
    {"config": {"pattern": ".", "version": "v3"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}
)
FILES = {
    "tekken.json": (TEKKEN, "Mistral's tekken format, which is not supported"),
    "tokenizer.model": ("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(9)),
                        "a vocabulary for tiktoken"),
    "model.gguf": ("GGUF\x03\0\0\0", "a GGUF model, which is not supported"),
    "vocab.json": (json.dumps({"a": 0, "b": 1}), "a vocabulary without its merges"),
    "tokenizer_config.json": (json.dumps({"tokenizer_class": "LlamaTokenizer"}),
                              "a description of a tokenizer"),
    "tokenizer.json": ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                       "a Git LFS pointer"),
    "broken.json": ("{", "this is not a readable tokenizer.json"),
    "broken.model": ("junk", "this is not a SentencePiece model"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_of_another_format_is_called_what_it_is(tmp_path: Path, name: str) -> None:
    content, said = FILES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as raised:
        Tokenizer.load(tmp_path / name)
    assert said in raised.value.why
    assert raised.value.remedy


FOLDERS = {
    "tekken.json": "it has only a tekken.json",
    "vocab.json merges.txt": "it has vocab.json and merges.txt",
    "tokenizer.model.v3": "its tokenizer has another name (tokenizer.model.v3)",
    "config.json": "it contains neither tokenizer.model nor tokenizer.json",
}


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_without_a_tokenizer_says_what_it_has(tmp_path: Path, names: str) -> None:
    for name in names.split():
        (tmp_path / name).write_bytes(tokenizer().model)
    with pytest.raises(UserError) as raised:
        Tokenizer.load(tmp_path)
    assert raised.value.why.startswith(FOLDERS[names])
    if names == "tokenizer.model.v3":  # the remedy works
        assert Tokenizer.load(raised.value.remedy.split(": ")[1]).sha256 == tokenizer().sha256


MODELS = {
    "hub name": ("meta-llama/Llama-3.2-1B", "nothing is downloaded from the Hugging Face hub"),
    "nowhere": ("./nowhere", "there is no such folder"),
    "GGUF file": ("model.gguf", "in GGUF format, which is not supported"),
    "other file": ("model.bin", "it is a file, not a folder"),
    "GGUF folder": ("gguf", "in GGUF format, which is not supported"),
    "Meta's folder": ("meta", "in its publisher's own format"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_of_another_format_is_called_what_it_is(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in (
        "model.gguf",
        "model.bin",
        "gguf/a.gguf",
        "meta/params.json",
        "meta/consolidated.00.pth",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF" if name.endswith("gguf") else b"{}")
    monkeypatch.chdir(tmp_path)
    given, said = MODELS[case]
    assert import_hf.main(["--hf", given, "--out", "out"]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(UserError) as raised:
        refuse_foreign(Path(given), "--checkpoint")
    assert raised.value.key == "--checkpoint"
    if case == "hub name":
        assert (
            "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`" in raised.value.remedy
        )


def test_a_model_without_a_tokenizer_is_imported_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hf = save(make_model("Llama 3, sharded"), tmp_path / "hf", "1GB")
    shutil.move(hf / "tokenizer.model", tmp_path / "elsewhere.model")
    arguments = ["--hf", str(hf), "--out", str(tmp_path / "out")]
    assert import_hf.main(arguments) == 2
    assert f"--tokenizer = '{hf}': it contains neither" in capsys.readouterr().err
    assert import_hf.main([*arguments, "--tokenizer", str(tmp_path / "nowhere")]) == 2
    assert "--tokenizer = " in capsys.readouterr().err
    assert import_hf.main([*arguments, "--tokenizer", str(tmp_path / "elsewhere.model")]) == 0
    assert Tokenizer.load(tmp_path / "out").sha256 == tokenizer().sha256


def test_weights_that_are_a_pointer_of_git_lfs_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hf = save(make_model("Llama 3, sharded"), tmp_path / "hf", "1GB")
    (hf / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert import_hf.main(["--hf", str(hf), "--out", str(tmp_path / "out")]) == 2
    assert "run `git lfs pull`" in capsys.readouterr().err


def test_what_another_process_writes_is_left(tmp_path: Path) -> None:
    """Its number may be ours, on another machine or in another container."""
    other = tmp_path / f"out.partial-{os.getpid()}"
    other.mkdir()
    with pytest.raises(UserError, match="it was not written"), new_folder(tmp_path / "out"):
        pass
    assert other.is_dir()
