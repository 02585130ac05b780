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
from data.loader import BatchLoader
from proofs.ranks import Ranks
from tests import runs
from tests.health.faulty_runs import run_with_bad_batches, run_with_bad_steps, run_without
from tests.planted import planted
from tests.proofs.parity_tiers import thorough_but
from tests.settings.stages import mixture
from training.guard import WINDOW, UpdateGuard
from training.step import TrainStep

LINE, SPLIT, SPACE = {"dp_shard": 2}, {"cp": 2, "dp_shard": 2}, runs.LAYOUT_3D | {"dp_shard": 2}


def config_of(folder: Path, data: Path, **sections: dict[str, Any]) -> str:
    """The small run of two layers, one for each stage."""
    return runs.write_config(folder, data, model={"num_layers": 2}, **sections)


def checkpoints(folder: Path) -> list[str]:
    return runs.names(folder / "run" / "checkpoints")


def judged(guard: UpdateGuard, loss: float, norm: float = 1.0) -> bool:
    """Whether the guard lets this step update. It then returns the step's norm unchanged, otherwise
    infinity."""
    given = guard(torch.tensor(loss), torch.tensor(norm)).item()
    assert given in (norm, math.inf)
    return given == norm


def quiet(sigmas: float, steps: int = WINDOW) -> UpdateGuard:
    """A guard that knows losses with mean 4 and standard deviation 0.1."""
    guard = UpdateGuard(sigmas, "cpu")
    for step in range(steps):
        assert judged(guard, 4 + (0.1 if step % 2 else -0.1))
    return guard


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (4.0, math.inf), (4.0, math.nan)]
)
def test_what_is_not_finite_does_not_update(loss: float, norm: float) -> None:
    guard = UpdateGuard(6.0, "cpu")
    for bad_in_a_row in (1, 2):
        assert guard(torch.tensor(loss), torch.tensor(norm)).item() == math.inf
        assert guard.bad_in_a_row.item() == bad_in_a_row
    assert judged(guard, 4.0)
    assert guard.bad_in_a_row.item() == 0


