"""What may happen at the boundary between two stages: bad steps, damage, a stop."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import train
from proofs.ranks import Ranks
from runtime.checkpoint import saving
from runtime.log.events import read_events
from tests.data_samples import flip_a_bit
from tests.health.faulty_runs import run_with_bad_steps
from tests.planted import planted
from tests.runs import checkpoint_of, losses, run, said_by, status_of, train_run
from tests.settings.stages import Read, expected, mixture, recorded, write_stages

# --- bad steps on both sides -----------------------------------------------------------------


def recorded_with_bad_steps(arguments: list[str], bad: set[int], file: Path) -> str:
    with recorded(file):
        return run_with_bad_steps(arguments, 0, bad)


SMALLER = {"from_step": 4, "train": {"global_batch_size": 4}}
TWO_BAD = {"checkpoint": {"interval": 2}, "guard": {"max_bad_steps": 2}}


def test_a_stage_does_not_end_on_skipped_updates(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Step 4, the last of stage 0, is bad: the run goes back to the checkpoint of step 2 at once.
    Steps 5 and 6, the first of stage 1, are bad too: it goes back to the boundary's checkpoint."""
    config = write_stages(tmp_path, data, [SMALLER], train={"steps": 7}, **TWO_BAD)
    # of all steps, with those that are made again
    assert ranks.run(recorded_with_bad_steps, 1, [config], {4, 7, 8}, tmp_path / "reads") == [""]
    one = mixture(data)
    at_first = expected([Read(one, 32, 8, 4)], 0)[0]
    first = Read(one, 32, 8, 4, (range(24, 32),))
    then = expected([first, Read(one, 32, 4, 2)], 0)[0]
    again = expected([first, Read(one, 32, 4, 3, (range(8),))], 0)[0]
    rows = [json.loads(line) for line in Path(f"{tmp_path / 'reads'}-0").read_text().splitlines()]
    assert [step for step, *_ in rows] == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6]
    for (step, _, _, mine), batches in zip(
        rows, [at_first] * 4 + [then] * 4 + [again] * 3, strict=True
    ):
        assert mine == batches[step][: len(mine)], step
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "rollback"]
    assert [(e["from_step"], e["step"], e["left_out"]) for e in events] == [
        (4, 2, [24, 32]),
        (6, 4, [0, 8]),
    ]
    trainer = json.loads((checkpoint_of(tmp_path, 7) / "trainer.json").read_text())
    assert trainer["earlier"][0]["data"]["skipped"] == [[24, 32]]
    assert (trainer["data"]["skipped"], trainer["updates"]) == ([[0, 8]], 7)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_rollback_never_leaves_its_stage(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A checkpoint that was saved on a bad step begins a stage, whose first step is bad."""
    config = write_stages(tmp_path, data, [SMALLER], train={"steps": 6}, **TWO_BAD)
    whole = [config, "data_stages=[]", "train.steps=4"]
    assert ranks.run(run_with_bad_steps, 1, whole, 0, {4}) == [""]
    (said,) = ranks.run(said_by, 1, run_with_bad_steps, [config], 0, {1})
    assert "there is no checkpoint to go back to in this data stage; save more often" in said
    assert status_of(tmp_path)["state"] == "failed"
    assert checkpoint_of(tmp_path, 4).exists(), "not put aside"


def run_with_damage(arguments: list[str], folder: Path) -> str:
    """Train; the only checkpoint is damaged in the changeover."""

    @planted(saving, "find_next")
    def damaged(honest: Any, *about: Any) -> Any:
        flip_a_bit(next(checkpoint_of(folder, 2).glob("*.safetensors")))
        return honest(*about)

    with damaged():
        return train_run(arguments)


def test_a_damaged_boundary_does_not_begin_anew(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Without another checkpoint, training from initial weights would look like success."""
    config = write_stages(tmp_path, data, [{"from_step": 2, "train": {"seq_len": 16}}])
    (said,) = ranks.run(said_by, 1, run_with_damage, [config], tmp_path)
    assert "no good one before it" in said
    status = status_of(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 2)
    # nor does the next start, which a launcher or the job script begins by itself
    (said,) = ranks.run(train_run, 1, [config])
    assert said.startswith("checkpoint.resume = 'auto': all checkpoints in ")
    assert "step-00000002.damaged" in said
    assert sorted(losses(tmp_path)) == [1, 2]


def test_a_stage_ahead_that_begins_at_a_token_knows_the_batches_before(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """With another batch size from step 2 on, it would begin at half the tokens."""
    ahead = {"from_token": 6 * 8 * 32, "train": {"seq_len": 16}}
    config = write_stages(tmp_path, data, [ahead], train={"steps": 9}, checkpoint={"interval": 2})
    run(ranks, 1, config, "data_stages=[]", "train.steps=2")
    (said,) = ranks.run(train_run, 1, [config, "train.global_batch_size=16"])
    assert said.startswith(f"data_stages.1.from_token = {6 * 8 * 32}")
    assert "512 tokens after step 2" in said
    assert "from_step=4" in said  # 1,024 tokens are left: two steps of 512
    # as a stage from step 2 on, the count is right
    larger = {"from_step": 2, "train": {"global_batch_size": 16}}
    config = write_stages(tmp_path, data, [larger, ahead], train={"steps": 5})
    run(ranks, 1, config)
    events = read_events(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "data_stage"] == [2, 4]


# --- stop requests, open files --------------------------------------------------------------------


def run_with_request(arguments: list[str], request: str, folder: Path) -> tuple[str, bool]:
    """Train; a stop is requested in the changeover. Return also whether there was a status.json
    then: a launcher that finds a rank killed there must not report a planned stop."""
    found = []

    @planted(train, "join_again")
    def requested(join: Any, signals: Any) -> None:
        found.append((folder / "run" / "status.json").exists())
        if request == "STOP":
            (folder / "run" / "STOP").touch()
        else:
            signals.heard.setdefault(signal.SIGTERM, 0.0)
        join(signals)

    with requested():
        return train_run(arguments), *found


@pytest.mark.parametrize(
    "request_by", ["SIGTERM", pytest.param("STOP", marks=pytest.mark.thorough)]
)
def test_a_stop_in_the_changeover(
    ranks: Ranks, data: Path, tmp_path: Path, request_by: str
) -> None:
    """(That a run resumes there with the same bits: test_killed_at_a_boundary.)"""
    config = write_stages(tmp_path, data, [{"from_step": 2, "train": {"seq_len": 16}}])
    short = "train.steps=3"
    stopped = ranks.run(run_with_request, 2, [config, short], request_by, tmp_path)
    assert stopped == [("", False)] * 2
    status = status_of(tmp_path)
    assert (status["state"], status["step"]) == ("requeue", 2)
    assert request_by in status["reason"]
    assert not (tmp_path / "run" / "STOP").exists()
    run(ranks, 2, config, short)
    assert sorted(losses(tmp_path)) == [1, 2, 3]


def open_files(arguments: list[str]) -> list[int]:
    """The number of open files at the beginning of each stage."""
    found: list[int] = []

    @planted(train, "build_listeners")
    def counted(build: Any, *about: Any) -> Any:
        found.append(len(list(Path("/proc/self/fd").iterdir())))
        return build(*about)

    with counted():
        assert train_run(arguments) == ""
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_boundaries_leave_no_open_files(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    stages = [{"from_step": n, "parallel": {"tp": 1 + n % 2}} for n in range(1, 5)]
    config = write_stages(tmp_path, data, stages, train={"steps": 5})
    for found in ranks.run(open_files, 2, [config]):
        assert len(found) == 5
        assert found[4] <= found[2], found
        assert found[3] <= found[1], found
