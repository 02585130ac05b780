"""A file is what its first bytes say, and a table's text is in the column that its rows show."""

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.contents import utf8_copy
from data.files import Report
from data.sources import documents
from errors import UserError
from tests.data_samples import read, refusal, row, texts_of, write

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PULL = "run `git lfs pull` in its folder"
UNPACK = "unpack it and give the folder, or leave that file out (--skip damaged)"
# a skippable frame, and a frame of one raw block, "text", that asks for a window of 2**31 bytes
SKIPPABLE = b"\x50\x2a\x4d\x18\4\0\0\0skip"
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8" + (4 << 3 | 1).to_bytes(3, "little") + b"text"
TAR = b"a.txt".ljust(257, b"\0") + b"ustar"
NOT_TEXT = {
    **{f"pointer{ending}": (POINTER, "it is a Git LFS pointer", PULL)
       for ending in (".txt", ".csv", ".jsonl", ".json", ".parquet", ".txt.gz")},
    "packed pointer.txt": (gzip.compress(POINTER.encode()), "decompressed, it is a Git", PULL),
    "annex.txt": ("/annex/objects/SHA256E-s9--1.txt\n", "it is a git-annex", "run `git annex get`"),
    "zip.txt": (b"PK\3\4rest", "it is a zip archive", UNPACK),
    "tar.jsonl.gz": (gzip.compress(TAR), "decompressed, it is a tar archive", UNPACK),
    "xz.gz": (gzip.compress(lzma.compress(b"")), "decompressed, it is compressed again, by xz", ""),
    "parquet.gz": (gzip.compress(b"PAR1\x15\0"), "decompressed, it is a parqu", "decompress it"),
    "a.parquet": ("text", "it is not a parquet table: it begins with b'text'", "copy it again"),
    "empty.parquet": ("", "it is not a parquet table: it begins with b''", "copy it again"),
    "arrow.jsonl": (b"ARROW1\0\0", "it is an Arrow or Feather table", "convert it to parquet"),
    "feather.txt": (b"FEA1\0", "it is an Arrow or Feather table", "convert it to parquet"),
    "secret.csv": (b"PARE\0PARE", "it is an encrypted parquet table", "decrypt it"),
    "cut.parquet": (b"PAR1\x15\0", "it is damaged or cut short", "copy it again"),
    "cut.jsonl": (b"PAR1\x15\0", "it is not UTF-8 text: it has bytes of value 0", "copy it again"),
    "paper.md": (b"%PDF-1.7\n", "it is a PDF", "extract its text"),
    "base.txt": (b"SQLite format 3\0", "it is an SQLite database", "export its text"),
    "page.csv": ("<!DOCTYPE html>\nx\n", "it is damaged or cut short: it is HTML", "copy it again"),
    "weights.txt": (b"\x08\0\0\0\0\0\0\0{}", "it is not UTF-8 text: it has bytes of value 0",
                    "copy it again"),
    "16.jsonl": (row("x").encode("utf-16"), "it is UTF-16, not UTF-8", "convert a copy and"),
    "32.csv": ("text\nx\n".encode("utf-32"), "it is UTF-32, not UTF-8", "convert a copy and"),
    "long.txt.zst": (SKIPPABLE + LONG_WINDOW, "it was compressed with a window above 128 MiB",
                     "decompress a copy, in up to 2 GiB of memory: `zstd -d --long=31 "),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TEXT)
def test_a_file_is_what_its_first_bytes_say(tmp_path: Path, name: str) -> None:
    content, why, remedy = NOT_TEXT[name]
    file = write(tmp_path, {name: content}) / name
    error = refusal(file)
    assert (error.value, error.why[: len(why)]) == (str(file), why)
    assert error.remedy.startswith(remedy)


def test_text_may_begin_like_something_else(tmp_path: Path) -> None:
    starts = [
        "nul " * 200 + "\0",
        "PARENTS and",
        "PAR1 is a receptor",
        "ARROW1 is a name",
        "FEA1…",
        f"{'.':257}ustar",
    ]
    packed = {f"{i}.txt.gz": gzip.compress(text.encode()) for i, text in enumerate(starts)}
    write(tmp_path, {f"{i}.txt": text for i, text in enumerate(starts)} | packed)
    assert read(tmp_path) == ([text for text in starts for _ in range(2)], {})
    write(tmp_path, {"a.csv": "PARENT_ID,text\n1,a\n"})
    assert read(tmp_path / "a.csv")[0] == ["a"]


def test_compressed_files_and_parquet_are_read_under_any_name(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "e.csv")
    usual = LONG_WINDOW.replace(b"\xa8", b"\x50")  # a window of 2**20 bytes
    write(
        tmp_path,
        {"a.jsonl": gzip.compress(row("a").encode()), "b.jsonl.gz": row("a"),
         "c.jsonl.bz2": lzma.compress(row("a").encode()), "d.xz": "a", "f": SKIPPABLE + usual},
    )  # fmt: skip
    assert [read(file)[0] for file in sorted(tmp_path.iterdir())] == [["a"]] * 5 + [["text"]]


