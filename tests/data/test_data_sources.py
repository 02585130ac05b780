"""Every file of a source is read, or reported with the reason why not. An error in a file is
reported with the file's name, the line and a remedy."""

import bz2
import gzip
import importlib
import json
import lzma
import os
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest

from data.files import Report, split_of
from data.sources import documents
from errors import UserError
from tests.data_samples import read, refusal, row, write

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


# --- which files ----------------------------------------------------------------------------------


def test_a_folder_of_mixed_kinds_is_read_whole_and_the_rest_is_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"a.jsonl": row("json"), "b.txt": "text", "c.txt.gz": gzip.compress(b"compressed"),
         "d/e.csv": "text,n\ncsv,1\n", "d/looks_like.txt/f.md": "in a folder named like a file",
         "empty.txt": "", ".hidden/x.txt": "not to be read", "d/.also_hidden.txt": "not to be read",
         "image.png": b"\x89PNG", "README": "no ending", "all.zip": b"PK",
         "package.json": '{"name": "a program", "version": "1"}', "number.json": '{"text": 5}',
         "mixed.json": '[1, {}]', "tsconfig.json": '{ // a comment\n}', "deep.json": "[" * 10**5,
         "latin.json": b'["na\xefve"]', "utf16.json": row("x").encode("utf-16")},
    )  # fmt: skip
    os.symlink(tmp_path, tmp_path / "d" / "loop")
    os.symlink("b.txt", tmp_path / "link.txt")
    os.symlink("nowhere", tmp_path / "broken.txt")
    texts, left_out = read(tmp_path)
    assert texts == ["json", "text", "compressed", "csv", "in a folder named like a file"]
    assert {reason: sorted(names) for reason, names in left_out.items()} == {
        "hidden": [".hidden/", "d/.also_hidden.txt"],
        "a link to something that is read anyway": ["d/loop", "link.txt"],
        "a broken link": ["broken.txt"],
        "an archive (.zip): unpack it": ["all.zip"],
        "unknown file type (.png)": ["image.png"],
        "unknown file type (no extension)": ["README"],
        "empty": ["empty.txt"],
        "JSON, but has no rows with text in column 'text'":
            ["mixed.json", "number.json", "package.json"],
        "JSON, but cannot be read as a table": [
            "deep.json (line 1: it is nested too deeply)",
            "latin.json (line 1: it is not UTF-8 (byte 0xef))",
            "tsconfig.json (line 1: it is not JSON: Expecting property name enclosed in double "
            "quotes, at character 3)",
            "utf16.json (it is UTF-16, not UTF-8)",
        ],
    }  # fmt: skip


def test_links_to_what_is_elsewhere_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"elsewhere/a.txt": "a", "elsewhere/b.txt": "b", "corpus/c.txt": "c"})
    for name in ("first", "second"):
        os.symlink(tmp_path / "elsewhere", tmp_path / "corpus" / name)
    texts, left_out = read(tmp_path / "corpus")
    assert texts == ["c", "a", "b"]
    assert left_out == {"a link to something that is read anyway": ["second"]}


