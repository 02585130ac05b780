"""Selects the files of a folder or a glob that are read, and reports why the others are not.

Every file found is either read or recorded in the `Report` with the reason it was left out. No file
is dropped silently.
"""

import glob
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import yaml

from data.contents import Refused, kind
from errors import UserError, is_file

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
# what a report counts, and the choice of --skip that leaves it out; "": it is always left out
COUNTED = {
    "empty_documents": "",
    "null_texts": "",
    "missing_texts": "missing",
    "damaged_rows": "damaged",
    "damaged_files": "damaged",
}


class Report:
    """What was read of a source, and what was left out; filled in while its documents are read.

    skip: what is left out and counted; otherwise it is refused: `missing` (rows without the column
        of the text) or `damaged` (rows, and files from the damage on).
    files: number of files that gave documents.
    left_out: reason → names of the files.
    counts: see COUNTED.
    """

    def __init__(self, skip: Collection[str] = ()) -> None:
        self.skip = frozenset(skip)
        self.counts = dict.fromkeys(COUNTED, 0)
        self.files = 0
        self.left_out: dict[str, list[str]] = {}

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def fault(self, what: str, error: UserError) -> None:
        """Counts a row or a file that cannot be used, under `what`: a key of COUNTED that --skip
        covers. If such faults are not to be skipped, raises the error as Refused instead."""
        if COUNTED[what] not in self.skip:
            raise Refused(error.key, error.value, error.why, error.remedy) from error
        self.counts[what] += 1

    def reasons(self) -> list[str]:
        """Each reason why files were left out, with the names of some of them, and the counts."""
        found = []
        for reason, names in self.left_out.items():
            more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            found.append(f"{reason}: {', '.join(names[:NAMED])}{more}")
        counts = self.counts.items()
        return found + [f"{what.replace('_', ' ')} left out: {n:,}" for what, n in counts if n]

    def lines(self) -> list[str]:
        """The report as lines of text to print."""
        return [f"files read: {self.files:,}", *self.reasons()] if self.files else self.reasons()


def files_of_folder(folder: Path, split: str, report: Report) -> list[Path]:
    """The folder's text files and its tables of that split, at any depth, sorted by relative path,
    so that the order is the same on every file system. Links are followed, but nothing is read
    twice. Raises UserError if there are none."""
    found = sorted((file.relative_to(folder).as_posix(), file) for file in _walk(folder, report))
    has_tables = any(kind(file) in TABLES for _, file in found)
    chosen = []
    for name, file in found:
        its_kind = kind(file)
        its_split = split_of(name) if its_kind in TABLES else "train"
        if its_kind not in TEXTS | TABLES:
            report.leave_out(name, f"unknown file type ({its_kind or 'no extension'})")
        elif name == "README.md" and has_tables:
            if len(names := _configurations(file)) > 1:
                why = f"its README.md describes several data sets: {', '.join(names)}"
                raise UserError("--source", str(folder), why, "give the folder of one, or a glob")
            report.leave_out(name, "describes the tables")
        elif its_split != split:
            report.leave_out(name, f"belongs to split {its_split!r} (--split {its_split})")
        else:
            chosen.append(file)
    if not chosen:
        why = f"nothing in it can be read ({'; '.join(report.reasons()) or 'the folder is empty'})"
        remedy = "give a folder with text files or tables, or a glob, which reads files of any "
        raise UserError("--source", str(folder), why, f"{remedy}type: '{folder}/**/*.xyz'")
    return chosen


def files_of_glob(pattern: str, report: Report) -> list[Path]:
    """The files that the pattern matches, each once, sorted by path. Matching folders are not
    entered. Raises UserError if it matches only what cannot be read."""
    names = sorted({Path(name).as_posix() for name in glob.iglob(pattern, recursive=True)})
    chosen = []
    for name in names:
        file = Path(name)
        if is_file(file):
            chosen.append(file)
        elif "**" not in pattern or not file.is_dir():
            report.leave_out(name, "not a file (of a folder, give the folder itself, or **)")
    if names and not chosen:
        why = f"it matches no file that can be read ({'; '.join(report.reasons())})"
        raise UserError("--source", pattern, why, "give another pattern")
    return chosen


def split_of(name: str) -> str:
    """The split of the file with this relative path: that of the first word in it that names a
    split, else `train`."""
    word = SPLIT_WORD.search(name.lower())
    return SPLIT_WORDS[word[1]] if word else "train"


def _configurations(readme: Path) -> list[str]:
    """Those named in a README.md of the Hugging Face hub."""
    try:
        parts = readme.read_text(encoding="utf-8").split("---", 2)
        listed = yaml.safe_load(parts[1])["configs"] if len(parts) == 3 else []
        return [str(entry["config_name"]) for entry in listed]
    except (OSError, ValueError, yaml.YAMLError, RecursionError, KeyError, TypeError):
        return []  # any other text


def _walk(folder: Path, report: Report) -> Iterator[Path]:
    """Yields every file that is not hidden, each once: links only to what is elsewhere."""
    root = os.path.realpath(folder)
    seen = {root}

    def refuse(error: OSError) -> None:
        raise error  # os.walk would otherwise skip the folder silently

    for path, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here, entered = os.path.realpath(path), []
        names = [*folders, *files]
        for name in sorted(names, key=lambda each: (Path(path, each).is_symlink(), each)):
            file = Path(path, name)
            is_link = file.is_symlink()
            real = os.path.realpath(file) if is_link else os.path.join(here, name)
            # a link that leads out of the folder (..), or to what is hidden in it, is the only one
            to = os.path.relpath(real, root).split(os.sep) if is_link else ["."]
            elsewhere = any(part.startswith(".") for part in to)
            if name.startswith("."):
                reason = "hidden"
            elif real in seen or (not elsewhere and file.exists()):
                reason = "a link to something that is read anyway"
            elif file.is_dir():
                seen.add(real)
                entered.append(name)
                continue
            elif is_file(file):
                seen.add(real)
                yield file
                continue
            else:
                reason = "neither a file nor a folder, nor a link to one"
            report.leave_out(file.relative_to(folder).as_posix(), reason)
        folders[:] = entered
