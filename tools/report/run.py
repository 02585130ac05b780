"""Reads a run folder for the report page.

The run may be in progress, may have been killed in the middle of writing a line, or may not have
reached its first step. Anything missing or unreadable is treated as empty.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from costs.timeline import Timeline
from data.dataset import open_data
from data.tokenizer import clean
from errors import UserError
from runtime.log.events import read_events
from runtime.log.ledger import account
from runtime.log.log_lines import content, is_number, json_object, read_records
from runtime.log.status import read_status
from settings.load import load_saved
from tools.report.ledger import Measured, measure
from tools.timeline.measured import from_chrome

Points = list[tuple[float, float]]
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")  # a run folder has at least one of them


@dataclass(frozen=True)
class Run:
    """One run, over all its starts."""

    name: str
    config_text: str
    status: dict[str, Any]  # status.json
    records: list[dict[str, Any]]  # metrics.jsonl
    events: list[dict[str, Any]]  # events.jsonl
    seconds: dict[str, float]  # by cause (runtime/log/ledger.py)
    measured: Measured  # what its saves, restarts and steps took
    # the first pipeline of the step traced by run.trace=true, and its name
    timeline: tuple[str, Timeline] | None

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of that kind."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    @property
    def data_stages(self) -> dict[float, str]:
        """The last step before each data stage → its name, in UTF-8, which a picture
        needs."""
        stages = [event for event in self.events if event["event"] == "data_stage"]
        steps = [event for event in stages if is_number(event.get("step"))]
        return {event["step"]: clean(f"data stage {event.get('data_stage')}") for event in steps}

    def points(self, key: str, scale: float = 1.0) -> Points:
        """(step, value) of every record whose value can be drawn, sorted by step."""
        found = ((record["step"], record.get(key)) for record in self.records)
        return sorted((x, y * scale) for x, y in found if can_be_drawn(y))

    def newest(self, key: str) -> float | None:
        """The last finite value of `key`; None if there is none."""
        values = (record.get(key) for record in reversed(self.records))
        return next(filter(is_number, values), None)

    def setting(self, section: str, key: str) -> float | None:
        """A number of the configuration; None if it is missing."""
        try:
            value = yaml.safe_load(self.config_text)[section][key]
        except (yaml.YAMLError, TypeError, KeyError):
            return None
        return value if is_number(value) else None


def can_be_drawn(value: Any) -> bool:
    """Whether it is a number with which an axis can be computed."""
    return is_number(value) and abs(value) < 1e100


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises UserError if `folder` is not one."""
    if not any(os.path.isfile(folder / name) for name in FILES):
        why = f"it has none of {', '.join(FILES)}"
        raise UserError("RUN", str(folder), why, "give a run folder (run.dir)")
    events = read_events(folder)
    return Run(
        folder.resolve().name,
        _text(folder / "config.yaml"),
        read_status(folder),
        read_records(folder),
        events,
        account(events),
        measure(events),
        _timeline(folder / "trace.json"),
    )


def unigram_loss(folder: Path) -> float | None:
    """The held-out loss, in nats per token, of a model that knows only each token's frequency; None
    if the configuration or the data no longer exists."""
    try:
        data = open_data(load_saved(folder).data, "heldout")
    except UserError:
        return None
    return data.unigram_nats_per_token


def _timeline(path: Path) -> tuple[str, Timeline] | None:
    trace = json_object(_text(path))
    try:
        timeline = from_chrome(trace, str(path))
        processes = [each for each in trace["traceEvents"] if each.get("name") == "process_name"]
        more = f", the first of {len(processes)}" if len(processes) > 1 else ""
        return f"{processes[0]['args']['name']}{more}", timeline
    except (UserError, KeyError, TypeError, IndexError):
        return None


def _text(path: Path) -> str:
    return content(path).decode("utf-8", errors="replace")
