"""Nodes die and return, and the run is the same: every step trained on exactly the rows of an
undisturbed run, each row once, and losses, gradient norms, weights and moments are equal within
1e-9, relative, because layouts differ in the order of float64 sums."""

from pathlib import Path

import pytest

from settings.layouts import layout_sizes
from settings.load import load_config
from tests.drills.elastic import (
    LAYOUTS,
    NODES,
    TOLERANCE,
    Change,
    compare,
    make_run,
    plan,
    rows_of,
    write_drill,
)


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
    config = write_drill(tmp_path / "it", data, 1, ranks_of_node)
    assert layout_sizes(load_config(config, [])) == [n * ranks_of_node for n in (4, 3, 1)]
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


def check_same(found: Path, expected: Path, steps: int) -> None:
    same = compare(found, expected)
    assert same["rows_equal"]
    assert same["rows"] == same["rows_distinct"] == 12 * steps
    assert same["tokens_equal"]
    assert max(same["worst_relative_difference"].values()) <= TOLERANCE


@pytest.mark.slow  # three minutes
def test_a_run_whose_nodes_die_and_return(data: Path, tmp_path: Path) -> None:
    """A node dies and returns; two die at once, so that one of the others is a spare; and the node
    that has the store dies, after which the job starts again."""
    steps = 40
    make_run(tmp_path / "alone", data, steps, [])
    changes = [Change(3, kills=(2,)), Change(2, returns=(2,)), Change(3, kills=(1, 3)),
               Change(2, kills=(0,))]  # fmt: skip
    found = make_run(tmp_path / "drilled", data, steps, changes)
    assert found["worlds"] == [4, 3, 4, 1, 4]
    assert found["requeues"] == 1
    # the return of a node is a planned stop: no step is lost
    assert found["changes"][1]["restarts_from"] >= found["changes"][1]["at_step"]
    check_same(tmp_path / "drilled", tmp_path / "alone", steps)
    # control: other samples are noticed
    make_run(tmp_path / "other", data, steps, [], seed=1)
    differs = compare(tmp_path / "other", tmp_path / "alone")
    assert not differs["rows_equal"]
    assert differs["worst_relative_difference"]["loss"] > TOLERANCE


@pytest.mark.slow  # a quarter of an hour
def test_twenty_changes_of_size(data: Path, tmp_path: Path) -> None:
    steps, number = 300, 26
    make_run(tmp_path / "alone", data, steps, [])
    changes = plan(3, number, steps // number - 4, host_deaths=2)
    found = make_run(tmp_path / "drilled", data, steps, changes)
    assert found["changes_of_size"] >= 20
    check_same(tmp_path / "drilled", tmp_path / "alone", steps)
