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
from tools.compile_kernels.__main__ import main

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


@functools.cache
def compiled(target: str, specimens: str = "") -> tuple[int, list[dict[str, Any]]]:
    """Run the tool; return its exit status and its table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "specimens.py").write_text(specimens)
        environment = OUTSIDE | {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1",
                                 "PYTHONWARNINGS": "ignore"}  # fmt: skip
        command = [sys.executable, "-m", "tools.compile_kernels", "--target", target]
        command += ["--json", str(folder / "kernels.json")]
        command += ["--specimens", str(folder / "specimens.py")] if specimens else []
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads((folder / "kernels.json").read_text())


def launched(file: Path) -> set[str]:
    """The kernels that a file launches: `name[grid](…)`, where `name` is decorated with @jit."""
    text = file.read_text(encoding="utf-8")
    jitted = re.findall(r"^@jit\ndef (\w+)", text, re.MULTILINE)
    return {f"{file.stem}.{name}" for name in jitted if re.search(rf"\b{name}\[", text)}


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "gfx942"])
def test_every_kernel_has_a_specimen_and_no_faults(target: str) -> None:
    _, kernels = compiled(target)
    assert [(k["kernel"], k["specimen"], k["faults"]) for k in kernels if k["faults"]] == []
    files = (ROOT / "model" / "kernels").glob("*.py")
    missing = set().union(*map(launched, files)) - {k["kernel"] for k in kernels}
    assert missing == ({"grouped_matmul._add_weight_gradient"} if target == "sm_75" else set())


@pytest.mark.parametrize("target", [pytest.param("sm_90", marks=pytest.mark.thorough), "gfx942"])
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
def test_faults_are_found(target: str, specimen: str, faults: list[str]) -> None:
    # Controls: the tool finds the planted fault and no other, and none in a sound kernel.
    if (target, specimen) == ("sm_90", "threads"):
        faults = []  # 1,024 threads are too many for AMD's alone
    status, reports = compiled(target, CONTROLS)
    assert status == 1
    (report,) = (each for each in reports if each["specimen"] == specimen)
    assert sorted({fault.split(":")[0] for fault in report["faults"]}) == faults
    if specimen == "sound":
        wide = {"sm_90": 2, "gfx942": 1}[target]  # of warps with 32 threads, and with 64
        assert (report["wide_loads"], report["narrow_loads"]) == (wide, 0)
    if specimen == "odd but allowed":  # accesses are allowed one by one
        assert all("tl.load(X" in fault and "tl.store" not in fault for fault in report["faults"])


def test_what_cannot_be_compiled_is_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main([]) == 2
    assert "pip install triton" in capsys.readouterr().err
