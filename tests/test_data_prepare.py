"""Sources are read exactly and in order, and the prepared data is the same for any number of
workers."""

import gzip
import json
import math
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.heldout import held_out
from data.prepare import prepare
from data.sources import MAX_TEXT_CHARS, STDLIB, documents
from errors import UserError
from tests.data_samples import MANY, SOURCE, prepared, split_texts, texts_of, tokenizer
from tools import prepare as prepare_command
from tools import tokenizer as tokenizer_command

ROOT = Path(__file__).parent.parent
TEXTS = ["first\r\ntext", "  zweiter\tText\n", "\u2581 третий", "四" * 50]


def test_stdlib_is_real_sorted_and_without_tests() -> None:
    read = list(documents(STDLIB))
    names = [document.id for document in read]
    assert names == sorted(names)
    assert {"json/decoder.py", "asyncio/base_events.py", "heapq.py"} <= set(names)
    assert not [
        name
        for name in names
        if {"test", "tests", "site-packages", "idle_test"} & set(name.split("/")[:-1])
    ]
    assert sum(len(document.text) for document in read) > 5_000_000


def test_text_files_are_read_exactly(tmp_path) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert texts_of(str(tmp_path)) == TEXTS
    assert texts_of(str(tmp_path / "*.txt")) == TEXTS
    assert texts_of(str(tmp_path / "1.txt")) == TEXTS[1:2]


def test_large_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path) -> None:
    lines = [f"line {i} ".ljust(90) + "\r\n" for i in range(30_000)]
    (tmp_path / "large.txt").write_text("".join(lines), newline="")
    (tmp_path / "one_line.txt").write_text("x" * (3 * MAX_TEXT_CHARS))
    parts = list(documents(str(tmp_path / "large.txt")))
    assert len(parts) == 3
    assert len({part.id for part in parts}) == 3
    assert "".join(part.text for part in parts) == "".join(lines)
    assert all(part.text.endswith("\r\n") for part in parts)
    assert max(map(len, texts_of(str(tmp_path / "one_line.txt")))) <= 2 * MAX_TEXT_CHARS


def write_tables(folder: Path) -> dict[str, Path]:
    """The same four rows in every table format."""
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    paths = {
        "jsonl": folder / "rows.jsonl",
        "jsonl_gz": folder / "rows2.jsonl.gz",
        "parquet": folder / "rows.parquet",
    }
    paths["jsonl"].write_text(lines)
    paths["jsonl_gz"].write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths["parquet"])
    return paths


@pytest.mark.parametrize("form", ["jsonl", "jsonl_gz", "parquet"])
def test_tables(tmp_path, form: str) -> None:
    path = write_tables(tmp_path)[form]
    read = list(documents(str(path)))
    assert [document.text for document in read] == TEXTS
    assert [document.id for document in read] == TEXTS
    with pytest.raises(UserError, match="id, text") as raised:
        texts_of(str(path), text_field="content")
    assert raised.value.key == "--text-field"
    with pytest.raises(UserError, match=r"(row 0|line 1) .* int"):
        texts_of(str(path), text_field="id")


