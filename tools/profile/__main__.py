"""Shows where the time of a profiled step went: `python -m tools.profile RUN`, after
run.profile=start:stop (docs/profiling.md).

Prints for each trace in RUN/profile, or for one trace file: compute time, communication by axis and
how much of it is exposed, idle time, and the operators or kernels that took the most time. It reads
only the traces. Of a run's folder, it also writes them to RUN/profile/summary-rank-….txt and .json.
"""

import json
from pathlib import Path

from errors import UserError
from runtime.output import log
from tools.command import CommandParser, reports_errors, run_command
from tools.profile.summary import REMEDY, describe, read_trace, summarise


def traces_of(run: Path) -> list[Path]:
    """The trace files of `run`: itself if it is a file, else all in its folder `profile`."""
    try:
        found = [run] if run.is_file() else sorted((run / "profile").glob("step-*.json.gz"))
    except OSError:  # a name that is too long, say
        found = []
    if not found:
        raise UserError("RUN", str(run), "has no profile/step-….json.gz", REMEDY)
    return found


def save(summary: dict[str, object], table: str, trace: Path) -> None:
    """Write a summary beside its trace, step-….json.gz, in place of that of the rank's earlier
    steps. Where that is not allowed, having printed it is enough."""
    rank = trace.name.removesuffix(".json.gz").partition("-rank-")[2]
    file = trace.with_name(f"summary-rank-{rank}.txt")
    try:
        file.write_text(table + "\n", encoding="utf-8")
        numbers = json.dumps(summary, indent=1) + "\n"
        file.with_suffix(".json").write_text(numbers, encoding="utf-8")
    except OSError as error:
        log(f"warning: {file} cannot be written: {error.strerror}")


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.profile", description=__doc__)
    parser.option("run", Path, "RUN", "a run folder, or a trace file")
    run = parser.parse_args(arguments).run
    found = [(path, summarise(read_trace(path), str(path))) for path in traces_of(run)]
    tables = [describe(summary) for _, summary in found]
    print("\n\n".join(tables))
    if run.is_dir():
        for (path, summary), table in zip(found, tables, strict=True):
            save(summary, table, path)
    return 0


if __name__ == "__main__":
    run_command(main)
