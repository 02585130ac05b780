"""Every comparison on a CPU runs, in its quickest form, and compares like with like. What they have
measured (benchmarks/results/) is data, and not asserted."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.experts import MIXTRAL, SAME, first_losses, programs, read, same_work
from benchmarks.train_cpu import random_batches
from proofs.ranks import Ranks
from tests import ROOT

QUICK = {
    "experts": "--rounds 1 --rounds-3d 0",
    "optimizers": "--rounds 1 --steps 2 --rates 1",
    "plan_accuracy": "fitted",
    "train_cpu": "--rounds 1 --steps 1 --size 1.8M",
}


SLOW = {"train_cpu", "optimizers"}  # need the data of `make train`, and one and a half minutes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.thorough)
        for name in QUICK
    ],
)
def test_a_comparison_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = [*shlex.split(QUICK[name]), "--json", file]
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # so little work may miss an aim
    assert done.returncode == 0 or "aim was NOT reached" in done.stdout, done.stdout + done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))


def test_experts_and_the_dense_model_do_the_same_work() -> None:
    dense, experts = read("dense"), read("experts")
    assert same_work(dense, experts)
    # Controls: another expert for each token, and other tokens
    own = dataclasses.replace(experts.model.experts, per_token=3)
    model = dataclasses.replace(experts.model, experts=own)
    assert not same_work(dense, dataclasses.replace(experts, model=model))
    train = dataclasses.replace(experts.train, steps=dense.train.steps + 1)
    assert not same_work(dense, dataclasses.replace(experts, train=train))


def losses() -> dict[str, float]:
    small = "train.global_batch_size=2", "train.micro_batch_size=1", "train.seq_len=32"
    config, steps = programs(*small)
    (rows,) = random_batches(config.model.vocab_size, 2, 32, 1)
    return first_losses(steps, rows)


@pytest.mark.thorough
def test_mixtral_computes_the_same_loss(ranks: Ranks) -> None:
    found = ranks.run(losses, 1)[0]
    ours = found["experts as Mixtral"]
    assert all(abs(found[name] / ours - 1) < SAME for name in MIXTRAL)
    assert abs(found["experts"] / ours - 1) > SAME, "control: another router must show"
