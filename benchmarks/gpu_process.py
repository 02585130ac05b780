"""Other processes that GPU benchmarks start to measure or to compare one row."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


def without_gpu() -> dict[str, str]:
    """The environment of a process that must not see a GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def run_python(*arguments: str, environment: Mapping[str, str]) -> str:
    """Run Python with these arguments in the repository, and return what it prints. If it fails,
    raise RuntimeError with the last line of its errors."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(arguments[:2])}: {last}")
    return done.stdout
