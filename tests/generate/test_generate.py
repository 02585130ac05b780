"""tools/generate from model folder to text: it writes the same tokens as transformers on any number
of ranks, and refuses bad input with a message."""

import contextlib
import functools
import io
import shutil
import subprocess
import sys

import pytest
import torch

from data.tokenizer import Tokenizer
from errors import UserError
from tests import ROOT
from tests.data_samples import flip_a_bit, tokenizer
from tests.huggingface.huggingface_models import change
from tools.export import export
from tools.generate import __main__ as program
from tools.generate.load_model import load_model
from tools.generate.loop import generate
from tools.generate.sampling import Sampling
from tools.huggingface.checkpoint_reader import newest
from tools.import_hf import import_hf


def written(arguments):
    """The output of the command on this rank, or the message of its UserError."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            program.run(program.parse(arguments), "cpu")
        except UserError as error:
            return str(error)
    return out.getvalue()


def greedy(folder, count=40):
    """The command's options for one greedy text."""
    return ["--checkpoint", str(folder), "--max-new-tokens", str(count), "--temperature", "0"]


def tokens_after(arguments, prompt):
    """The tokens of a prompt, and those that the model generates after it."""
    options = program.parse(arguments)
    loaded = load_model(options.checkpoint, torch.float32, "cpu")
    tokens, sampling = loaded.encode(prompt), Sampling(options.temperature)
    num_tokens, count = loaded.tokenizer.vocab_size, options.max_new_tokens
    new = generate(loaded.model, [tokens], count, sampling, loaded.stop, num_tokens=num_tokens)
    return tokens, [token for (token,) in new]


@functools.cache
def by_transformers(folder, prompt, count, padding=False):
    """The tokens of a prompt, and those that `transformers` generates greedily after it. `padding`:
    it may generate ids that are no tokens."""
    from transformers import LlamaForCausalLM

    coder = Tokenizer.load(folder)
    tokens = [coder.bos_id, *coder.encode(prompt)]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = torch.tensor([tokens])
    out = model.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=None if padding else [*range(coder.vocab_size, model.config.vocab_size)],
    )
    new = out[0, len(tokens) :].tolist()
    return tokens, new[:-1] if len(new) < count else new  # without the token that ended it


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder written by transformers, in several files: a random Llama with the tests'
    tokenizer. It has more rows than that has tokens, which often have the largest logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer().vocab_size + 21, hidden_size=32, intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        bos_token_id=tokenizer().bos_id, eos_token_id=[tokenizer().eos_id, 300],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[tokenizer().vocab_size :] *= 3
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return folder


@pytest.mark.parametrize("tp", [1, 4])
def test_a_hugging_face_folder_writes_what_transformers_writes(ranks, foreign, tp):
    """The tokens are those of transformers on 1 and 4 ranks; with 4 there are fewer key/value heads
    than ranks, and the vocabulary does not divide evenly. None is an id beyond the tokenizer's."""
    expected = by_transformers(foreign, "import", 40)
    assert ranks.run(tokens_after, tp, greedy(foreign), "import") == [expected] * tp
    assert max(by_transformers(foreign, "import", 40, padding=True)[1]) >= tokenizer().vocab_size
    assert len(list(foreign.glob("*.safetensors"))) > 1


def test_an_imported_folder_stops_where_transformers_stops(ranks, foreign, tmp_path):
    """At a token of its list that is not the tokenizer's eos."""
    folder = shutil.copytree(foreign, tmp_path / "hf")
    end = by_transformers(foreign, "import", 40)[1][30]
    for file in ("config.json", "generation_config.json"):
        change(folder, file, eos_token_id=[tokenizer().eos_id, end])
    expected = by_transformers(folder, "import", 40)
    assert len(expected[1]) <= 30
    import_hf(folder, tmp_path / "imported")
    assert ranks.run(tokens_after, 1, greedy(tmp_path / "imported"), "import") == [expected]


def test_transformers_writes_from_our_export_what_the_checkpoint_writes(ranks, saved, tmp_path):
    out = tmp_path / "exported"
    export(newest(saved / "run"), out)
    for folder in (saved / "run", out):
        expected = by_transformers(out, "def f", 40)
        assert ranks.run(tokens_after, 2, greedy(folder), "def f") == [expected] * 2


