"""Every test belongs to exactly one of the tiers `make test`, `make test-rest` and `make
test-slow`."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
    "ini_options"
]
MARKERS = [line.split(":")[0] for line in PYTEST["markers"]]
TIERS = ("test", "test-rest", "test-slow")


def commands(target: str) -> list[str]:
    """The command lines of a target in the Makefile."""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert rule, target
    return rule[1].splitlines()


def expression(target: str) -> str:
    """The marker expression by which a target selects tests. The command must name no file, so that
    it selects from all."""
    (command,) = (line for line in commands(target) if "-m pytest" in line)
    chosen = re.fullmatch(
        r"\tOMP_NUM_THREADS=1 \$\(PYTHON\) -m pytest (?:\$\(workers\) )?-m (\w+|\".+\")", command
    )
    assert chosen, command
    return chosen[1].strip('"')


def one_test_for_each(subsets: list[tuple[str, ...]]) -> str:
    """The text of a test file with one test per set of markers, named by the set's number."""
    lines = ["import pytest"]
    for number, markers in enumerate(subsets):
        lines += [*(f"@pytest.mark.{marker}" for marker in markers), f"def test_{number}(): pass"]
    return "\n".join(lines)


def chosen(file: Path, expression: str) -> set[int]:
    """The numbers of the tests that pytest selects by `expression`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
               "-m", expression, file.name]  # fmt: skip
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=file.parent, env=plain, capture_output=True, text=True, timeout=100
    )
    return {
        int(number)
        for number in re.findall(rf"^{file.name}::test_(\d+)$", done.stdout, re.MULTILINE)
    }


def test_every_test_is_in_exactly_one_tier(tmp_path: Path) -> None:
    """Every set of markers is in exactly one tier, as pytest itself selects tests."""
    subsets = [
        markers for count in range(len(MARKERS) + 1) for markers in combinations(MARKERS, count)
    ]
    file = tmp_path / "test_subsets.py"
    file.write_text(one_test_for_each(subsets))
    found = {tier: chosen(file, expression(tier)) for tier in TIERS}
    assert sorted(number for numbers in found.values() for number in numbers) == list(
        range(len(subsets))
    )

    # Control: without `make test-slow`, tests remain that are in no tier.
    left = set(range(len(subsets))) - found["test"] - found["test-rest"]
    assert {subsets[number] for number in left} == {
        markers for markers in subsets if "slow" in markers
    }


def test_every_file_of_tests_is_collected() -> None:
    """Every file with tests is collected, by its name or because `make test-slurm` or `make
    test-alerts` names it."""
    assert PYTEST["testpaths"] == ["tests"]
    named = "".join(commands("test-slurm") + commands("test-alerts"))
    for file in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        collected = file.name.startswith("test_") or str(file.relative_to(ROOT)) in named
        assert collected or not [name for name in functions if name.startswith("test_")], file


def test_every_marker_that_is_used_is_declared_and_says_where_it_runs() -> None:
    """Every declared marker selects a tier, except `gpu`, whose tests are skipped without a GPU.
    pytest itself refuses undeclared markers (--strict-markers)."""
    assert "--strict-markers" in PYTEST["addopts"]
    named = set().union(*(re.findall(r"\w+", expression(tier)) for tier in TIERS)) - {
        "not",
        "and",
        "or",
    }
    assert named | {"gpu"} == set(MARKERS)


def test_continuous_integration_runs_what_make_test_all_runs() -> None:
    """`make test-all` runs `make test` and `make test-rest` once each, and so does continuous
    integration, which then runs what it can of the tests with other programs."""
    assert re.search(r"^test-all: test$", MAKEFILE, re.MULTILINE)
    assert commands("test-all") == ["\t$(MAKE) test-rest"]
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = re.findall(r"^make (\S+)", run, re.MULTILINE)
    assert made == ["lint", "test", "test-rest"]
