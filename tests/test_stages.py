"""Runs with stages read every token as one process would that never stops, wherever they are killed
and whatever layout each stage has."""

import json
import math
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

import train
import training.step
from data.dataset import Mixture, TokenDataset
from data.earlier import Earlier
from data.loader import BatchLoader
from runtime import next_stage
from runtime.events import read_events
from tests.data_samples import SOURCE, prepared
from tests.runs import copy_of, fresh, global_state, losses, train_run
from tests.stages import Read, check_reads, expected, recorded, recorded_run, write_stages
from tools.ranks import RankError, Ranks

DP2, TP2, PP2 = {"dp_shard": -1}, {"tp": 2}, {"pp": 2}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second, smaller data set."""
    return prepared(tmp_path_factory.mktemp("other") / "json", SOURCE)


def mixture(*paths: Path, weights: tuple[float, ...] = (1.0,)) -> Mixture:
    return Mixture([TokenDataset.open(path, "train") for path in paths], weights)


# --- the loader -----------------------------------------------------------------------------------


def test_every_token_over_three_stages(data: Path, other: Path) -> None:
    """Mixture, length and batch change; the loaders of all dp sizes read what the reference reads,
    over several epochs of the small source, and no window of a source is read n + 1 times before
    all have been read n times, also across a boundary."""
    few, both = mixture(other), (mixture(data, other, weights=(0.3, 0.7)), 64)
    stages = [
        Read(both[0], 64, 8, 40),
        Read(few, 64, 12, 20, (range(24, 36),)),
        Read(both[0], 32, 4, 30),
        Read(mixture(other, data, weights=(0.5, 0.5)), 64, 4, 30),
    ]
    batches, windows = expected(stages, seed=3)
    for dp in (1, 2, 4):
        earlier: list[Earlier] = []
        left = iter(batches)
        for stage in stages:
            loaders = [
                BatchLoader(
                    stage.data,
                    seq_len=stage.seq_len,
                    global_batch_size=stage.batch,
                    seed=3,
                    dp_rank=rank,
                    dp_size=dp,
                    skipped=[(r.start, r.stop) for r in stage.left_out],
                    earlier=earlier,
                )
                for rank in range(dp)
            ]
            for _ in range(stage.steps):
                parts = [next(loader) for loader in loaders]
                whole = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in parts])
                assert whole.tolist() == next(left)
            earlier = [*earlier, Earlier(stage.data, stage.seq_len, loaders[0].next_sample)]
            for loader in loaders:
                loader.close()
    assert next(left, None) is None
    small = [
        n for (source, length, _), n in windows.items() if (source, length) == (few.checksum, 64)
    ]
    assert max(small) > 2, "several epochs"
    assert max(small) - min(small) <= 1 + 1, "each once per epoch, but for those left out"

    # Control: a stage that begins its sources anew reads other windows.
    anew = BatchLoader(
        few, seq_len=64, global_batch_size=12, seed=3, dp_rank=0, dp_size=1, skipped=[(24, 36)]
    )
    assert torch.cat([next(anew)[0]]).tolist() != [row[:-1] for row in batches[40]]
    anew.close()


# --- runs -----------------------------------------------------------------------------------------


def three_stages(data: Path, other: Path, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Stages from steps 3 and 5 of 7: another mixture and batch, then another length and phase."""
    return [
        {"from_step": 3, "data": {"path": {str(data): 0.4, str(other): 0.6}},
         "train": {"global_batch_size": 12}, "parallel": layouts[0]},
        {"from_token": 3 * 8 * 32 + 2 * 12 * 32 - 5, "parallel": layouts[1],
         "train": {"seq_len": 64, "global_batch_size": 4, "micro_batch_size": 1},
         "model": {"rope_theta": 8e5}, "optimizer": {"schedule": "linear", "lr": 1e-3}},
    ]  # fmt: skip


