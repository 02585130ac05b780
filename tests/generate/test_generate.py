"""tools/generate from model folder to text: it writes the same tokens as transformers on any number
of ranks, and refuses bad input with a message."""

import contextlib
import functools
import io
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from data.tokenizer import Tokenizer
from errors import UserError
from tests import ROOT
from tests.data_samples import flip_a_bit, tokenizer
from tests.huggingface.huggingface_models import SMALL, RoundTrip, write_theirs
from tools.export import export
from tools.generate import __main__ as program
from tools.generate.load_model import Loaded, load_model
from tools.generate.loop import Sampling, generate
from tools.huggingface.checkpoint_reader import newest


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
    """The command's options for greedy texts."""
    return ["--checkpoint", str(folder), "--max-new-tokens", str(count), "--temperature", "0"]


def tokens_after(arguments, prompt):
    """The tokens of a prompt, and those that the model generates after it."""
    options = program.parse([*arguments, "--prompt", prompt])
    loaded = load_model(options.checkpoint, torch.float32, "cpu")
    tokens, sampling = loaded.encode(prompt), Sampling(options.temperature)
    num_tokens, count = loaded.tokenizer.vocab_size, options.max_new_tokens
    return tokens, [*generate(loaded.model, tokens, count, sampling, loaded.stop, num_tokens)]


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
    ends = {"bos_token_id": tokenizer().bos_id, "eos_token_id": [tokenizer().eos_id, 300]}
    config = SMALL | ends | {"vocab_size": tokenizer().vocab_size + 201}
    trip = RoundTrip("Llama", config, "60KB", torch.float32, {}, {})
    return write_theirs(trip, tmp_path_factory.mktemp("foreign"))


def test_a_hugging_face_folder_writes_what_transformers_writes(ranks, foreign):
    """There are fewer key/value heads than ranks, and the vocabulary does not divide evenly. No
    token is an id beyond the tokenizer's."""
    expected = by_transformers(foreign, "import", 40)
    assert ranks.run(tokens_after, 4, greedy(foreign), "import") == [expected] * 4
    assert max(by_transformers(foreign, "import", 40, padding=True)[1]) >= tokenizer().vocab_size
    assert len(list(foreign.glob("*.safetensors"))) > 1


def test_transformers_writes_from_our_export_what_the_checkpoint_writes(ranks, saved, tmp_path):
    out = tmp_path / "exported"
    export(newest(saved / "run"), out)
    for folder in (saved / "run", out):
        expected = by_transformers(out, "def f", 40)
        assert ranks.run(tokens_after, 2, greedy(folder), "def f") == [expected] * 2


def test_any_ranks_write_what_a_checkpoint_of_any_layout_would(ranks, saved):
    """A checkpoint of a run with tp 2 and pp 2 generates the same text from one process or two,
    from one prompt or several. Each prompt is drawn by its own seed."""
    folder = greedy(saved / "run", 30)
    (alone,) = ranks.run(written, 1, [*folder, "--prompt", "import email"])
    assert alone.startswith("import email")
    assert ranks.run(written, 2, [*folder, "--prompt", "import email"]) == [alone, ""]
    twice = ["--prompt", "import email"] * 2
    (texts,) = ranks.run(written, 1, [*folder, *twice])
    assert texts == f"--- 1\n{alone}--- 2\n{alone}"
    (drawn,) = ranks.run(written, 1, [*folder, *twice, "--temperature", "1"])
    one, other = drawn.removeprefix("--- 1\n").split("--- 2\n")
    assert one != other


def all_written(cases):
    return {name: written(arguments) for name, arguments in cases.items()}


def test_every_rank_refuses_alike(ranks, saved, foreign, tmp_path):
    run = str(saved / "run")
    cases = {
        "--top-k = ": ["--checkpoint", run, "--prompt", "x", "--top-k", "-1"],
        "--checkpoint = ": ["--checkpoint", "/nowhere", "--prompt", "x"],
    }
    for file in ("config.json", min(foreign.glob("*.safetensors")).name):
        folder = shutil.copytree(foreign, tmp_path / file)
        (folder / file).write_text("{")
        cases[f"--checkpoint = '{folder / file}'"] = ["--checkpoint", str(folder), "--prompt", "x"]
    # one byte of a weight has changed: refused with the message of tools.verify
    damaged = shutil.copytree(newest(saved / "run"), tmp_path / "damaged")
    flip_a_bit(max(damaged.glob("*.safetensors")))
    cases["(its sha256 differs)"] = ["--checkpoint", str(damaged), "--prompt", "x"]
    one, other = ranks.run(all_written, 2, cases)
    assert one == other
    for said, message in one.items():
        assert said in message


def test_bos_begins_a_prompt_if_the_tokenizer_says_so():
    for adds_bos, first in ((True, [1]), (False, [])):
        coder = SimpleNamespace(bos_id=1, adds_bos=adds_bos, encode=tokenizer().encode)
        loaded = Loaded(None, coder, frozenset(), 32)
        assert loaded.encode("x") == [*first, *tokenizer().encode("x")]
    with pytest.raises(UserError, match="it has no tokens"):
        loaded.encode("")


@pytest.mark.thorough  # the tests above run its program on ranks
def test_the_command(saved):
    options = ["--prompt", "naïve €", "--dtype", "bfloat16", "--temperature", "1", "--top-k", "3"]
    command = [sys.executable, "-m", "tools.generate", *greedy(saved / "run", 5), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("naïve €")
    assert done.stdout.endswith("\n")