def test_the_report_for_a_person(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": "id,body\n1,words\n", **{f"{i}.bin": "" for i in range(9)}})
    report = Report()
    assert [document.text for document in documents(str(tmp_path), report=report)] == ["words"]
    assert report.lines() == [
        "1 file read, 9 left out:",
        "  unknown file type (.bin): 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 4 more",
        "the text is in the column 'body' of a.csv",
    ]


def test_a_file_that_is_used_in_part_is_not_left_out(tmp_path: Path) -> None:
    lines = [row(random.Random(i).randbytes(500).hex()) for i in range(999)]
    content = gzip.compress("".join(lines).encode())
    write(tmp_path, {"a.jsonl.gz": content[:-9999], "b.jsonl": row(None), "c.jsonl": lines[0]})
    report = Report(["damaged"])
    used = sum(1 for _ in documents(f"{tmp_path}/*", report=report))
    assert report.lines() == [
        "2 files read, 1 left out:",
        "  empty: b.jsonl",
        f"  damaged; what is before it was used: a.jsonl.gz (damaged from document {used} on)",
        "1 null text left out",
        "1 damaged file left out from the damage on",
    ]


@pytest.mark.parametrize(
    ("files", "source", "why"),
    [
        ({}, "", "the folder is empty"),
        ({".git/a.txt": "x"}, "", "nothing in it can be read (hidden: .git/)"),
        ({"c.xyz": "text", "d.xyz": "text", "b.png": "", "b.zip": "PK"}, "",
         "none of its files is of a known type"),
        ({"a.txt": "", "b.jsonl": ""}, "", "it contains no text"),
        ({"a.txt": ""}, "a.txt", "it contains no text"),
        ({"c.jsonl": "\n \n"}, "c.jsonl", "it contains no text"),
        ({"b.tar.gz": b""}, "b.tar.gz", "it is an archive (.tar)"),
    ],
    ids=["empty folder", "hidden", "unknown endings", "empty files", "empty file", "no rows",
         "archive"],
)  # fmt: skip
def test_a_source_without_text_is_refused_for_its_own_reason(
    tmp_path: Path, files: dict, source: str, why: str
) -> None:
    folder = tmp_path / "a [folder]"
    folder.mkdir()
    error = refusal(write(folder, files) / source)
    assert error.why.startswith(why)
    if "c.xyz" in files:  # the remedy works
        _, pattern = shlex.split(error.remedy.split(": ", 1)[1])
        assert read(pattern)[0] == ["text"] * 2


def test_a_glob_reads_each_file_once_and_names_folders(tmp_path: Path) -> None:
    write(tmp_path, {"a/b.txt": "b", "c.txt": "c", "d.unknown": "d", "e.zip": "PK"})
    texts, left_out = read(f"{tmp_path}/*")
    assert texts == ["c", "d"]
    assert list(left_out.values()) == [[f"{tmp_path}/a"], [f"{tmp_path}/e.zip"]]
    assert read(f"{tmp_path}/**/**/*.txt")[0] == ["b", "c"]
    assert "matches no file that can be read" in refusal(f"{tmp_path}/*.zip").why


def test_tables_of_a_folder_have_splits_by_their_names(tmp_path: Path) -> None:
    files = {"data/train-00000-of-00002.jsonl": "a", "data/test-0.jsonl": "b", "latest.jsonl": "c"}
    write(tmp_path, {name: row(text) for name, text in files.items()})
    left_out = {"belongs to split 'test' (--split test)": ["data/test-0.jsonl"]}
    assert read(tmp_path) == (["a", "c"], left_out)
    assert read(tmp_path, split="test")[0] == ["b"]
    error = refusal(tmp_path, split="validation")
    assert (error.key, error.remedy.split(";")[0]) == ("--split", "give one of: test, train")
    assert [split_of(name) for name in ("dev/x.csv", "eval.csv", "valid2.csv", "contest.csv")] == [
        "validation", "test", "validation", "train",
    ]  # fmt: skip


def test_a_data_set_s_card_is_not_text(tmp_path: Path) -> None:
    card = "---\nconfigs:\n- config_name: en\n---\n# Data"
    write(tmp_path, {"README.md": card, "a.jsonl": row("a")})
    assert read(tmp_path) == (["a"], {"describes the data set": ["README.md"]})
    write(tmp_path, {"README.md": "---\nconfigs:\n- config_name: en\n- config_name: fr\n---\n"})
    assert "several data sets: en, fr" in refusal(tmp_path).why
    write(tmp_path, {"README.md": "# Notes\n"})
    assert read(tmp_path)[0] == ["# Notes\n", "a"]


def test_several_sources_are_read_in_order_and_each_file_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a", "b/c.txt": "c", "b/d.jsonl": row("d"), "b/e.csv": "text\ne\n"})
    os.symlink("a.txt", tmp_path / "link.txt")
    write(tmp_path, {"f/c.txt": "another c"})
    names = ["b/d.jsonl", "a.txt", "*.txt", "b", "f", "b/*.csv", "a.txt"]
    report = Report()
    found = list(documents([f"{tmp_path}/{name}" for name in names], report=report))
    assert [document.text for document in found] == ["d", "a", "c", "e", "another c"]
    assert [document.id for document in found] == ["d", "a.txt", "c.txt", "e", "c.txt"]
    twice = ["a.txt", "link.txt", "b/d.jsonl", "b/e.csv", "a.txt"]
    assert report.left_out == {"given twice: read once": [f"{tmp_path}/{name}" for name in twice]}
    with pytest.raises(UserError) as raised:  # all that are not there, before one is read
        list(documents([f"{tmp_path}/x.txt", f"{tmp_path}/a.txt", f"{tmp_path}/y*.txt"]))
    assert raised.value.why.splitlines()[1:] == [
        f"    {tmp_path}/{name}: there is no such file or folder" for name in ("x.txt", "y*.txt")
    ]


# --- content of files -----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_compressed_files_are_read_and_damaged_ones_refused(
    tmp_path: Path, ending: str, name: str
) -> None:
    content = {
        "a.txt": "first\r\nsecond\n" * 999,
        "a.jsonl": row("x" * 99) * 99,
        "a.csv": "text\n" + "words\n" * 999,
    }[name]
    file = write(tmp_path, {name + ending: COMPRESS[ending](content.encode())}) / (name + ending)
    write(tmp_path, {name: content})
    assert read(file)[0] == read(tmp_path / name)[0]
    file.write_bytes(file.read_bytes() * 2)  # members, frames and streams may follow one another
    if name != "a.csv":
        assert "".join(read(file)[0]) == "".join(read(tmp_path / name)[0]) * 2
    for damaged in (file.read_bytes()[:-9], b"junk\xff" * 99):
        file.write_bytes(damaged)
        error = refusal(file)
        assert error.value == str(file)
        assert error.why.startswith("it is damaged")


