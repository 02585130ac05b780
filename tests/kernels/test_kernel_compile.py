"""Every Triton kernel, compiled for GPUs that this machine need not have, spills no registers,
accesses memory 16 bytes at a time, and keeps the devices' limits.

tools/compile_kernels runs in a separate process, as for a user, because the kernels in this process
are interpreted.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

KERNELS = sorted((ROOT / "model" / "kernels").glob("*.py"))
TARGETS = ("sm_80", "sm_90", "gfx942")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

CONTROLS = """
import torch
import triton
import triton.language as tl

from model.kernels import backend
from tools.compile_kernels.specimens import Specimen


@triton.jit
def copy(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(X + i, mask=inside)
    tl.store(Y + i, x, mask=inside)


@triton.jit
def hoard(X, Y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(X + start + i)
        total += x * tl.sum(x, 0)
    tl.store(Y + i, total)


@triton.jit
def transpose(X, Y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i[:, None] * BLOCK + i[None, :])
    tl.store(Y + i[:, None] * BLOCK + i[None, :], tl.trans(x))


def launch(kernel, n, warps, block, shift=0):
    tensors = [torch.empty(n + shift)[shift:] for _ in kernel.arg_names[:-2]]
    kernel[(1,)](*tensors, n, BLOCK=block, num_warps=warps)


SPECIMENS = [
    Specimen("sound", lambda: launch(copy, 4096, 4, 1024)),
    Specimen("odd size", lambda: launch(copy, 4095, 4, 1024)),
    Specimen("odd address", lambda: launch(copy, 4096, 4, 1024, shift=1)),
    Specimen("odd but allowed", lambda: launch(copy, 4095, 4, 1024), narrow=("tl.store(Y",)),
    Specimen("odd and expected", lambda: launch(copy, 4095, 4, 1024), wide=False),
    # twice 256 numbers a thread
    Specimen("spills", lambda: launch(hoard, 65536, 1, 256 * backend.LANES)),
    Specimen("shared", lambda: launch(transpose, 256 * 256, 8, 256)),
    Specimen("threads", lambda: launch(copy, 32768, 32, 32768)),
]
"""
OUTSIDE = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def compiled(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the tool; return its exit status and its table."""
    environment = OUTSIDE | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tools.compile_kernels", "--json",
               str(folder / "kernels.json"), *options]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads((folder / "kernels.json").read_text())


@functools.cache
def kernels(target: str) -> list[dict[str, Any]]:
    """The tool's table for this target."""
    with tempfile.TemporaryDirectory() as folder:
        return compiled(Path(folder), "--target", target)[1]


EACH_TARGET = pytest.mark.parametrize(
    "target", [pytest.param(target, marks=pytest.mark.thorough) for target in TARGETS]
)


@EACH_TARGET
def test_kernels_have_no_faults(target: str) -> None:
    assert [(k["kernel"], k["specimen"], k["faults"]) for k in kernels(target) if k["faults"]] == []


def launched(file: Path) -> set[str]:
    """The kernels that a file launches: `name[grid](…)`, where `name` is decorated with @jit."""
    text = file.read_text(encoding="utf-8")
    jitted = re.findall(r"^@jit\ndef (\w+)", text, re.MULTILINE)
    return {f"{file.stem}.{name}" for name in jitted if re.search(rf"\b{name}\[", text)}


@EACH_TARGET
def test_every_kernel_has_a_specimen(target: str) -> None:
    assert {k["kernel"] for k in kernels(target)} == set().union(*map(launched, KERNELS))


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the tool reports of CONTROLS, by target and name."""
    folder = tmp_path_factory.mktemp("controls")
    (folder / "controls.py").write_text(CONTROLS)
    status, reports = compiled(
        folder, "--specimens", str(folder / "controls.py"), "--target", "sm_90", "gfx942"
    )
    assert status == 1
    return {(report["target"], report["specimen"]): report for report in reports}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("specimen", "faults"),
    [
        ("sound", []),
        ("odd size", ["narrow"]),
        ("odd address", ["narrow"]),
        ("odd but allowed", ["narrow"]),
        ("odd and expected", []),
        ("spills", ["spills"]),
        ("shared", ["shared"]),
        ("threads", ["threads"]),
    ],
)
def test_faults_are_found(controls, target: str, specimen: str, faults: list[str]) -> None:
    # Controls: the tool finds the planted fault and no other, and none in a sound kernel.
    if (target, specimen) == ("sm_90", "threads"):
        faults = []  # 1,024 threads are too many for AMD's alone
    found = controls[target, specimen]["faults"]
    assert sorted({fault.split(":")[0] for fault in found}) == faults


def test_narrow_accesses_are_counted_and_allowed_one_by_one(controls) -> None:
    sound = controls["sm_90", "sound"]
    assert (sound["wide_loads"], sound["narrow_loads"]) == (2, 0)
    faults = controls["sm_90", "odd but allowed"]["faults"]
    assert all("tl.load(X" in fault and "tl.store" not in fault for fault in faults)


def test_help_and_refusals_need_no_triton(tmp_path: Path) -> None:
    """Without Triton, where `import triton` fails, the command still prints its help and refuses to
    run with a remedy."""
    code = "import sys; sys.modules['triton'] = None\n"
    code += "from tools.compile_kernels.__main__ import main; sys.exit(main(sys.argv[1:]))"

    def run(*options: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, *options]
        return subprocess.run(command, cwd=ROOT, env=OUTSIDE | more, capture_output=True, text=True)

    helped, refused, interpreted = run("--help"), run(), run(TRITON_INTERPRET="1")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--target" in helped.stdout
    assert refused.returncode == interpreted.returncode == 2
    assert "pip install triton" in refused.stderr
    assert "unset TRITON_INTERPRET" in interpreted.stderr
    assert "Traceback" not in refused.stderr + interpreted.stderr
