"""`parallel.layouts`: which layout a world gets, and what is refused."""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from runtime.start.host import CONNECTIONS, set_connections
from settings.config import Config
from settings.data_stages import data_stages
from settings.layouts import choose_layout, layout_sizes
from settings.load import dump_config, load_config
from tests.runs import write_config
from tools import launch
from tools.plan import __main__ as plan
from tools.preflight import __main__ as preflight
from tools.rehearse import __main__ as rehearse

LIST = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 4, "micro_batch_size": 1, "zero_stage": 3},
    {"dp_shard": 2, "tp": 2, "activation_checkpointing": "full"},
    {"dp_shard": 2},
]  # for 8, 4, 4 and 2 ranks


OF_STAGE_1 = [
    {"pp": 1, "cp": 4, "dp_shard": 2, "tp": 1},
    {"cp": 2, "dp_shard": 2, "tp": 1},
    {"cp": 2, "dp_shard": 1, "tp": 1},
]  # for 8, 4 and 2 ranks
# over `LIST`, whose pp it keeps: for 8, 4, 4 and 2 ranks
KEEPS_PP = [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2}]


def configured(folder: Path, *of_stage_1: dict[str, int], layouts: list[Any] = LIST) -> str:
    """A configuration with `LIST`, whose layouts all fit batches of 8 sequences; if layouts of a
    second stage are given, that stage has longer sequences and these."""
    path = write_config(folder, folder / "data", parallel={"layouts": layouts, "zero_stage": 1})
    if of_stage_1:
        later = {"from_step": 2, "train": {"seq_len": 64}, "parallel": {"layouts": of_stage_1}}
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"\ndata_stages: {json.dumps([later])}\n")
    return path


@pytest.fixture
def path(tmp_path: Path) -> str:
    return configured(tmp_path)


def refused(path: str, world: int, *overrides: str) -> UserError:
    """Why no layout is chosen for this world."""
    with pytest.raises(UserError) as caught:
        choose_layout(load_config(path, [*overrides]), world)
    return caught.value


def chosen_again(path: str, first: int, world: int) -> Config:
    """What the run folder's config.yaml of a run on `first` ranks chooses for another world."""
    saved = Path(path).with_name("saved.yaml")
    saved.write_text(dump_config(choose_layout(load_config(path, []), first)))
    return choose_layout(load_config(str(saved), []), world)


@pytest.mark.parametrize(("world", "at"), [(3, 3), (4, 1), (7, 1), (8, 0)])
def test_the_largest_that_fits(path: str, world: int, at: int) -> None:
    """Of the two layouts for four ranks, the first one is taken. A key that a layout leaves out
    does not become that of the layout which happened to be chosen before."""
    chosen = choose_layout(load_config(path, []), world)
    expected = {"pp": 1, "tp": 1, "micro_batch_size": 2, "zero_stage": 1} | LIST[at]
    values = vars(chosen.train) | vars(chosen.parallel)
    assert {key: values[key] for key in expected} == expected
    assert chosen.train.global_batch_size == 8
    assert chosen_again(path, 4, world) == chosen


def test_no_layout_for_this_world(path: str, tmp_path: Path) -> None:
    error = refused(path, 1)
    assert error.key == "parallel.layouts[3]"
    assert "the world has 1 processes, and the smallest layout needs 2" in error.why
    assert "start at least 2 processes" in error.remedy
    error = refused(configured(tmp_path, *OF_STAGE_1[:2]), 8)
    assert error.key == "parallel.layouts[3].data_stages.1.parallel.layouts"
    assert "none has 2 ranks" in error.why
    error = refused(configured(tmp_path, {"dp_shard": 2}), 2, "parallel.layouts=[]")
    assert error.key == "data_stages.1.parallel.layouts"
    assert "the run has no list" in error.why


