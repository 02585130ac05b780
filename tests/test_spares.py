"""Which of the launcher's ranks train, and how the others wait and end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from runtime.health.excluded import exclude, excluded_nodes, node_name
from runtime.signals import Signals
from runtime.start import spares
from runtime.start.spares import choose_ranks, training_ranks
from runtime.torchrun import SPARES
from tests.alert_helpers import ROOT, wait_until
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
        ([8, 6], ["a", "b"], [4, 5, 6, 7, 0, 1]),  # 6 need one of them, 8 both
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


def test_a_file_that_a_person_has_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "excluded.json"
    file.write_text('{"a": {"reason": "slow"},\n "b": "computes wrongly",\n}\n')
    assert excluded_nodes(tmp_path) == {
        "a": {"reason": "slow"},
        "b": {"reason": "computes wrongly"},
    }
    for text in ('["a", "b"]', "- a\n- b\n", '{\n\t"a": "slow",\n\t"b": 1\n}'):
        file.write_text(text)
        assert list(excluded_nodes(tmp_path)) == ["a", "b"]
    for text in ('{"a": {"reason": "slow"}', "a", "a: 1\na: 2\n"):
        file.write_text(text)
        assert excluded_nodes(tmp_path) == {}
        assert "warning: no node is excluded" in capsys.readouterr().err
        assert exclude(tmp_path, "c", "slow")
        assert list(excluded_nodes(tmp_path)) == ["c"]
        assert (tmp_path / "excluded.json.unreadable").read_text() == text  # nothing is lost
    file.write_text("")
    assert excluded_nodes(tmp_path) == {}
    assert capsys.readouterr().err == ""


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


class HangingStore:
    """The store of a process that is stopped: nothing answers."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(600)
        return False


@pytest.mark.parametrize("signalled", [False, True])
def test_a_spare_does_not_hang_with_rank_0(signalled: bool) -> None:
    heard = Signals(speaks=False)
    if signalled:
        heard.heard[signal.SIGTERM] = time.monotonic()
    with (
        patch.object(spares, "LOST_SECONDS", 1.0),
        patch.object(spares, "LOOK_SECONDS", 0.1),
        pytest.raises(SystemExit) as left,
    ):
        spares._wait_as_spare(HangingStore(), heard)  # type: ignore[arg-type]
    assert left.value.code == 0 if signalled else "no sign of life" in str(left.value.code)


class Agents:
    """Two torchrun agents of one rank each, on this machine: n1 on an excluded node, and n0. n1
    comes first, so its rank is the launcher's rank 0, which decides and then is the spare."""

    def __init__(self, folder: Path, data: Path, *arguments: str) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        exclude(self.run, "n1", "slow")
        config = write_config(folder, data, parallel={"layouts": [{"dp_shard": 1}]})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.logs = [folder / "n0.log", folder / "n1.log"]
        self.agents = {}
        for node in (1, 0):
            rendezvous = f"last_call_timeout=3,keep_alive_interval=2,is_host={int(node == 0)}"
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2",
                "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={rendezvous}", "--rdzv-id=x",
                "--local-addr=127.0.0.1", "train.py", config, *arguments,
            ]  # fmt: skip
            more = {
                "LATTICE_NODE": f"n{node}",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            with open(self.logs[node], "wb") as log:
                self.agents[node] = subprocess.Popen(
                    command, cwd=ROOT, env={**os.environ, **more}, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip

    def rank(self, node: int) -> int:
        """The process of the node's rank."""
        (rank,) = psutil.Process(self.agents[node].pid).children()
        return rank.pid

    def said(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def until(self, text: str) -> None:
        wait_until(lambda: text in self.said() or all(a.poll() for a in self.agents.values()), 120)
        assert text in self.said(), self.said()

    def end(self, status: int = 0) -> None:
        """Wait until both agents have ended, with this status."""
        try:
            wait_until(lambda: all(a.poll() is not None for a in self.agents.values()), 240)
        finally:
            assert [self.agents[node].poll() for node in (0, 1)] == [status] * 2, self.said()

    def status(self) -> dict[str, Any]:
        return json.loads((self.run / "status.json").read_text())

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*psutil.Process(agent.pid).children(recursive=True), agent):
                    process.kill()
            agent.wait()


@pytest.mark.thorough
def test_a_spare_that_was_the_launchers_rank_0_lets_the_run_end(data: Path, tmp_path: Path) -> None:
    """torchrun's store is in the process of the launcher's rank 0, a spare. It lives until the run
    has ended, and both agents end with status 0: without a restart, and without waiting for each
    other."""
    with Agents(tmp_path, data) as both:
        both.end()
        said = both.said()
    assert "1 of 2 ranks train; spares: 1 on n1" in said
    assert said.count("finished after 6 steps") == 1
    assert (both.status()["state"], "Traceback" in said) == ("finished", False)


@pytest.mark.thorough
@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_a_spare_that_was_the_launchers_rank_0_ends_before_the_run(
    data: Path, tmp_path: Path, ends: str
) -> None:
    """Everyone is signalled, as by the job script, and the run stops. Or the spare's node dies, and
    the run does not notice."""
    steps = ["train.steps=60"] if ends == "killed" else ["train.steps=100000"]
    with Agents(tmp_path, data, "run.log_interval=1", *steps) as both:
        both.until("step      2/" if ends == "stopped" else "step  2/")
        if ends == "stopped":
            (both.run / "STOP").touch()
            for node in (0, 1):
                os.kill(both.rank(node), signal.SIGUSR1)
            both.end()
            assert both.status()["state"] == "requeue"
        else:
            for process in (both.rank(1), both.agents[1].pid):
                os.kill(process, signal.SIGKILL)
            both.until("finished after 60 steps")
            # torchrun's agent waits for the dead one for minutes
            wait_until(lambda: not psutil.Process(both.agents[0].pid).children(), 60)
            assert both.status()["state"] == "finished"
        said = both.said()
    assert said.count("starting from initial weights") == 1
    assert "Traceback" not in said


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["everyone", "one rank"])
def test_a_refusal_ends_torchrun_on_every_node(data: Path, tmp_path: Path, who: str) -> None:
    """Although both agents have restarts left: by all ranks that train, while a spare waits on the
    other node; and by one rank that reads a shard with a broken header, in the middle of the run
    (or by both, if the other one finds it first)."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for shard in sorted(copy.glob("train-*.safetensors"))[1:]:
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    layout = ["parallel.layouts=[{dp_shard: 2}]", "train.micro_batch_size=1", "train.seq_len=8"]
    layout += ["train.steps=500"]
    wrong = {"everyone": ["data.path=/nowhere"], "one rank": [f"data.path={copy}", *layout]}
    with Agents(tmp_path, data, *wrong[who]) as both:
        both.end(status=1)
        said = both.said()
    assert said.count("got signal: 15") == 2, "in torchrun's words"
    if who == "everyone":
        assert "1 of 2 ranks train; spares: 1 on n1" in said
        assert said.count("error: data.path = ") == 1
    else:
        assert 1 <= said.count("error on rank") <= 2


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
    (said,) = ranks.run(train_run, 1, [config])
    assert "the smallest layout needs 2" in said
