"""What commands share: they end without a traceback on Ctrl-C, whatever becomes of their output
(output.py); their options; and the argument for settings."""

import argparse
import difflib
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from errors import UserError
from output import guard_output, log


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its status; with 1 if that is 0 but some of standard output could
    not be written. After Ctrl-C, and main's own cleanup, exits as other programs do on SIGINT."""
    out = guard_output()
    try:
        status: object = main()
    except UserError as error:
        log(f"error: {error}")
        status = 2
    except SystemExit as leaving:  # also after --help
        status = leaving.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a calling script stops too
    sys.stdout.flush()
    if out and out.problem and not status:
        log(f"error: standard output could not be written: {out.problem}")
        status = 1
    sys.exit(status)  # type: ignore[arg-type]


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Let a command take settings after the configuration."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings to override, as for train.py",
    )


class CommandParser(argparse.ArgumentParser):
    """The options of a command, which are given in full: a prefix that happens to fit one option
    may be meant for another. An error is one line, and names the nearest option or choice."""

    def __init__(self, **settings: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=raw, **settings)
        # what type=Path does: a shell expands --out ~/x, but not --out=~/x
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Checks the options' names first; argparse would name a missing option instead."""
        args = sys.argv[1:] if args is None else [*args]
        mine = itertools.takewhile("--".__ne__, args)
        if self._subparsers:  # what follows the first argument belongs to one of them
            mine = itertools.takewhile(lambda word: word.startswith("-"), mine)
        for word in mine:
            option, known = word.split("=", 1)[0], self._option_string_actions
            # as for argparse, a negative number and what has a space in it is a value
            if (
                re.match(r"-(?![\d.]).", word)
                and " " not in word
                and not known.keys() & {option, option[:2]}
            ):
                near = _nearest(f"--{option.lstrip('-')}", known)
                self.error(f"there is no option {option}{near}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            message += _nearest(found[1], [choice.strip(" '") for choice in found[2].split(",")])
        self.exit(2, f"error: {message} (help: {self.prog} --help)\n")


def _nearest(word: str, words: Iterable[str]) -> str:
    """The end of a message about `word`, which is not one of `words`."""
    near = [each for each in words if each.startswith(word)]
    near = near or difflib.get_close_matches(word, [*words], n=1)
    return f"; did you mean {near[0]}?" if near else ""