def reference(data: Path, other: Path) -> list[list[list[int]]]:
    both = mixture(data, other, weights=(0.4, 0.6))
    stages = [Read(mixture(data), 32, 8, 3), Read(both, 32, 12, 2), Read(both, 64, 4, 2)]
    return expected(stages, seed=0)[0]


EXACT = {"steps": 7, "dtype": "float64"}


def undisturbed(ranks: Ranks, folder: Path, data: Path, other: Path) -> tuple[str, dict, dict]:
    """A run without a kill, on two data-parallel ranks: its configuration, losses and weights."""
    config = write_stages(
        folder, data, three_stages(data, other, [DP2, DP2]), train=EXACT, checkpoint={"interval": 2}
    )
    assert ranks.run(recorded_run, 2, [config], folder / "reads") == ["", ""]
    check_reads(folder / "reads", reference(data, other))
    last = str(folder / "run" / "checkpoints" / "step-00000007")
    return config, losses(folder), ranks.run(global_state, 1, [config], last)[0]


@pytest.fixture(scope="module")
def whole(
    ranks: Ranks, data: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict, dict]:
    folder = tmp_path_factory.mktemp("whole")
    _, found, state = undisturbed(ranks, folder, data, other)
    return folder, found, state


KILLS = [
    ("before the save", 3),
    ("before the commit", 5),
    ("after the save", 3),
    ("the changeover", 3),
    ("the changeover", 5),
    ("begun", 5),
]


@pytest.mark.parametrize(
    "kills",
    [KILLS[3:4], *(pytest.param([one], marks=pytest.mark.thorough) for one in KILLS)],
    ids=str,
)
def test_killed_at_a_boundary(
    ranks: Ranks, data: Path, other: Path, tmp_path: Path, whole: tuple, kills: list
) -> None:
    """Killed at a boundary and started again, a run reads the same samples and has the same bits:
    of every loss, and of the weights and moments at the end."""
    stages = three_stages(data, other, [DP2, DP2])
    config = write_stages(tmp_path, data, stages, train=EXACT, checkpoint={"interval": 2})
    for where, step in kills:
        with pytest.raises(RankError):
            ranks.run(recorded_run, 2, [config], tmp_path / "reads", where, step)
    assert ranks.run(recorded_run, 2, [config], tmp_path / "reads") == ["", ""]
    check_reads(tmp_path / "reads", reference(data, other))
    assert losses(tmp_path) == whole[1]
    last = str(tmp_path / "run" / "checkpoints" / "step-00000007")
    state = ranks.run(global_state, 1, [config], last)[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in whole[2].items())
    kinds = [event["event"] for event in read_events(tmp_path / "run")]
    assert kinds.count("stage") >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [[TP2, PP2], [PP2, {"cp": 2, "tp": 1, "pp": 1}]], ids=str)
def test_other_layouts_in_each_stage(
    ranks: Ranks, data: Path, other: Path, tmp_path: Path, whole: tuple, layouts: list
) -> None:
    """With another layout in each stage, on twice the ranks, killed in the changeover and after a
    save, a run reads the same samples; losses agree to the rounding of sums."""
    stages = three_stages(data, other, layouts)
    config = write_stages(tmp_path, data, stages, train=EXACT, checkpoint={"interval": 2})
    with pytest.raises(RankError):
        ranks.run(recorded_run, 4, [config], tmp_path / "reads", "the changeover", 3)
    with pytest.raises(RankError):
        ranks.run(recorded_run, 4, [config], tmp_path / "reads", "after the save", 5)
    assert ranks.run(recorded_run, 4, [config], tmp_path / "reads") == [""] * 4
    check_reads(tmp_path / "reads", reference(data, other))
    found = losses(tmp_path)
    assert all(found[step] == pytest.approx(loss, rel=1e-9) for step, loss in whole[1].items())
    last = str(tmp_path / "run" / "checkpoints" / "step-00000007")
    state = ranks.run(global_state, 1, [config], last)[0]
    for name, tensor in whole[2].items():
        if name.startswith("model."):
            assert torch.allclose(state[name], tensor, rtol=0, atol=1e-9), name


