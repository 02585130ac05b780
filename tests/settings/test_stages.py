"""Runs with stages read every token as one process would that never stops, wherever they are killed
and whatever layout each stage has."""

import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import train
from data.loader import BatchLoader, Earlier
from proofs.ranks import Ranks
from runtime.checkpoint import saving
from runtime.log.events import read_events
from tests import runs
from tests.data_samples import SOURCE, flip_a_bit, prepared
from tests.health.faulty_runs import run_with_bad_steps
from tests.planted import planted
from tests.settings.stages import (
    Read,
    check_reads,
    expected,
    mixture,
    recorded,
    recorded_run,
    write_stages,
)

DP2, TP2, PP2, CP2 = {"dp_shard": -1}, {"tp": 2}, {"pp": 2}, {"cp": 2, "tp": 1, "pp": 1}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second, smaller data set."""
    return prepared(tmp_path_factory.mktemp("other") / "json", SOURCE)


# --- the loader -----------------------------------------------------------------------------------


def loader(stage: Read, rank: int = 0, dp: int = 1, earlier: Sequence[Earlier] = ()) -> BatchLoader:
    """Reads a data stage of a run as rank `rank` of `dp`."""
    options = {"seq_len": stage.seq_len, "global_batch_size": stage.batch, "seed": 3}
    skipped = [(left_out.start, left_out.stop) for left_out in stage.left_out]
    about = {"dp_rank": rank, "dp_size": dp, "earlier": earlier, "skipped": skipped}
    return BatchLoader(stage.data, **options, **about)


def test_every_token_over_three_stages(data: Path, other: Path) -> None:
    """Mixture, length and batch change; the loaders of all dp sizes read what the reference reads,
    over several epochs of the small source, and no window of a source is read n + 1 times before
    all have been read n times, also across a boundary."""
    few, both = mixture(other), mixture(data, other, weights=(0.3, 0.7))
    stages = [
        Read(both, 64, 8, 40),
        Read(few, 64, 12, 20, (range(30, 36), range(24, 32))),  # the loader merges them
        Read(both, 32, 4, 30),
        Read(mixture(other, data, weights=(0.5, 0.5)), 64, 4, 30),
    ]
    batches, windows = expected(stages, seed=3)
    for dp in (1, 2, 4):
        earlier: list[Earlier] = []
        left = iter(batches)
        for stage in stages:
            loaders = [loader(stage, rank, dp, earlier) for rank in range(dp)]
            for _ in range(stage.steps):
                parts = [next(each) for each in loaders]
                assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in parts)
                whole = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in parts])
                assert whole.tolist() == next(left)
            assert loaders[0].state()["skipped"] == ([[24, 36]] if stage.left_out else [])
            earlier = [*earlier, Earlier(stage.data, stage.seq_len, loaders[0].next_sample)]
            for each in loaders:
                each.close()
    assert next(left, None) is None
    small = [n for window, n in windows.items() if window[:2] == (few.checksum, 64)]
    assert max(small) > 2, "several epochs"
    assert max(small) - min(small) <= 1 + 1, "each once per epoch, but for those left out"

    # Control: a stage that begins its sources anew reads other windows.
    anew = loader(stages[1])
    assert next(anew)[0].tolist() != [row[:-1] for row in batches[40]]
    anew.close()


# --- runs -----------------------------------------------------------------------------------------


def staged(
    folder: Path, data: Path, other: Path, layouts: tuple[dict[str, int], ...] = (DP2, DP2)
) -> str:
    """Stages from steps 3 and 5 of 7: another mixture and batch, then another length and phase."""
    stages = [
        {"from_step": 3, "data": {"path": {str(data): 0.4, str(other): 0.6}},
         "train": {"global_batch_size": 12}, "parallel": layouts[0]},
        {"from_token": 3 * 8 * 32 + 2 * 12 * 32 - 5, "parallel": layouts[1],
         "train": {"seq_len": 64, "global_batch_size": 4, "micro_batch_size": 1},
         "model": {"rope_theta": 8e5}, "optimizer": {"schedule": "linear", "lr": 1e-3}},
    ]  # fmt: skip
    exact = {"steps": 7, "dtype": "float64", "micro_batch_size": 2, "seed": 3}
    saves = {"interval": 2, "keep_last": 3}
    return write_stages(folder, data, stages, train=exact, checkpoint=saves)


def reference(data: Path, other: Path) -> list[list[list[int]]]:
    both = mixture(data, other, weights=(0.4, 0.6))
    stages = [Read(mixture(data), 32, 8, 3), Read(both, 32, 12, 2), Read(both, 64, 4, 2)]
    return expected(stages, seed=3)[0]


def last_state(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """The weights and moments at the end, loaded on one rank."""
    last = runs.checkpoint_of(folder, 7)
    return ranks.run(runs.global_state, 1, [str(folder / "config.yaml")], str(last))[0]


@pytest.fixture(scope="module")
def whole(ranks: Ranks, data: Path, other: Path, tmp_path_factory) -> tuple[Path, dict, dict]:
    """A run without a kill, on two data-parallel ranks: its folder, losses and last state."""
    folder = tmp_path_factory.mktemp("whole")
    assert ranks.run(recorded_run, 2, [staged(folder, data, other)], folder / "reads") == ["", ""]
    check_reads(folder / "reads", reference(data, other))
    return folder, runs.losses(folder), last_state(ranks, folder)


def killed_run(ranks: Ranks, world: int, config: str, kills: list, batches: list) -> None:
    """Run in the folder of `config` until the end, with one start for each kill. Together, all
    starts read `batches`."""
    reads = Path(config).with_name("reads")
    for where, step in kills:
        with runs.dies():
            ranks.run(recorded_run, world, [config], reads, where, step)
    assert ranks.run(recorded_run, world, [config], reads) == [""] * world
    check_reads(reads, batches)


# where the first, the second and the third start are killed
THREE = [("before the save", 3), ("before the commit", 5), ("begun", 5)]


@pytest.mark.parametrize(
    "kills",
    [[("the changeover", 3)], pytest.param(THREE, marks=pytest.mark.thorough)],
    ids=lambda kills: str(kills[0]) if len(kills) == 1 else "three starts",
)
def test_killed_at_a_boundary(ranks, data, other, tmp_path, whole, kills) -> None:
    """Killed at a boundary and started again, a run reads the same samples and has the same bits:
    of every loss, and of the weights and moments at the end."""
    killed_run(ranks, 2, staged(tmp_path, data, other), kills, reference(data, other))
    assert runs.losses(tmp_path) == whole[1]
    assert runs.same_tensors(last_state(ranks, tmp_path), whole[2])
    kinds = [event["event"] for event in read_events(tmp_path / "run")]
    assert kinds.count("data_stage") >= 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layouts", "kill"),
    [((TP2, PP2), ("after the save", 5)), ((PP2, CP2), ("the changeover", 3))],
    ids=str,
)
def test_other_layouts_in_each_stage(ranks, data, other, tmp_path, whole, layouts, kill) -> None:
    """With another layout in each stage, on twice the ranks, one begun by a start after a kill and
    one by the same processes, a run reads the same samples; losses agree to the rounding of
    sums."""
    config = staged(tmp_path, data, other, layouts)
    killed_run(ranks, 4, config, [kill], reference(data, other))
    found = runs.losses(tmp_path)
    assert all(found[step] == pytest.approx(loss, rel=1e-9) for step, loss in whole[1].items())
    state = last_state(ranks, tmp_path)
    for name, tensor in whole[2].items():
        if name.startswith("model."):
            assert torch.allclose(state[name], tensor, rtol=0, atol=1e-9), name


def test_what_a_boundary_leaves(whole: tuple[Path, dict, dict]) -> None:
    events = read_events(whole[0] / "run")
    kinds = [e["event"] for e in events if e["event"] in ("start", "started", "data_stage", "end")]
    begun = ["started", "data_stage"]
    assert kinds == ["start", *begun, *begun, "started", "end"], "one start, and its end"
    assert runs.status_of(whole[0])["state"] == "finished"
    changed = [e for e in events if e["event"] == "data_stage"]
    assert [(e["data_stage"], e["step"]) for e in changed] == [(1, 3), (2, 5)]
    assert "train.seq_len 32 → 64" in changed[1]["changes"]
    lines = runs.metrics_of(whole[0])
    assert [line["tokens"] for line in lines] == [256, 512, 768, 1152, 1536, 1792, 2048]
    assert [line["lr"] for line in lines][-2:] == [1e-3, 5.5e-4], "a phase of two steps"
    trainer = runs.trainer_of(whole[0], 7)
    assert [(e["step"], e["data"]["next_sample"]) for e in trainer["earlier"]] == [(3, 24), (5, 24)]
    assert (trainer["seq_len"], trainer["data"]["next_sample"]) == (64, 8)
    known = [loss for loss in trainer["recent_losses"] if loss is not None]
    assert known == [whole[1][6], whole[1][7]], "those since the length changed"


def compiled_run(arguments: list[str]) -> list[bool]:
    """Train with compiled blocks; whether each graph has symbolic sizes."""
    found = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()  # of earlier tests
    backend = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        assert runs.train_run(arguments) == ""
    return found


def test_blocks_are_compiled_anew(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """As after a restart: for the length of their stage."""
    config = write_stages(tmp_path, data, [{"from_step": 1, "train": {"seq_len": 64}}])
    arguments = [config, "train.compile=true", "train.steps=2"]
    assert ranks.run(compiled_run, 1, arguments) == [[False] * 4], "forward and backward"


# --- what may change at a resume ------------------------------------------------------------------


REFUSED = [
    (["train.seq_len=16", "train.steps=20"], "train.seq_len = 16: ", "the change as a data stage"),
    (["data_stages.1.from_step=2"], "data_stages = [2, 5]: ", "leave data stages as they were"),
    (["data_stages.2.train.seq_len=16"], "data_stages.2.train.seq_len = 16: ", "train.seq_len=64"),
    (["data_stages=[]"], "model.rope_theta = ", "declare the change as a data stage"),
    (["data_stages=[]", "model.rope_theta=8e5"], "data_stages = []: ", "leave data stages as"),
    (["data_stages.1.data.path={tmp: 1}"], "data_stages.1.data.path = ", "no prepared data"),
    (["data_stages.2.data.path=OTHER"], "data_stages.2.data.path = ", "other data"),
    (["train.seed=1"], "train.seed = 1: ", "use the checkpoint's value"),
    (["train.steps=6"], "train.steps = 6: ", "7"),
    (["checkpoint.resume=none"], "run.dir = ", "checkpoint.resume"),
]


def test_what_has_passed_cannot_change_but_more_may_follow(ranks, other, tmp_path, whole) -> None:
    config, _ = runs.copy_of(whole[0], tmp_path)
    before = runs.contents(tmp_path / "run")
    cases = {
        str(changes): [config, "train.steps=8", *(c.replace("OTHER", str(other)) for c in changes)]
        for changes, _, _ in REFUSED
    }
    (said,) = ranks.run(runs.messages, 1, cases)
    for changes, begins, has in REFUSED:
        assert said[str(changes)].startswith(begins)
        assert has in said[str(changes)]
    assert runs.contents(tmp_path / "run") == before, "nothing is lost"
    raw = yaml.safe_load(Path(config).read_text())
    raw["data_stages"].append({"from_step": 7, "train": {"seq_len": 16}})
    Path(config).write_text(json.dumps(raw))
    runs.run(ranks, 1, config, "train.steps=8")
    assert sorted(runs.losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_stage_ahead_that_begins_at_a_token_knows_the_batches_before(ranks, tmp_path, whole):
    """Another batch size in stage 1 would move the start of stage 2, which is still ahead."""
    config, _ = runs.copy_of(whole[0], tmp_path)
    for _ in (7, 6):
        runs.forget_last(tmp_path)
    (said,) = ranks.run(runs.train_run, 1, [config, "data_stages.1.train.global_batch_size=8"])
    assert said.startswith("data_stages.2.from_token = 1531: ")
    assert "1,536 tokens after step 5" in said
    # one that lies two steps ahead would begin at once with twice the batch
    twice = ["data_stages.2.from_token=2304", "data_stages.1.train.global_batch_size=24"]
    (said,) = ranks.run(runs.train_run, 1, [config, *twice])
    assert said.startswith("data_stages.2.from_token = 2304: ")


# --- bad steps, damage and a stop at a boundary ---------------------------------------------------


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
    rows = [json.loads(line) for line in (tmp_path / "reads-0").read_text().splitlines()]
    assert [step for step, *_ in rows] == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6]
    wanted = [at_first] * 4 + [then] * 4 + [again] * 3
    for (step, _, _, mine), batches in zip(rows, wanted, strict=True):
        assert mine == batches[step], step
    events = runs.events_of(tmp_path / "run", "rollback")
    went_back = [(e["from_step"], e["step"], e["left_out"]) for e in events]
    assert went_back == [(4, 2, [24, 32]), (6, 4, [0, 8])]
    trainer = runs.trainer_of(tmp_path, 7)
    assert trainer["earlier"][0]["data"]["skipped"] == [[24, 32]]
    assert (trainer["data"]["skipped"], trainer["updates"]) == ([[0, 8]], 7)
    assert sorted(runs.losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_rollback_never_leaves_its_stage(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A checkpoint that was saved on a bad step begins a stage, whose first steps are bad, always
    or only twice: the run goes back to it, and no further."""
    config = write_stages(tmp_path, data, [SMALLER], train={"steps": 6}, **TWO_BAD)
    whole = [config, "data_stages=[]", "train.steps=4"]
    assert ranks.run(run_with_bad_steps, 1, whole, 0, {4}) == [""]
    (said,) = ranks.run(runs.said_by, 1, run_with_bad_steps, [config], 0, {*range(1, 9)})
    assert "the run has already gone back 3 times to" in said
    assert runs.status_of(tmp_path)["state"] == "failed"
    assert runs.checkpoint_of(tmp_path, 4).exists(), "not put aside"
    assert ranks.run(run_with_bad_steps, 1, [config], 0, {1, 2}) == [""]
    went_back = [(e["from_step"], e["step"]) for e in runs.events_of(tmp_path / "run", "rollback")]
    assert went_back == [(6, 4)] * 4


