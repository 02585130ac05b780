"""Sources are read exactly and in order, and the prepared data is the same for any number of
workers. The held-out text is a pure function of document ids, or of texts if there are few."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from data.files import Report
from data.heldout import FEW, MOST_DOCUMENTS, Part, Splitter, cut, held_out
from data.prepare import _put_in_place, prepare
from data.readers import MAX_TEXT_CHARS
from data.sources import STDLIB, Document, documents
from data.tokenizer import MODEL, Tokenizer
from errors import UserError
from runtime.start.checks import open_train_and_heldout
from settings.load import load_config
from tests import ROOT
from tests.data_samples import (
    MANY,
    SOURCE,
    prepare_by_command,
    prepared,
    row,
    split_texts,
    texts_of,
    tokenizer,
    write,
)
from tests.runs import STALE, contents, names, write_config
from tools import tokenizer as tokenizer_command
from tools.tokenizer import texts as tokenizer_texts


def test_stdlib_is_real_sorted_and_without_tests() -> None:
    read = list(documents(STDLIB))
    files = [document.id for document in read]
    assert files == sorted(files)
    assert {"json/decoder.py", "asyncio/base_events.py", "heapq.py"} <= set(files)
    folders = {folder for file in files for folder in file.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idle_test"}
    assert sum(len(document.text) for document in read) > 5_000_000


def test_large_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path) -> None:
    text = "".join(f"line {i} ".ljust(90) + "\r\n" for i in range(30_000))
    write(tmp_path, {"large.txt": text, "one_line.txt": "x" * (3 * MAX_TEXT_CHARS)})
    parts = list(documents(str(tmp_path / "large.txt")))
    assert len({part.id for part in parts}) == len(parts) == 3
    assert "".join(part.text for part in parts) == text
    assert all(part.text.endswith("\r\n") for part in parts)
    assert max(map(len, texts_of(str(tmp_path / "one_line.txt")))) <= 2 * MAX_TEXT_CHARS


def test_prepared_documents_are_the_source_and_the_index_counts_them(data: Path) -> None:
    index = json.loads((data / "index.json").read_text())
    named = {shard["file"] for split in index["splits"].values() for shard in split["shards"]}
    assert set(names(data)) == named | {"index.json", "tokenizer.model"}
    assert (data / "tokenizer.model").read_bytes() == tokenizer().model
    assert index["vocab_size"] == tokenizer().vocab_size
    assert index["tokenizer_sha256"] == tokenizer().sha256
    ids: dict[str, list[int]] = {}
    bos, eos = tokenizer().bos_id, tokenizer().eos_id
    source = [(each.text, held_out(each.id, 0.3)) for each in documents(MANY)]
    for name, split in index["splits"].items():
        texts, shards = split_texts(data, name), split["shards"]
        assert texts == [text for text, held in source if held == (name == "heldout")]
        ids[name] = [i for text in texts for i in (bos, *tokenizer().encode(text), eos)]
        assert (split["documents"], split["tokens"]) == (len(texts), len(ids[name]))
        assert split["characters"] == sum(map(len, texts))
        assert split["utf8_bytes"] == sum(len(text.encode()) for text in texts)
        assert len(shards) > 1
        assert all(shard["tokens"] >= 20_000 for shard in shards[:-1])
        assert all(shard["bytes"] == (data / shard["file"]).stat().st_size for shard in shards)
    seen, total = Counter(ids["train"]), len(ids["train"]) + tokenizer().vocab_size
    nats = [-math.log((seen[token] + 1) / total) for token in ids["heldout"]]
    assert index["unigram_nats_per_token"] == pytest.approx(math.fsum(nats) / len(nats), rel=1e-12)


def test_same_bytes_for_any_number_of_workers(data: Path, tmp_path) -> None:
    assert contents(prepared(tmp_path / "three", workers=3)) == contents(data)
    assert len({file.stat().st_mode for file in data.iterdir()}) == 1, "permissions of the umask"


def test_damage_is_refused_or_skipped_and_counted(tmp_path, capsys) -> None:
    """By both commands. Nothing is written of what is refused."""
    source, out, model = tmp_path / "corpus", tmp_path / "out", tmp_path / "t.model"
    model.write_bytes(tokenizer().model)
    rows = [row("a"), "[1]\n", row("\uff21 漢"), row(None), row("")]
    files = {"a.jsonl": "".join(rows), "b.txt": LINES, "c.txt": b"na\xefve"}
    write(source, files | {f"{i}.bin": "" for i in range(9)})
    other = str(write(tmp_path, {"f.txt": "another source"}) / "f.txt")
    prepared_from = ["--heldout-fraction", "0", "--source", other]
    training = ["--source", str(source), "--vocab-size", "300", "--out", str(tmp_path / "u.model")]
    # as it is, although SentencePiece wraps what its iterator raises
    why = f"error: --source = '{source}/a.jsonl': line 2: a row must be an object"
    assert prepare_by_command(source, model, out, *prepared_from) == 2
    assert capsys.readouterr().err.startswith(why)
    assert tokenizer_command.main(training) == 2
    assert capsys.readouterr().err.startswith(why)
    assert names(tmp_path) == ["corpus", "f.txt", "t.model"]
    skip = ["--skip", "damaged", "--skip", "missing"]
    assert prepare_by_command(source, model, out, *prepared_from, *skip) == 0
    said = "unknown file type (.bin): 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 4 more\n"
    said += "damaged: c.txt\n"
    for what in ("empty documents", "null texts", "damaged rows", "damaged files"):
        said += f"{what} left out: 1\n"
    printed = capsys.readouterr().out
    assert f"files read: 3\n{said}" in printed
    index = json.loads((out / "index.json").read_text())
    left_out = ("empty_documents", "null_texts", "damaged_rows", "damaged_files")
    assert [index[name] for name in left_out] == [1, 1, 1, 1]
    assert index["unigram_nats_per_token"] is None, "nothing is held out"
    assert "text_not_kept" not in index
    assert "does not keep" not in printed
    assert shlex.split(index["source"]) == [str(source), other]
    assert split_texts(out, "train") == ["a", "\uff21 漢", LINES, "another source"]
    assert tokenizer_command.main([*training, *skip]) == 0
    assert f"files read: 2\n{said}" in capsys.readouterr().out


class Killed:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple:
        return os._exit, (9,)


def test_a_preparation_that_fails_leaves_nothing(tmp_path) -> None:
    """Also in the middle, when documents have been written; and if a worker is killed."""
    files = {f"{i:02}.txt": "a line of text\n" * 2000 for i in range(20)}
    source = write(tmp_path / "source", files | {"20.txt": b"\xff\xfe"})
    with pytest.raises(UserError, match=r"20\.txt"):
        prepare(str(source), tokenizer(), tmp_path / "out", workers=2)
    mine = Tokenizer({MODEL: tokenizer().model})
    mine.files = {MODEL: Killed()}
    with pytest.raises(UserError, match="--workers"):
        prepare(SOURCE, mine, tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_only_what_prepare_wrote_is_deleted(tmp_path, capsys) -> None:
    """`overwrite` deletes only what `prepare` wrote, and never the source."""
    texts = write(tmp_path / "texts", {"one.txt": "mine alone"})
    with pytest.raises(UserError, match="nor a prepared one"):
        prepared(texts, str(texts), overwrite=True)
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be replaced
    before = contents(prepared(out, SOURCE, heldout_fraction=0.0))
    with pytest.raises(UserError, match=r"(?s)is not empty.* add --overwrite"):
        prepared(out)
    assert contents(out) == before
    prepared(out, SOURCE, overwrite=True)
    assert contents(out) != before
    assert names(tmp_path) == ["out", "texts"]
    link = tmp_path / "link"
    link.symlink_to(out)  # to another disk
    prepared(link, SOURCE, heldout_fraction=0.0, overwrite=True)
    assert link.is_symlink()
    assert contents(out) == before
    link.unlink()
    write(out, {"two.txt": "mine alone"})
    for source in (out, out / "two.txt", tmp_path):
        with pytest.raises(UserError, match=r"contains two\.txt"):
            prepared(out, str(source), overwrite=True)
    notes = texts / "one.txt"  # a tokenizer replaces only a tokenizer
    arguments = ["--source", SOURCE, "--vocab-size", "600", "--out", str(notes)]
    assert tokenizer_command.main(arguments) == 2
    assert "is not a tokenizer" in capsys.readouterr().err
    found = {path.name: path.read_text() for path in tmp_path.rglob("*.txt")}
    assert found == dict.fromkeys(("one.txt", "two.txt"), "mine alone")


def test_what_appears_during_the_work_stays(tmp_path, monkeypatch) -> None:
    def late(*_):
        yield from (Document(str(i), "text") for i in range(30))
        write(tmp_path / "out", {"notes.txt": "mine alone"})

    monkeypatch.setattr("data.prepare.documents", late)
    with pytest.raises(UserError, match="nor a prepared one"):
        prepare("any", tokenizer(), tmp_path / "out")
    assert names(tmp_path) == ["out"]
    monkeypatch.setattr("os.path.ismount", lambda path: True)
    with pytest.raises(UserError, match="mount point"):
        prepare(SOURCE, tokenizer(), tmp_path / "other")


def test_a_terminated_command_leaves_nothing(tmp_path) -> None:
    (tmp_path / "t.model").write_bytes(tokenizer().model)
    said = f"--source {STDLIB} --tokenizer {tmp_path}/t.model --out {tmp_path}/out --workers 1"
    command = [sys.executable, "-m", "tools.prepare", *said.split()]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None and not list(tmp_path.glob(".out.partial-*")):
            time.sleep(0.05)
        process.terminate()
    assert process.returncode == 143
    assert names(tmp_path) == ["t.model"]


def test_commands(tmp_path, capsys, monkeypatch) -> None:
    """They refuse what is wrong before the work begins."""
    model, out = str(tmp_path / "models" / "t.model"), str(tmp_path / "deep" / "out")
    trained = ["--vocab-size", "600", "--out", model]
    assert tokenizer_command.main(["--source", MANY, *trained]) == 0
    assert prepare_by_command(MANY, model, out, "--workers", "2") == 0
    said = capsys.readouterr()
    assert said.err == "", "no progress bar without a terminal"
    assert "tokens/s" in said.out
    wrong = [("--heldout-fraction", "1"), ("--shard-tokens", "0"), ("--out", model), ("--out", out)]
    for option, value in wrong:  # the last one is not replaced without --overwrite
        assert prepare_by_command(SOURCE, model, "unused", option, value) == 2
        assert capsys.readouterr().err.startswith(f"error: {option} = ")
    for option, value in (("--max-characters", "0"), ("--out", str(tmp_path))):
        assert tokenizer_command.main(["--source", SOURCE, *trained, option, value]) == 2
        assert capsys.readouterr().err.startswith(f"error: {option} = ")
    monkeypatch.setattr(Tokenizer, "train", Mock(side_effect=AssertionError("too late")))
    trained[-1] = f"{model}/in_a_file.model"
    assert tokenizer_command.main(["--source", SOURCE, *trained]) == 2


LINES = "".join(f"line {i} of a small text, where there is little to learn\n" for i in range(400))


def parts(ids: list[str], fraction: float) -> tuple[list[Part], bool]:
    splitter = Splitter((Document(name, f"{name}\n" * 100) for name in ids), fraction)
    return list(splitter), splitter.cuts


def test_held_out_is_a_pure_function_of_the_id_with_the_right_rate() -> None:
    ids = [f"document {i}" for i in range(20_000)]
    chosen = [i for i in ids if held_out(i, 0.05)]
    assert chosen[:2] == ["document 40", "document 70"], "as when folders were prepared before"
    assert 800 < len(chosen) < 1200
    assert not any(held_out(i, 0.0) for i in ids)
    assert all(held_out(i, 0.2) for i in chosen)  # a larger fraction only adds


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.99])
def test_a_document_is_cut_near_its_share_and_at_a_line(fraction: float) -> None:
    answer = "A question\nand an answer" + " in one line" * 60
    for text in (LINES, "words " * 500, "x" * 3000, "ab", "a\r\nb\r\n", answer):
        at, share = cut(text, fraction), fraction * len(text)
        assert 0 < at < len(text)
        assert abs(len(text) - at - share) <= min(max(share, 1), 61)
        if share > 61 and " " in text and text != answer:
            assert text[at - 1] == ("\n" if "\n" in text else " ")
    assert cut("", fraction) == cut("a", fraction) == 1


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
    # so are those of which the hash holds out none, or all, unless there are very many
    none = [name for name in map(str, range(200)) if not held_out(name, 0.05)]
    assert parts(none, 0.05)[1]
    assert parts([name for name in map(str, range(60)) if held_out(name, 0.9)], 0.9)[1]
    assert not parts(none, 0.0)[1]  # nothing is to be held out
    names = [f"{name} {i}" for name in none for i in range(9)]
    assert not parts([name for name in names if not held_out(name, 0.05)], 0.05)[1]
    assert len(names) > MOST_DOCUMENTS


def test_one_file_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its end is held out. Without held-out text, as older versions prepared one document, a run
    needs `train.eval_interval=0`."""
    write(tmp_path, {"tiny.txt": LINES, "t.model": tokenizer().model})
    source, model, out = (str(tmp_path / name) for name in ("tiny.txt", "t.model", "out"))
    assert prepare_by_command(source, model, out) == 0
    at = cut(LINES, 0.05)
    share = f"is held out for evaluation: {100 * (1 - at / len(LINES)):.3g}% of the text"
    assert share in capsys.readouterr().out
    assert split_texts(Path(out), "train") == [LINES[:at]]
    assert split_texts(Path(out), "heldout") == [LINES[at:]]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["heldout"] == "the end of each document"
    options = Namespace(source=[source], text_field="text", split="train", skip=[])
    options.heldout_fraction, options.max_characters = 0.05, 10**9
    assert list(tokenizer_texts(options, Report())) == [LINES[:at]]
    config = write_config(tmp_path, Path(out), train={"eval_interval": 1})
    assert all(open_train_and_heldout(load_config(config, [])))
    with pytest.raises(UserError, match=r"(?s)and a sample needs 2001.*--heldout-fraction"):
        open_train_and_heldout(load_config(config, ["train.seq_len=2000"]))
    prepare(source, tokenizer(), Path(out), heldout_fraction=0.0, overwrite=True)
    with pytest.raises(UserError, match=r"(?s)split 'heldout' is empty.*train\.eval_interval=0"):
        open_train_and_heldout(load_config(config, []))
    assert open_train_and_heldout(load_config(config, ["train.eval_interval=0"]))[1] is None


