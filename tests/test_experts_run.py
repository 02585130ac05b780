"""Complete runs of models with experts: resuming, skipped steps, rollbacks, copies that differ."""

from pathlib import Path

import pytest
import torch

from runtime.checkpoints import checkpoint
from runtime.records.events import read_events
from tests.faulty_runs import run_with_bad_batches, run_with_bad_steps, run_without
from tests.planted import planted
from tests.runs import (
    EXPERTS,
    batches_of,
    copy_of,
    evaluations,
    forget_step_6,
    fresh,
    global_state,
    losses,
    metrics_of,
    run,
    train_run,
    write_config,
)
from tools.ranks import Ranks

SAVED_AT = {"pp": 2, "tp": 2, "ep": 2}
OTHERS = [  # world, layout
    (4, ["parallel.ep=4", "parallel.tp=1", "parallel.pp=1"]),
    (2, ["parallel.ep=1", "parallel.tp=1", "parallel.pp=2"]),
    (8, ["parallel.ep=4", "parallel.dp_replicate=2", "parallel.pp=1"]),
]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on 8 ranks, saved and evaluated after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("experts")
    config = write_config(
        folder,
        data,
        model=EXPERTS,
        parallel=SAVED_AT,
        train={"dtype": "float64", "eval_interval": 3, "eval_samples": 6},
        checkpoint={"interval": 3},
    )
    run(ranks, 8, config)
    return folder


def state_at(ranks: Ranks, folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "run" / "checkpoints" / f"step-{step:08d}"
    one_rank = [str(folder / "config.yaml"), *(f"parallel.{axis}=1" for axis in SAVED_AT)]
    return ranks.run(global_state, 1, one_rank, str(path))[0]


def biases_at(ranks: Ranks, folder: Path, step: int) -> torch.Tensor:
    """[layers, X]"""
    found = state_at(ranks, folder, step)
    return torch.stack([found[name] for name in sorted(found) if name.endswith("router.bias")])


def test_a_stopped_run_resumes_bit_for_bit(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    config, _ = copy_of(saved, tmp_path)
    forget_step_6(tmp_path)
    run(ranks, 8, config)
    assert losses(tmp_path) == losses(saved)
    assert evaluations(tmp_path) == evaluations(saved)
    assert evaluations(tmp_path).keys() == {3, 6}
    ours, theirs = state_at(ranks, tmp_path, 6), state_at(ranks, saved, 6)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(biases_at(ranks, saved, 3), biases_at(ranks, saved, 6))


@pytest.mark.parametrize(
    ("world", "layout"),
    [OTHERS[0], *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS[1:])],
)
def test_it_resumes_on_another_ep(
    ranks: Ranks, saved: Path, tmp_path: Path, world: int, layout: list[str]
) -> None:
    """The same numbers but for rounding, and the same choices of experts, so equal biases."""
    config, _ = copy_of(saved, tmp_path)
    forget_step_6(tmp_path)
    run(ranks, world, config, *layout)
    assert losses(tmp_path) == pytest.approx(losses(saved), rel=1e-9)
    assert evaluations(tmp_path) == pytest.approx(evaluations(saved), rel=1e-9)
    assert torch.equal(biases_at(ranks, tmp_path, 6), biases_at(ranks, saved, 6))


@planted(checkpoint, "load")
def biases_forgotten(load, step, start):
    load(step, start)
    for _, bias in step.balance.tensors():
        bias.to_local().zero_()


def run_without_biases(arguments: list[str]) -> str:
    with biases_forgotten():
        return train_run(arguments)


def test_without_its_biases_a_run_continues_as_another(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """Control: the two tests above would fail if biases were not loaded."""
    config, _ = copy_of(saved, tmp_path)
    forget_step_6(tmp_path)
    assert ranks.run(run_without_biases, 8, [config]) == [""] * 8
    ours, whole = losses(tmp_path), losses(saved)
    assert any(ours[step] != pytest.approx(whole[step], rel=1e-9) for step in (4, 5, 6))


def test_a_skipped_step_leaves_the_biases(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Step 3 is skipped, and ends the run, which then saves."""
    config = write_config(
        tmp_path,
        data,
        model=EXPERTS,
        parallel={"tp": 2, "ep": 2},
        train={"steps": 3},
        checkpoint={"interval": 1, "keep_last": 9},
    )
    assert ranks.run(run_with_bad_steps, 4, [config], 3, {3}) == [""] * 4
    first, second, third = (state_at(ranks, tmp_path, step) for step in (1, 2, 3))
    assert all(torch.equal(second[name], third[name]) for name in second)
    name = "model.blocks.2.feed_forward.router.bias"
    assert not torch.equal(first[name], second[name])


@pytest.mark.thorough
def test_a_rollback_restores_the_biases(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Steps 4 and 5 have bad batches. The run returns to step 2 and then is a run whose data never
    had them, bit for bit."""
    config = write_config(
        tmp_path,
        data,
        model=EXPERTS,
        parallel={"tp": 2, "ep": 4},
        checkpoint={"interval": 2, "keep_last": 9},
        guard={"max_bad_steps": 2},
    )
    batches = ranks.run(batches_of, 4, [config])[0]
    bad = [batches[step][0] for step in (3, 4)]
    fresh(tmp_path)
    assert ranks.run(run_with_bad_batches, 4, [config], bad, 0) == [""] * 4
    (rollback,) = [event for event in read_events(tmp_path / "run") if event["event"] == "rollback"]
    assert (rollback["from_step"], rollback["step"]) == (5, 2)
    found, state = losses(tmp_path), state_at(ranks, tmp_path, 6)
    fresh(tmp_path)
    assert ranks.run(run_without, 4, [config], tuple(rollback["left_out"])) == [""] * 4
    assert losses(tmp_path) == found
    again = state_at(ranks, tmp_path, 6)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_metrics_tell_the_load(saved: Path) -> None:
    lines = metrics_of(saved)
    for line in lines:
        by_layer = line["experts_by_layer"]
        assert by_layer["layer"] == [1, 2, 3]
        assert all(1 <= share <= 2 for share in by_layer["largest_share"]), "k 2 of X 4"
        assert all(0.5 <= entropy <= 1 for entropy in by_layer["entropy"])
        assert line["lowest_expert_entropy"] == pytest.approx(min(by_layer["entropy"]), abs=1e-4)
        assert line["largest_expert_share"] == pytest.approx(max(by_layer["largest_share"]), 1e-3)
        assert line["dead_experts"] == sum(by_layer["dead"])
        assert 0.002 < line["router_balance_loss"] < 0.01, "1e-3 of at least 1, in each of 3 layers"
        assert line["router_z_loss"] > 0
