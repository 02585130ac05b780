"""Every comparison on a CPU runs, in its quickest form, and compares like with like. What they have
measured (benchmarks/results/) is data, and not asserted."""

import dataclasses
import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.experts import SAME, first_losses, programs, read, same_work
from benchmarks.plan_accuracy import FITTED
from tests import ROOT
from tests.runs import forked, status


@pytest.mark.slow  # these need the data of `make train`, and one and a half minutes
@pytest.mark.parametrize(
    "quick",
    ["optimizers --rounds 1 --steps 2 --rates 1", "train_cpu --rounds 1 --steps 1 --size 1.8M"],
)
def test_a_comparison_runs(quick: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    name, *options = quick.split()
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # so little work may miss an aim
    assert done.returncode == 0 or "aim was NOT reached" in done.stdout, done.stdout + done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))


def compare(name: str, *options: str, **smaller: Any) -> Any:
    """Do what `python -m benchmarks.NAME` does, with parts of it replaced by smaller ones."""
    comparison = import_module(f"benchmarks.{name}")
    with patch.multiple(comparison, **smaller), patch.object(sys, "argv", [name, *options]):
        return comparison.main()


def test_plans_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    """With one row; tests/plan/test_plan_published.py compares all. The exit status says
    whether the aim was reached."""
    file = tmp_path / "results.json"
    options = ["fitted", "--json", str(file)]
    for aim, missed in ((6.0, 0), (0.0, 1)):
        few = {"FITTED": FITTED[1:2], "LARGEST_LIMIT": aim}
        assert compare("plan_accuracy", *options, **few) == missed
    assert json.loads(file.read_text(encoding="utf-8"))["fitted"]["rows"] == 1


def printed_losses(*about: Any) -> dict[str, float]:
    """first_losses, which also prints what it returns: it runs in another process."""
    losses = first_losses(*about)
    print(json.dumps(losses))
    return losses


@pytest.mark.thorough
def test_mixtral_computes_the_same_loss_in_the_comparison_with_it(tmp_path: Path) -> None:
    """first_losses asserts that losses are equal; here, that it would notice another router."""
    log, results, errors = tmp_path / "log", tmp_path / "results.json", tmp_path / "errors"
    few = "train.global_batch_size=2", "train.micro_batch_size=1", "train.seq_len=32"
    smaller = {"programs": partial(programs, *few), "first_losses": printed_losses}
    options = ["--rounds", "1", "--rounds-3d", "0", "--json", str(results)]
    process = forked(log, partial(compare, **smaller), "experts", *options, errors=errors)
    assert status(process) == 0, errors.read_text()
    assert "as_mixtral_over_mixtral_loop" in json.loads(results.read_text())["ratios"]
    found = json.loads(log.read_text().splitlines()[0])
    assert abs(found["experts"] / found["experts as Mixtral"] - 1) > SAME


def test_experts_and_the_dense_model_do_the_same_work() -> None:
    dense, experts = read("dense"), read("experts")
    assert same_work(dense, experts)
    # Controls: another expert for each token, and other tokens
    own = dataclasses.replace(experts.model.experts, per_token=3)
    model = dataclasses.replace(experts.model, experts=own)
    assert not same_work(dense, dataclasses.replace(experts, model=model))
    train = dataclasses.replace(experts.train, steps=dense.train.steps + 1)
    assert not same_work(dense, dataclasses.replace(experts, train=train))
