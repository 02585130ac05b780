"""Reads a run folder for the report page.

The run may be in progress, may have been killed in the middle of writing a line, or may not have
reached its first step. Anything missing or unreadable is treated as empty.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.dataset import open_data
from data.tokenizer import clean
from errors import UserError
from parallel.pipeline.simulate import Timeline
from runtime.profiling.chrome import from_chrome
from runtime.records.events import read_events
from runtime.records.ledger import account
from runtime.records.log_lines import content, is_number, json_object, read_records
from runtime.records.status import read_status
from tools.report.ledger import Measured, measure
from training.load_config import load_config

Points = list[tuple[float, float]]
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")  # a run folder has at least one of them


@dataclass(frozen=True)
class Run:
    """One run, over all its starts."""

    name: str
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)  # status.json
    records: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # events.jsonl
    seconds: dict[str, float] = field(default_factory=dict)  # by cause (runtime/records/ledger.py)
    measured: Measured | None = None  # what its saves, restarts and steps took
    # a traced step: (name, timeline) of each pipeline
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of that kind."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    @property
    def stages(self) -> dict[float, str]:
        """The last step before each stage of the data → its name, in UTF-8, which a picture
        needs."""
        stages = [event for event in self.events if event["event"] == "stage"]
        steps = [event for event in stages if is_number(event.get("step"))]
        return {event["step"]: clean(f"stage {event.get('stage')}") for event in steps}

    def points(self, key: str, scale: float = 1.0) -> Points:
        """(step, value) of every record whose value can be drawn, sorted by step."""
        found = ((record["step"], record.get(key)) for record in self.records)
        return sorted((x, y * scale) for x, y in found if can_be_drawn(y))

    def newest(self, key: str) -> float | None:
        """The last finite value of `key`; None if there is none."""
        return next(
            (value for record in reversed(self.records) if is_number(value := record.get(key))),
            None,
        )

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration; empty if it is missing."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def can_be_drawn(value: Any) -> bool:
    """Whether it is a number with which an axis can be computed."""
    return is_number(value) and abs(value) < 1e100


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises UserError if `folder` is not one."""
    if not any((folder / name).is_file() for name in FILES):
        why = f"it has none of {', '.join(FILES)}"
        raise UserError("RUN", str(folder), why, "give a run folder (run.dir)")
    config_text = _text(folder / "config.yaml")
    events = read_events(folder)
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None
    return Run(
        folder.resolve().name,
        config_text,
        config if isinstance(config, dict) else {},
        read_status(folder),
        read_records(folder),
        events,
        account(events) if events else {},
        measure(events) if events else None,
        _timelines(folder / "trace.json"),
    )


def unigram_loss(folder: Path) -> float | None:
    """The held-out loss, in nats per token, of a model that knows only each token's frequency; None
    if the configuration or the data no longer exists."""
    try:
        data = open_data(load_config(str(folder / "config.yaml"), []).data, "heldout")
    except UserError:
        return None
    return data.unigram_nats_per_token


def _timelines(path: Path) -> list[tuple[str, Timeline]]:
    """(name, timeline) of every pipeline of the step traced by run.trace=true."""
    trace = json_object(_text(path))
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
    return content(path).decode("utf-8", errors="replace")