def test_a_python_without_a_compression_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, {"a.txt.xz": lzma.compress(b"x")}) / "a.txt.xz"
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ImportError))
    assert refusal(file).why == "this Python was built without xz support"


BAD_LINES = {
    "malformed": (b'{"text": \n', "line 3: it is not JSON"),
    "Latin-1": ('{"text": "naïve"}\n'.encode("latin-1"), "line 3: it is not UTF-8"),
    "lone surrogate": (b'{"text": "\\ud83d alone"}\n',
                       r"line 3: 'text' contains a lone surrogate, \ud83d"),
    "list": (b"[1]\n", "line 3: a row must be an object"),
    "nested": (b"[" * 100_000 + b"\n", "line 3: it is nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_bad_line_of_json_is_named(tmp_path: Path, case: str, name: str) -> None:
    bad, why = BAD_LINES[case]
    content = row("fine").encode() + b"\r\n" + bad + row("fine").encode()
    write(tmp_path, {name: gzip.compress(content) if name.endswith("gz") else content})
    error = refusal(tmp_path)
    assert error.value == str(tmp_path / name)
    assert error.why.startswith(why)
    assert read(tmp_path, skip=["damaged"]) == (["fine"] * 2, {})


def test_json_in_its_forms(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": None}, {"text": "nul \0 and \u2028 and 🐍"}]
    lines = "\r\n".join(json.dumps(row) for row in rows)
    forms = {"a.jsonl": b"\xef\xbb\xbf" + lines.encode(), "b.json": lines, "c.ndjson": lines,
             "d.json": json.dumps(rows, indent=1)}  # fmt: skip
    write(tmp_path, forms)
    for name in forms:
        assert read(tmp_path / name)[0] == ["a", rows[2]["text"]]
    one = json.dumps({"text": "one"}, indent=1)
    write(tmp_path, {"one.json": one, "long.jsonl": row("x" * 5_000_000)})
    assert read(tmp_path / "one.json")[0] == ["one"]
    assert read(tmp_path / "long.jsonl")[0] == ["x" * 5_000_000]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_is_read_exactly(tmp_path: Path, separator: str) -> None:
    rows = [["1", "NA"], ["2", 'two\r\nlines, "quoted"; and\ttabs'], ["3", ""]]
    quoted = [[number, f'"{text.replace(chr(34), chr(34) * 2)}"'] for number, text in rows]
    content = "\r\n\r\n".join(separator.join(fields) for fields in [["id", "text"], *quoted])
    write(tmp_path, {"a.csv": b"\xef\xbb\xbf" + content.encode()})
    assert read(tmp_path / "a.csv")[0] == [text for _, text in rows if text]


BAD_CSV = {
    "ragged": (b"b\n", "line 3: it has 1 fields, and the first line names 2 columns"),
    "quote": (b'"open,1\n', "line 3: unexpected end of data"),
    "Latin-1": ("naïve,2\n".encode("latin-1"), "line 3: it is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_bad_line_of_csv_is_named(tmp_path: Path, case: str) -> None:
    bad, why = BAD_CSV[case]
    write(tmp_path, {"a.csv": b"text,n\na,1\n" + bad})
    assert refusal(tmp_path / "a.csv").why.startswith(why)


def test_parquet_without_text_or_damaged_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"n": 1, "title": "a", "body": "b"}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "n, title, body" in refusal(tmp_path / "a.parquet").remedy
    assert read(tmp_path / "a.parquet", text_field="body")[0] == ["b"]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert refusal(tmp_path / "b.parquet").why.startswith("it is damaged or cut short")


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    stream = documents(str(tmp_path))
    next(stream)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match="No such file") as raised:
        next(stream)
    assert raised.value.value == str(tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("encoding", "line"),
    [("latin-1", "line 2: it is not UTF-8 (byte 0xef)"), ("utf-16", "it is UTF-16"),
     ("utf-32", "it is UTF-32")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a text.txt", "a text.txt.gz"])
def test_text_in_another_encoding_is_refused_and_the_remedy_works(
    tmp_path: Path, encoding: str, line: str, name: str
) -> None:
    text = "ein Satz\nnaïve\n"
    content = text.encode(encoding)
    content = gzip.compress(content) if name.endswith("gz") else content
    file = write(tmp_path, {name: content, "a text.utf8.txt": "mine"}) / name
    error = refusal(tmp_path)
    assert error.value == str(file)
    assert error.why.removeprefix("decompressed, ").startswith(line)
    subprocess.run(error.remedy.split("`")[1], shell=True, check=True)
    # in a copy: no remedy overwrites a file
    assert read(tmp_path / "a text.utf8-2.txt")[0] == [text]
    assert (file.read_bytes(), read(tmp_path / "a text.utf8.txt")[0]) == (content, ["mine"])
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read(file)[0] == [text]  # without the byte order mark
