"""The interface of a place to which a run's numbers are written, what several of them need, and
how lines of a run's files are read: they may come from anyone, so each is checked."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from errors import short
from output import log

LARGEST = 2**63  # of whole numbers: each fits a float
_warned: set[Path] = set()  # files with an odd line, of which one warning was given
# one logged step: "step" and the measurements; None for those that are not known
Record = dict[str, Any]


class Tracker:
    """Interface: `log` gets each logged step's record, in step order except after `went_back`."""

    name = ""

    def log(self, record: Record) -> None:
        raise NotImplementedError

    def went_back(self, step: int, reached: int) -> None:
        """The run was at step `reached` and continues from `step`; the steps between come again."""

    def close(self, failed: bool) -> None:
        """The process ends."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that are known. A number of one layer is named like
    `experts_by_layer/entropy/017`."""
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    by_layer = record.get("experts_by_layer", {})
    for name, values in by_layer.items():
        if name != "layer":
            for layer, value in zip(by_layer["layer"], values, strict=True):
                found[f"experts_by_layer/{name}/{layer:03d}"] = value
    return found


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


def whole_lines(
    path: Path, lines: Iterable[bytes], is_whole: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The objects in lines of the file `path` that are whole. The others are left out; the first is
    warned of once, but not what a killed process left unfinished."""
    found, odd = [], None
    for line in lines:
        try:
            known = json.loads(line)
        except (ValueError, RecursionError):
            if line.lstrip()[:1] in (b"{", b""):
                continue
            known = None
        if isinstance(known, dict) and is_whole(known):
            found.append(known)
        else:
            odd = line if odd is None else odd
    if odd is not None and path not in _warned:
        _warned.add(path)
        shown = short(odd.decode(errors="replace"))
        log(f"warning: {path} has lines that are no whole records, which are left out: {shown}")
    return found
