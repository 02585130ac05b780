"""`make api` builds documentation from docstrings without warnings, and it contains every
module."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house import ROOMS, module_name
from tests.transcripts import ROOT

PACKAGES = re.search(
    r"pdoc --output-directory docs/api (.+)",
    (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", ""),
)
# pdoc warns about what it cannot read. Ignored are annotations with tqdm, which is generic only in
# its stubs. pdoc also warns if a default value equals an environment variable, so `build` removes
# the variables that contain the working directory.
BUILD = """
import sys, warnings
from pdoc.__main__ import cli
warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", "Error parsing type annotation tqdm")
cli(sys.argv[1:])
"""


def build(packages: list[str], out: Path) -> None:
    command = [sys.executable, "-c", BUILD, "--output-directory", str(out), *packages]
    # tools.compile_kernels refuses to be imported with TRITON_INTERPRET set
    left_out = ("TRITON_INTERPRET", "OLDPWD", "PWD")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_package_s_documentation_builds(tmp_path: Path) -> None:
    """The documentation of one package, parallel/, builds and contains a known docstring."""
    build(["errors", "parallel"], tmp_path)
    assert (tmp_path / "parallel" / "pipeline" / "schedules.html").exists()
    assert "consecutive ranks form a" in (tmp_path / "parallel" / "axes.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_all_documentation_builds(tmp_path: Path) -> None:
    assert PACKAGES
    packages = PACKAGES[1].split()
    build(packages, tmp_path)
    rooms = [room for room in ROOMS if room in packages]
    modules = [
        module_name(file)
        for room in rooms
        for file in (ROOT / room).rglob("*.py")
        if file.stem != "__main__"
    ]
    missing = [
        name for name in modules if not (tmp_path / f"{name.replace('.', '/')}.html").exists()
    ]
    assert missing == []


def test_everything_public_is_built() -> None:
    """`make api` covers everything except tests/, benchmarks/ and docs/."""
    assert PACKAGES
    programs = {file.stem for file in ROOT.glob("*.py")}
    assert set(PACKAGES[1].split()) == programs | set(ROOMS) - {"benchmarks", "docs", "tests"}
