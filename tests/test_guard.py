"""Bad steps do not update the weights, on any rank. A run with many of them rolls back to a
checkpoint and skips the samples of the bad steps."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import training.guard
import training.step
from data.loader import BatchLoader
from proofs.ranks import RankError, Ranks
from runtime.records.events import read_events
from tests.faulty_runs import run_with_bad_batches, run_with_bad_steps, run_without
from tests.planted import planted
from tests.runs import fresh, losses, metrics_of, said_by, status_of, train_run, write_config
from tests.stages import mixture
from training.guard import WINDOW, UpdateGuard
from training.step import TrainStep

LINE, PLANE, SPLIT = {"dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"cp": 2, "dp_shard": 2}
SPACE = {"tp": 2, "pp": 2, "dp_shard": 2}
layouts = pytest.mark.parametrize(
    "layout",
    [LINE, *(pytest.param(other, marks=pytest.mark.thorough) for other in (PLANE, SPACE, SPLIT))],
    ids=str,
)


def world_of(layout: dict[str, int]) -> int:
    return math.prod(layout.values())


def named(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == kind]


def trainer_of(folder: Path, step: int) -> dict[str, Any]:
    path = folder / "run" / "checkpoints" / f"step-{step:08d}" / "trainer.json"
    return json.loads(path.read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


# --- decisions of the guard -----------------------------------------------------------------------


def judged(guard: UpdateGuard, loss: float, norm: float = 1.0) -> bool:
    """Whether the guard lets this step update. It then returns the step's norm unchanged, otherwise
    infinity."""
    given = guard(torch.tensor(loss), torch.tensor(norm)).item()
    assert given in (norm, math.inf)
    return given == norm


def quiet(guard: UpdateGuard, steps: int) -> None:
    """Feed the guard losses with mean 4 and standard deviation 0.1."""
    for step in range(steps):
        assert judged(guard, 4 + (0.1 if step % 2 else -0.1))


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (4.0, math.inf), (4.0, math.nan), (-math.inf, 1.0)],
)
def test_what_is_not_finite_does_not_update(loss: float, norm: float) -> None:
    guard = UpdateGuard(6.0, "cpu")
    assert guard(torch.tensor(loss), torch.tensor(norm)).item() == math.inf
    assert guard(torch.tensor(loss), torch.tensor(norm)).item() == math.inf
    assert guard.bad_in_a_row.item() == 2
    assert judged(guard, 4.0)
    assert guard.bad_in_a_row.item() == 0


def test_a_spike_does_not_update() -> None:
    guard = UpdateGuard(6.0, "cpu")
    quiet(guard, WINDOW)
    assert judged(guard, 4.59)
    guard = UpdateGuard(6.0, "cpu")
    quiet(guard, WINDOW)
    assert not judged(guard, 4.61)
    assert judged(guard, 3.0), "a low loss is not a spike"


def test_a_guard_that_knows_little_lets_all_pass() -> None:
    guard = UpdateGuard(6.0, "cpu")
    quiet(guard, WINDOW // 2 - 1)
    assert judged(guard, 100.0)
    guard = UpdateGuard(0.0, "cpu")
    quiet(guard, WINDOW)
    assert judged(guard, 100.0), "spike_sigmas 0 switches the check off"


def test_a_lasting_change_is_got_used_to() -> None:
    guard = UpdateGuard(6.0, "cpu")
    quiet(guard, WINDOW)
    passed = [judged(guard, 5.0) for _ in range(20)]
    assert not passed[0]
    assert all(passed[10:])


def test_a_restored_guard_decides_as_before() -> None:
    one, other = UpdateGuard(1.0, "cpu"), UpdateGuard(1.0, "cpu")
    generator = torch.Generator().manual_seed(0)
    for loss in torch.randn(WINDOW + 5, generator=generator).tolist():
        one(torch.tensor(loss), torch.tensor(1.0))
    one(torch.tensor(math.nan), torch.tensor(1.0))
    other.restore(json.loads(json.dumps(one.recent_losses())), int(one.bad_in_a_row))
    assert other.bad_in_a_row.item() == one.bad_in_a_row.item() > 0
    values = torch.randn(50, generator=generator).tolist()
    decisions = [judged(one, value) for value in values]
    assert decisions == [judged(other, value) for value in values]
    assert len(set(decisions)) == 2


# --- runs with planted mistakes -------------------------------------------------------------------


@layouts
def test_a_nan_in_one_ranks_gradient_skips_one_update(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """A NaN in one rank's gradient skips one update on all ranks (each save compares what ranks
    hold in common). The skip is counted, and the run resumes bitwise."""
    config = write_config(
        tmp_path, data, parallel=layout, checkpoint={"interval": 3, "keep_last": 9}
    )
    world = world_of(layout)
    rank = world - 1
    assert ranks.run(run_with_bad_steps, world, [config], rank, {3}) == [""] * world
    lines = metrics_of(tmp_path)
    finite = [math.isfinite(line["grad_norm"]) for line in lines]
    assert finite == [True, True, False, True, True, True]
    assert [line["skipped_updates"] for line in lines] == [0, 0, 1, 1, 1, 1]
    trainer = trainer_of(tmp_path, 6)
    assert (trainer["step"], trainer["updates"]) == (6, 5)

    (tmp_path / "run" / "checkpoints" / "step-00000006").rename(tmp_path / "other")
    before = losses(tmp_path)
    assert ranks.run(train_run, world, [config]) == [""] * world
    assert losses(tmp_path) == before
    last = metrics_of(tmp_path)[-1]
    assert last["skipped_updates"] == 1


@layouts
def test_bad_batches_are_left_out(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Steps 6 and 7 of 10 have bad batches. The run returns to the checkpoint of step 4 and then
    has the losses of a run whose data never contained these batches."""
    log_interval, world = 1 if layout in (LINE, PLANE) else 2, world_of(layout)
    config = write_config(
        tmp_path, data, parallel=layout, train={"steps": 10}, guard={"max_bad_steps": 2},
        checkpoint={"interval": 4, "keep_last": 9}, run={"log_interval": log_interval},
    )  # fmt: skip
    reader = {"global_batch_size": 8, "seed": 0, "dp_rank": 0, "dp_size": 2}
    loader = BatchLoader(mixture(data), seq_len=32, **reader)
    batches = [next(loader)[0] for _ in range(10)]  # the tokens of rank 0
    loader.close()

    # The run learns of bad steps when it logs: two at once, here 7 and 8, if it logs every second
    # step.
    first = 6 if log_interval == 1 else 7
    said = ranks.run(run_with_bad_batches, world, [config], batches[first - 1 : first + 1], 0)
    assert said == [""] * world
    found, left_out = losses(tmp_path), ((first - 1) * 8, (first + 1) * 8)
    (rollback,) = named(tmp_path, "rollback")
    assert (rollback["from_step"], rollback["step"]) == (first + 1, 4)
    assert tuple(rollback["left_out"]) == left_out
    trainer = trainer_of(tmp_path, 10)
    assert trainer["data"]["skipped"] == [list(left_out)]
    assert trainer["updates"] == 10

    fresh(tmp_path)
    assert ranks.run(run_without, world, [config], left_out) == [""] * world
    assert losses(tmp_path) == found