def test_a_spike_does_not_update() -> None:
    assert judged(quiet(6.0), 4.59)
    guard = quiet(6.0)
    assert not judged(guard, 4.61)
    assert judged(guard, 3.0), "a low loss is not a spike"
    assert judged(quiet(6.0, WINDOW // 2 - 1), 100.0), "it knows little"
    assert judged(quiet(0.0), 100.0), "spike_sigmas 0 switches the check off"
    guard = quiet(6.0)
    passed = [judged(guard, 5.0) for _ in range(20)]
    assert not passed[0]
    assert all(passed[10:]), "a lasting change is got used to"


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


def run_with_bad_updates(arguments: list[str], rank: int) -> str:
    """Train with a NaN in a gradient of `rank` in step 3, and a loss far above the others' in step
    4, on all ranks."""
    calls = []

    @planted(TrainStep, "forward_backward")
    def spiking(forward_backward: Any, *args: Any, **more: Any) -> Any:
        loss, norm = forward_backward(*args, **more)
        calls.append(None)
        return (loss * 1.5 if len(calls) == 4 else loss), norm

    with spiking(), patch.object(training.guard, "WINDOW", 4):
        return run_with_bad_steps([*arguments, "guard.spike_sigmas=6"], rank, {3})


@pytest.mark.parametrize("layout", thorough_but([LINE], [LINE, SPLIT]), ids=str)
def test_bad_updates_are_skipped(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """On all ranks (each save compares what ranks hold in common). They are counted, and the run
    resumes bitwise."""
    saves, world = {"interval": 5, "keep_last": 9}, math.prod(layout.values())
    config = config_of(tmp_path, data, parallel=layout, checkpoint=saves)
    assert ranks.run(run_with_bad_updates, world, [config], world - 1) == [""] * world
    lines, before = runs.metrics_of(tmp_path), runs.losses(tmp_path)
    finite = [math.isfinite(line["grad_norm"]) for line in lines]
    assert finite == [True, True, False, True, True, True]
    assert [line["skipped_updates"] for line in lines] == [0, 0, 1, 2, 2, 2]
    assert runs.trainer_of(tmp_path, 6)["updates"] == 4

    runs.forget_last(tmp_path)
    assert ranks.run(run_with_bad_updates, world, [config], world - 1) == [""] * world
    assert runs.losses(tmp_path) == before
    assert runs.metrics_of(tmp_path)[-1]["skipped_updates"] == 2


@pytest.mark.parametrize("layout", thorough_but([LINE], [LINE, SPACE]), ids=str)
def test_bad_batches_are_left_out(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Steps 6 and 7 of 9 have bad batches. The run returns to the checkpoint of step 4 and then
    has the losses of a run whose data never contained these batches."""
    log_interval, world = 1 if layout == LINE else 2, math.prod(layout.values())
    config = config_of(
        tmp_path, data, parallel=layout, train={"steps": 9},
        guard={"max_bad_steps": 2, "slow_ranks": "none"},
        checkpoint={"interval": 4, "keep_last": 9}, run={"log_interval": log_interval},
    )  # fmt: skip
    reader = {"global_batch_size": 8, "seed": 0, "dp_rank": 0, "dp_size": 2}
    loader = BatchLoader(mixture(data), seq_len=32, **reader)
    batches = [next(loader)[0] for _ in range(9)]  # the tokens of rank 0
    loader.close()

    # The run learns of bad steps when it logs: of two at once, 7 and 8, if every second step.
    first = 6 if log_interval == 1 else 7
    said = ranks.run(run_with_bad_batches, world, [config], batches[first - 1 : first + 1], 0)
    assert said == [""] * world
    found, left_out = runs.losses(tmp_path), ((first - 1) * 8, (first + 1) * 8)
    assert "slow_ranks" not in runs.metrics_of(tmp_path)[-1], "none are looked for"
    (rollback,) = runs.events_of(tmp_path / "run", "rollback")
    assert (rollback["from_step"], rollback["step"]) == (first + 1, 4)
    assert tuple(rollback["left_out"]) == left_out
    trainer = runs.trainer_of(tmp_path, 9)
    assert (trainer["data"]["skipped"], trainer["updates"]) == ([list(left_out)], 9)

    runs.fresh(tmp_path)
    assert ranks.run(run_without, world, [config], left_out) == [""] * world
    assert runs.losses(tmp_path) == found


def test_what_rollbacks_leave_out_stays_out(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """After a second rollback to the same checkpoint, and after a restart. The run learns of both
    bad steps at once, one more than guard.max_bad_steps."""
    logged, bounds = {"log_interval": 2}, {"max_bad_steps": 1}
    more = {"train": {"steps": 12}, "checkpoint": {"interval": 4}, "run": logged, "guard": bounds}
    config = config_of(tmp_path, data, **more)
    for bad in ({5, 6, 9, 10}, set()):
        assert ranks.run(run_with_bad_steps, 1, [config], 0, bad) == [""]
        assert runs.trainer_of(tmp_path, 12)["data"]["skipped"] == [[32, 48], [64, 80]]
        tokens = {line["step"]: line["tokens"] for line in runs.metrics_of(tmp_path)}
        assert tokens == {step: 256 * step for step in range(2, 13, 2)}
        runs.forget_last(tmp_path)


TWO, SHORT = {"guard": {"max_bad_steps": 2}}, {"train": {"steps": 3}, "checkpoint": {"interval": 3}}
LOST = {  # what is lost → sections, steps that are bad, what is said, how often it has gone back
    "no checkpoint": (TWO, {2, 3}, "no checkpoint to go back to; save more often", 0),
    "always bad": (TWO | {"train": {"steps": 90}, "checkpoint": {"interval": 2}},
                   set(range(3, 90)), "gone back 3 times to .*step-00000002", 3),
    # too short for guard.max_bad_steps, but its last steps were all bad
    "no update": (SHORT, {1, 2, 3}, "no update was made up", 0),
    "no update at the end": (SHORT, {2, 3}, "no update was made after step 1", 0),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
def test_a_run_that_is_lost_fails(ranks: Ranks, data: Path, tmp_path: Path, lost: str) -> None:
    sections, bad, why, rollbacks = LOST[lost]
    config = config_of(tmp_path, data, **sections)
    (said,) = ranks.run(runs.said_by, 1, run_with_bad_steps, [config], 0, bad)
    assert re.search(why, said)
    status = runs.status_of(tmp_path)
    assert status["state"] == "failed"
    assert re.search(why, status["reason"])
    assert len(runs.events_of(tmp_path / "run", "rollback")) == rollbacks
    assert (tmp_path / "run" / "checkpoints").exists() == (rollbacks > 0)


def run_with_bad_weights(arguments: list[str]) -> str:
    """Train with a NaN planted in the optimizer state of rank 1 after step 3, which affects no loss
    or gradient."""

    @planted(TrainStep, "__call__")
    def spoiling(call: Any, self: TrainStep, step: int, *batch: torch.Tensor) -> Any:
        result = call(self, step, *batch)
        if step == 2 and dist.get_rank() == 1:
            self.optimizer.states[-1]["exp_avg"].view(-1)[0] = math.nan
        return result

    with spoiling():
        return runs.train_run(arguments)


def test_what_is_not_finite_is_not_saved(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    sections = {"train": {"steps": 3}, "checkpoint": {"interval": 2}}
    config = config_of(tmp_path, data, parallel=LINE, **sections)
    for said in ranks.run(runs.said_by, 2, run_with_bad_weights, [config]):
        assert re.search(r"on rank 1: FloatingPointError: optimizer\.\S+ is not finite", said)
    assert checkpoints(tmp_path) == ["latest", "step-00000002"]


@pytest.mark.thorough
def test_what_was_saved_among_bad_steps_is_not_gone_back_to(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """A run ends with two bad steps and is saved. When it resumes with a third, it goes back to the
    checkpoint before the first."""
    bounds = {"guard": {"max_bad_steps": 3}, "checkpoint": {"interval": 2, "keep_last": 1}}
    config = config_of(tmp_path, data, parallel=LINE, **bounds)
    assert ranks.run(run_with_bad_steps, 2, [config, "train.steps=4"], 1, {3, 4}) == [""] * 2
    assert checkpoints(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    assert ranks.run(run_with_bad_steps, 2, [config, "train.steps=8"], 1, {1}) == [""] * 2
    (rollback,) = runs.events_of(tmp_path / "run", "rollback")
    assert (rollback["from_step"], rollback["step"], rollback["left_out"]) == (5, 2, [32, 40])
    assert checkpoints(tmp_path) == ["latest", "step-00000004.abandoned", "step-00000008"]
    skipped = {line["step"]: line["skipped_updates"] for line in runs.metrics_of(tmp_path)}
    assert skipped == dict.fromkeys(range(1, 9), 0)


SAVES: dict[str, tuple[set[int], list[int]]] = {  # steps that are bad, and those that are saved
    "a save waits for a good step": ({2, 6}, [3, 4, 6]),  # 3 in place of 2; 6 ends the run
    # the save due at step 4 is postponed, and after the rollback to 2 made at 4 again
    "one that was due before a rollback": ({3, 4, 5}, [2, 4, 6]),
}


@pytest.mark.parametrize("case", SAVES)
def test_saves_and_bad_steps(ranks: Ranks, data: Path, tmp_path: Path, case: str) -> None:
    """A save on a bad step takes the place of no good one."""
    bad, saved = SAVES[case]
    bounds = {"guard": {"max_bad_steps": 3}, "checkpoint": {"interval": 2, "keep_last": 1}}
    config = config_of(tmp_path, data, **bounds)
    assert ranks.run(run_with_bad_steps, 1, [config], 0, bad) == [""]
    assert [event["step"] for event in runs.events_of(tmp_path / "run", "checkpoint")] == saved
    left = ["step-00000004", "step-00000006"] if 6 in bad else ["step-00000006"]
    assert checkpoints(tmp_path) == ["latest", *left]


def test_without_a_good_checkpoint_the_bad_one_stays(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, data, guard={"max_bad_steps": 3}, checkpoint={"interval": 4})
    assert ranks.run(run_with_bad_steps, 1, [config, "train.steps=4"], 0, {3, 4}) == [""]
    (said,) = ranks.run(runs.said_by, 1, run_with_bad_steps, [config], 0, {1})
    assert "no checkpoint to go back to" in said
    assert "step-00000004" in checkpoints(tmp_path)
