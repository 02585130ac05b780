"""Every file of a source is read, or reported with the reason why not. An error in a file is
reported with the file's name, the line and a remedy. A file is what its first bytes say, and a
table's text is in the column that its rows show."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.files import Report, split_of
from data.sources import documents
from errors import UserError
from tests.data_samples import POINTER, read, refusal, row, texts_of, write

# --- which files ----------------------------------------------------------------------------------


def test_a_folder_of_mixed_kinds_is_read_whole_and_the_rest_is_named(tmp_path: Path) -> None:
    write(tmp_path, {
        "a.jsonl": row("json"), "b.txt": "text", "c.txt.gz": gzip.compress(b"compressed"),
        "d/e.csv": "text,n\ncsv,1\n", "d/looks_like.txt/f.md": "in a folder named like a file",
        "empty.txt": "", ".hidden/x.txt": "not to be read", "d/.also_hidden.txt": "not to be read",
        "image.png": b"\x89PNG", "README": "no ending", "all.zip": b"PK",
        "package.json": '{"name": "a program", "version": "1"}', "number.json": '{"text": 5}',
        "mixed.json": '[1, {}]', "utf16.json": row("x").encode("utf-16"), "z.json": row("z"),
    })  # fmt: skip
    os.symlink(tmp_path, tmp_path / "d" / "loop")
    os.symlink("b.txt", tmp_path / "link.txt")
    os.symlink("nowhere", tmp_path / "broken.txt")
    os.symlink("/dev/null", tmp_path / "device.txt")
    texts, left_out = read(tmp_path)
    assert texts == ["json", "text", "compressed", "csv", "in a folder named like a file", "z"]
    assert {reason: sorted(names) for reason, names in left_out.items()} == {
        "hidden": [".hidden", "d/.also_hidden.txt"],
        "a link to something that is read anyway": ["d/loop", "link.txt"],
        "neither a file nor a folder, nor a link to one": ["broken.txt", "device.txt"],
        "unknown file type (.zip)": ["all.zip"],
        "unknown file type (.png)": ["image.png"],
        "unknown file type (no extension)": ["README"],
        "empty": ["empty.txt"],
        "JSON, but its first lines have no text in column 'text'": [
            "mixed.json", "number.json", "package.json", "utf16.json",
        ],
    }  # fmt: skip


def test_links_to_what_is_elsewhere_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"elsewhere/a.txt": "a", "elsewhere/b.txt": "b", "corpus/c.txt": "c"})
    for name in ("first", "second"):
        os.symlink(tmp_path / "elsewhere", tmp_path / "corpus" / name)
    left_out = {"a link to something that is read anyway": ["second"]}
    assert read(tmp_path / "corpus") == (["c", "a", "b"], left_out)
    os.symlink("b.txt", tmp_path / "elsewhere" / "a link.txt")
    write(tmp_path, {"corpus/.git/annex/x": "annexed"})
    os.symlink(".git/annex/x", tmp_path / "corpus" / "d.txt")  # nothing else reads it
    assert sorted(read(tmp_path / "corpus")[0]) == ["a", "annexed", "b", "c"]
    assert texts_of(f"{tmp_path}/elsewhere/*.txt") == ["b", "a"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "nothing in it can be read (the folder is empty)"),
        ({".git/a.txt": "x"}, "nothing in it can be read (hidden: .git)"),
        ({"c.xyz": "text", "d.xyz": "text", "b.zip": "PK"},
         "nothing in it can be read (unknown file type (.zip): b.zip; unknown file type (.xyz)"),
        ({"a.txt": "", "b.jsonl": "\n \n"}, "it contains no text; empty: a.txt, b.jsonl"),
    ],
    ids=["empty folder", "hidden", "unknown endings", "no rows"],
)  # fmt: skip
def test_a_source_without_text_is_refused_for_its_own_reason(tmp_path, files, why) -> None:
    assert refusal(write(tmp_path, files)).why.startswith(why)


def test_a_glob_reads_each_file_once_and_names_folders(tmp_path: Path, monkeypatch) -> None:
    """Files of one name have ids of their own."""
    write(tmp_path, {"a/x.txt": "a", "b/x.txt": "b", "c.txt": "c", "d.unknown": "d"})
    texts, left_out = read(f"{tmp_path}/*")
    assert texts == ["c", "d"]
    assert list(left_out.values()) == [[f"{tmp_path}/a", f"{tmp_path}/b"]]
    assert read(f"{tmp_path}/**/**/*.txt")[0] == ["a", "b", "c"]
    for pattern in ("*/x.txt", "**/x.txt"):
        assert [each.id for each in documents(f"{tmp_path}/{pattern}")] == ["a/x.txt", "b/x.txt"]
    monkeypatch.chdir(tmp_path)
    expanded = ["a/x.txt", f"{tmp_path}/b/x.txt"]  # by a shell
    assert [each.id for each in documents(expanded)] == ["a/x.txt", "b/x.txt"]
    assert [each.id for each in documents(f"{tmp_path}/a/*.txt")] == ["x.txt"]
    assert "matches no file that can be read" in refusal(f"{tmp_path}/[ab]").why


def test_tables_of_a_folder_have_splits_by_their_names(tmp_path: Path) -> None:
    files = {"data/train-00000-of-00002.jsonl": "a", "data/test-0.jsonl": "b", "latest.jsonl": "c"}
    write(tmp_path, {name: row(text) for name, text in files.items()})
    left_out = {"belongs to split 'test' (--split test)": ["data/test-0.jsonl"]}
    assert read(tmp_path) == (["a", "c"], left_out)
    assert read(tmp_path, split="test")[0] == ["b"]
    assert "belongs to split 'test' (--split test): " in refusal(tmp_path, split="dev").why
    splits = {"dev/x": "validation", "eval.y": "test", "valid2.z": "validation", "contest": "train"}
    assert {name: split_of(name) for name in splits} == splits


def test_the_readme_of_tables_is_not_text(tmp_path: Path) -> None:
    write(tmp_path, {"README.md": "# Data", "a.jsonl": row("a")})
    assert read(tmp_path) == (["a"], {"describes the tables": ["README.md"]})
    write(tmp_path, {"README.md": "---\nconfigs:\n- config_name: en\n- config_name: fr\n---\n"})
    assert "several data sets: en, fr" in refusal(tmp_path).why
    write(tmp_path, {"README.md": "# Data"})
    (tmp_path / "a.jsonl").unlink()
    assert read(tmp_path)[0] == ["# Data"]


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
    assert report.left_out["given twice: read once"] == [f"{tmp_path}/{name}" for name in twice]
    for missing in ("x.txt", "y*.txt"):  # before one is read
        with pytest.raises(UserError, match="there is no such file or folder") as raised:
            next(documents([f"{tmp_path}/a.txt", f"{tmp_path}/{missing}"]))
        assert raised.value.value == f"{tmp_path}/{missing}"


# --- content of files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress),
     (".zst", partial(pyarrow.compress, codec="zstd", asbytes=True))],
)  # fmt: skip
def test_compressed_files_are_read_and_damaged_ones_refused(tmp_path, ending, compress) -> None:
    packed = compress(row("x" * 99).encode() * 99)
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(packed * 2)  # members, frames and streams may follow one another
    assert read(file)[0] == ["x" * 99] * 198
    for damaged in packed[:-9], packed + b"x" + packed[1:], b"<html>":
        for name in "a.jsonl", "a.json":  # a .json file of a folder may be no table
            file.unlink()
            file = tmp_path / f"{name}{ending}"
            file.write_bytes(damaged)
            error = refusal(tmp_path)
            assert error.value == str(file)
            assert error.why.startswith("it is damaged")


def test_tables_are_read_exactly(tmp_path: Path) -> None:
    texts = ["first\r\ntext", "  zweiter\tText\n", "\u2581 третий", "nul \0 and \u2028 and 🐍"]
    rows = [{"id": i, "text": text} for i, text in enumerate([*texts, None])]
    lines = "\r\n".join(json.dumps(row) for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    forms = {"a.jsonl": b"\xef\xbb\xbf" + lines.encode(), "b.json": lines, "c.ndjson": lines}
    write(tmp_path, forms)
    for name in [*forms, "d.parquet"]:
        path = str(tmp_path / name)
        assert list(documents(path)) == [(text, text) for text in texts]
        assert re.search("(row 0|line 1) .* int", refusal(path, text_field="id").why)
    write(tmp_path, {"long.jsonl": row("x" * 5_000_000), "list.json": json.dumps(rows)})
    assert read(tmp_path / "long.jsonl")[0] == ["x" * 5_000_000]
    assert "line 1: a row must be an object" in refusal(tmp_path / "list.json").why


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_is_read_exactly(tmp_path: Path, separator: str) -> None:
    rows = [["1", "NA"], ["2", 'two\r\nlines, "quoted"; and\ttabs'], ["3", ""]]
    quoted = [[number, f'"{text.replace(chr(34), chr(34) * 2)}"'] for number, text in rows]
    content = "\r\n\r\n".join(separator.join(fields) for fields in [["id", "text"], *quoted])
    name = "a.tsv" if separator == "\t" else "a.csv"
    write(tmp_path, {name: b"\xef\xbb\xbf" + content.encode()})
    assert read(tmp_path / name)[0] == [text for _, text in rows if text]


def not_utf8() -> bytes:
    """A parquet table of two strings, one of which is not UTF-8."""
    strings = pyarrow.array([b"\xff", b"a"]).cast(pyarrow.binary())
    strings = pyarrow.StringArray.from_buffers(2, *strings.buffers()[1:])  # not checked
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), out)
    return out.getvalue()


LATIN = "ein Satz\nnaïve\n".encode("latin-1")
LATIN_LINE = r"(?s)line 2: it is not UTF-8 \(byte 0xef\).* `iconv -f LATIN1"
# of a file whose first bytes show that it is something else
NEITHER = (
    r"(?s)neither UTF-8 text nor a parquet table: it begins with b.%s.* "
    "unpack or convert it, or copy it again"
)
# file → its content, what is wrong with it, and what is read if that is skipped
DAMAGE: dict[str, tuple[str | bytes, str, list[str]]] = {
    "number.jsonl": (row("a") + row(5) + row("b"), "line 2 of .* holds int, not text", ["a", "b"]),
    "latin.jsonl": (b'{"text": "\xff"}\n{"text": "a"}', r"line 1: .*UTF-8 \(byte 0xff", ["a"]),
    "cut.jsonl": (row("a") + "{", "line 2: it is not JSON: ", ["a"]),
    "half.jsonl": (r'{"text": "\ud83d"}', r"line 1: 'text' contains a lone .*, \\ud83d", []),
    "list.jsonl": ("[1]\n" + row("a"), "line 1: a row must be an object", ["a"]),
    "deep.jsonl": ("[" * 100_000, "line 1: it is nested too deeply", []),
    "cut.jsonl.gz": (gzip.compress(row("a").encode())[:-6], "it is damaged or cut short", []),
    "latin.txt": (LATIN, LATIN_LINE, []),
    "latin text.txt.gz": (gzip.compress(LATIN), LATIN_LINE, []),
    "latin.parquet": (not_utf8(), r"row 0: it is not UTF-8 \(byte 0xff", ["a"]),
    "latin.csv": (b"n,text\n1,\xff\n2,b\n", r"line 2: it is not UTF-8 \(byte 0xff", ["b"]),
    "latin name.csv": (b"text,na\xefve\na,1\n", r"line 1: it is not UTF-8 \(byte 0xef", []),
    "latin names.csv": (b'text,"na\nme\xef"\na,1\n', r"line 2: it is not UTF-8 \(byte 0xef", []),
    "short.csv": ("n,text\n1\n2,b\n", "line 2: it has 1 fields, .* names 2 columns", ["b"]),
    "tar.jsonl.gz": (gzip.compress(b"a.txt\0"), NEITHER % r"a\.txt", []),
    "a.parquet.gz": (gzip.compress(b"PAR1\x15\0"), NEITHER % "PAR1", []),
    "a.parquet": ("text", NEITHER % "text", []),
    "cut.parquet": (b"PAR1\x15\0", "(?s)it is damaged or cut short.* copy it again", []),
    "utf-16.txt": ("text".encode("utf-16"), NEITHER % r"\\xff\\xfe", []),
    "packed.jsonl": (gzip.compress(b"{}"), NEITHER % r"\\x1f\\x8b", []),
    "open.tsv": ('n\ttext\n0\ta\n1\t"open\n', "line 3: unexpected end of data", ["a"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_or_skipped_and_counted(tmp_path: Path, name: str) -> None:
    content, why, texts = DAMAGE[name]
    write(tmp_path, {name: content, "z.txt": "another file"})
    error = str(refusal(tmp_path, skip=["missing"]))
    assert f"{tmp_path / name}" in error
    assert re.search(why, error)
    report = Report(["damaged"])
    assert texts_of(str(tmp_path), report=report) == [*texts, "another file"]
    assert report.counts["damaged_rows"] + report.counts["damaged_files"] == 1
    assert ("damaged" in report.left_out) == bool(report.counts["damaged_files"])


OF_LFS = (POINTER, "it is a Git LFS pointer", "run `git lfs pull` in its folder")
ANNEX = "/annex/objects/SHA256E-s9--1.txt\n"
POINTERS = {
    **dict.fromkeys(("a.txt", "a.jsonl.gz", "a.json", "a.parquet"), OF_LFS),
    "annex.txt": (ANNEX, "it is a git-annex pointer", "run `git annex get` in its folder"),
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_is_refused_and_never_skipped(tmp_path: Path, name: str) -> None:
    """What it points to may be whole."""
    content, why, remedy = POINTERS[name]
    write(tmp_path, {name: content, "text.txt": "text"})
    error = refusal(tmp_path, skip=["damaged"])
    assert (error.value, error.why[: len(why)]) == (f"{tmp_path}/{name}", why)
    assert error.remedy.startswith(remedy)


def test_text_may_begin_like_something_else(tmp_path: Path) -> None:
    """A byte order mark is not part of a text."""
    texts = ["nul " * 200 + "\0", "PAR1 is a receptor", "naïve\n", "packed"]
    write(tmp_path, {"a.txt": texts[0], "b.txt": texts[1], "c.txt": f"\ufeff{texts[2]}",
                     "d.txt.gz": gzip.compress(f"\ufeff{texts[3]}".encode())})  # fmt: skip
    assert read(tmp_path) == (texts, {})


def test_rows_without_the_column_are_refused_or_counted(tmp_path, monkeypatch) -> None:
    typo = [{"text": f"document {i}"} if i % 2 else {"txet": f"document {i}"} for i in range(1, 60)]
    rows = [*typo, {"text": None}]
    file, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    for skip in ([], ["damaged"]):
        error = refusal(file, skip=skip)
        assert (error.key, error.why) == ("--text-field", f"line 2 of {file} has no such column")
        assert "--skip missing" in error.remedy
    # a data set of the hub whose rows differ, as a script may yield them
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: stream)
    for source in (str(file), "some/name"):
        report = Report(["missing"])
        assert texts_of(source, report=report) == [each["text"] for each in typo[::2]]
        assert (report.counts["missing_texts"], report.counts["null_texts"]) == (29, 1)
    twice = documents(["some/name", "some/name"], report=Report(["missing"]))
    assert len(list(twice)) == len(typo[::2])  # read once
    stream = iter(typo)  # is read only up to the first fault
    with pytest.raises(UserError, match="row 1 of some/name has no such column"):
        texts_of("some/name")
    assert next(stream) == typo[2]
    # A table of parquet has the column in all rows or in none.
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([typo[0], {"text": None}]), table)
    assert texts_of(str(table), report=(report := Report())) == ["document 1"]
    assert report.counts["null_texts"] == 1
    for source in (file, table):  # a name that is in no row
        assert "(text" in refusal(source, text_field="texts").remedy
        assert "it contains no text" in refusal(source, skip=["missing"], text_field="texts").why
