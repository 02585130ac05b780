"""`python -m tools.launch`, which `make train` calls: its processes are torchrun's, and fail as they do."""

import json
import subprocess
import sys
from pathlib import Path

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
