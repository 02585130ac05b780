"""What several files of a Hugging Face folder state must agree; stop tokens and the rest of
generation_config.json survive import and export."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data.prepare import prepare
from data.token_ids import check_tokens
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from proofs.ranks import Ranks
from tests.data_samples import MANY, POINTER, tokenizer
from tests.huggingface.huggingface_models import SMALL, change, random_folder
from tools import export
from tools import prepare as prepare_command
from tools.generate.load_model import load_model
from tools.huggingface import checkpoint_reader
from tools.huggingface.agreement import GENERATION, generation_config
from tools.huggingface.new_folder import new_folder
from tools.huggingface.tokenizer import huggingface_files
from tools.import_hf import import_hf

END = tokenizer().vocab_size  # <|im_end|>, a token that was added beside tokenizer.model
CONFIG = SMALL | {
    "model_type": "llama", "num_hidden_layers": 1,
    "vocab_size": END + 1, "rope_theta": 10_000.0, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip
STATED = {"eos_token_id": [END, 2], "bos_token_id": 1, "pad_token_id": 0, "temperature": 0.6,
          "do_sample": True}  # fmt: skip


def build(folder: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> Path:
    """A model for chats, as many are published: it ends a turn by a token that it added."""
    folder.mkdir()
    tensors = random_folder(folder, architecture, **CONFIG | config)
    save_file(tensors, folder / "model.safetensors")
    change(folder, GENERATION, **STATED)
    change(folder, "added_tokens.json", **{"<|im_end|>": END})
    change(folder, "tokenizer_config.json", chat_template="{{ messages }}", bos_token="<s>")
    return folder


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return build(tmp_path / "chat")


def stops(folders: list[Path]) -> list[set[int]]:
    return [set(load_model(folder, torch.float32, "cpu").stop) for folder in folders]


def test_generation_stops_where_the_folder_says_after_import_and_export(
    chat: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Also of a model that was trained further, whose tokenizer comes with its data."""
    from transformers import GenerationConfig

    imported, out = tmp_path / "imported", tmp_path / "out"
    import_hf(chat, imported)
    export.export(imported, out)
    assert json.loads((out / GENERATION).read_text()) == STATED
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [END, 2]
    for file in ("added_tokens.json", MODEL):
        assert (out / file).read_bytes() == (chat / file).read_bytes()
    told = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (chat, out)]
    assert told[0].items() <= told[1].items()
    theirs = [GenerationConfig.from_pretrained(folder) for folder in (chat, out)]
    assert theirs[0].to_dict() == theirs[1].to_dict()
    assert ranks.run(stops, 1, [chat, imported, out]) == [[{END, 2}] * 3]
    prepare(MANY, Tokenizer.load(imported), tmp_path / "data")
    of_data = Tokenizer.load(tmp_path / "data")
    generation = generation_config(tmp_path / "data", of_data, END + 1)
    assert generation["eos_token_id"] == [END, 2]


def test_config_json_says_what_generation_config_does_not(chat: Path, tmp_path: Path) -> None:
    (chat / GENERATION).unlink()
    change(chat, "config.json", eos_token_id=[2, END], pad_token_id=0)
    change(chat, "tokenizer_config.json", added_tokens_decoder=None)
    import_hf(chat, tmp_path / "imported")
    expected = {"bos_token_id": 1, "eos_token_id": [2, END], "pad_token_id": 0}
    assert json.loads((tmp_path / "imported" / GENERATION).read_text()) == expected


def test_what_llama_cpp_does_not_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hf = build(tmp_path / "hf", "Qwen3ForCausalLM", model_type="qwen3", head_dim=8)
    import_hf(hf, tmp_path / "imported")
    command = ["--checkpoint", str(tmp_path / "imported"), "--out", str(tmp_path / "out")]
    assert export.main(command) == 0
    assert "--override-kv" in capsys.readouterr().out


def other_tokenizer_json(added: str = "") -> dict[str, Any]:
    """With two tokens in each other's places, or with another one that texts have."""
    made = json.loads(huggingface_files(tokenizer(), 32)[JSON])
    vocab = made["model"]["vocab"]
    if added:
        made["added_tokens"] += [{**made["added_tokens"][0], "id": END, "content": added,
                                  "special": False}]  # fmt: skip
    else:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return made