@pytest.mark.parametrize(
    ("layouts", "key", "why"),
    [
        ("[{dp_shard: 2}, {tp: 3, dp_shard: 1}]", "parallel.layouts[1]", "parallel.tp = 3"),
        ("[{dp_shard: 2}, {dp_shard: 3}]", "parallel.layouts[1]", "train.global_batch_size = 8"),
        ("[{tp: 2}]", "parallel.layouts[0]", "-1 would fit many worlds"),
        ("[{pp: 8, dp_shard: 1}]", "parallel.layouts[0]", "8 stages"),
        ("[{dp_shard: 2, tp: -1}]", "parallel.layouts[0]", "parallel.tp = -1"),
        (f"[{{ep: 7, dp_shard: {2**31 - 1}, cp: 2}}]", "parallel.layouts[0]", "too many"),
        (f"[{', '.join(['{dp_shard: 2}'] * 101)}]", "parallel.layouts", "101 layouts: too many"),
        ("[{layouts: []}]", "parallel.layouts[0].layouts", "no such key"),
        ("[{seq_len: 64}]", "parallel.layouts[0].seq_len", "no such key"),
        ("{dp_shard: 2}", "parallel.layouts", "is not allowed"),
    ],
)  # fmt: skip
def test_refusals(path: str, layouts: str, key: str, why: str) -> None:
    """The error names the layout, although another would have been chosen."""
    error = refused(path, 8, f"parallel.layouts={layouts}")
    assert error.key.startswith(key)
    assert why in str(error)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["parallel.layouts=[{tp: 2}]"], "-1 would fit many worlds"),
        (["train.dtype=bfloat16", "optimizer.pure_bfloat16=true", "optimizer.name=muon"],
         "muon rounds to nearest"),
    ],
)  # fmt: skip
def test_every_command_refuses_alike(
    path: str,
    overrides: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = [path, *overrides]
    error = str(refused(path, 8, *overrides))
    assert why in error
    monkeypatch.setattr("sys.argv", ["launch", *arguments])
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    for command in (
        partial(plan.main, [*arguments, "--gpus", "8"]),
        partial(rehearse.main, [*arguments, "--gpus", "8"]),
        launch.main,
    ):
        assert command() == 2
        assert f"error: {error}" in capsys.readouterr().err
    options = argparse.Namespace(config=path, overrides=overrides, ranks_per_node=8,
                                 spare_nodes=0, min_nodes=1)  # fmt: skip
    with pytest.raises(UserError) as caught:
        preflight.read_config(options, 1)
    assert str(caught.value) == error


def test_what_every_command_takes(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner and the rehearsal show the layout that training would use."""
    report = Path(path).with_name("plan.json")
    arguments = [path, "--gpus", "5", "--json", str(report)]
    assert plan.main(arguments) == 0
    mesh = json.loads(report.read_text())["mesh"]
    assert (mesh["pp"], mesh["dp_shard"], mesh["tp"]) == (1, 4, 1)
    assert rehearse.main(arguments) == 0
    assert json.loads(report.read_text())["world"] == 4
    assert "the same collectives" in capsys.readouterr().out


def test_queues_follow_the_chosen_layout(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS is 1 with tp, 32 without."""
    for world, expected in (("8", "1"), ("2", "32")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.delenv(CONNECTIONS, raising=False)
        set_connections(load_config(path, []))
        assert os.environ[CONNECTIONS] == expected
    monkeypatch.delenv(CONNECTIONS)


@pytest.mark.parametrize(
    ("of_stage_1", "world", "cp"),
    [(OF_STAGE_1, 8, 4), (OF_STAGE_1, 5, 2), (KEEPS_PP, 8, 1), (KEEPS_PP, 5, 1), (KEEPS_PP, 2, 1)],
)
def test_each_stage_has_a_layout_for_the_same_ranks(
    tmp_path: Path, of_stage_1: list[dict[str, int]], world: int, cp: int
) -> None:
    """Also if a run that began with another layout continues. (A key that a layout of the second
    stage leaves out does not become that of the layout which was chosen before it.)"""
    path = configured(tmp_path, *of_stage_1)
    chosen = choose_layout(load_config(path, []), world)
    first, second = (stage.config for stage in data_stages(chosen))
    assert first.parallel.num_ranks == second.parallel.num_ranks <= world
    assert (first.parallel.cp, second.parallel.cp, second.parallel.tp) == (1, cp, 1)
    assert layout_sizes(chosen) == [8, 4, 4, 2]
    assert chosen_again(path, 8, world) == chosen


def test_a_layout_that_is_not_chosen_need_not_fit(tmp_path: Path) -> None:
    """Its stages are not those of the layout before."""
    layers: list[dict[str, Any]] = [
        {"layers_per_stage": [1, 1, 1, 1]},
        {"layers_per_stage": [3, 1]},
    ]
    sizes = {"pp": 4, "dp_shard": 2, "tp": 1}, {"pp": 2, "dp_shard": 2, "tp": 1}
    later = {"pp": 4, "cp": 2, "dp_shard": 1}, {"pp": 2, "cp": 2, "dp_shard": 1}
    first = [one | more for one, more in zip(sizes, layers, strict=True)]
    path = configured(tmp_path, *later, layouts=first)
    for world, pp in (8, 4), (4, 2):
        chosen = data_stages(choose_layout(load_config(path, []), world))
        assert [stage.config.parallel.pp for stage in chosen] == [pp, pp]
