"""Shows where the time of a profiled step went: `python -m tools.profile RUN`, after
run.profile=start:stop (docs/profiling.md).

Prints for each trace in RUN/profile, or for one trace file: compute time, communication by axis and
how much of it is exposed, idle time, and a GPU's kernels that took the most time. It reads
only the traces. Of a run's folder, it also writes the numbers to RUN/profile/summary-rank-….json.
"""

import json
import os
from glob import escape, glob
from pathlib import Path

from errors import UserError
from runtime.files import write_or_warn
from tools.command import CommandParser, reports_errors, run_command
from tools.profile.summary import REMEDY, describe, read_trace, summarise


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.profile", description=__doc__)
    parser.option("run", Path, "RUN", "a run folder, or a trace file")
    run = parser.parse_args(arguments).run
    names = sorted(glob(os.path.join(escape(str(run)), "profile", "step-*.json.gz")))
    traces = [run] if os.path.isfile(run) else [Path(name) for name in names]
    if not traces:
        raise UserError("RUN", str(run), "has no profile/step-….json.gz", REMEDY)
    for path in traces:
        summary = summarise(read_trace(path), str(path))
        print(describe(summary), end="\n\n")
        if path != run:
            rank = path.name.removesuffix(".json.gz").partition("-rank-")[2]
            # in place of the summary of the rank's earlier steps
            file = path.with_name(f"summary-rank-{rank}.json")
            write_or_warn(file, json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
