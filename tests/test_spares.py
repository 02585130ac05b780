"""Which of the launcher's ranks train, and how the others wait and end."""

import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from runtime import spares
from runtime.health.excluded import exclude, excluded_nodes, node_name
from runtime.signals import Signals
from runtime.spares import SPARES, choose_ranks, training_ranks
from tests.runs import train_run, write_config

NODES = ["a", "a", "b", "b", "c", "c", "d", "d"]  # the node of each rank


@pytest.mark.parametrize(
    ("sizes", "excluded", "expected"),
    [
        ([8, 6, 4], [], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([4, 6], [], [0, 1, 2, 3, 4, 5]),  # the largest, wherever it is in the list
        ([8, 6, 4], ["b"], [0, 1, 4, 5, 6, 7]),  # a node's ranks stay together
        ([8, 6, 4], ["a", "c"], [2, 3, 6, 7]),
        ([8], ["b"], [0, 1, 4, 5, 6, 7, 2, 3]),  # too few without b: it trains, as the last
        ([5], ["a"], [2, 3, 4, 5, 6]),
        ([16], ["b"], [0, 1, 2, 3, 4, 5, 6, 7]),  # nothing fits: all go on, and are refused
    ],
)
def test_who_trains(sizes: list[int], excluded: list[str], expected: list[int]) -> None:
    assert choose_ranks(NODES, sizes, set(excluded)) == expected


def test_names_of_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LATTICE_NODE", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert node_name() == os.uname().nodename
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-017")
    assert node_name() == "gpu-017"
    exclude(tmp_path, node_name(), "slow")
    assert excluded_nodes(tmp_path)["gpu-017"]["reason"] == "slow"


def take_part(
    config: str, store: str, nodes: list[str], beats: bool = True, asked: bool = False
) -> dict:
    """What one of the launcher's ranks sees: its new numbers, or how it ended as a spare."""
    rank, world, heard = dist.get_rank(), dist.get_world_size(), Signals(speaks=False)
    local = {"LOCAL_RANK": str(nodes[:rank].count(nodes[rank])), "LOCAL_WORLD_SIZE": "2"}
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LATTICE_NODE": nodes[rank]} | local
    if asked:
        heard.heard[signal.SIGTERM] = time.monotonic()
    with patch.dict(os.environ, variables), patch.object(spares, "LOST_SECONDS", 2.0):
        try:
            here = training_ranks([config], heard, dist.FileStore(store, world))
        except SystemExit as leaving:
            return {"status": leaving.code}
        if beats:
            assert here.store is not None
            here.store.add("trained", 1)
            while here.store.add("trained", 0) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
            here.leave(heard)
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", SPARES)
        return {name: os.environ[name] for name in names}


def elastic(folder: Path, *sizes: int) -> str:
    layouts = [{"dp_shard": size, "micro_batch_size": 1} for size in sizes]
    return write_config(
        folder, folder, parallel={"layouts": layouts}, train={"global_batch_size": 24}
    )


def test_ranks_of_an_excluded_node_wait_and_end(ranks, tmp_path: Path) -> None:
    """Rank 0 is on the excluded node: it decides, and becomes a spare. The others get consecutive
    numbers."""
    (tmp_path / "run").mkdir()
    exclude(tmp_path / "run", "a", "slow")
    found = ranks.run(
        take_part, 6, elastic(tmp_path, 6, 3), str(tmp_path / "store"), ["a", "a", *"bbcc"]
    )
    assert found[:2] == [{"status": 0}] * 2
    assert found[5] == {"status": 0}
    spare = json.dumps({"a": 2, "c": 1})
    assert [rank["RANK"] for rank in found[2:5]] == ["0", "1", "2"]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in found[2:5]] == ["2", "2", "1"]
    assert {(rank["WORLD_SIZE"], rank[SPARES]) for rank in found[2:5]} == {("3", spare)}


def test_a_spare_does_not_outlive_rank_0(ranks, tmp_path: Path) -> None:
    """Rank 0 shows no sign of life for two seconds (showing one takes longer), nor says that the
    the run has ended: the spare ends by itself, with an error, so that torchrun tries again."""
    found = ranks.run(
        take_part, 2, elastic(tmp_path, 1), str(tmp_path / "store"), ["a", "b"], False
    )
    assert found[0]["WORLD_SIZE"] == "1"
    assert "no sign of life" in str(found[1]["status"])


def test_a_rank_that_was_signalled_does_not_join(ranks, tmp_path: Path) -> None:
    config, store = elastic(tmp_path, 2), str(tmp_path / "store")
    found = ranks.run(take_part, 2, config, store, ["a", "b"], True, True)
    assert found == [{"status": 128 + signal.SIGTERM}] * 2


def test_without_a_list_ranks_do_not_meet(tmp_path: Path) -> None:
    """The store that is given comes back untouched, and no variable is read."""
    config = write_config(tmp_path, tmp_path)
    with patch.dict(os.environ, {"RANK": "3", "WORLD_SIZE": "4"}):
        assert training_ranks([config], Signals(speaks=False), None).store is None
        assert training_ranks([], Signals(speaks=False), None).store is None


def test_a_run_on_a_list(ranks, data: Path, tmp_path: Path) -> None:
    """Two ranks choose the layout for two, and the run folder's configuration has the choice."""
    layouts = [{"pp": 2, "dp_shard": 2, "tp": 1}, {"pp": 1, "dp_shard": 2, "tp": 1}]
    config = write_config(tmp_path, data, parallel={"layouts": layouts}, train={"steps": 1})
    assert ranks.run(train_run, 2, [config]) == ["", ""]
    said = ranks.run(train_run, 1, [config])
    assert "the smallest layout needs 2" in said[0]
