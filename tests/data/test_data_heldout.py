"""The held-out text is a pure function of document ids, or of texts if there are few documents. A
single file can be prepared and trained on, and evaluation can be switched off."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from data.dataset import TokenDataset
from data.files import Report
from data.heldout import FEW, MOST_DOCUMENTS, Part, Splitter, cut, held_out
from data.prepare import prepare
from data.sources import Document
from errors import UserError
from proofs.ranks import Ranks
from runtime.start.checks import open_train_and_heldout
from settings.load import load_config
from tests.data_samples import MANY, prepared, split_texts, tokenizer
from tests.runs import run, write_config
from tools import prepare as prepare_command
from tools.tokenizer import texts as tokenizer_texts

LINE = "line {} of a small text, in which there is little to learn\n"
LINES = "".join(LINE.format(i) for i in range(400))


def parts(ids: list[str], fraction: float) -> tuple[list[Part], bool]:
    splitter = Splitter((Document(name, f"{name}\n" * 100) for name in ids), fraction)
    return list(splitter), splitter.cuts


def test_the_hash_of_an_id_is_what_it_was_when_folders_were_prepared_before() -> None:
    assert [i for i in range(100) if held_out(f"document {i}", 0.05)] == [40, 70]


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.99])
@pytest.mark.parametrize(
    "text",
    [LINES, "words " * 500, "x" * 3000, "ab", "a\r\nb\r\n"],
    ids=["lines", "words", "x", "ab", "crlf"],
)
def test_a_document_is_cut_near_its_share_and_at_a_line(text: str, fraction: float) -> None:
    at = cut(text, fraction)
    assert 0 < at < len(text)
    assert abs(len(text) - at - fraction * len(text)) <= 61
    if len(text) > 10 and " " in text:
        assert text[at - 1] == ("\n" if "\n" in text else " ")
    assert cut("", fraction) == 1
    assert cut("a", fraction) == 1


def test_few_documents_are_cut_and_many_are_held_out_whole() -> None:
    names = [f"document {i}" for i in range(60)]  # the hash holds out document 40
    few, cuts = parts(names[: FEW - 1], 0.05)
    assert cuts
    assert [part.held_out for part in few] == [False, True] * (FEW - 1)
    whole = [a.text + b.text for a, b in zip(few[::2], few[1::2], strict=True)]
    assert whole == [f"{name}\n" * 100 for name in names[: FEW - 1]]
    many, cuts = parts(names, 0.05)
    assert not cuts
    assert many == [Part(f"{name}\n" * 100, held_out(name, 0.05)) for name in names]


def test_documents_of_which_the_hash_holds_out_none_or_all_are_cut() -> None:
    none = [name for name in map(str, range(200)) if not held_out(name, 0.05)]
    assert parts(none, 0.05)[1]
    assert parts([name for name in map(str, range(60)) if held_out(name, 0.9)], 0.9)[1]
    assert not parts(none, 0.0)[1]  # nothing is to be held out
    names = [f"{name} {i}" for name in none for i in range(9)]
    assert not parts([name for name in names if not held_out(name, 0.05)], 0.05)[1]
    assert len(names) > MOST_DOCUMENTS


def test_one_file_is_prepared_and_trains(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, out = tmp_path / "tiny.txt", tmp_path / "out"
    source.write_text(LINES)
    (tmp_path / "t.model").write_bytes(tokenizer().model)
    tokenizing = ["--tokenizer", str(tmp_path / "t.model"), "--out", str(out)]
    assert prepare_command.main(["--source", str(source), *tokenizing]) == 0
    assert "the last 5% of each document's text is held out" in capsys.readouterr().out
    (trained,), (held,) = split_texts(out, "train"), split_texts(out, "heldout")
    assert trained + held == LINES
    assert (trained, held) == (LINES[: cut(LINES, 0.05)], LINES[cut(LINES, 0.05) :])
    assert json.loads((out / "index.json").read_text())["heldout"] == "the end of each document"
    options = Namespace(source=[str(source)], text_field=None, split="train", skip=[])
    options.heldout_fraction, options.max_characters = 0.05, 10**9
    assert list(tokenizer_texts(options, Report())) == [trained]
    config = write_config(tmp_path, out, train={"steps": 1, "eval_interval": 1, "eval_samples": 4})
    run(ranks, 1, config)
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_index_of_many_documents_says_nothing_new(tmp_path: Path) -> None:
    """With many documents the index has no new keys, so that the prepared folder is, byte for byte,
    what older versions wrote."""
    keys = set(json.loads((prepared(tmp_path / "out") / "index.json").read_text()))
    assert keys == {"format", "version", "source", "dtype", "vocab_size", "tokenizer_sha256",
                    "bos_id", "eos_id", "heldout_fraction", "empty_documents",
                    "unigram_nats_per_token", "splits"}  # fmt: skip


def test_without_evaluation_no_held_out_split_is_needed(ranks: Ranks, tmp_path: Path) -> None:
    """A folder without held-out text, as older versions prepared it from one document, trains with
    `train.eval_interval=0` and is refused otherwise."""
    (tmp_path / "tiny.txt").write_text(LINES)
    prepare(str(tmp_path / "tiny.txt"), tokenizer(), tmp_path / "out", heldout_fraction=0.0)
    config = write_config(tmp_path, tmp_path / "out", train={"steps": 1, "eval_interval": 1})
    with pytest.raises(UserError, match="split 'heldout' is empty") as raised:
        open_train_and_heldout(load_config(config, []))
    assert "train.eval_interval=0" in raised.value.remedy
    run(ranks, 1, config, "train.eval_interval=0")


def test_a_held_out_split_that_is_too_short_says_what_helps(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text(LINES[:3000])
    prepare(str(tmp_path / "tiny.txt"), tokenizer(), tmp_path / "out")
    assert TokenDataset.open(tmp_path / "out", "heldout").num_tokens < 200
    config = write_config(tmp_path, tmp_path / "out", train={"seq_len": 200, "eval_interval": 1})
    with pytest.raises(UserError, match="and a sample needs 201") as raised:
        open_train_and_heldout(load_config(config, []))
    assert "--heldout-fraction" in raised.value.remedy
    assert open_train_and_heldout(load_config(config, ["train.eval_interval=0"]))[1] is None


def test_documents_of_a_folder_are_not_cut(tmp_path: Path) -> None:
    splitter = Splitter([Document(str(i), "text") for i in range(100)], 0.3)
    assert {part.text for part in splitter} == {"text"}
    assert not splitter.cuts
    assert len(split_texts(prepared(tmp_path / "out", MANY), "heldout")) > 3
