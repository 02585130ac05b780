"""Models with experts in a run: what a checkpoint holds of them, skipped steps, rollbacks."""

import dataclasses
from pathlib import Path

import pytest
import torch

from parallel.memory import MOMENTS, WEIGHTS
from proofs.ranks import Ranks
from runtime.checkpoint.load import load
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.verify import parse_trainer
from runtime.log.events import read_events
from runtime.metrics.memory_report import held_bytes
from runtime.trainer_state import held_tensors
from settings.load import load_config
from tests.health.faulty_runs import run_with_bad_batches, run_with_bad_steps, run_without
from tests.runs import (
    EXPERTS,
    batches_of,
    checkpoint_of,
    copy_of,
    fresh,
    losses,
    run,
    same_tensors,
    saved_start,
    step_of,
    stored_tensors,
    write_config,
)
from tools import verify

BIASES = {f"model.blocks.{layer}.feed_forward.router.bias" for layer in (1, 2, 3)}
ONE_STAGE = ["parallel.pp=1", "parallel.ep=1"]


def biases(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = stored_tensors(checkpoint_of(folder, step))
    return {name: found[name] for name in BIASES}


# --- a checkpoint ---------------------------------------------------------------------------------


def test_a_checkpoint_holds_experts_and_biases(
    saved_experts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint_of(saved_experts, 4)
    tensors, state = read_manifest(path).tensors, stored_tensors(path)
    assert tensors.keys() == state.keys()
    assert tensors["model.blocks.3.feed_forward.experts.gate.weight"] == ("F64", (4, 16, 32))
    assert {name for name in tensors if "bias" in name} == BIASES, "biases have no moments"
    assert {tensors[name] for name in BIASES} == {("F32", (4,))}
    assert any(state[name].any() for name in BIASES), "updates have changed them"
    moment = state["optimizer.blocks.1.feed_forward.experts.down.weight.exp_avg_sq"]
    assert (moment.amax((1, 2)) > 0).all(), "of every expert"
    assert verify.main([str(saved_experts / "run")]) == 0
    assert "good" in capsys.readouterr().out


def loaded_weights(arguments: list[str], path: str) -> tuple[dict[str, torch.Tensor], float]:
    """Load only the weights: the biases, and the largest moment."""
    step = step_of(arguments)
    load(step, saved_start(Path(path), weights_only=True))
    biases, largest = {}, 0.0
    for held in held_tensors(step):
        if held.name.endswith("bias"):
            biases[held.name] = held.tensor.to_local().clone()
        elif not held.of_model and held.tensor.to_local().numel():
            largest = max(largest, held.tensor.to_local().abs().max().item())
    return biases, largest


def test_weights_come_with_their_biases(ranks: Ranks, saved_experts: Path) -> None:
    """A new run that starts from weights gets the biases too, because they decide which experts
    these weights were trained for; its moments are new."""
    config, path = str(saved_experts / "config.yaml"), str(checkpoint_of(saved_experts, 4))
    overrides = ["parallel.pp=1", "parallel.tp=2"]
    for found, largest_moment in ranks.run(loaded_weights, 2, [config, *overrides], path):
        assert same_tensors(found, biases(saved_experts, 4))
        assert largest_moment == 0


def test_how_the_load_is_evened_may_change(
    ranks: Ranks, saved_experts: Path, tmp_path: Path
) -> None:
    """Auxiliary losses and the rate of biases are not stored. With rate 0 biases stay."""
    config, _ = copy_of(saved_experts, tmp_path)
    free = {"router_aux_weight", "router_z_weight", "router_bias_rate"}
    stored = parse_trainer(checkpoint_of(tmp_path, 4)).model.keys()
    fields = {field.name for field in dataclasses.fields(load_config(config, []).model)}
    assert free <= fields - stored
    changed = [f"model.{key}=0" for key in sorted(free)]
    run(ranks, 1, config, *ONE_STAGE, *changed, "train.steps=5")
    assert same_tensors(biases(tmp_path, 5), biases(tmp_path, 4))
    before, after = (stored_tensors(checkpoint_of(tmp_path, step)) for step in (4, 5))
    assert not same_tensors(before, after), "weights do not"


def counted(arguments: list[str]) -> tuple[dict[str, int], int]:
    """The bytes that the memory report counts, and the numbers in this rank's weights."""
    step = step_of(arguments)
    return held_bytes(step), sum(w.sharded.to_local().numel() for w in step.weights)


def test_the_memory_report_counts_experts(ranks: Ranks, saved_experts: Path) -> None:
    config = str(saved_experts / "config.yaml")
    for held, numbers in ranks.run(counted, 4, [config, "train.dtype=float32"]):
        assert held[WEIGHTS] == 4 * numbers
        assert held[MOMENTS] == 8 * numbers


# --- steps that are not made ----------------------------------------------------------------------


def test_a_skipped_step_leaves_the_biases(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Step 3 is skipped, and ends the run, which then saves."""
    sections = {
        "model": EXPERTS,
        "parallel": {"tp": 2, "ep": 2},
        "train": {"steps": 3, "micro_batch_size": 8},
    }
    config = write_config(tmp_path, data, checkpoint={"interval": 1, "keep_last": 9}, **sections)
    assert ranks.run(run_with_bad_steps, 2, [config], 1, {3}) == [""] * 2
    second, third = (stored_tensors(checkpoint_of(tmp_path, step)) for step in (2, 3))
    assert same_tensors(second, third)
    assert not same_tensors(biases(tmp_path, 1), biases(tmp_path, 2))


@pytest.mark.thorough
def test_a_rollback_restores_the_biases(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Steps 4 and 5 have bad batches. The run returns to step 2 and then is a run whose data never
    had them, bit for bit."""
    sections = {"model": EXPERTS, "parallel": {"tp": 2, "ep": 4}, "guard": {"max_bad_steps": 2}}
    config = write_config(tmp_path, data, checkpoint={"interval": 2, "keep_last": 9}, **sections)
    batches = ranks.run(batches_of, 4, [config])[0]
    bad = [batches[step][0] for step in (3, 4)]
    fresh(tmp_path)
    assert ranks.run(run_with_bad_batches, 4, [config], bad, 0) == [""] * 4
    (rollback,) = [event for event in read_events(tmp_path / "run") if event["event"] == "rollback"]
    assert (rollback["from_step"], rollback["step"]) == (5, 2)
    found, state = losses(tmp_path), stored_tensors(checkpoint_of(tmp_path, 6))
    fresh(tmp_path)
    assert ranks.run(run_without, 4, [config], tuple(rollback["left_out"])) == [""] * 4
    assert losses(tmp_path) == found
    assert same_tensors(stored_tensors(checkpoint_of(tmp_path, 6)), state)