def test_any_ranks_write_what_a_checkpoint_of_any_layout_would(ranks, saved):
    """A checkpoint of a run with tp 2 and pp 2 generates the same text from one process or two,
    from one prompt or several."""
    folder = greedy(saved / "run", 30)
    (alone,) = ranks.run(written, 1, [*folder, "--prompt", "import email"])
    assert alone.startswith("import email")
    assert ranks.run(written, 2, [*folder, "--prompt", "import email"]) == [alone, ""]
    prompts = saved / "prompts.txt"
    prompts.write_text("import email\n\nclass", encoding="utf-8")
    several = ["--prompt", "def __init__(self", "--prompts", str(prompts), "--batch-size", "2"]
    (texts,) = ranks.run(written, 1, [*folder, *several])
    assert texts.startswith("--- 1\ndef __init__(self")
    assert f"--- 2\n{alone}--- 3\nclass" in texts


REFUSED = {
    "--temperature": ["--prompt", "x", "--temperature", "-1"],
    "--top-k": ["--prompt", "x", "--top-k", "-1"],
    "--top-p": ["--prompt", "x", "--top-p", "0"],
    "--max-new-tokens": ["--prompt", "x", "--max-new-tokens", "-1"],
    "--batch-size": ["--prompt", "x", "--batch-size", "0"],
    "--prompts": ["--prompts", "/nowhere"],
    "--prompt": [],
    "--checkpoint": ["--prompt", "x", "--checkpoint", "/nowhere"],
}


def all_written(cases):
    return {key: written(arguments) for key, arguments in cases.items()}


@pytest.fixture(scope="module")
def refused(ranks, saved):
    """The messages of each of two ranks."""
    folder = ["--checkpoint", str(saved / "run")]
    return ranks.run(all_written, 2, {key: [*folder, *REFUSED[key]] for key in REFUSED})


@pytest.mark.parametrize("key", REFUSED)
def test_every_rank_refuses_alike(refused, key):
    assert refused[0][key].startswith(f"{key} = ")
    assert refused[1][key] == refused[0][key]


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_hugging_face_folder_is_refused(ranks, foreign, tmp_path, damage):
    folder = shutil.copytree(foreign, tmp_path / "damaged")
    (folder / damage).write_text("{")
    messages = ranks.run(written, 2, ["--checkpoint", str(folder), "--prompt", "x"])
    assert messages == [messages[0]] * 2
    assert messages[0].startswith(f"--checkpoint = '{folder / damage}'")


def test_nothing_is_generated_from_a_damaged_checkpoint(ranks, saved, tmp_path):
    """If one byte of a weight has changed, every rank refuses to generate, with the same message as
    tools.verify."""
    folder = shutil.copytree(newest(saved / "run"), tmp_path / "run")
    arguments = [*greedy(folder, 1), "--prompt", "x"]
    assert ranks.run(written, 2, arguments)[0].startswith("x")
    file = max(folder.glob("*.safetensors"))
    flip_a_bit(file)
    messages = ranks.run(written, 2, arguments)
    assert messages == [messages[0]] * 2
    assert f"its file {file.name!r} was changed (its sha256 differs)" in messages[0]


def first_tokens(folder):
    loaded = load_model(folder, torch.float32, "cpu")
    return [loaded.encode("x", bos)[0] for bos in (None, True, False)]


def test_bos_begins_a_prompt_unless_told_otherwise(ranks, saved):
    bos, first = tokenizer().bos_id, tokenizer().encode("x")[0]
    assert ranks.run(first_tokens, 1, newest(saved / "run")) == [[bos, bos, first]]


def test_more_ranks_than_heads_are_refused(ranks, saved):
    messages = ranks.run(written, 8, ["--checkpoint", str(saved / "run"), "--prompt", "x"])
    assert messages == [messages[0]] * 8
    assert "--nproc-per-node = 8" in messages[0]
    assert "choose one of [1, 2, 4]" in messages[0]


@pytest.mark.thorough  # a fresh process; the tests above run its program on ranks
def test_the_command(saved):
    options = ["--prompt", "naïve €", "--dtype", "bfloat16", "--temperature", "1", "--top-k", "3"]
    command = [sys.executable, "-m", "tools.generate", *greedy(saved / "run", 5), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("naïve €")
    assert done.stdout.endswith(b"\n")
