"""Shows where the time of a profiled step went: `python -m tools.profile RUN`, after
run.profile=start:stop (docs/profiling.md).

Prints for each trace in RUN/profile, or for one trace file: compute time, communication by axis and
how much of it is exposed, idle time, and the operators or kernels that took the most time. It reads
only the trace.
"""

from pathlib import Path

from errors import UserError
from runtime.profiling.profile_summary import REMEDY, describe, read_trace, summarise
from tools.command import CommandParser, reports_errors, run_command


def traces_of(run: Path) -> list[Path]:
    """The trace files of `run`: itself if it is a file, else all in its folder `profile`."""
    if run.is_file():
        return [run]
    found = sorted((run / "profile").glob("step-*.json.gz"))
    if not found:
        raise UserError("RUN", str(run), "has no profile/step-….json.gz", REMEDY)
    return found


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.profile", description=__doc__)
    parser.option("run", Path, "RUN", "a run folder, or a trace file")
    traces = traces_of(parser.parse_args(arguments).run)
    tables = [describe(summarise(read_trace(path), str(path))) for path in traces]
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    run_command(main)
