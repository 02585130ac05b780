"""Every Triton kernel, compiled for GPUs that this machine need not have, spills no registers,
accesses memory 16 bytes at a time, and keeps the devices' limits.

tools/compile_kernels runs in a separate process, as for a user, because the kernels in this process
are interpreted.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tools.compile_kernels import TARGETS
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
FAULTS = {  # specimen of CONTROLS → the kinds of its faults
    "sound": [],
    "odd size": ["narrow"],
    "odd address": ["narrow"],
    "odd but allowed": ["narrow"],
    "odd and expected": [],
    "spills": ["spills"],
    "shared": ["shared"],
    "threads": ["threads"],
}
OUTSIDE = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = OUTSIDE | {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    table = folder / "kernels.json"
    command = [sys.executable, "-m", "tools.compile_kernels", "--json", str(table), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def compiled(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the tool; return its exit status and its table."""
    done = run(folder, *options)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads((folder / "kernels.json").read_text())


def launched(file: Path) -> set[str]:
    """The kernels that a file launches: `name[grid](…)`, where `name` is decorated with @jit."""
    text = file.read_text(encoding="utf-8")
    jitted = re.findall(r"^@jit\ndef (\w+)", text, re.MULTILINE)
    return {f"{file.stem}.{name}" for name in jitted if re.search(rf"\b{name}\[", text)}


@pytest.mark.thorough
def test_every_kernel_has_a_specimen_and_no_faults(tmp_path: Path) -> None:
    status, kernels = compiled(tmp_path)
    assert [k for k in kernels if k["faults"]] == []
    assert status == 0
    files = (ROOT / "model" / "kernels").glob("*.py")
    wanted = product(TARGETS, set().union(*map(launched, files)))
    missing = {*wanted} - {(k["target"], k["kernel"]) for k in kernels}
    assert missing == {
        ("sm_75", "grouped_matmul._add_weight_gradient")
    }  # PyTorch's loop is used there


@pytest.mark.parametrize("target", [pytest.param("sm_90", marks=pytest.mark.thorough), "gfx942"])
def test_faults_are_found(tmp_path: Path, target: str) -> None:
    # Controls: the tool finds the planted fault and no other, and none in a sound kernel.
    (tmp_path / "own.py").write_text(CONTROLS)
    own = str(tmp_path / "own.py")
    status, reports = compiled(tmp_path, "--target", target, "--specimens", own)
    assert status == 1
    by_name = {report["specimen"]: report for report in reports}
    assert len(by_name) == len(reports), "a specimen occurs twice"
    # 32 warps are 1,024 threads, which is the limit; on AMD they are 2,048
    faults = FAULTS | ({"threads": []} if target == "sm_90" else {})
    assert faults == {
        name: sorted({fault.split(":")[0] for fault in report["faults"]})
        for name, report in by_name.items()
    }
    wide = {"sm_90": 2, "gfx942": 1}[target]  # of warps with 32 threads, and with 64
    assert (by_name["sound"]["wide_loads"], by_name["sound"]["narrow_loads"]) == (wide, 0)
    allowed = by_name["odd but allowed"]["faults"]  # accesses are allowed one by one
    assert all("tl.load(X" in fault and "tl.store" not in fault for fault in allowed)


def test_a_specimen_that_launches_nothing_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    idle = "from model.kernels.swiglu import swiglu\nx = torch.ones(2, 16)\n"
    idle += 'SPECIMENS[1:] = [Specimen("idle", lambda: swiglu(x, x, "auto"))]\n'
    own.write_text(CONTROLS + idle)
    done = run(tmp_path, "--target", "sm_90", "--specimens", str(own))
    assert done.returncode == 2, done.stdout
    assert "--specimens = 'idle': launches no kernel" in done.stderr


def test_what_cannot_be_compiled_is_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main([]) == 2
    assert "pip install triton" in capsys.readouterr().err
