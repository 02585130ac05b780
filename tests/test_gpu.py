"""On a GPU: the program of the laptop, one process, bfloat16, against the same on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data_samples import prepared
from tests.runs import losses, write_config

ROOT = Path(__file__).parent.parent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_first_losses_agree_with_the_cpu(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    found = {}
    for device, visible in (("gpu", None), ("cpu", "")):
        folder = tmp_path / device
        folder.mkdir()
        config = write_config(folder, data, train={"dtype": "bfloat16", "eval_interval": 6}, checkpoint={"interval": 3})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        subprocess.run([sys.executable, "train.py", config], cwd=ROOT, env=environment, check=True)
        assert json.loads((folder / "run" / "status.json").read_text())["state"] == "finished"
        found[device] = losses(folder)
    for step, loss in found["cpu"].items():
        assert found["gpu"][step] == pytest.approx(loss, rel=2**-8), step
