"""Every comparison on a CPU runs, in its quickest form, and compares like with like. What they have
measured (benchmarks/results/) is data, and not asserted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import plan_accuracy
from benchmarks.experts import read, same_work
from benchmarks.plan_accuracy import FITTED
from tests import ROOT


@pytest.mark.parametrize(
    "quick",
    [
        # needs the data of `make train`, and a minute
        pytest.param("optimizers --rounds 1 --steps 2 --rates 1", marks=pytest.mark.slow),
        pytest.param("experts --rounds 1", marks=pytest.mark.thorough),
    ],
)
def test_a_comparison_runs(quick: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    name, *options = quick.split()
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))


def test_plans_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    """With one row; tests/plan/test_plan_published.py compares all. The exit status says
    whether the aim was reached."""
    file = tmp_path / "results.json"
    options = patch.object(sys, "argv", ["plan_accuracy", "fitted", "--json", str(file)])
    for aim, missed in ((6.0, 0), (0.0, 1)):
        few = {"FITTED": FITTED[1:2], "LARGEST_LIMIT": aim}
        with options, patch.multiple(plan_accuracy, **few):
            assert plan_accuracy.main() == missed
    assert json.loads(file.read_text(encoding="utf-8"))["fitted"]["rows"] == 1


def test_experts_and_the_dense_model_do_the_same_work() -> None:
    dense, experts = read("dense"), read("experts")
    assert same_work(dense, experts)
    # Controls: another expert for each token, and other tokens
    own = dataclasses.replace(experts.model.experts, per_token=3)
    model = dataclasses.replace(experts.model, experts=own)
    assert not same_work(dense, dataclasses.replace(experts, model=model))
    train = dataclasses.replace(experts.train, steps=dense.train.steps + 1)
    assert not same_work(dense, dataclasses.replace(experts, train=train))