def run_with_damage(arguments: list[str], folder: Path) -> str:
    """Train; the only checkpoint is damaged in the changeover."""

    @planted(saving, "find_before")
    def damaged(honest: Any, *about: Any) -> Any:
        flip_a_bit(next(runs.checkpoint_of(folder, 2).glob("*.safetensors")))
        return honest(*about)

    with damaged():
        return runs.train_run(arguments)


def test_a_damaged_boundary_does_not_begin_anew(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Without another checkpoint, training from initial weights would look like success."""
    config = write_stages(tmp_path, data, [{"from_step": 2, "train": {"seq_len": 16}}])
    (said,) = ranks.run(runs.said_by, 1, run_with_damage, [config], tmp_path)
    assert "no good one before it" in said
    status = runs.status_of(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 2)
    # nor does the next start, which a launcher or the job script begins by itself
    (said,) = ranks.run(runs.train_run, 1, [config])
    assert said.startswith("checkpoint.resume = 'auto': all that the run has saved in ")
    assert "step-00000002.damaged" in said
    assert sorted(runs.losses(tmp_path)) == [1, 2]


def run_with_request(arguments: list[str], folder: Path) -> tuple[str, bool]:
    """Train; a stop is requested in the changeover. Return also whether there was a status.json
    then: a launcher that finds a rank killed there must not report a planned stop."""
    found = []

    @planted(train, "join_again")
    def requested(join: Any, signals: Any) -> None:
        found.append((folder / "run" / "status.json").exists())
        signals.heard.setdefault(signal.SIGTERM, 0.0)
        join(signals)

    with requested():
        return runs.train_run(arguments), *found


def test_a_stop_in_the_changeover(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """(That a run resumes there: test_killed_at_a_boundary.)"""
    config = write_stages(tmp_path, data, [{"from_step": 2, "train": {"seq_len": 16}}])
    arguments = [config, "train.steps=3"]
    assert ranks.run(run_with_request, 2, arguments, tmp_path) == [("", False)] * 2
    status = runs.status_of(tmp_path)
    assert (status["state"], status["step"]) == ("requeue", 2)
    assert "SIGTERM" in status["reason"]
