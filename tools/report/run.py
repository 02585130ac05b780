"""What a run's folder says, as far as it says anything: for the report page.

A run may be going on, may have been killed in the middle of a line, may never have come to its
first step. What is missing or cannot be read is empty.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from errors import UserError
from parallel.pipeline.simulate import Timeline
from runtime.chrome import from_chrome
from runtime.events import read_events
from runtime.ledger import account

FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")  # a run's folder has one of them at least


@dataclass(frozen=True)
class Run:
    """One run, over all its starts."""

    name: str
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)  # status.json
    records: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # events.jsonl
    seconds: dict[str, float] = field(default_factory=dict)  # by cause (runtime/ledger.py)
    # a traced step: each pipeline's name, and what it did
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of that kind."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    def points(self, key: str, scale: float = 1.0) -> list[tuple[float, float]]:
        """(step, value) of every record that has a finite one, by step."""
        found = ((record.get("step"), record.get(key)) for record in self.records)
        return sorted((x, y * scale) for x, y in found if is_number(x) and is_number(y))

    def newest(self, key: str) -> float | None:
        """The value of the last record that has a finite one."""
        return next(
            (value for record in reversed(self.records) if is_number(value := record.get(key))),
            None,
        )

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_run(folder: Path) -> Run:
    """Raises UserError where the folder is no run's."""
    if not any((folder / name).is_file() for name in FILES):
        why = f"has none of {', '.join(FILES)}"
        raise UserError("RUN", str(folder), why, "give a run's folder (run.dir)")
    config_text = _text(folder / "config.yaml")
    events = read_events(folder) if (folder / "events.jsonl").is_file() else []
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None
    try:
        seconds = account(events) if events else {}
    except (KeyError, TypeError, AttributeError):  # lines that a run does not write
        seconds = {}
    return Run(
        folder.resolve().name,
        config_text,
        config if isinstance(config, dict) else {},
        _object(_text(folder / "status.json")),
        [
            record
            for line in _text(folder / "metrics.jsonl").splitlines()
            if (record := _object(line))
        ],
        events,
        seconds,
        _timelines(folder / "trace.json"),
    )


def _timelines(path: Path) -> list[tuple[str, Timeline]]:
    """Of every pipeline of a step that run.trace=true measured."""
    trace = _object(_text(path))
    names = [
        event
        for event in trace.get("traceEvents") or []
        if isinstance(event, dict) and event.get("name") == "process_name"
    ]
    try:
        return [
            (str(event["args"]["name"]), from_chrome(trace, str(path), i))
            for i, event in enumerate(names)
        ]
    except (UserError, KeyError, TypeError):
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is; empty where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
