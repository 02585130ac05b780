"""Mutants: small mistakes, made on purpose, of which a test should find each (mutant_list.py).

    python -m tests.mutants                         all of them: less than a minute for each
    python -m tests.mutants --only parallel/ok      those whose file, text or note contains this
    python -m tests.mutants --json FILE --continue  those that FILE does not judge yet
    python -m tests.mutants --list                  run nothing: print each, and its tests

Each is made in a copy of the working tree, where tests run until one fails (`steps`): the files of
tests that import the changed module most directly, then the proofs, then all of `make test`. Before
them comes the test that found it for the committed results, if that still exists. In the end, every
test that has found a mutant must pass in the unchanged copy.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import about
from tests import ROOT
from tests.docs.transcripts import copy_tree
from tests.modules import MODULES, imports, is_test, module_name
from tests.mutant_list import CHANGES

MOST = 6  # files of tests that know a module are run before others
PROOFS = [f"tests/proofs/test_{name}.py" for name in ("parity", "controls")]
HANGS = 240  # seconds after which a test is ended, and has found the mutant: ranks may wait forever
SECONDS = itertools.count(int(time.time()))


class Mutant(NamedTuple):
    """A mistake: `old` occurs once in the file, and `new` takes its place."""

    file: str
    old: str
    new: str
    note: str = ""

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) or "(nothing)" for text in (self.old, self.new))
        return f"{self.file}: {old} → {new}" + (f" ({self.note})" if self.note else "")

    def made_in(self, text: str) -> str:
        if text.count(self.old) != 1:
            sys.exit(f"error: the text is there {text.count(self.old)} times, not once: {self}")
        return text.replace(self.old, self.new)


MUTANTS = [Mutant(file, *change) for file, changes in CHANGES.items() for change in changes]


@cache
def known_to(name: str) -> set[str]:
    """What a module imports; of a module of tests also what its helpers in tests/ do, and of one
    that chooses kinds by name also these."""
    found = imports(MODULES[name])
    if "kinds" in found:
        found |= {each for each in MODULES if each.rpartition(".")[0] == name}
    helpers = {each for each in found if name.startswith("tests.") and each.startswith("tests.")}
    return found.union(*map(known_to, helpers))


def steps(file: str) -> list[list[str]]:
    """The files of tests to run with a mutant of `file`, until one fails: those that know the
    module, the ones first that know least else; for what a step computes the proofs; and all."""
    tests = [name for name in filter(is_test, MODULES) if not name.startswith("tests.gpu.")]
    knowing = [name for name in tests if module_name(ROOT / file) in known_to(name)]
    knowing.sort(key=lambda name: len(known_to(name) & MODULES.keys()))
    near = [name.replace(".", "/") + ".py" for name in knowing[:MOST]]
    of_a_step = file.partition("/")[0] in ("model", "parallel", "settings", "training")
    proofs = [each for each in PROOFS if of_a_step and each not in near]
    return [files for files in (near, proofs) if files] + [["tests"]]


@cache
def found_before() -> dict[tuple[str, ...], str]:
    """What found each mutant of the committed results. (Of HEAD: --json writes the file anew.)"""
    show = ["git", "show", "HEAD:benchmarks/results/mutants.json"]
    shown = subprocess.run(show, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    return {tuple(change): test for *change, test, _ in json.loads(shown)["mutants"]}


def attempts(mutant: Mutant) -> list[list[str]]:
    """The test that found the mutant before, if its file is there; then `steps`."""
    test = found_before().get(mutant[:3], "")
    return [[test]] * (ROOT / test.partition("::")[0]).is_file() + steps(mutant.file)


@contextlib.contextmanager
def made(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Make the mistake in the copy, and take it back."""
    file, before = tree / mutant.file, (tree / mutant.file).read_text()

    def put(text: str) -> None:
        file.write_text(text)
        # a second of its own: by this and the size, Python knows whether to compile it again
        os.utime(file, times=(second := next(SECONDS), second))

    try:
        put(mutant.made_in(before))
        yield
    finally:
        put(before)


def failing(tree: Path, targets: Sequence[str], *options: str) -> list[str]:
    """The tests among `targets` that `make test` runs and that fail in the copy. Raises
    RuntimeError if pytest cannot run them."""
    tier = re.search(r'^test:.*\n.*-m "(.+)"', (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tier
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "worksteal", "-m", tier[1], *options, *targets]
    command += ["-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with tempfile.TemporaryFile() as out:
        ran = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = ran.wait(timeout=2 * 3600)
        finally:  # what tests have started and left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)
        out.seek(0)
        said = out.read().decode(errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+(?:\[.*?\])?)(?: - .*)?$", said, re.MULTILINE)
    # 2: pytest-xdist was stopped by -x. 5: `make test` runs none of them, or they do not exist.
    if (status in (1, 2)) if found else (status in (0, 5)):
        return found
    raise RuntimeError(f"pytest ended with status {status}: …{said[-1500:]}")


def found_by(tree: Path, mutant: Mutant) -> str:
    """The first test that fails with the mutant, in the first attempt with one; empty: none."""
    with made(tree, mutant):
        for targets in attempts(mutant):
            if failed := failing(tree, targets, "-x"):
                return failed[0]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path(os.devnull))
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    for mutant in MUTANTS:  # the whole list, before the first is run
        mutant.made_in((ROOT / mutant.file).read_text())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end what is running, too
    rows: list[list[Any]] = []  # file, old, new, what found it (empty: it survived), seconds
    if options.goes_on and options.json.is_file():
        listed, known = {mutant[:3] for mutant in MUTANTS}, json.loads(options.json.read_text())
        rows = [row for row in known["mutants"] if tuple(row[:3]) in listed]
    judged = [row[:3] for row in rows]
    mutants = [e for e in MUTANTS if options.only in str(e) and list(e[:3]) not in judged]
    if options.list:
        for number, mutant in enumerate(mutants, 1):
            print(number, mutant, *map(" ".join, attempts(mutant)), sep="\n    ")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(Path(folder))
        for mutant in mutants:
            began = time.monotonic()
            try:
                found = found_by(tree, mutant)
            except RuntimeError as error:  # --continue tries it again
                print(f"not judged: {mutant}\n{error}", flush=True)
                continue
            seconds = time.monotonic() - began
            rows.append([*mutant[:3], found, round(seconds, 1)])
            print(f"{found or 'SURVIVED'}, {seconds:.0f} s: {mutant}", flush=True)
            write(options.json, rows)
        finders = sorted({row[3] for row in rows if row[3]})
        # each file by itself, because a test may pass only after those of another file
        files = itertools.groupby(finders, key=lambda name: name.partition("::")[0])
        wrong = [name for _, names in files for name in failing(tree, list(names))]
    for *mutant, found, _ in rows:
        if not found or found in wrong:  # the latter are not judged
            print(f"{found} fails without it too:" if found else "survived:", Mutant(*mutant))
    rows = [row for row in rows if row[3] not in wrong]
    print(f"found: {write(options.json, rows):.1%} of {len(rows)}")


def write(file: Path, rows: list[list[Any]]) -> float:
    """Write what is known; returns the share that tests have found."""
    share = round(sum(bool(row[3]) for row in rows) / max(1, len(rows)), 4)
    said = {**about("pytest"), "share_found": share, "mutants": rows}
    file.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    return share


if __name__ == "__main__":
    main()
