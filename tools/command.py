"""What commands share: how they end (without a traceback, on Ctrl-C and whatever becomes of their
output: runtime/output.py), their options, and how they print tables and durations.

    @reports_errors
    def main(arguments: list[str] | None = None) -> None:  # or its exit status
        parser = CommandParser(prog="python -m tools.NAME", description=__doc__)
        parser.required("--out", Path, "DIR", "the folder to write")
        parser.option("--file-bytes", 1_000_000, "N", "the most bytes in one file")
        options = parser.parse_args(arguments)
        ...

    if __name__ == "__main__":
        run_command(main)
"""

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from errors import UserError
from runtime.output import guard_output, log


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its status; with 1 if that is 0 but some of standard output could
    not be written. After Ctrl-C, and main's own cleanup, exits as other programs do on SIGINT."""
    out = guard_output()
    try:
        status: object = reports_errors(main)()
    except SystemExit as leaving:  # also after --help
        status = leaving.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a calling script stops too
        status = 128 + signal.SIGINT  # the first process of a container is not ended by it
    sys.stdout.flush()
    if out and out.problem and not status:
        log(f"error: standard output could not be written: {out.problem}")
        status = 1
    sys.exit(status)  # type: ignore[arg-type]


@contextlib.contextmanager
def writes(option: str, path: Path) -> Iterator[None]:
    """Raises UserError about this option if what is written inside cannot be."""
    try:
        yield
    except OSError as error:
        why = f"it cannot be written ({error.strerror})"
        remedy = "free some space, or give a path where you have permission to write"
        raise UserError(option, str(path), why, remedy) from None


def check_json(file: Path | None) -> None:
    """Raises UserError if --json cannot be written: not only after minutes of work."""
    if file is not None:
        with writes("--json", file):
            file.touch()


def write_json(file: Path | None, content: Any, **how: Any) -> None:
    """Writes what --json asks for, if it was given. Raises UserError if it cannot be written."""
    if file is not None:
        with writes("--json", file):
            file.write_text(json.dumps(content, indent=1, **how) + "\n", encoding="utf-8")


def reports_errors(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorates a command's main function, which returns its exit status, if any but 0. A UserError
    is printed, and the status is 2."""

    @functools.wraps(main)
    def reporting(*arguments: Any, **named: Any) -> int:
        try:
            return main(*arguments, **named) or 0
        except UserError as error:
            log(f"error: {error}")
            return 2
        except OSError as error:
            log(f"error: {error}")
            return 1

    return reporting


def at_least(least: int, below: float = math.inf, **options: float | None) -> None:
    """Raises UserError for an option that is less, or not `below`; None was not given."""
    for name, value in options.items():
        if value is not None and not least <= value < below:
            why = f"it must be at least {least}"
            why += f" and less than {below}" if below < math.inf or not value < least else ""
            raise UserError(f"--{name.replace('_', '-')}", value, why, "give such a number")


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """The rows, of which the first names the columns, as lines of text. Columns are aligned to the
    right, except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def duration(seconds: float) -> str:
    """3.2 s, 12 min 4 s, 5 h 12 min or 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60 // 1:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class CommandParser(argparse.ArgumentParser):
    """The options of a command, which are given in full: a prefix that happens to fit one option
    may be meant for another. An error is one line."""

    def __init__(self, **settings: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=raw, **settings)
        # what type=Path does: a shell expands --out ~/x, but not --out=~/x
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def option(self, name: str, kind: Any, metavar: str | None, help: str, **settings: Any) -> None:
        """Adds an option, or an argument if `name` has no dashes. `kind` is the type of its value,
        or its default, which the help then states; bool: a switch."""
        if kind is bool:
            settings["action"] = "store_true"
        else:
            is_type = isinstance(kind, type)
            settings |= {"type": kind if is_type else type(kind), "metavar": metavar}
            settings |= {} if is_type else {"default": kind}
            help += "" if is_type else " (default: %(default)s)"
        if name.startswith("-") and "nargs" in settings:
            settings["action"] = "extend"  # repeated, each adds its values
        self.add_argument(name, help=help, **settings)

    def required(self, name: str, kind: type, metavar: str, help: str, **settings: Any) -> None:
        """Adds an option that must be given."""
        self.option(name, kind, metavar, help, required=True, **settings)

    def configuration(self, metavar: str, help: str) -> None:
        """Adds the path of a configuration, and settings after it that override its own."""
        self.option("config", str, metavar, help)
        said, metavar = "settings to override (docs/running.md)", "section.key=value"
        self.option("overrides", str, metavar, said, nargs="*", default=[])

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (help: {self.prog} --help)\n")
