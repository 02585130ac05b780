"""Sends an alarm about a run from outside of it:
`python -m tools.alarm TEXT CONFIG.yaml [section.key=value …]`

For job scripts: slurm/train_70b.sh calls it when a job gives up, because no rank is left that
could (runtime/monitor/). The alarm goes to run.on_event, as event "job"; without that key, nothing
is sent. Only the section `run` is read, because the job may end as another one is refused. The exit
status is 1 if the alarm could not be delivered, and 2 if this section is refused.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from errors import UserError
from runtime.monitor.alarms import alarm
from runtime.monitor.check import on_event
from runtime.monitor.send import Sender
from settings.load import load_section
from tools.command import CommandParser, run_command

LIMIT_SECONDS = 120.0  # longer than all attempts together (runtime/monitor/send.py)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.alarm", description=__doc__)
    parser.add_argument("text")
    parser.configuration("CONFIG.yaml", "the configuration of the run")
    options = parser.parse_intermixed_args(arguments)
    try:
        run = load_section("run", options.config, options.overrides)
        target = on_event(run)
    except UserError as error:
        print(f"error: no alarm is sent: {error}", file=sys.stderr)
        return 2
    if not target:
        return 0
    sender = Sender(target, os.getcwd(), lambda *_: None)  # it logs why an alarm is lost
    event = {"event": "job", "time": time.time(), "says": options.text}
    sender.send(alarm(run.dir, str(Path(run.dir).absolute()), event))
    sender.finish(LIMIT_SECONDS, pauses=True)
    return 0 if sender.delivered else 1


if __name__ == "__main__":
    run_command(main)