def test_folder_of_tables_is_a_data_set_with_splits(tmp_path) -> None:
    """A local folder of tables has splits, as a data set on the Hugging Face hub has."""
    for split, texts in (("train", TEXTS), ("test", ["only here"])):
        (tmp_path / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    assert texts_of(str(tmp_path)) == TEXTS
    assert texts_of(str(tmp_path), split="test") == ["only here"]
    with pytest.raises(UserError, match="--split"):
        texts_of(str(tmp_path), split="nowhere")


@pytest.mark.parametrize("name", ["missing.txt", "./missing", "/missing/folder", "missing/*.jsonl"])
def test_missing_sources_are_refused(name: str) -> None:
    with pytest.raises(UserError) as raised:
        texts_of(name)
    assert raised.value.key == "--source"


def test_held_out_is_a_pure_function_of_the_id_with_the_right_rate() -> None:
    ids = [f"document {i}" for i in range(20_000)]
    assert 0.04 < np.mean([held_out(i, 0.05) for i in ids]) < 0.06
    assert not any(held_out(i, 0.0) for i in ids)
    assert all(held_out(i, 0.2) for i in ids if held_out(i, 0.05))  # a larger fraction only adds


def test_prepared_documents_are_the_source(tmp_path) -> None:
    folder = prepared(tmp_path / "out")
    source = list(documents(MANY))
    for split, out in (("train", False), ("heldout", True)):
        expected = [
            document.text
            for document in source
            if document.text and held_out(document.id, 0.3) == out
        ]
        assert len(expected) > 3
        assert split_texts(folder, split) == expected


def test_index_counts_what_is_there(tmp_path) -> None:
    folder = prepared(tmp_path / "out")
    index = json.loads((folder / "index.json").read_text())
    named = {shard["file"] for split in index["splits"].values() for shard in split["shards"]}
    assert {path.name for path in folder.iterdir()} == named | {"index.json", "tokenizer.model"}
    assert (folder / "tokenizer.model").read_bytes() == tokenizer().model
    assert (index["vocab_size"], index["tokenizer_sha256"]) == (
        tokenizer().vocab_size,
        tokenizer().sha256,
    )
    ids = {}
    for name, split in index["splits"].items():
        texts = split_texts(folder, name)
        ids[name] = [
            t
            for text in texts
            for t in [tokenizer().bos_id, *tokenizer().encode(text), tokenizer().eos_id]
        ]
        assert (split["documents"], split["tokens"]) == (len(texts), len(ids[name]))
        assert split["characters"] == sum(map(len, texts))
        assert split["utf8_bytes"] == sum(len(text.encode()) for text in texts)
        assert len(split["shards"]) > 1
        assert all(shard["tokens"] >= 20_000 for shard in split["shards"][:-1])
        assert all(
            shard["bytes"] == (folder / shard["file"]).stat().st_size for shard in split["shards"]
        )
    seen, total = Counter(ids["train"]), len(ids["train"]) + tokenizer().vocab_size
    nats = -math.fsum(math.log((seen[token] + 1) / total) for token in ids["heldout"]) / len(
        ids["heldout"]
    )
    assert index["unigram_nats_per_token"] == pytest.approx(nats, rel=1e-12)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_bytes_for_any_number_of_workers(tmp_path) -> None:
    one = contents(prepared(tmp_path / "one", workers=1))
    assert contents(prepared(tmp_path / "three", workers=3)) == one
    assert contents(prepared(tmp_path / "control", shard_tokens=30_000)) != one


def test_empty_documents_are_counted_and_left_out(tmp_path) -> None:
    rows = [{"text": ""}, {"text": "some text"}, {"text": None}, {"text": ""}]
    file = tmp_path / "my rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = prepare(str(file), tokenizer(), tmp_path / "out", heldout_fraction=0.0)
    assert index["source"] == str(file)
    assert (index["empty_documents"], index["null_texts"]) == (2, 1)
    assert index["splits"]["train"]["documents"] == 1
    assert index["splits"]["heldout"] == {
        "tokens": 0,
        "documents": 0,
        "characters": 0,
        "utf8_bytes": 0,
        "shards": [],
    }
    assert index["unigram_nats_per_token"] is None


def test_all_damage_is_listed_at_once_or_skipped_and_counted(tmp_path, capsys) -> None:
    source, out, model = tmp_path / "corpus", tmp_path / "out", tmp_path / "t.model"
    model.write_bytes(tokenizer().model)
    source.mkdir()
    fine = [json.dumps({"text": f"document {i}"}).encode() for i in range(30)]
    bad = b'{"text": 5}\n{"text": ["a"]}\n{"text": {"a": "b"}}\n{"text": "\xff"}\n{'
    (source / "a.jsonl").write_bytes(b"\n".join([*fine[:10], bad, *fine[10:20]]))
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(fine[20:]))[:-6])
    (source / "c.txt").write_bytes(b"na\xefve")
    (source / "d.csv").write_bytes(b"n,text\n1,\xff\n2\n3,csv\n")
    strings = pyarrow.array([b"\xff", b"parquet"]).cast(pyarrow.binary())
    strings = pyarrow.StringArray.from_buffers(2, *strings.buffers()[1:])  # not checked
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), source / "e.parquet")
    arguments = ["--source", str(source), "--tokenizer", str(model), "--out", str(out)]
    arguments += ["--heldout-fraction", "0", "--workers", "1"]
    assert prepare_command.main(arguments) == 2
    said = capsys.readouterr().err
    first, said = said.split("\n", 1)
    assert first == (
        f"text: line 11 of {source}/a.jsonl holds int, not text; "
        "reading on to list all faults; nothing will be written"
    )
    assert said.startswith("error: --source = ")
    assert "10 rows or files cannot be read:" in said
    expected = [
        f"text: line 11 of {source}/a.jsonl holds int, not text",
        f"text: line 12 of {source}/a.jsonl holds list, not text",
        f"text: line 13 of {source}/a.jsonl holds dict, not text",
        f"{source}/a.jsonl: line 14: it is not UTF-8 (byte 0xff)",
        f"{source}/a.jsonl: line 15: it is not JSON: ",
        f"{source}/b.jsonl.gz: it is damaged or cut short: ",
        f"{source}/c.txt: line 1: it is not UTF-8 (byte 0xef)",
        f"{source}/d.csv: line 2: it is not UTF-8 (byte 0xff)",
        f"{source}/d.csv: line 3: it has 1 fields, and the first line names 2 columns",
        f"{source}/e.parquet: row 0: it is not UTF-8 (byte 0xff)",
    ]
    for line, starts in zip(said.splitlines()[1:], expected, strict=False):
        assert line.strip().startswith(starts)
    assert not out.exists()
    (tmp_path / "f.txt").write_text("another source")
    arguments += ["--source", str(tmp_path / "f.txt"), "--skip", "damaged", "--skip", "missing"]
    assert prepare_command.main(arguments) == 0
    said = capsys.readouterr().out
    assert "8 damaged rows left out\n2 damaged files left out from the damage on\n" in said
    assert "damaged: b.jsonl.gz, c.txt" in said
    index = json.loads((out / "index.json").read_text())
    assert (index["damaged_rows"], index["damaged_files"]) == (8, 2)
    assert shlex.split(index["source"]) == [str(source), str(tmp_path / "f.txt")]
    expected = [*(f"document {i}" for i in range(20)), "csv", "parquet", "another source"]
    assert split_texts(out, "train") == expected
    arguments = ["--source", str(source), "--skip", "damaged", "--vocab-size", "280"]
    assert tokenizer_command.main([*arguments, "--out", str(tmp_path / "u.model")]) == 0
    assert (
        said.split("8 damaged rows")[1].splitlines()[:2]
        == (capsys.readouterr().out.split("8 damaged rows")[1].splitlines()[:2])
    )


