"""Nodes die and return, and the run is the same: the short form of benchmarks/elastic_drill.py."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.elastic_compare import compare, rows_of
from benchmarks.elastic_drill import (
    LAYOUTS,
    NODES,
    ROOT,
    TOLERANCE,
    Change,
    make_run,
    plan,
    write_drill,
)
from tests.data_samples import tokenizer
from training.layouts import layout_sizes
from training.load_config import load_config


def base(data: Path) -> dict[str, Any]:
    raw = yaml.safe_load((ROOT / "configs/laptop.yaml").read_text())
    raw["model"]["vocab_size"] = tokenizer().vocab_size
    return raw | {"data": {"path": str(data)}}


def alive_after(changes: list[Change]) -> list[set[int]]:
    """The nodes that live after each change; checks that only living ones die, and dead return."""
    alive, found = set(range(NODES)), []
    for change in changes:
        assert alive >= set(change.kills)
        assert not alive & set(change.returns)
        alive = alive - set(change.kills) | set(change.returns)
        if 0 in change.kills:  # the job is requeued
            alive = set(range(NODES))
        found.append(alive)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_possible(seed: int) -> None:
    changes = plan(seed, 26, 7, host_deaths=2)
    assert len(changes) == 26
    alive = alive_after(changes)
    assert alive[-1] == set(range(NODES))
    assert all(0 in nodes for nodes in alive)
    assert sum(0 in change.kills for change in changes) == 2
    assert changes == plan(seed, 26, 7, host_deaths=2) != plan(seed + 1, 26, 7, host_deaths=2)


@pytest.mark.parametrize("ranks_of_node", LAYOUTS)
def test_the_layouts_of_the_drill(data: Path, tmp_path: Path, ranks_of_node: int) -> None:
    """tp, pp and data parallelism are among them, and two nodes leave one spare."""
    config = write_drill(tmp_path / "it", base(data), 1, ranks_of_node)
    assert layout_sizes(load_config(str(config), [])) == [n * ranks_of_node for n in (4, 3, 1)]
    for axis in ("pp", "dp_shard", "tp"):
        assert {layout[axis] for layout in LAYOUTS[ranks_of_node]} != {1}


def test_rows_are_those_of_the_last_try(tmp_path: Path) -> None:
    """A step that was repeated after a death counts as its last try read it; a line that a killed
    process left unfinished counts as nothing."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1.jsonl").write_text(
        '{"time": 1, "step": 0, "first": 0, "rows": ["old", "b"]}\n{"time": 9, "step": 0, "fir'
    )
    (tmp_path / "rows" / "2.jsonl").write_text(
        '{"time": 2, "step": 0, "first": 0, "rows": ["a"]}\n'
    )
    assert rows_of(tmp_path) == {(0, 0): "a", (0, 1): "b"}


@pytest.mark.slow
def test_a_run_whose_nodes_die_and_return(data: Path, tmp_path: Path) -> None:
    """A node dies and returns; two die at once, so that one of the others is a spare; and the node
    that has the store dies, after which the job starts again. Rows, losses and the last state are
    those of an undisturbed run."""
    steps, raw = 40, base(data)
    make_run(tmp_path / "alone", raw, steps, [], 1)
    changes = [Change(3, kills=(2,)), Change(2, returns=(2,)), Change(3, kills=(1, 3)),
               Change(2, kills=(0,))]  # fmt: skip
    found = make_run(tmp_path / "drilled", raw, steps, changes, 1)
    assert found["worlds"] == [4, 3, 4, 1, 4]
    assert found["requeues"] == 1
    # the return of a node is a planned stop: no step is lost
    assert found["changes"][1]["restarts_from"] >= found["changes"][1]["at_step"]
    same = compare(tmp_path / "drilled", tmp_path / "alone")
    assert same["rows_equal"]
    assert same["rows"] == same["rows_distinct"] == 12 * steps
    assert same["tokens_equal"]
    assert max(same["worst_relative_difference"].values()) <= TOLERANCE
    # control: other samples are noticed
    other = raw | {"train": {**raw["train"], "seed": 1}}
    make_run(tmp_path / "other", other, steps, [], 1)
    differs = compare(tmp_path / "other", tmp_path / "alone")
    assert not differs["rows_equal"]
    assert differs["worst_relative_difference"]["loss"] > TOLERANCE