def test_the_column_of_the_text_is_found_or_asked_for(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one.csv": "number,body\n1,words\n",
            "two.csv": "title,body\na,words\n",
            "late.jsonl": '{"b": "x"}\n' + row("y"),
        },
    )
    assert read(tmp_path / "one.csv")[0] == ["words"]
    error = refusal(tmp_path / "two.csv")
    assert (error.key, error.remedy) == (
        "--text-field",
        "set --text-field to one of: title, body; or leave that file out",
    )
    assert read(tmp_path / "two.csv", text_field="body")[0] == ["words"]
    assert "line 2 has a column 'text'" in refusal(tmp_path / "late.jsonl").why
    # the rows before the one that shows the column are read like the others
    late = '{"n": 1}\n{"b": null}\n{"b": ""}\n{"b": "42"}\n{"b": "x"}\n'
    write(tmp_path, {"c.jsonl": late, "d.csv": "id,b\n1,42\n2,x\n", "e.csv": "t,b\na,b\nc,4\n"})
    report = Report(["missing"])
    texts = [document.text for document in documents(f"{tmp_path}/c.jsonl", report=report)]
    assert (texts, [*report.counts.values()]) == (["42", "x"], [1, 1, 1, 0, 0])
    assert "line 1 of" in refusal(tmp_path / "c.jsonl").why
    assert read(tmp_path / "d.csv", ["missing"]) == read(tmp_path / "d.csv") == (["42", "x"], {})
    assert refusal(tmp_path / "e.csv").key == "--text-field"  # `t` and `b`
    assert (
        "have no such column" in refusal(tmp_path / "d.csv", skip=["missing"], text_field="c").why
    )
    write(tmp_path, {"f.jsonl": '{"n": 1}\n' * 1001 + row("y")})
    assert refusal(tmp_path / "f.jsonl").remedy.startswith("set --text-field to one of: n;")
    assert refusal(tmp_path / "one.csv", text_field="text").key == "--text-field"


TYPO = [{"text": f"document {i}"} if i % 2 else {"txet": f"document {i}"} for i in range(1, 60)]


def test_rows_without_the_column_are_refused_or_counted(tmp_path, monkeypatch) -> None:
    file, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*TYPO, {"text": None}]))
    with pytest.raises(UserError) as raised:
        texts_of(str(file))
    lines = raised.value.why.splitlines()
    assert (len(lines), lines[0]) == (22, "29 rows or files cannot be read:")
    assert lines[1] == f"    text: line 2 of {file} has no such column"
    assert lines[-1] == "    and 9 more"
    assert "--skip missing" in raised.value.remedy
    report = Report(["missing"])
    assert texts_of(str(file), report=report) == [row["text"] for row in TYPO if "text" in row]
    # The independent reader has null for what is missing and for what is null.
    read = datasets.Dataset.from_json(str(file), cache_dir=str(tmp_path / "cache"))
    assert (report.counts["missing_texts"], report.counts["null_texts"]) == (29, 1)
    assert read["text"].count(None) == 30
    # a data set of the hub whose rows differ, as a script may yield them
    stream = datasets.IterableDataset.from_generator(lambda: iter([*TYPO, {"text": None}]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: stream)
    assert texts_of("some/name", report=(hub := Report(["missing"]))) == texts_of(
        str(file), report=report
    )
    assert (hub.counts["missing_texts"], hub.counts["null_texts"]) == (29, 1)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: stream)
    stream = iter(TYPO)  # is read only up to the first fault
    with pytest.raises(UserError, match="row 1 of some/name has no such column"):
        texts_of("some/name")
    assert next(stream) == TYPO[3]
    # A table of parquet has the column in all rows or in none.
    pyarrow.parquet.write_table(read.data.table, table)
    assert len(texts_of(str(table), report=(report := Report()))) == 30
    assert report.counts["null_texts"] == 30
    for source in (file, table):  # a name that is in no row is refused as such
        with pytest.raises(UserError, match="set --text-field to one of: text") as raised:
            texts_of(str(source), text_field="texts")
        assert raised.value.key == "--text-field"


def test_many_lines_that_are_not_utf_8_need_one_remedy(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"text": "na\xefve"}\n' * 9 + row("x").encode()})
    before = utf8_copy.cache_info().misses
    assert read(tmp_path / "a.jsonl", skip=["damaged"])[0] == ["x"]
    assert utf8_copy.cache_info().misses == before + 1


def test_a_pointer_in_a_folder_is_refused_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "text", "b.json": POINTER})
    assert refusal(tmp_path).remedy.startswith(PULL)
