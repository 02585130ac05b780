"""How every reader gets the lines of a run's own logs, events.jsonl and metrics.jsonl.

They may come from anyone: from a process that was killed in the middle of a line, from a newer
version, from another program. So readers get only the objects that are whole, which have every
entry that a reader relies on: `is_record`, and `is_whole_event` (events.py). Other lines are left
out, with one warning for each file and process. The last line is not odd as long as it is
unfinished: somebody may be writing it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import short
from runtime.output import log

LARGEST = 2**63  # of whole numbers: each fits a float
IsWhole = Callable[[dict[str, Any]], bool]  # whether an object is a line of a file
_warned: set[Path] = set()  # files with an odd line, of which one warning was given


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse `text` as a JSON object; empty if it is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: Any) -> Any:
    """`value`, with a name in place of each number that JSON does not have: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def is_number(value: Any, finite: bool = True) -> bool:
    if isinstance(value, float):
        return not finite or math.isfinite(value)
    return type(value) is int and abs(value) < LARGEST  # a bool is an int, too


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def is_record(found: dict[str, Any]) -> bool:
    """Whether an object is a line of metrics.jsonl."""
    return is_count(found.get("step"))


def whole_lines(path: Path, data: bytes, is_whole: IsWhole) -> list[dict[str, Any]]:
    """The whole objects in `data`, which was read from `path`. Blank lines are not odd."""
    found, odd, lines = [], None, data.split(b"\n")
    for number, line in enumerate(lines, 1):
        known = json_object(line)
        if is_whole(known):
            found.append(known)
        elif odd is None and number < len(lines) and line.strip():
            odd = number
    if odd is not None and path.absolute() not in _warned:
        _warned.add(path.absolute())
        shown = short(lines[odd - 1].decode(errors="replace"))
        why = "is no whole record, and is left out like any other such line"
        log(f"warning: {path}: line {odd} {why}: {shown}")
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
