"""Every file of a source is read, or reported with the reason why not. An error in a file is
reported with the file's name, the line and a remedy. A file is what its first bytes say, and a
table's text is in the column that its rows show."""

import bz2
import gzip
import json
import lzma
import os
import random
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.files import Report, split_of
from data.sources import documents
from errors import UserError
from tests.data_samples import read, refusal, row, texts_of, write

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
    os.symlink("/dev/null", tmp_path / "device.txt")
    texts, left_out = read(tmp_path)
    assert texts == ["json", "text", "compressed", "csv", "in a folder named like a file"]
    assert {reason: sorted(names) for reason, names in left_out.items()} == {
        "hidden": [".hidden/", "d/.also_hidden.txt"],
        "a link to something that is read anyway": ["d/loop", "link.txt"],
        "a broken link": ["broken.txt"],
        "a link to neither a file nor a folder": ["device.txt"],
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
    """A file that is used in part is not left out."""
    lines = [row(random.Random(i).randbytes(500).hex()) for i in range(999)]
    content = gzip.compress("".join(lines).encode())
    files = {"a.jsonl.gz": content[:-9999], "b.jsonl": row(None), "c.csv": "id,body\n1,words\n"}
    write(tmp_path, files | {f"{i}.bin": "" for i in range(9)})
    report = Report(["damaged"])
    used = sum(1 for _ in documents(str(tmp_path), report=report))
    assert report.lines() == [
        "2 files read, 10 left out:",
        "  unknown file type (.bin): 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 4 more",
        "  empty: b.jsonl",
        f"  damaged; what is before it was used: a.jsonl.gz (damaged from document {used} on)",
        "1 null text left out",
        "1 damaged file left out from the damage on",
        "the text is in the column 'body' of c.csv",
    ]


@pytest.mark.parametrize(
    ("files", "source", "why"),
    [
        ({}, "", "the folder is empty"),
        ({".git/a.txt": "x"}, "", "nothing in it can be read (hidden: .git/)"),
        ({"c.xyz": "text", "d.xyz": "text", "b.png": "", "b.zip": "PK"}, "",
         "none of its files is of a known type"),
        ({"a.txt": "", "b.jsonl": "\n \n"}, "", "it contains no text"),
        ({"b.tar.gz": b""}, "b.tar.gz", "it is an archive (.tar)"),
    ],
    ids=["empty folder", "hidden", "unknown endings", "no rows", "archive"],
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


@pytest.mark.parametrize(
    ("ending", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress),
     (".zst", partial(pyarrow.compress, codec="zstd", asbytes=True))],
)  # fmt: skip
def test_compressed_files_are_read_and_damaged_ones_refused(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    packed = compress(row("x" * 99).encode() * 99)
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(packed * 2)  # members, frames and streams may follow one another
    assert read(file)[0] == ["x" * 99] * 198
    for damaged in (packed[:-9], b"junk\xff" * 99):
        file.write_bytes(damaged)
        error = refusal(file)
        assert error.value == str(file)
        assert error.why.startswith("it is damaged")


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


@pytest.mark.parametrize(
    ("name", "encoding", "line"),
    [("a text.txt", "latin-1", "line 2: it is not UTF-8 (byte 0xef)"),
     ("a text.txt.gz", "latin-1", "line 2: it is not UTF-8 (byte 0xef)"),
     ("a text.txt", "utf-16", "it is UTF-16"), ("a text.txt.gz", "utf-32", "it is UTF-32")],
)  # fmt: skip
def test_text_in_another_encoding_is_refused_and_the_remedy_works(
    tmp_path: Path, name: str, encoding: str, line: str
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


# --- what a file is -------------------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PULL = "run `git lfs pull` in its folder"
UNPACK = "unpack it and give the folder, or leave that file out (--skip damaged)"
# a skippable frame, and a frame of one raw block, "text", that asks for a window of 2**31 bytes
SKIPPABLE = b"\x50\x2a\x4d\x18\4\0\0\0skip"
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8" + (4 << 3 | 1).to_bytes(3, "little") + b"text"
TAR = b"a.txt".ljust(257, b"\0") + b"ustar"
NOT_TEXT = {
    **{f"pointer{ending}": (POINTER, "it is a Git LFS pointer", PULL)
       for ending in (".txt", ".json", ".parquet")},
    "packed pointer.gz": (gzip.compress(POINTER.encode()), "decompressed, it is a Git", PULL),
    "annex.txt": ("/annex/objects/SHA256E-s9--1.txt\n", "it is a git-annex", "run `git annex get`"),
    "tar.jsonl.gz": (gzip.compress(TAR), "decompressed, it is a tar archive", UNPACK),
    "xz.gz": (gzip.compress(lzma.compress(b"")), "decompressed, it is compressed again, by xz", ""),
    "parquet.gz": (gzip.compress(b"PAR1\x15\0"), "decompressed, it is a parqu", "decompress it"),
    "a.parquet": ("text", "it is not a parquet table: it begins with b'text'", "copy it again"),
    "arrow.jsonl": (b"ARROW1\0\0", "it is an Arrow or Feather table", "convert it to parquet"),
    "secret.csv": (b"PARE\0PARE", "it is an encrypted parquet table", "decrypt it"),
    "cut.parquet": (b"PAR1\x15\0", "it is damaged or cut short", "copy it again"),
    "paper.md": (b"%PDF-1.7\n", "it is a PDF", "extract its text"),
    "page.csv": ("<!DOCTYPE html>\nx\n", "it is damaged or cut short: it is HTML", "copy it again"),
    "weights.txt": (b"\x08\0\0\0\0\0\0\0{}", "it is not UTF-8 text: it has bytes of value 0",
                    "copy it again"),
    "long.txt.zst": (SKIPPABLE + LONG_WINDOW, "it was compressed with a window above 128 MiB",
                     "decompress a copy, in up to 2 GiB of memory: `zstd -d --long=31 "),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TEXT)
def test_a_file_is_what_its_first_bytes_say(tmp_path: Path, name: str) -> None:
    content, why, remedy = NOT_TEXT[name]
    write(tmp_path, {name: content, "a.txt": "text"})
    # in a folder, a JSON file that is no table is left out; a pointer is refused
    error = refusal(tmp_path if name == "pointer.json" else tmp_path / name)
    assert (error.value, error.why[: len(why)]) == (f"{tmp_path}/{name}", why)
    assert error.remedy.startswith(remedy)


def test_text_may_begin_like_something_else(tmp_path: Path) -> None:
    starts = ["nul " * 200 + "\0", "PARENTS and", "PAR1 is a receptor", "ARROW1 is a name", "FEA1…",
              f"{'.':257}ustar"]  # fmt: skip
    packed = {f"{i}.txt.gz": gzip.compress(text.encode()) for i, text in enumerate(starts)}
    write(tmp_path, {f"{i}.txt": text for i, text in enumerate(starts)} | packed)
    assert read(tmp_path) == ([text for text in starts for _ in range(2)], {})


def test_the_column_of_the_text_is_found_or_asked_for(tmp_path: Path) -> None:
    # the rows before the one that shows the column are read like the others
    late = '{"n": 1}\n{"b": null}\n{"b": ""}\n{"b": "42"}\n{"b": "x"}\n'
    write(
        tmp_path,
        {"one.csv": "id,b\n1,42\n2,x\n", "two.csv": "title,body\na,b\nc,4\n", "late.jsonl": late,
         "text.jsonl": '{"b": "x"}\n' + row("y"), "far.jsonl": '{"n": 1}\n' * 1001 + row("y")},
    )  # fmt: skip
    assert read(tmp_path / "one.csv", ["missing"]) == read(tmp_path / "one.csv")
    assert read(tmp_path / "one.csv")[0] == ["42", "x"]
    error = refusal(tmp_path / "two.csv")
    assert error.key == "--text-field"
    assert error.remedy == "set --text-field to one of: title, body; or leave that file out"
    assert read(tmp_path / "two.csv", text_field="body")[0] == ["b", "4"]
    assert "line 2 has a column 'text'" in refusal(tmp_path / "text.jsonl").why
    report = Report(["missing"])
    assert texts_of(f"{tmp_path}/late.jsonl", report=report) == ["42", "x"]
    assert [*report.counts.values()] == [1, 1, 1, 0, 0]
    assert "line 1 of" in refusal(tmp_path / "late.jsonl").why
    error = refusal(tmp_path / "one.csv", skip=["missing"], text_field="text")
    assert "have no such column" in error.why
    assert refusal(tmp_path / "far.jsonl").remedy.startswith("set --text-field to one of: n;")
    write(tmp_path, {"null.jsonl": '{"id": "a1", "body": null}\n{"id": "a2", "body": "words"}\n'})
    assert "line 2 has a column 'body'" in refusal(tmp_path / "null.jsonl").why
    assert read(tmp_path / "null.jsonl", text_field="body")[0] == ["words"]


def test_rows_without_the_column_are_refused_or_counted(tmp_path, monkeypatch) -> None:
    typo = [{"text": f"document {i}"} if i % 2 else {"txet": f"document {i}"} for i in range(1, 60)]
    rows = [*typo, {"text": None}]
    file, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    error = refusal(file)
    lines = error.why.splitlines()
    assert (len(lines), lines[0]) == (22, "29 rows or files cannot be read:")
    assert lines[1] == f"    text: line 2 of {file} has no such column"
    assert lines[-1] == "    and 9 more"
    assert "--skip missing" in error.remedy
    # a data set of the hub whose rows differ, as a script may yield them
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: stream)
    for source in (str(file), "some/name"):
        report = Report(["missing"])
        assert texts_of(source, report=report) == [each["text"] for each in typo[::2]]
        assert (report.counts["missing_texts"], report.counts["null_texts"]) == (29, 1)
    stream = iter(typo)  # is read only up to the first fault
    with pytest.raises(UserError, match="row 1 of some/name has no such column"):
        texts_of("some/name")
    assert next(stream) == typo[3]
    # A table of parquet has the column in all rows or in none.
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([typo[0], {"text": None}]), table)
    assert texts_of(str(table), report=(report := Report())) == ["document 1"]
    assert report.counts["null_texts"] == 1
    for source in (file, table):  # a name that is in no row is refused as such
        error = refusal(source, text_field="texts")
        assert error.remedy.startswith("set --text-field to one of: text")
        assert error.key == "--text-field"


def test_compressed_files_and_parquet_are_read_under_any_name(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "e.csv")
    usual = LONG_WINDOW.replace(b"\xa8", b"\x50")  # a window of 2**20 bytes
    write(
        tmp_path,
        {"a.jsonl": gzip.compress(row("a").encode()), "b.jsonl.gz": row("a"),
         "c.jsonl.bz2": lzma.compress(row("a").encode()), "d.xz": "a", "f": SKIPPABLE + usual},
    )  # fmt: skip
    assert [read(file)[0] for file in sorted(tmp_path.iterdir())] == [["a"]] * 5 + [["text"]]


def test_files_of_one_name_below_a_glob_have_ids_of_their_own(tmp_path) -> None:
    write(tmp_path, {f"{n}/x.txt": n for n in "ab"})
    for pattern in ("*/x.txt", "**/x.txt"):
        assert [each.id for each in documents(str(tmp_path / pattern))] == ["a/x.txt", "b/x.txt"]
    assert [each.id for each in documents(str(tmp_path / "a" / "*.txt"))] == ["x.txt"]
