"""Selects the files of a folder or a glob that are read, and reports why the others are not.

Every file found is either read or recorded in the `Report` with the reason it was left out. No file
is dropped silently.
"""

import glob
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import yaml

from data.contents import ARCHIVES, kind
from errors import UserError

TABLES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
_ENDINGS = (
    ".txt .text .md .markdown .rst .tex .html .py .pyi .c .h .cc .cpp .hpp .cu "
    ".go .java .js .ts .rs .rb .sh .sql .scala .kt .swift .lua .jl .r"
)
TEXTS = set(_ENDINGS.split())
# Words in a table's path that name its split, as on the Hugging Face hub.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
NAMED = 5  # the most file names that a report lists for each reason
SHOWN = 20  # the most rows and files that an error lists
# what a report counts, and the choice of --skip that leaves it out; "": it is always left out
COUNTED = {
    "empty_documents": "",
    "null_texts": "",
    "missing_texts": "missing",
    "damaged_rows": "damaged",
    "damaged_files": "damaged",
}


T = TypeVar("T")


class UnknownColumn(UserError):
    """It is not known which column of a table holds the text."""


class Report:
    """What was read of a source, and what was left out; filled in while its documents are read.

    skip: what is left out and counted; otherwise it is refused: `missing` (rows without the column
        of the text) or `damaged` (rows, and files from the damage on).
    announce: whether the first fault is written to standard error as soon as reading continues.
    files: number of files that gave documents.
    columns: columns other than `text` that texts came from, each with one example file.
    left_out: reason → names of the files.
    used_in_part: damaged files that gave documents: each with where the damage begins.
    counts: see COUNTED.
    refused: number of the faults that are not to be skipped; once there is one, nothing is
        prepared, and the rest is only read to list all faults.
    """

    def __init__(self, skip: Collection[str] = (), announce: bool = False) -> None:
        self.skip = frozenset(skip)
        self.counts = dict.fromkeys(COUNTED, 0)
        self.refused = 0
        self._shown: list[UserError] = []
        self.files = 0
        self.columns: dict[str, str] = {}
        self.left_out: dict[str, list[str]] = {}
        self.used_in_part: list[str] = []
        self._announce = announce

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def fault(self, what: str, error: UserError) -> None:
        """Counts a row or a file that cannot be used. what: a key of COUNTED; any other: it is
        refused whatever --skip says."""
        if what in COUNTED:
            self.counts[what] += 1
            if COUNTED[what] in self.skip:
                return
        self.refused += 1
        if len(self._shown) < SHOWN:
            self._shown.append(error)

    def take(self, other: "Report") -> None:
        """Moves the counts and the faults of `other` here."""
        for what, count in other.counts.items():
            self.counts[what] += count
        self.refused += other.refused
        self._shown += other._shown[: SHOWN - len(self._shown)]
        other.counts, other.refused, other._shown = dict.fromkeys(COUNTED, 0), 0, []

    def while_reading(self, things: Iterable[T]) -> Iterator[T]:
        """Yields the files or rows, and announces the first fault once there is another of them."""
        for thing in things:
            if self._announce and self._shown:
                error, self._announce = self._shown[0], False
                why = "reading on to list all faults; nothing will be written"
                print(f"{error.value}: {error.why}; {why}", file=sys.stderr, flush=True)
            yield thing

    def check(self, key: str, value: str) -> None:
        """Raises one UserError for all faults that are not to be skipped: the only one itself, or
        one of `value` that lists them."""
        if self.refused == 1:
            raise self._shown[0]
        if self.refused:
            listed = [f"{error.value}: {error.why}" for error in self._shown]
            if more := self.refused - len(listed):
                listed.append(f"and {more:,} more")
            remedies = [*dict.fromkeys(error.remedy for error in self._shown)]
            why = "\n    ".join([f"{self.refused:,} rows or files cannot be read:", *listed])
            raise UserError(key, value, why, "\n    ".join(remedies[:NAMED]))

    def counted(self) -> list[str]:
        """The counts that are not 0, as text."""
        found = []
        for what, count in self.counts.items():
            name = what.replace("_", " ").removesuffix("s" if count == 1 else "")
            end = " from the damage on" if what == "damaged_files" else ""
            found += [f"{count:,} {name} left out{end}"] if count else []
        return found

    def reasons(self) -> list[str]:
        """Each reason why files were left out, and the names of some of them."""
        return [f"{reason}: {_some(names)}" for reason, names in self.left_out.items()]

    def lines(self) -> list[str]:
        """The report as lines of text to print."""
        found, number = [], sum(map(len, self.left_out.values()))
        if self.files or number:
            files = "file" if self.files == 1 else "files"
            found.append(f"{self.files:,} {files} read, {number:,} left out{':' * bool(number)}")
        found += [f"  {reason}" for reason in self.reasons()]
        if self.used_in_part:
            found.append(f"  damaged; what is before it was used: {_some(self.used_in_part)}")
        found += self.counted()
        columns = self.columns.items()
        return found + [
            f"the text is in the column {column!r} of {name}" for column, name in columns
        ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def files_of_folder(folder: Path, split: str, report: Report) -> list[Path]:
    """The folder's text files and its tables of that split, at any depth, sorted by relative path,
    so that the order is the same on every file system. Links are followed, but nothing is read
    twice. Raises UserError if there are none."""
    found = dict(
        sorted((file.relative_to(folder).as_posix(), file) for file in _walk(folder, report))
    )
    if not found:
        reasons = "; ".join(report.reasons())
        why = f"nothing in it can be read ({reasons})" if reasons else "the folder is empty"
        raise UserError("--source", str(folder), why, "give a folder with text files or tables")
    has_tables = any(kind(file) in TABLES for file in found.values())
    chosen, splits, unknown = [], set(), Counter[str]()
    for name, file in found.items():
        ending = kind(file)
        if name == "README.md" and has_tables and (configurations := _card(file)) is not None:
            if len(configurations) > 1:
                why = f"its README.md describes several data sets: {', '.join(configurations)}"
                remedy = f"give the files of one of them, as a glob: '{folder}/…/*.parquet'"
                raise UserError("--source", str(folder), why, remedy)
            report.leave_out(name, "describes the data set")
        elif ending in ARCHIVES:
            report.leave_out(name, f"an archive ({ending}): unpack it")
        elif ending not in TEXTS | TABLES:
            report.leave_out(name, f"unknown file type ({ending or 'no extension'})")
            unknown[file.suffix] += 1
        elif (its := split_of(name) if ending in TABLES else "train") != split:
            report.leave_out(name, f"belongs to split {its!r} (--split {its})")
            splits.add(its)
        else:
            chosen.append(file)
    if not chosen and splits:
        why = f"no file in {folder} belongs to this split"
        remedy = f"give one of: {', '.join(sorted(splits))}; the files' paths name their splits"
        raise UserError("--split", split, why, remedy)
    if not chosen:
        why = f"none of its files is of a known type ({'; '.join(report.reasons())})"
        remedy = "unpack them, or give a folder with text"
        for ending, _ in unknown.most_common(1):
            pattern = shlex.quote(f"{glob.escape(str(folder))}/**/*{ending}")
            remedy = (
                "if they are text, give them as a glob, which reads files of any type: "
                f"--source {pattern}"
            )
        raise UserError("--source", str(folder), why, remedy)
    return chosen


def files_of_glob(pattern: str, report: Report) -> list[Path]:
    """The files that the pattern matches, each once, sorted by path. Matching folders are not
    entered. Raises UserError if it matches only what cannot be read."""
    names = sorted({Path(name).as_posix() for name in glob.iglob(pattern, recursive=True)})
    chosen = []
    for name in names:
        file = Path(name)
        if file.is_dir():
            if "**" not in pattern:
                report.leave_out(name, "a folder (give the folder itself, or ** for all below it)")
        elif not file.is_file():
            report.leave_out(name, "a broken link" if file.is_symlink() else "not a regular file")
        elif kind(file) in ARCHIVES:
            report.leave_out(name, f"an archive ({kind(file)}): unpack it")
        else:
            chosen.append(file)
    if names and not chosen:
        why = f"it matches no file that can be read ({'; '.join(report.reasons())})"
        raise UserError("--source", pattern, why, "give another pattern")
    return chosen


def split_of(name: str) -> str:
    """The split of the file with this relative path: that of the first word in it that names a
    split, else `train`."""
    word = SPLIT_WORD.search(name.lower())
    return SPLIT_WORDS[word[1]] if word else "train"


def _walk(folder: Path, report: Report) -> Iterator[Path]:
    """Yields every file that is not hidden, each once: first regular files, then links' targets."""
    seen: set[tuple[int, int]] = set()  # files, and folders that were entered
    links = [folder]
    while links:
        link = links.pop(0)
        name = link.relative_to(folder).as_posix()
        if link != folder and not link.exists():
            report.leave_out(name, "a broken link")
        elif _identity(link) in seen:
            report.leave_out(name, "a link to something that is read anyway")
        elif link.is_dir():
            for file in _walk_without_links(link, folder, seen, links, report):
                if link == folder or _identity(file) not in seen:
                    seen.add(_identity(file))
                    yield file
        elif link.is_file():
            seen.add(_identity(link))
            yield link
        else:
            report.leave_out(name, "a link to neither a file nor a folder")


def _walk_without_links(
    top: Path, folder: Path, seen: set[tuple[int, int]], links: list[Path], report: Report
) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error  # os.walk would otherwise skip the folder silently

    for path, folders, files in os.walk(top, onerror=refuse):
        here = Path(path)
        seen.add(_identity(here))
        shown = [name for name in sorted([*folders, *files]) if not name.startswith(".")]
        for name in sorted({*folders, *files} - {*shown}):
            slash = "/" if name in folders else ""
            report.leave_out((here / name).relative_to(folder).as_posix() + slash, "hidden")
        links += [here / name for name in shown if (here / name).is_symlink()]
        real = [name for name in shown if not (here / name).is_symlink()]
        folders[:] = [
            name for name in real if name in set(folders) and _identity(here / name) not in seen
        ]
        for name in real:
            if (here / name).is_file():
                yield here / name
            elif not (here / name).is_dir():
                report.leave_out(
                    (here / name).relative_to(folder).as_posix(), "neither a file nor a folder"
                )


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _card(readme: Path) -> list[str] | None:
    """The configurations named in a README.md of the Hugging Face hub; None for any other text."""
    try:
        parts = readme.read_text(encoding="utf-8").split("---", 2)
        content = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    listed = content.get("configs")
    if not isinstance(listed, list):
        return []
    return [str(entry.get("config_name")) for entry in listed if isinstance(entry, dict)]
