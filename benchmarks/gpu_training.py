"""Compares training on the GPU with training on the CPU: every mechanism that one GPU can run.

    python -m benchmarks.gpu_training              part of `make bench-gpu PART=right`

For each mechanism, a small model is trained for two steps on the GPU, with our kernels, and the
loss, the gradient norm, the gradient of every parameter and, in float64, every updated weight are
compared with those of plain training on the CPU, with PyTorch's operations (gpu_reference.py, in
another process, which needs no GPU). Errors are those of whole tensors, ‖found − exact‖ / ‖exact‖.

    float64    at most 1e-9
    bfloat16   compared with the CPU's float64 results; at most twice the error of the CPU's own
               bfloat16 results, plus 2⁻⁸

The second is the only one that runs the kernels of 16-bit numbers: flash attention, documents,
products that sum in float32.

The exit status is 1 if a mechanism is wrong or fails.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.gpu_check import Check
from benchmarks.gpu_process import ROOT, without_gpu
from benchmarks.gpu_reference import EXACT, MECHANISMS, ROUNDED, Mechanism, load, train
from benchmarks.gpu_rows import Cannot, Measurement, exit_status, options, parse, run_training
from tools.command import run_command

EXACT_BOUND = 1e-9
TIMES, PLUS = 2.0, 2**-8  # of the CPU's own error in bfloat16, and beside it
WAIT_SECONDS = 120  # for the CPU's numbers


class Reference:
    """The CPU's numbers, computed by another process into a temporary folder."""

    def __init__(self, folder: Path, process: subprocess.Popen) -> None:
        self.folder, self.process = folder, process

    def of(self, mathematics: str, kind: str) -> dict[str, Tensor]:
        """Waits for these numbers."""
        end = time.monotonic() + WAIT_SECONDS
        while (found := load(self.folder, mathematics, kind)) is None:
            if self.process.poll() is not None and not load(self.folder, mathematics, kind):
                raise RuntimeError("the CPU's run failed")
            if time.monotonic() > end:
                raise Cannot(f"the CPU took more than {WAIT_SECONDS} s")
            time.sleep(0.05)
        return found


@contextlib.contextmanager
def reference(tiny: bool, only: str) -> Iterator[Reference]:
    """Starts the CPU's runs, and ends them at exit."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_reference", folder, only]
        command += ["--tiny"] * tiny
        process = subprocess.Popen(command, cwd=ROOT, env=without_gpu())
        try:
            yield Reference(Path(folder), process)
        finally:
            process.kill()
            process.wait()


def compare(
    found: dict[str, Tensor], exact: dict[str, Tensor], rounded: dict[str, Tensor] | None
) -> list[Check]:
    """Compares tensors by name. rounded: the CPU's own results in bfloat16, if `found` is in
    bfloat16; updated weights are then left out, because an update depends on a gradient's sign
    however small it is."""
    names = [name for name in exact if rounded is None or not name.startswith("weight ")]
    missing = sorted(set(names) - found.keys())
    assert not missing, f"there is no {', '.join(missing)}"
    checks = []
    for name in names:
        bound = EXACT_BOUND
        if rounded is not None:
            bound = TIMES * error(rounded[name], exact[name]) + PLUS
        checks.append(Check(name, error(found[name], exact[name]), bound))
    return checks


def error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖; of two zeros 0."""
    size = exact.double().norm()
    off = (found.double() - exact.double()).norm()
    return (off / size).item() if size else off.item()


def measure(mechanism: Mechanism, kind: str, tiny: bool, cpu: Reference) -> dict[str, Any]:
    found = train(mechanism, kind, tiny, kernels="triton")
    exact = cpu.of(mechanism.mathematics, EXACT)
    rounded = cpu.of(mechanism.mathematics, ROUNDED) if kind == ROUNDED else None
    checks = compare(found, exact, rounded)
    worst = max(checks, key=lambda check: check.error / check.bound)
    wrong = [check for check in checks if not check.passed]
    return {
        "right": not wrong,
        "compared": len(checks),
        "worst": {**worst._asdict()},
        "wrong": [check._asdict() for check in wrong[:5]],
        "loss": found["loss"].item(),
    }


def describe(row: dict[str, Any]) -> str:
    worst = row["worst"]
    said = f"{row['compared']:4} tensors, {worst['error']:.1e} off in {worst['what']}"
    said = f"{row['name']:46}{said} (bound {worst['bound']:.1e})"
    return said + "".join(f"\n    WRONG: {c['what']} is {c['error']:.2e} off" for c in row["wrong"])


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=180), arguments)
    # deterministic cuBLAS requires it, and reads it at its first use, as in train.py
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with reference(parsed.tiny, parsed.only) as cpu:
        rows = [
            Measurement(
                f"{mechanism.name}, {kind}",
                3,
                partial(measure, mechanism, kind, parsed.tiny, cpu),
            )
            for mechanism in MECHANISMS
            for kind in mechanism.kinds
        ]
        return exit_status(run_training(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
