"""Sources are read exactly and in order, and the prepared data is the same for any number of
workers."""

import gzip
import json
import math
import shlex
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
from tests.runs import names
from tools import tokenizer as tokenizer_command

TEXTS = ["first\r\ntext", "  zweiter\tText\n", "\u2581 третий", "四" * 50]


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


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_tables(tmp_path, name: str) -> None:
    path = tmp_path / name
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    read = list(documents(str(path)))
    assert [document.text for document in read] == TEXTS
    assert [document.id for document in read] == TEXTS
    with pytest.raises(UserError, match="id, text") as raised:
        texts_of(str(path), text_field="content")
    assert raised.value.key == "--text-field"
    with pytest.raises(UserError, match=r"(row 0|line 1) .* int"):
        texts_of(str(path), text_field="id")


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


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_prepared_documents_are_the_source(data: Path, split: str) -> None:
    expected = [
        document.text
        for document in documents(MANY)
        if document.text and held_out(document.id, 0.3) == (split == "heldout")
    ]
    assert len(expected) > 3
    assert split_texts(data, split) == expected


def test_index_counts_what_is_there(data: Path) -> None:
    index = json.loads((data / "index.json").read_text())
    named = {shard["file"] for split in index["splits"].values() for shard in split["shards"]}
    assert set(names(data)) == named | {"index.json", "tokenizer.model"}
    assert (data / "tokenizer.model").read_bytes() == tokenizer().model
    assert index["vocab_size"] == tokenizer().vocab_size
    assert index["tokenizer_sha256"] == tokenizer().sha256
    ids: dict[str, list[int]] = {}
    for name, split in index["splits"].items():
        texts, shards = split_texts(data, name), split["shards"]
        ids[name] = []
        for text in texts:
            ids[name] += [tokenizer().bos_id, *tokenizer().encode(text), tokenizer().eos_id]
        assert (split["documents"], split["tokens"]) == (len(texts), len(ids[name]))
        assert split["characters"] == sum(map(len, texts))
        assert split["utf8_bytes"] == sum(len(text.encode()) for text in texts)
        assert len(shards) > 1
        assert all(shard["tokens"] >= 20_000 for shard in shards[:-1])
        assert all(shard["bytes"] == (data / shard["file"]).stat().st_size for shard in shards)
    seen, total = Counter(ids["train"]), len(ids["train"]) + tokenizer().vocab_size
    nats = [-math.log((seen[token] + 1) / total) for token in ids["heldout"]]
    assert index["unigram_nats_per_token"] == pytest.approx(math.fsum(nats) / len(nats), rel=1e-12)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_bytes_for_any_number_of_workers(tmp_path) -> None:
    one = contents(prepared(tmp_path / "one", workers=1))
    assert contents(prepared(tmp_path / "three", workers=3)) == one
    assert contents(prepared(tmp_path / "control", shard_tokens=30_000)) != one


def test_empty_documents_are_counted_and_left_out(tmp_path) -> None:
    write(tmp_path, {"my rows.jsonl": row("") + row("some text") + row(None) + row("")})
    file = str(tmp_path / "my rows.jsonl")
    index = prepare(file, tokenizer(), tmp_path / "out", heldout_fraction=0.0)
    assert index["source"] == file
    assert (index["empty_documents"], index["null_texts"]) == (2, 1)
    assert index["splits"]["train"]["documents"] == 1
    empty = dict.fromkeys(("tokens", "documents", "characters", "utf8_bytes"), 0)
    assert index["splits"]["heldout"] == empty | {"shards": []}
    assert index["unigram_nats_per_token"] is None


