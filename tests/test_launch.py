"""`python -m tools.launch`, which `make train` calls: its processes are torchrun's, and fail as they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import LAYOUT_3D, write_config

ROOT = Path(__file__).parent.parent


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.launch", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_it_trains_and_it_refuses(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, parallel=LAYOUT_3D)
    done = launch(config, "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("+ torchrun --standalone --nproc-per-node 8 train.py")
    assert "88,352 parameters on 8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2" in done.stdout
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"

    done = launch(config, "parallel.tp=3", f"run.dir={tmp_path / 'refused'}")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "parallel.tp = 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling, and glibc's")
def test_ranks_share_the_cores() -> None:
    """Through the server that forks them."""
    program = "from tools.launch import start_processes; from tests.test_launch import say_settings as say; "
    done = subprocess.run(
        [sys.executable, "-c", f"{program}raise SystemExit(start_processes(1, say))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")},
    )
    assert done.stdout.split() == [str(os.SCHED_BATCH), "1", str(2**25), str(2**30)], done.stderr


def say_settings() -> None:
    names = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    print(os.sched_getscheduler(0), *(os.environ[name] for name in names))