MODEL_CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
# what disagrees → changed fields by file, and what the message says
DISAGREE: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "eos of the two": ({MODEL_CONFIG: {"eos_token_id": 5}},
                       ["config.json: eos_token_id = 5", f"{GENERATION} in", f"[{END}, 2]"]),
    "eos of the tokenizer": ({GENERATION: {"eos_token_id": END}},
                             [f"eos_token_id = {END}: its tokenizer says 2"]),
    "bos of the tokenizer": ({GENERATION: {"bos_token_id": 5}, MODEL_CONFIG: {"bos_token_id": 5}},
                             ["bos_token_id = 5: its tokenizer says 1"]),
    "eos without a row": ({GENERATION: {"eos_token_id": [END, 2, END + 1]}},
                          [f"id of a token, and the model has {END + 1}"]),
    "eos by name": ({TOKENIZER_CONFIG: {"eos_token": "<|im_end|>"}},
                    ["--tokenizer = ", "eos_token is '</s>', and tokenizer_config.json beside it",
                     "names '<|im_end|>'"]),
    "bos in two files": ({"special_tokens_map.json": {"bos_token": "<bos>"}},
                         ["bos_token is '<s>', and special_tokens_map.json beside",
                          "names '<bos>'"]),
    "an added token": ({"added_tokens.json": {"<|im_end|>": 2}},
                       ["added_tokens.json says that token 2 is '<|im_end|>'",
                        "tokenizer.model says '</s>'"]),
    "added tokens of another form": (
        {TOKENIZER_CONFIG: {"added_tokens_decoder": {"0": "<s>"}}},
        ["tokenizer_config.json beside it must have added_tokens_decoder as"]),
    "an added token of texts": (
        {TOKENIZER_CONFIG: {"added_tokens_decoder": {str(END): {"content": "<think>"}}}},
        ["texts have '<think>' as one token by tokenizer_config.json"]),
    "one of tokenizer.json": ({JSON: other_tokenizer_json("<think>")},
                              ["texts have '<think>' as one token by tokenizer.json"]),
    "tokenizer.json": ({JSON: other_tokenizer_json()},
                       [f"{JSON} says that token ", f"{MODEL} says "]),
    "theta": ({MODEL_CONFIG: {"rope_parameters": {"rope_theta": 5e5}}},
              ["rope_theta = 10000.0: rope_parameters says 500000.0"]),
    "model_type": ({MODEL_CONFIG: {"model_type": "qwen3"}},
                   ["model_type = 'qwen3': architectures says 'llama'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREE)
def test_files_that_disagree_are_refused(chat: Path, tmp_path: Path, name: str) -> None:
    changes, said = DISAGREE[name]
    for file, fields in changes.items():
        change(chat, file, **fields)
    with pytest.raises(UserError, match=".*".join(map(re.escape, said))):
        import_hf(chat, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_configuration_says_which_tokens_are_special(chat: Path) -> None:
    change(chat, JSON, **other_tokenizer_json("<think>"))
    special = {"content": "<think>", "special": True}
    change(chat, TOKENIZER_CONFIG, added_tokens_decoder={str(END): special})
    files = {name: (chat / name).read_bytes() for name in (MODEL, JSON, TOKENIZER_CONFIG)}
    check_tokens(files, "chat")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load_model(folder, torch.float32, "cpu")
    return str(error.value)


def test_a_folder_s_tokens_are_compared_by_each_command_that_reads_it(
    chat: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    changes, (said,) = DISAGREE["an added token of texts"]
    change(chat, TOKENIZER_CONFIG, **changes[TOKENIZER_CONFIG])
    command = ["--source", str(chat / MODEL_CONFIG), "--tokenizer", str(chat)]
    assert prepare_command.main([*command, "--out", str(tmp_path / "data")]) == 2
    assert f"--tokenizer = '{chat}': {said}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
    assert f"--checkpoint = '{chat}': {said}" in ranks.run(refusal, 1, chat)[0]


def test_what_cannot_be_read_is_said_so(chat: Path, tmp_path: Path) -> None:
    (chat / JSON).write_text(POINTER)
    with pytest.raises(UserError, match="a Git LFS pointer"):
        import_hf(chat, tmp_path / "out")
    with pytest.raises(UserError, match=r"--hf = .*File name too long"):
        import_hf(Path("x" * 300), tmp_path / "out")
    too_long = pytest.raises(UserError, match=r"--out = .*File name too long")
    with too_long, new_folder(tmp_path / ("x" * 300)):
        pass
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="it already exists"):
        import_hf(chat, tmp_path / "link")


def test_a_checkpoint_s_own_files_are_not_compared(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no other ones. What cannot be read is refused by the option that names it."""
    imported = tmp_path / "imported"
    import_hf(chat, imported)
    monkeypatch.setattr(checkpoint_reader, "verify_checkpoint", checkpoint_reader.read_manifest)
    change(imported, "special_tokens_map.json", eos_token="<|im_end|>")
    export.export(imported, tmp_path / "out")
    broken = (imported / GENERATION).read_text().replace("{", "x", 1)  # of the same size
    (imported / GENERATION).write_text(broken)
    assert export.main(["--checkpoint", str(imported), "--out", str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert f"--checkpoint = '{imported / GENERATION}': it is not JSON" in said
    assert "data.path" in said
    assert "safetensors" not in said


def test_a_refused_tokenizer_may_be_given_by_itself(chat: Path, tmp_path: Path) -> None:
    """If eos has two names, tokenizer.model may be given by itself, or tokenizer.json."""
    change(chat, "tokenizer_config.json", eos_token="<|im_end|>")
    shutil.copy(chat / MODEL, tmp_path / "base.model")
    made = json.loads(huggingface_files(tokenizer(), 32)[JSON])
    made["added_tokens"].append(made["added_tokens"][-1] | {"id": END, "content": "<|im_end|>"})
    (chat / JSON).write_text(json.dumps(made))
    for given, eos in ((tmp_path / "base.model", 2), (chat / JSON, END)):
        import_hf(chat, tmp_path / str(eos), tokenizer_path=given)
        assert Tokenizer.load(tmp_path / str(eos)).eos_id == eos
