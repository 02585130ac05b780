"""Read the lines that are added to a JSON-lines file, also after the file was replaced."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.records.tracker import whole_lines

READ_BYTES = 1 << 24  # at a time, and the longest line: events.jsonl of months is larger


class Follower:
    """Follows one file.

    Args:
        path: the file; it need not exist yet.
        is_whole: whether an object is a line of this file; others are left out.
        tail: of a file that is new or was replaced, read only so many bytes at its end; None: all.
    """

    def __init__(
        self, path: Path, is_whole: Callable[[dict[str, Any]], bool], tail: int | None = None
    ) -> None:
        self.path, self.is_whole, self.tail = path, is_whole, tail
        self._inode, self.offset = -1, 0  # bytes of complete lines that were read
        self.modified = 0.0  # when the file was, as last read, in seconds since 1970

    def read(self, until: int | None = None) -> list[dict[str, Any]]:
        """Return the objects in the complete lines that were added since the last call, of the next
        READ_BYTES; lines that a killed process left unfinished are left out.

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
        self.offset += complete
        return whole_lines(self.path, data[:complete].splitlines(), self.is_whole)