def test_a_run_without_checkpoint_cannot_go_back(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, guard={"max_bad_steps": 2})
    (said,) = ranks.run(said_by, 1, run_with_bad_steps, [config], 0, {2, 3})
    assert "no checkpoint to go back to; save more often" in said
    assert status_of(tmp_path)["state"] == "failed"


def test_a_run_that_stays_bad_ends(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    bounds = {"guard": {"max_bad_steps": 2}, "checkpoint": {"interval": 2}}
    config = write_config(tmp_path, data, train={"steps": 90}, **bounds)
    (said,) = ranks.run(said_by, 1, run_with_bad_steps, [config], 0, set(range(3, 90)))
    assert re.search("gone back 3 times to .*step-00000002", said)
    assert len(named(tmp_path, "rollback")) == 3


def run_with_a_spike(arguments: list[str]) -> str:
    """Train with a last step whose loss is far above the others'."""
    calls = []

    @planted(TrainStep, "forward_backward")
    def spiking(forward_backward: Any, *args: Any, **more: Any) -> Any:
        loss, norm = forward_backward(*args, **more)
        calls.append(None)
        return (loss * 1.5 if len(calls) == 6 else loss), norm

    with spiking(), patch.object(training.guard, "WINDOW", 8):
        return train_run(arguments)


@layouts
def test_a_spike_is_skipped_in_a_run(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    config = write_config(tmp_path, data, parallel=layout)
    skipped = []
    for sigmas in (6.0, 0.0):
        arguments = [config, f"guard.spike_sigmas={sigmas}"]
        assert set(ranks.run(run_with_a_spike, world_of(layout), arguments)) == {""}
        skipped.append(metrics_of(tmp_path)[-1]["skipped_updates"])
        fresh(tmp_path)
    assert skipped == [1, 0]


def run_with_bad_weights(arguments: list[str], rank: int) -> str:
    """Train with a NaN planted in one rank's optimizer state after step 3, which affects no loss or
    gradient."""
    call = TrainStep.__call__

    def planted(self: TrainStep, step: int, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        result = call(self, step, tokens, targets)
        if step == 2 and dist.get_rank() == rank:
            self.optimizer.state["exp_avg"][-1].view(-1)[0] = math.nan
        return result

    with patch.object(TrainStep, "__call__", planted):
        return train_run(arguments)


def test_what_is_not_finite_is_not_saved(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, data, parallel={"dp_shard": 2}, train={"steps": 3}, checkpoint={"interval": 2}
    )
    with pytest.raises(
        RankError, match=r"on rank 1: FloatingPointError: optimizer\.\S+ is not finite"
    ):
        ranks.run(run_with_bad_weights, 2, [config], 1)
    assert checkpoints(tmp_path) == ["latest", "step-00000002"]


@pytest.mark.thorough
def test_what_was_saved_among_bad_steps_is_not_gone_back_to(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """A run ends with two bad steps and is saved. When it resumes with a third, it goes back to the
    checkpoint before the first."""
    bounds = {"guard": {"max_bad_steps": 3}, "checkpoint": {"interval": 2, "keep_last": 1}}
    config = write_config(tmp_path, data, parallel=PLANE, **bounds)
    assert ranks.run(run_with_bad_steps, 4, [config, "train.steps=4"], 2, {3, 4}) == [""] * 4
    assert checkpoints(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    assert ranks.run(run_with_bad_steps, 4, [config, "train.steps=8"], 2, {1}) == [""] * 4
    (rollback,) = named(tmp_path, "rollback")
    assert (rollback["from_step"], rollback["step"], rollback["left_out"]) == (5, 2, [32, 40])
    assert checkpoints(tmp_path) == ["latest", "step-00000004.abandoned", "step-00000008"]
    skipped = {line["step"]: line["skipped_updates"] for line in metrics_of(tmp_path)}
    assert skipped == dict.fromkeys(range(1, 9), 0)


@pytest.mark.parametrize(
    ("bad", "saved"),
    [
        ({2, 6}, [3, 4, 6]),  # 3 in place of 2; 6 ends the run
        # the save due at step 4 is postponed, and after the rollback to 2 made at 4 again
        ({3, 4, 5}, [2, 4, 6]),
    ],
    ids=["a save waits for a good step", "one that was due before a rollback"],
)
def test_saves_and_bad_steps(
    ranks: Ranks, data: Path, tmp_path: Path, bad: set[int], saved: list[int]
) -> None:
    bounds = {"guard": {"max_bad_steps": 3}, "checkpoint": {"interval": 2, "keep_last": 9}}
    config = write_config(tmp_path, data, **bounds)
    assert ranks.run(run_with_bad_steps, 1, [config], 0, bad) == [""]
    assert [event["step"] for event in named(tmp_path, "checkpoint")] == saved


def test_without_a_good_checkpoint_the_bad_one_stays(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, guard={"max_bad_steps": 3}, checkpoint={"interval": 4})
    assert ranks.run(run_with_bad_steps, 1, [config, "train.steps=4"], 0, {3, 4}) == [""]
    (said,) = ranks.run(said_by, 1, run_with_bad_steps, [config], 0, {1})
    assert "no checkpoint to go back to" in said
    assert "step-00000004" in checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("bad", "why"),
    [({1, 2, 3}, "no update was made up"), ({2, 3}, "no update was made after step 1")],
)
def test_a_run_that_learnt_nothing_is_not_finished(
    ranks: Ranks, data: Path, tmp_path: Path, bad: set[int], why: str
) -> None:
    """A run whose last steps were all bad ends as failed, even if it is too short for
    guard.max_bad_steps to end it."""
    config = write_config(tmp_path, data, train={"steps": 3}, checkpoint={"interval": 3})
    (said,) = ranks.run(said_by, 1, run_with_bad_steps, [config], 0, bad)
    assert why in said
    status = status_of(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 3)
    assert why in status["reason"]
    assert not (tmp_path / "run" / "checkpoints").exists()
