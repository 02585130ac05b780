"""Every Triton kernel, compiled for GPUs that this machine need not have, spills no registers,
accesses memory 16 bytes at a time, and keeps the devices' limits.

tools/compile_kernels runs in a separate process, as for a user, because the kernels in this process
are interpreted.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "model" / "kernels").glob("*.py"))
TARGETS = ("sm_80", "sm_90", "gfx942")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

BROKEN = """
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
def transpose(X, Y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(X + i[:, None] * SIZE + i[None, :])
    tl.store(Y + i[:, None] * SIZE + i[None, :], tl.trans(x))


def launch(kernel, n, warps, shift=0, **blocks):
    x, y = (torch.empty(n + shift)[shift:] for _ in range(2))
    kernel[(1,)](x, y, *([n] if "BLOCK" in blocks else []), **blocks, num_warps=warps)


SPECIMENS = [
    Specimen("sound", lambda: launch(copy, 4096, 4, BLOCK=1024)),
    Specimen("odd size", lambda: launch(copy, 4095, 4, BLOCK=1024)),
    Specimen("odd address", lambda: launch(copy, 4096, 4, shift=1, BLOCK=1024)),
    Specimen("odd but allowed", lambda: launch(copy, 4095, 4, BLOCK=1024), narrow=("tl.store(Y",)),
    Specimen("odd and expected", lambda: launch(copy, 4095, 4, BLOCK=1024), wide=False),
    # twice 256 numbers a thread
    Specimen("spills", lambda: launch(hoard, 65536, 1, BLOCK=256 * backend.LANES)),
    Specimen("shared", lambda: launch(transpose, 256 * 256, 8, SIZE=256)),
    Specimen("threads", lambda: launch(copy, 32768, 32, BLOCK=32768)),
]
"""

FEW = """
import torch
import triton
import triton.language as tl

from tools.compile_kernels.specimens import Specimen


@triton.jit
def add(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i)
    y = tl.load(Y + i)
    tl.store(Z + i, x + y)


@triton.jit
def copy(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Z + i, tl.load(X + i))


@triton.jit
def follow(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i)
    y = tl.load(Y + x)
    tl.store(Z + i, y)


@triton.jit
def hoard(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(X + start + i)
        total += x * tl.sum(x, 0)
    tl.store(Z + i, total)


def launch(kernel, warps, block, dtype=torch.float32):
    kernel[(1,)](*(torch.empty(65536, dtype=dtype) for _ in range(3)), 65536, BLOCK=block,
                 num_warps=warps)


SPECIMENS = [
    Specimen("sound", lambda: launch(add, 4, 512)),
    Specimen("follow", lambda: launch(follow, 4, 512, torch.int32), wide=False),
    Specimen("many registers", lambda: launch(hoard, 1, 64 * 32)),
    Specimen("tiny block", lambda: launch(copy, 1, 32), wide=False),
]
"""


def compiled(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the tool; return its exit status and its table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
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


@EACH_TARGET
def test_loads_in_flight_suffice(target: str) -> None:
    counted = [k for k in kernels(target) if k["in_flight_needed"]]
    assert bool(counted) == target.startswith("sm")
    assert [k["hints"] for k in counted if k["hints"]] == []
    for one in counted:
        assert one["in_flight_at_once"] >= 4 * one["in_flight_needed"], one


def launched(file: Path) -> set[str]:
    """The kernels that a file launches: `name[grid](…)`, where `name` is decorated with @jit."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = {
        f.name
        for f in functions
        if any(isinstance(d, ast.Name) and d.id == "jit" for d in f.decorator_list)
    }
    calls = [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    return {
        f"{file.stem}.{call.value.id}"
        for call in calls
        if isinstance(call.value, ast.Name) and call.value.id in jitted
    }


@EACH_TARGET
def test_every_kernel_has_a_specimen(target: str) -> None:
    assert {k["kernel"] for k in kernels(target)} == set().union(*map(launched, KERNELS))


def test_faults_are_found(tmp_path: Path) -> None:
    # Control: the tool finds each fault planted in BROKEN, and none in the sound kernel.
    (tmp_path / "broken.py").write_text(BROKEN)
    status, reports = compiled(
        tmp_path, "--specimens", str(tmp_path / "broken.py"), "--target", "sm_90", "gfx942"
    )
    assert status == 1
    found = {
        (r["target"], r["specimen"]): sorted({fault.split(":")[0] for fault in r["faults"]})
        for r in reports
    }
    for target in ("sm_90", "gfx942"):
        assert found[target, "sound"] == []
        assert found[target, "odd size"] == ["narrow"]
        assert found[target, "odd address"] == ["narrow"]
        assert found[target, "odd but allowed"] == ["narrow"]
        assert found[target, "odd and expected"] == []
        assert "spills" in found[target, "spills"]
        assert "shared" in found[target, "shared"]
    assert ("sm_90", "threads") in found
    assert found["sm_90", "threads"] == []
    assert found["gfx942", "threads"] == ["threads"]
    (allowed,) = (
        r["faults"]
        for r in reports
        if r["specimen"] == "odd but allowed" and r["target"] == "sm_90"
    )
    assert all("tl.load(X" in fault and "tl.store" not in fault for fault in allowed)
    assert {
        (r["wide_loads"], r["narrow_loads"])
        for r in reports
        if r["specimen"] == "sound" and r["target"] == "sm_90"
    } == {(2, 0)}


def test_kernels_that_use_little_of_a_multiprocessor_are_seen(tmp_path: Path) -> None:
    """Controls: many registers or tiny blocks leave fewer warps than the sound kernel has; a load
    whose address is the result of another does not add to the bytes in flight; and tiny blocks of
    narrow loads have too few of them."""
    (tmp_path / "few.py").write_text(FEW)
    _, reports = compiled(tmp_path, "--specimens", str(tmp_path / "few.py"), "--target", "sm_90")
    by_name: dict[str, dict[str, Any]] = {report["specimen"]: report for report in reports}
    sound, registers = by_name["sound"], by_name["many registers"]
    assert (sound["warps"], sound["limit"]) == (64, "threads")
    assert registers["registers"] > 128
    assert registers["limit"] == "registers"
    assert registers["warps"] < sound["warps"] / 3
    tiny = by_name["tiny block"]
    assert (tiny["blocks"], tiny["warps"], tiny["limit"]) == (32, 32, "blocks")
    # four numbers of each tensor per thread: both are under way at once, unless one must wait
    assert (sound["in_flight"], by_name["follow"]["in_flight"]) == (32, 16)
    assert sound["in_flight_at_once"] == 32 * 2048
    assert tiny["in_flight_at_once"] == 4 * 1024 < tiny["in_flight_needed"]
    assert [name for name, one in by_name.items() if one["hints"]] == ["tiny block"]
    assert "4,096 on a multiprocessor, where the memory's bandwidth needs 6,924" in tiny["hints"][0]
    assert not tiny["faults"]


def test_help_and_refusals_need_no_triton(tmp_path: Path) -> None:
    """Without Triton, where `import triton` fails, the command still prints its help and refuses to
    run with a remedy."""
    code = "import sys; sys.modules['triton'] = None\n"
    code += "from tools.compile_kernels.__main__ import main; sys.exit(main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(*options: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, *options]
        return subprocess.run(
            command, cwd=ROOT, env=environment | more, capture_output=True, text=True
        )

    helped, refused, interpreted = run("--help"), run(), run(TRITON_INTERPRET="1")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--target" in helped.stdout
    assert refused.returncode == interpreted.returncode == 2
    assert "pip install triton" in refused.stderr
    assert "unset TRITON_INTERPRET" in interpreted.stderr
    assert "Traceback" not in refused.stderr + interpreted.stderr
