"""What rank 0 tells the companion: one JSON line at the beginning of the pipe. It is not passed as
arguments, which every user of the machine can read: a webhook's address is a secret."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings of a companion."""

    folder: str  # the run folder, absolute
    name: str  # the run folder as in the configuration: how the run is called in alarms
    cwd: str  # where rank 0 was started: commands run there
    events_from: int  # bytes of events.jsonl from before this start, which raise no alarm
    on_event: str = ""  # as run.on_event, with its variable replaced
    prometheus: str = ""  # as run.prometheus
    after_commit: str = ""  # as checkpoint.after_commit
    after_commit_seconds: float = 3600.0  # limit of one run of that command
    # as guard.*; the companion's limits are twice those of the watchdog (companion.py)
    hang_factor: float = 10.0
    hang_seconds: float = 120.0

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def loads(line: str) -> "Settings":
        return Settings(**json.loads(line))