def test_all_damage_is_listed_at_once_or_skipped_and_counted(tmp_path, capsys) -> None:
    source, out, model = tmp_path / "corpus", tmp_path / "out", tmp_path / "t.model"
    model.write_bytes(tokenizer().model)
    fine = [json.dumps({"text": f"document {i}"}).encode() for i in range(30)]
    bad = b'{"text": 5}\n{"text": ["a"]}\n{"text": {"a": "b"}}\n{"text": "\xff"}\n{'
    write(
        source,
        {"a.jsonl": b"\n".join([*fine[:10], bad, *fine[10:20]]),
         "b.jsonl.gz": gzip.compress(b"\n".join(fine[20:]))[:-6],
         "c.txt": b"na\xefve", "d.csv": b"n,text\n1,\xff\n2\n3,csv\n"},
    )  # fmt: skip
    strings = pyarrow.array([b"\xff", b"parquet"]).cast(pyarrow.binary())
    strings = pyarrow.StringArray.from_buffers(2, *strings.buffers()[1:])  # not checked
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), source / "e.parquet")
    assert prepare_by_command(source, model, out, "--heldout-fraction", "0") == 2
    first, second, *listed = capsys.readouterr().err.splitlines()
    assert first == (
        f"text: line 11 of {source}/a.jsonl holds int, not text; "
        "reading on to list all faults; nothing will be written"
    )
    assert second.startswith("error: --source = ")
    assert second.endswith("10 rows or files cannot be read:")
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
    for line, starts in zip(listed, expected, strict=False):
        assert line.strip().startswith(starts)
    assert not out.exists()
    other = str(write(tmp_path, {"f.txt": "another source"}) / "f.txt")
    skip = ["--skip", "damaged", "--skip", "missing"]
    more = ["--heldout-fraction", "0", "--source", other, *skip]
    assert prepare_by_command(source, model, out, *more) == 0
    counts = "8 damaged rows left out\n2 damaged files left out from the damage on\n"
    said = capsys.readouterr().out
    assert counts in said
    assert "damaged: b.jsonl.gz, c.txt" in said
    index = json.loads((out / "index.json").read_text())
    assert (index["damaged_rows"], index["damaged_files"]) == (8, 2)
    assert shlex.split(index["source"]) == [str(source), other]
    expected = [*(f"document {i}" for i in range(20)), "csv", "parquet", "another source"]
    assert split_texts(out, "train") == expected
    arguments = ["--source", str(source), "--skip", "damaged", "--vocab-size", "280"]
    assert tokenizer_command.main([*arguments, "--out", str(tmp_path / "u.model")]) == 0
    assert counts in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"rows.jsonl": ""}, "it contains no text"),
        ({"rows.jsonl": row("") * 3}, "no text"),
        # found in the middle, when others have been written
        ({f"{i:02}.txt": "a line of text\n" * 2000 for i in range(20)} | {"20.txt": b"\xff\xfe"},
         r"20\.txt"),
    ],
    ids=["no rows", "no text", "unreadable after readable ones"],
)  # fmt: skip
def test_what_cannot_be_prepared_is_refused_and_leaves_nothing(
    tmp_path, files: dict[str, str | bytes], said: str
) -> None:
    source = write(tmp_path / "source", files)
    with pytest.raises(UserError, match=said):
        prepare(str(source), tokenizer(), tmp_path / "out", workers=2)
    assert names(tmp_path) == ["source"]


def test_existing_folder_is_only_replaced_when_told(tmp_path) -> None:
    out = prepared(tmp_path / "out", SOURCE, heldout_fraction=0.0)
    before = contents(out)
    with pytest.raises(UserError, match="not empty"):
        prepared(out)
    assert contents(out) == before
    prepared(out, overwrite=True)
    assert contents(out) != before
    assert names(tmp_path) == ["out"]
    (tmp_path / "empty").mkdir()
    prepared(tmp_path / "empty", SOURCE, heldout_fraction=0.0)
    assert contents(tmp_path / "empty") == before


def test_only_what_prepare_wrote_is_deleted(tmp_path) -> None:
    """`overwrite` deletes only what `prepare` wrote, and never the source."""
    texts = write(tmp_path / "texts", {"one.txt": "mine alone"})
    with pytest.raises(UserError, match="nor a prepared one"):
        prepared(texts, str(texts), overwrite=True)
    out = prepared(tmp_path / "out", SOURCE, heldout_fraction=0.0)
    write(out, {"two.txt": "mine alone"})
    for source in (out, out / "two.txt", out / "*.txt"):
        with pytest.raises(UserError, match="contains the source"):
            prepared(out, str(source), overwrite=True)
    assert {path.name for path in tmp_path.rglob("*.txt")} == {"one.txt", "two.txt"}


def test_a_tokenizer_replaces_only_a_tokenizer(tmp_path, capsys) -> None:
    notes = write(tmp_path, {"notes.md": "mine alone"}) / "notes.md"
    arguments = ["--source", SOURCE, "--vocab-size", "600", "--out", str(notes)]
    assert tokenizer_command.main(arguments) == 2
    assert "is not a tokenizer" in capsys.readouterr().err
    assert notes.read_text() == "mine alone"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("prepare", "--heldout-fraction", "1"),
        ("prepare", "--heldout-fraction", "-0.1"),
        ("prepare", "--shard-tokens", "0"),
        ("prepare", "--workers", "0"),
        ("prepare", "--out", "t.model/out"),
        ("tokenizer", "--heldout-fraction", "1"),
        ("tokenizer", "--max-characters", "0"),
        ("tokenizer", "--out", "."),
        ("tokenizer", "--vocab-size", "0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path, capsys, monkeypatch, command: str, option: str, value: str
) -> None:
    monkeypatch.chdir(write(tmp_path, {"t.model": tokenizer().model}))
    if command == "prepare":
        assert prepare_by_command(SOURCE, "t.model", "out", option, value) == 2
    else:
        words = ["--source", SOURCE, "--vocab-size", "300", "--out", "out.model"]
        assert tokenizer_command.main([*words, option, value]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} = ")


def test_commands(tmp_path, capsys) -> None:
    model, out = str(tmp_path / "models" / "t.model"), str(tmp_path / "deep" / "out")
    trained = ["--vocab-size", "600", "--out", model]
    assert tokenizer_command.main(["--source", MANY, *trained]) == 0
    assert prepare_by_command(MANY, model, out, "--workers", "2") == 0
    said = capsys.readouterr()
    assert said.err == "", "no progress bar without a terminal"
    assert "tokens/s" in said.out
    assert prepare_by_command(MANY, model, out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert tokenizer_command.main(["--source", "./nowhere", *trained]) == 2
    assert "Traceback" not in capsys.readouterr().err