def test_what_a_boundary_leaves(whole: tuple[Path, dict, dict]) -> None:
    run = whole[0] / "run"
    events = read_events(run)
    assert [e["step"] for e in events if e["event"] == "start"] == [0, 3, 5]
    ends = [(e["state"], e["reason"]) for e in events if e["event"] == "end"]
    assert ends[:2] == [("requeue", "stage 1 begins"), ("requeue", "stage 2 begins")]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    changed = [e for e in events if e["event"] == "stage"]
    assert [(e["stage"], e["step"]) for e in changed] == [(1, 3), (2, 5)]
    assert "train.seq_len 32 → 64" in changed[1]["changes"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [256, 512, 768, 1152, 1536, 1792, 2048]
    assert [line["lr"] for line in lines][-2:] == [1e-3, 5.5e-4], "a phase of two steps"
    trainer = json.loads((run / "checkpoints" / "step-00000007" / "trainer.json").read_text())
    assert [(e["step"], e["data"]["next_sample"]) for e in trainer["earlier"]] == [(3, 24), (5, 24)]
    assert (trainer["seq_len"], trainer["data"]["next_sample"]) == (64, 8)


# --- what may change at a resume ------------------------------------------------------------------


REFUSED = [
    (
        ["train.seq_len=16", "train.steps=20"],
        "train.seq_len = 16: ",
        "declare the change as a stage",
    ),
    (["stages.1.from_step=2"], "stages.1 = [2]: ", "leave stages as they were"),
    (["stages.2.train.seq_len=16"], "stages.2.train.seq_len = 16: ", "train.seq_len=64"),
    (["stages.2.model.rope_theta=7e5"], "stages.2.model.rope_theta = ", "declare the change"),
    (["stages=[]"], "model.rope_theta = ", "declare the change as a stage"),
    (["stages=[]", "model.rope_theta=8e5"], "stages.1 = []: ", "leave stages as they were"),
    (["stages.1.data.path={tmp: 1}"], "stages.1.data.path = ", "contains no prepared data"),
    (["train.seed=1"], "train.seed = 1: ", "use the checkpoint's value"),
]


@pytest.mark.parametrize(("overrides", "begins", "has"), REFUSED, ids=str)
def test_a_past_stage_cannot_change(
    ranks: Ranks, tmp_path: Path, whole: tuple, overrides: list[str], begins: str, has: str
) -> None:
    config, _ = copy_of(whole[0], tmp_path)
    (message,) = set(ranks.run(train_run, 2, [config, "train.steps=8", *overrides]))
    assert message.startswith(begins), message
    assert has in message


def test_a_later_stage_may_be_added(ranks: Ranks, tmp_path: Path, whole: tuple) -> None:
    config, _ = copy_of(whole[0], tmp_path)
    raw = yaml.safe_load(Path(config).read_text())
    raw["stages"].append({"from_step": 7, "train": {"seq_len": 16}})
    Path(config).write_text(yaml.safe_dump(raw))
    assert ranks.run(train_run, 2, [config, "train.steps=8"]) == ["", ""]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8]


# --- rollback across a boundary -----------------------------------------------------------------


def run_with_bad_steps(arguments: list[str], bad: list[int], file: Path) -> str:
    """Train and record; the norm of the gradient is infinite in the steps that are `bad`, counted
    over the whole run, with those that are made again."""
    made: list[int] = []
    norm = training.step.gradient_norm

    def planted(*arguments: Any) -> torch.Tensor:
        made.append(1)
        return norm(*arguments) * (math.inf if len(made) in bad else 1)

    with recorded(file), patch.object(training.step, "gradient_norm", planted):
        return train_run(arguments)


