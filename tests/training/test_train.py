"""Complete runs: the files they write, other layouts, and other arithmetic."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

import parallel.data
from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.ranks import Ranks
from settings.checks import validate
from tests import runs
from tests.steps import make_step, named_parameters, rows_of


def test_what_a_run_leaves(saved: Path) -> None:
    """Steps are logged, evaluations and saves made when due, and defaults written out."""
    lines = runs.metrics_of(saved)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    keys = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second",
            "tokens_per_second_per_device", "mfu", "step_seconds", "data_seconds",
            "peak_memory_bytes", "peak_memory_rank"}  # fmt: skip
    assert all(keys <= set(line) for line in lines)
    assert all(line["peak_memory_bytes"] > 1 << 20 for line in lines)
    assert all(line["peak_memory_rank"] in range(8) for line in lines)
    assert [line["tokens"] for line in lines] == [256 * (i + 1) for i in range(6)]
    in_a_step = [line["tokens_per_second"] * line["step_seconds"] for line in lines]
    assert in_a_step == pytest.approx([256] * 6)
    assert runs.losses(saved)[6] < runs.losses(saved)[1], "it learns"
    assert runs.status_of(saved)["state"] == "finished"
    assert runs.evaluations(saved).keys() == {3, 6}
    resolved = yaml.safe_load((saved / "run" / "config.yaml").read_text())
    assert resolved["optimizer"]["adamw"]["eps"] == 1e-8
    checkpoints = saved / "run" / "checkpoints"
    assert runs.names(checkpoints) == ["latest", "step-00000002", "step-00000004", "step-00000006"]
    assert (checkpoints / "latest").read_text() == "step-00000006"
    events = runs.events_of(saved / "run", "checkpoint")
    assert [event["step"] for event in events] == [2, 4, 6]
    assert all(event["bytes"] > 0 and event["write_seconds"] > 0 for event in events)
    assert all(event["stall_seconds"] >= 0 for event in events)


def test_bfloat16_follows_float32(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The loss stays within 2% of float32's."""
    train, model = {"steps": 3, "micro_batch_size": 4}, {"num_layers": 2}
    config = runs.write_config(tmp_path, data, train=train, model=model)
    runs.run(ranks, 2, config)
    expected = runs.losses(tmp_path)
    layout = ["train.dtype=bfloat16", "parallel.tp=2", "parallel.zero_stage=2"]
    for reduce_dtype in ("float32", "bfloat16"):
        runs.fresh(tmp_path)
        runs.run(ranks, 2, config, *layout, f"parallel.reduce_dtype={reduce_dtype}")
        rounded = runs.losses(tmp_path)
        assert rounded != expected, f"bfloat16 was not used ({reduce_dtype})"
        assert max(abs(rounded[s] / expected[s] - 1) for s in expected) < 0.02, reduce_dtype


def error_of_sums(adds: bool) -> float:
    """The relative error of gradients that are reduced in bfloat16, of 16 micro-batches; `adds`:
    each is added to `p.grad`."""
    case = Case(MeshSizes(dp_shard=2), dtype="bfloat16", zero_stage=2, num_microbatches=16)
    found = []
    with patch.object(parallel.data, "adds_to_gradients", lambda *_: adds):
        for reduce_dtype in ("float32", "bfloat16"):
            config = case.config()
            config = replace(config, parallel=replace(config.parallel, reduce_dtype=reduce_dtype))
            validate(config, 2)
            step = make_step(config)
            step.forward_backward(*rows_of(step))
            gradients = [weight.grad.to_local() for _, weight in named_parameters(step)]
            found.append(torch.cat([each.flatten() for each in gradients]))
    exact, rounded = found
    return float((rounded - exact).norm() / exact.norm())


def test_gradients_reduced_in_bfloat16_are_not_summed_in_it(ranks: Ranks) -> None:
    """With several micro-batches, each of which is reduced. Control: their sum in bfloat16."""
    assert max(ranks.run(error_of_sums, 2, True)) < 0.002
    assert min(ranks.run(error_of_sums, 2, False)) > 0.003


@pytest.mark.thorough
def test_bfloat16_with_split_backwards(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Weight gradients formed after backward, of which FSDP reduces each micro-batch's, give the
    losses and norms of those formed in backward."""
    train = {"steps": 3, "dtype": "bfloat16", "micro_batch_size": 1}
    sizes = {"pp": 2, "dp_shard": 2, "zero_stage": 2}
    config = runs.write_config(tmp_path, data, train=train, parallel=sizes)
    found = []
    for schedule in ("1f1b", "zb_h1"):
        runs.fresh(tmp_path)
        runs.run(ranks, 4, config, f"parallel.schedule={schedule}")
        found.append(runs.metrics_of(tmp_path))
    for whole, split in zip(*found, strict=True):
        assert split["loss"] == pytest.approx(whole["loss"], rel=1e-3)
        assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)


@pytest.mark.thorough
def test_compiled_agrees(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    # Blocks are compiled one by one, so two suffice. Evaluation runs them too.
    train, model = {"steps": 3, "eval_interval": 3}, {"num_layers": 2}
    config = runs.write_config(tmp_path, data, train=train, model=model)
    runs.run(ranks, 2, config)
    eager = runs.losses(tmp_path)
    for mode in ("none", "selective", "full"):
        runs.fresh(tmp_path)
        compiled = ["train.compile=true", f"train.activation_checkpointing={mode}"]
        runs.run(ranks, 2, config, *compiled)
        assert runs.losses(tmp_path) == pytest.approx(eager, rel=1e-5), mode
