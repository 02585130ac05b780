"""How every reader gets the lines of a run's own logs, events.jsonl and metrics.jsonl.

They may come from anyone: from a process that was killed in the middle of a line, from a newer
version, from another program. So readers get only the objects that are whole, which have every
entry that a reader relies on: `is_record`, and `is_whole_event` (events.py). Other lines are left
out, with one warning for each file and process. The last line is not odd as long as it is
unfinished: somebody may be writing it.

    read_events, read_records  all lines of a file
    Follower                   those that were added since the last look, also after the file was
                               replaced
"""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import short
from runtime.output import log

LARGEST = 2**63  # of whole numbers: each fits a float
READ_BYTES = 1 << 24  # at a time, and the longest line: events.jsonl of months is larger
IsWhole = Callable[[dict[str, Any]], bool]  # whether an object is a line of a file
_warned: set[Path] = set()  # files with an odd line, of which one warning was given


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse `text` as a JSON object; empty if it is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_number(value: Any, finite: bool = True) -> bool:
    if isinstance(value, float):
        return not finite or math.isfinite(value)
    return type(value) is int and abs(value) < LARGEST  # a bool is an int, too


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def is_record(found: dict[str, Any]) -> bool:
    """Whether an object is a line of metrics.jsonl."""
    return is_count(found.get("step"))


def whole_lines(path: Path, data: bytes, is_whole: IsWhole, begin: int = 0) -> list[dict[str, Any]]:
    """The whole objects in `data`, which was read from byte `begin` of `path` on, where a line
    begins. Blank lines are not odd."""
    found, odd, lines = [], None, data.split(b"\n")
    for number, line in enumerate(lines, 1):
        known = json_object(line)
        if is_whole(known):
            found.append(known)
        elif odd is None and number < len(lines) and line.strip():
            odd = number
    if odd is not None and path.absolute() not in _warned:
        _warned.add(path.absolute())
        shown, before = short(lines[odd - 1].decode(errors="replace")), 0
        with contextlib.suppress(OSError), open(path, "rb") as file:
            before = file.read(begin).count(b"\n")
        why = "is no whole record, and is left out like any other such line"
        log(f"warning: {path}: line {before + odd} {why}: {shown}")
    return found


def content(path: Path) -> bytes:
    """The content of a file in a run folder; empty if it is not there or cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        log(f"warning: {path} cannot be read ({error.strerror}), and is left out")
        return b""


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """Read all lines of metrics.jsonl in order."""
    path = Path(folder) / "metrics.jsonl"
    return whole_lines(path, content(path), is_record)


class Follower:
    """Follows one file.

    Args:
        path: the file; it need not exist yet.
        is_whole: whether an object is a line of this file.
        tail: of a file that is new or was replaced, read only so many bytes at its end; None: all.
    """

    def __init__(self, path: Path, is_whole: IsWhole, tail: int | None = None) -> None:
        self.path, self.is_whole, self.tail = path, is_whole, tail
        self._inode, self.offset = -1, 0  # bytes of complete lines that were read
        self.modified = 0.0  # when the file was, as last read, in seconds since 1970

    def read(self, until: int | None = None) -> list[dict[str, Any]]:
        """Return the objects in the complete lines that were added since the last call, of the next
        READ_BYTES.

        until: do not read beyond so many bytes of the file.
        """
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self.offset:
                    self._inode, self.offset = found.st_ino, 0
                    if self.tail is not None and found.st_size > self.tail:
                        file.seek(-self.tail, os.SEEK_END)
                        file.readline()  # it may begin inside a line
                        self.offset = file.tell()
                if found.st_size == self.offset:
                    return []
                self.modified = found.st_mtime
                file.seek(self.offset)
                left = found.st_size if until is None else until
                data = file.read(max(0, min(left - self.offset, READ_BYTES)))
        except OSError:  # not there yet, or unavailable for a while
            return []
        complete = data.rfind(b"\n") + 1
        if not complete and len(data) == READ_BYTES:
            complete = READ_BYTES  # no line of ours
        begin, self.offset = self.offset, self.offset + complete
        return whole_lines(self.path, data[:complete], self.is_whole, begin)