def test_a_rollback_across_a_boundary(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Steps 4, 5 and 6 are bad, and stage 1 begins after step 4: the run goes back to the
    checkpoint of step 2, in stage 0, and leaves out the samples of step 4, and of steps 5 and 6 of
    stage 1. A start that is told to leave them out has the same bits."""
    config = write_stages(
        tmp_path,
        data,
        [{"from_step": 4, "train": {"seq_len": 64, "global_batch_size": 4}}],
        train={"steps": 7},
        checkpoint={"interval": 2},
        guard={"max_bad_steps": 3, "examine": False},  # the planted norms are counted
    )
    bad = [4, 5, 6]
    assert ranks.run(run_with_bad_steps, 2, [config], bad, tmp_path / "reads") == ["", ""]
    one = mixture(data)
    at_first = expected([Read(one, 32, 8, 4), Read(one, 64, 4, 2)], 0)[0]
    stages = [Read(one, 32, 8, 4, (range(24, 32),)), Read(one, 64, 4, 3, (range(8),))]
    again = expected(stages, 0)[0]
    rows = [json.loads(line) for line in Path(f"{tmp_path / 'reads'}-0").read_text().splitlines()]
    assert [step for step, *_ in rows] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    for (step, _, _, mine), batches in zip(rows, [at_first] * 6 + [again] * 5, strict=True):
        assert mine == batches[step][: len(mine)], step
    run = tmp_path / "run"
    (event,) = [e for e in read_events(run) if e["event"] == "rollback"]
    assert (event["from_step"], event["step"]) == (6, 2)
    assert (event["left_out"], event["left_out_before"]) == ([0, 8], [[0, 24, 32]])
    trainer = json.loads((run / "checkpoints" / "step-00000007" / "trainer.json").read_text())
    assert trainer["earlier"][0]["data"]["skipped"] == [[24, 32]]
    assert trainer["data"]["skipped"] == [[0, 8]]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    assert trainer["updates"] == 7


# --- stop requests, open files --------------------------------------------------------------------


def run_with_request(arguments: list[str], request: str, folder: Path) -> str:
    """Train; a stop is requested in the changeover."""
    join = next_stage.join_again

    def requested(signals: Any) -> None:
        if request == "STOP":
            (folder / "run" / "STOP").touch()
        else:
            signals.heard.setdefault(signal.SIGTERM, 0.0)
        join(signals)

    with patch.object(next_stage, "join_again", requested):
        return train_run(arguments)


@pytest.mark.parametrize(
    "request_by", ["SIGTERM", pytest.param("STOP", marks=pytest.mark.thorough)]
)
def test_a_stop_in_the_changeover(
    ranks: Ranks, data: Path, tmp_path: Path, request_by: str
) -> None:
    config = write_stages(tmp_path, data, [{"from_step": 2, "train": {"seq_len": 16}}])
    short = "train.steps=3"
    assert ranks.run(run_with_request, 2, [config, short], request_by, tmp_path) == ["", ""]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("requeue", 2)
    assert request_by in status["reason"]
    assert not (tmp_path / "run" / "STOP").exists()
    assert ranks.run(train_run, 2, [config, short]) == ["", ""]
    stopped = losses(tmp_path)
    fresh(tmp_path)
    assert ranks.run(train_run, 2, [config, short]) == ["", ""]
    assert losses(tmp_path) == stopped


def open_files(arguments: list[str]) -> list[int]:
    """The number of open files at the beginning of each stage."""
    found: list[int] = []
    build = train.build_listeners

    def counted(*about: Any) -> Any:
        found.append(len(list(Path("/proc/self/fd").iterdir())))
        return build(*about)

    with patch.object(train, "build_listeners", counted):
        assert train_run(arguments) == ""
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_boundaries_leave_no_open_files(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    stages = [{"from_step": n, "parallel": {"tp": 1 + n % 2}} for n in range(1, 5)]
    config = write_stages(tmp_path, data, stages, train={"steps": 5})
    for found in ranks.run(open_files, 2, [config]):
        assert len(found) == 5
        assert found[4] <= found[2], found
        assert found[3] <= found[1], found
