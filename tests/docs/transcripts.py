"""Read the commands and their output from documentation pages, and run the commands.

    ```console
    $ .venv/bin/python -m tools.plan configs/llama3_8b.yaml
    the output, in which … matches anything within a line, and
    …
    on a line by itself matches any number of lines
    $ sbatch slurm/train_70b.sh      # not run: needs Slurm
    ```

A command continues after a backslash, up to the end of its here-document, or after -c ' up to a
line with the closing '. A command marked `# not run: REASON` is only parsed.

Numbers are not compared, because an honest change of the code moves many of them: a figure on a
page is what its command printed when the page was written. Words, names and the order of lines are
compared, and the command must succeed.

In ```bash blocks every line is a command, without `$ `, and the page shows no output.

Commands run at the root of a copy of the repository, in bash. A command that only runs Python, also
if its output is piped into grep, runs it in a process that has already imported torch
(tests.runs.forked), which saves seconds.

    python -m tests.docs.transcripts PAGE …    in a copy: checks its pages against its code
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT
from tests.runs import forked

LEFT_OUT = (".git", ".venv", "runs", "prepared", "wandb", "__pycache__", ".*_cache", "*.pyc",
            ".whl", "site", "corpus")  # fmt: skip
SECONDS = 1200  # timeout of one command, or of those of all recipes; far more than any takes


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    line: int  # of the page, 1-based
    text: str  # as written, without the prompt and the `# not run` mark
    output: str | None  # as the page shows it; None if it shows none
    not_run: str  # the reason; empty if the command is run

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = (  # up to the end of its here-document, to the closing ', or to a line without backslash
    r"(?P<text>.*<<'(?P<end>\w+)'\n(?:.*\n)*?(?P=end)\n"
    r"|.* -c '\n(?:.*\n)*?'\n"
    r"|(?:.*\\\n)*.*\n)"
)
COMMANDS = {
    "console": re.compile(rf"^\$ {COMMAND}(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE),
    "bash": re.compile(rf"^(?!#|\s*$){COMMAND}", re.MULTILINE),
}


def commands(page: Path) -> list[Command]:
    """All commands of a page, in order."""
    found, text = [], page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        kind, lines = block.groups()
        assert kind == "bash" or lines.startswith("$ "), f"{page.name}: output before any command"
        for each in COMMANDS[kind].finditer(lines):
            line = text[: block.start(2) + each.start()].count("\n") + 1
            command, _, reason = each["text"].rstrip().partition("# not run: ")
            output = each["output"].removesuffix("\n") if kind == "console" else None
            found.append(Command(page.name, line, command.rstrip(), output, reason))
    return found


NUMBER = re.compile(r"\d[\d,.]*")


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what the page shows; numbers, empty lines and the amount of space
    between words are not compared."""

    def without_numbers(text: str) -> str:
        rows = (" ".join(NUMBER.sub("0", row).split()) for row in text.splitlines())
        return "".join(f"{row}\n" for row in rows if row)

    pattern = "".join(
        r"(?:.*\n)*?" if row == "…" else ".*?".join(map(re.escape, row.split("…"))) + r"\n"
        for row in without_numbers(shown).splitlines()
    )
    return re.fullmatch(pattern, without_numbers(printed)) is not None


def copy_tree(folder: Path) -> Path:
    """Copy the repository's sources to `folder`, with a .venv/bin/python that is this
    interpreter."""
    copy = folder / "lattice"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    program = copy / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return copy


def in_bash(command: str, folder: Path, given: str = "") -> tuple[int, str, str]:
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    about = {"cwd": folder, "env": environment, "input": given, "timeout": SECONDS}
    words = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, **about)
    return done.returncode, done.stdout, done.stderr


def check(command: Command, folder: Path) -> None:
    """Run a command in a copy of the repository: it must succeed, and print what the page shows."""
    first, pipe, rest = command.text.partition(" | grep ")
    if python := as_python(first):
        status, output, errors = run_python(*python, folder)
        if pipe and status == 0:
            status, output, errors = in_bash(f"grep {rest}", folder, output)
    else:
        status, output, errors = in_bash(command.text, folder)
    assert status == 0, f"{command}: status {status}\n{output}{errors}"
    if command.output is not None:
        assert matches(command.output, output), f"{command} printed\n{output}"


def as_python(command: str) -> tuple[list[str], str] | None:
    """(arguments, program) of a command that only runs Python: `-m MODULE …` (empty program), `-c
    PROGRAM …`, or a program in a here-document. None if the command needs a shell, or starts ranks
    (or pytest, which may), which are forked from the program's own process."""
    if any(starts in command for starts in ("Ranks(", "tools.launch", "-m pytest")):
        return None
    if here := re.fullmatch(r"\.venv/bin/python - <<'(\w+)'\n(.*\n)\1", command, re.DOTALL):
        return [], here[2]
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    shell = r"\d?[<>|&;].*|[^\n]*\$[^\n]*"  # a redirection or a pipe, or a $ in a word of one line
    if any(re.fullmatch(shell, word) for word in words):
        return None
    match words:
        case [".venv/bin/python", "-m", *arguments]:
            return arguments, ""
        case [".venv/bin/python", "-c", program, *arguments]:
            return arguments, program
    return None


def run_python(arguments: list[str], program: str, folder: Path) -> tuple[int, str, str]:
    """Run Python in a process that has already imported torch, with this repository's modules and
    the working directory `folder`: its status, standard output and standard error."""
    with tempfile.TemporaryDirectory() as said:
        output, errors = Path(said) / "output", Path(said) / "errors"
        process = forked(output, _run_python, arguments, program, folder, errors=errors)
        process.join(SECONDS)
        process.kill()
        process.join()
        return process.exitcode or 0, *(file.read_text("utf-8") for file in (output, errors))


def _run_python(arguments: list[str], program: str, folder: Path) -> None:
    os.chdir(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    sys.argv = ["-c", *arguments] if program else arguments
    if program:
        exec(compile(program, "<page>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        for command in commands(Path(page)):
            if not command.not_run:
                check(command, Path.cwd())