@pytest.mark.parametrize(
    "content", ["", "\n".join(['{"text": ""}'] * 3)], ids=["no rows", "no text"]
)
def test_nothing_to_prepare_is_refused_and_leaves_nothing(tmp_path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError):
        prepare(str(tmp_path / "rows.jsonl"), tokenizer(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_failure_in_the_middle_leaves_nothing(tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        (source / f"{i:02}.txt").write_text("a line of text\n" * 10_000)
    (source / "39.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"39\.txt"):
        prepare(str(source), tokenizer(), tmp_path / "out", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_existing_folder_is_only_replaced_when_told(tmp_path) -> None:
    out = prepared(tmp_path / "out", SOURCE, heldout_fraction=0.0)
    before = contents(out)
    with pytest.raises(UserError, match="not empty"):
        prepared(out)
    assert contents(out) == before
    prepared(out, overwrite=True)
    assert contents(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    prepared(tmp_path / "empty", SOURCE, heldout_fraction=0.0)
    assert contents(tmp_path / "empty") == before


def test_only_what_prepare_wrote_is_deleted(tmp_path) -> None:
    """`overwrite` deletes only what `prepare` wrote, and never the source."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("mine alone")
    with pytest.raises(UserError, match="nor a prepared one"):
        prepared(tmp_path / "texts", str(tmp_path / "texts"), overwrite=True)
    out = prepared(tmp_path / "out", SOURCE, heldout_fraction=0.0)
    (out / "two.txt").write_text("mine alone")
    for source in (out, out / "two.txt", out / "*.txt"):
        with pytest.raises(UserError, match="contains the source"):
            prepared(out, str(source), overwrite=True)
    assert {path.name for path in tmp_path.rglob("*.txt")} == {"one.txt", "two.txt"}


def test_a_tokenizer_replaces_only_a_tokenizer(tmp_path, capsys) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("mine alone")
    arguments = ["--source", SOURCE, "--vocab-size", "600", "--out", str(notes)]
    assert tokenizer_command.main(arguments) == 2
    assert "is not a tokenizer" in capsys.readouterr().err
    assert notes.read_text() == "mine alone"


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("heldout_fraction", 1.0, "--heldout-fraction"),
        ("heldout_fraction", -0.1, "--heldout-fraction"),
        ("shard_tokens", 0, "--shard-tokens"),
        ("workers", 0, "--workers"),
    ],
)
def test_bad_options_are_refused(tmp_path, option: str, value: float, key: str) -> None:
    with pytest.raises(UserError) as raised:
        prepare(SOURCE, tokenizer(), tmp_path / "out", **{option: value})
    assert raised.value.key == key


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory") as raised:
        prepare(SOURCE, tokenizer(), tmp_path / "file" / "out")
    assert raised.value.key == "--out"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--heldout-fraction", "1"), ("--max-characters", "0"), ("--out", "."), ("--vocab-size", "0")],
)
def test_the_tokenizer_s_command_refuses_what_makes_no_sense(
    tmp_path, capsys, option: str, value: str
) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    arguments = {
        "--source": str(tmp_path),
        "--vocab-size": "300",
        "--out": str(tmp_path / "out.model"),
    } | {option: value}
    assert tokenizer_command.main([word for pair in arguments.items() for word in pair]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} = ")


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_commands(tmp_path) -> None:
    model, out = str(tmp_path / "models" / "t.model"), str(tmp_path / "deep" / "out")
    trained = run("tools.tokenizer", "--source", MANY, "--vocab-size", "600", "--out", model)
    assert (trained.returncode, trained.stderr) == (0, "")
    done = run(
        "tools.prepare", "--source", MANY, "--tokenizer", model, "--out", out, "--workers", "2"
    )
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar without a terminal
    assert "tokens/s" in done.stdout
    again = run("tools.prepare", "--source", MANY, "--tokenizer", model, "--out", out)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr
    lost = run("tools.tokenizer", "--source", "./nowhere", "--vocab-size", "600", "--out", model)
    assert lost.returncode == 2
    assert "Traceback" not in lost.stderr