OLD, NEW = {"out/file": b"old", ".out.partial/file": b"new"}, {"out/file": b"new"}


@pytest.mark.parametrize(
    ("renamed", "is_done", "left"),
    [("out", True, OLD), (".out.partial", False, OLD), (".out.partial", True, NEW)],
)
def test_a_replacement_that_is_interrupted_leaves_a_whole_folder(tmp_path, renamed, is_done, left):
    """Before or after a rename."""
    write(tmp_path, OLD)
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> None:
        if is_done or path.name != renamed:
            rename(path, to)
        if path.name == renamed:
            raise KeyboardInterrupt

    with patch.object(Path, "rename", interrupted), pytest.raises(KeyboardInterrupt):
        _put_in_place(tmp_path / ".out.partial", tmp_path / "out")
    assert contents(tmp_path) == left


def test_a_replacement_that_cannot_be_undone_keeps_the_old_folder(tmp_path):
    """A file system that fails is not taken for one that has no such folder, as by Path.exists from
    Python 3.14 on."""
    write(tmp_path, OLD)
    rename, stat = Path.rename, os.stat

    def failing(path: Path, to: Path) -> None:
        if path.name == ".out.partial":
            raise STALE
        rename(path, to)

    def stale(path: Path, **options: bool) -> os.stat_result:
        if str(path).endswith("-old"):
            raise STALE
        return stat(path, **options)

    exists = patch.object(Path, "exists", lambda path: os.path.exists(path))
    fails = patch.object(Path, "rename", failing)
    with exists, fails, patch.object(os, "stat", stale), pytest.raises(OSError, match="Stale"):
        _put_in_place(tmp_path / ".out.partial", tmp_path / "out")
    assert contents(tmp_path / ".out.partial-old") == {"file": b"old"}
