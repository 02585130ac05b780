"""Which of the launcher's ranks train, and how the others wait and end."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import psutil
import pytest
import torch.distributed as dist

from proofs.ranks import Ranks
from runtime.health.excluded import exclude, excluded_nodes, include
from runtime.signals import Signals
from runtime.start import elastic, init
from runtime.start.checks import try_config
from runtime.start.elastic import choose_ranks, training_ranks
from tests import ROOT
from tests.monitor.alert_helpers import free_port, wait_until
from tests.runs import status_of, write_config

NODES = ["a", "a", "b", "b", "c", "c", "d", "d"]  # the node of each rank


@pytest.mark.parametrize(
    ("sizes", "excluded", "expected"),
    [
        ([4, 6], [], [0, 1, 2, 3, 4, 5]),  # the largest, wherever it is in the list
        ([8, 6, 4], ["b"], [0, 1, 4, 5, 6, 7]),  # a node's ranks stay together
        ([8], ["b"], [0, 1, 4, 5, 6, 7, 2, 3]),  # too few without b: it trains, as the last
        ([8, 6], ["a", "b"], [4, 5, 6, 7, 0, 1]),  # 6 need one of them, 8 both
        ([16], ["b"], [0, 1, 2, 3, 4, 5, 6, 7]),  # nothing fits: all go on, and are refused
    ],
)
def test_who_trains(sizes, excluded, expected):
    assert choose_ranks(NODES, sizes, set(excluded)) == expected


NAMED = {"a": {"reason": "slow"}, "b": {"reason": "1"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": {"reason": "slow"},\n "b": 1,\n}\n', NAMED),
        ('{\n\t"a": "slow",\n\t"b": 1\n}', NAMED),
        ('{"a": {"reason": "slow"}', None),
        ('["a"]', None),
    ],
)
def test_a_file_that_a_person_has_edited(tmp_path, capsys, text, expected):
    """If it cannot be read, it is kept."""
    (tmp_path / "excluded.json").write_text(text)
    assert excluded_nodes(tmp_path) == (expected or {})
    warned = "warning: no node is excluded" in capsys.readouterr().err
    assert exclude(tmp_path, "c", "slow")
    (tmp_path / "excluded.partial").mkdir()  # nothing can be written
    assert not exclude(tmp_path, "d", "slow")
    assert not include(tmp_path, "c", "slow")
    assert [*excluded_nodes(tmp_path)] == [*(expected or {}), "c"]
    kept = tmp_path / "excluded.json.unreadable"
    assert warned == kept.exists() == (expected is None)
    assert expected or kept.read_text() == text


def signalled(asked: bool) -> Signals:
    """Signals of which SIGTERM was heard, if `asked`."""
    signals = Signals(speaks=False)
    if asked:
        signals.heard[signal.SIGTERM] = time.monotonic()
    return signals


def take_part(config: str, store: str, nodes: list[str], asked: bool) -> dict:
    """What one of the launcher's ranks sees: its new numbers, or how it ended as a spare."""
    rank, world, heard = dist.get_rank(), dist.get_world_size(), signalled(asked)
    local = {"LOCAL_RANK": str(nodes[:rank].count(nodes[rank])), "LOCAL_WORLD_SIZE": "2"}
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LATTICE_NODE": nodes[rank]} | local
    with patch.dict(os.environ, variables):
        try:
            here = training_ranks(try_config([config]), heard, dist.FileStore(store, world))
        except SystemExit as leaving:
            return {"status": leaving.code}
        assert here.store is not None
        here.store.add("trained", 1)
        while here.store.add("trained", 0) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        here.leave(heard)
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return {name: os.environ[name] for name in names} | {"spares": here.spares}


def parted(ranks: Ranks, folder: Path, nodes: str, sizes: list[int], asked: bool) -> list[dict]:
    """`take_part` on one rank for each letter of `nodes`, with layouts for `sizes` ranks."""
    layouts = [{"dp_shard": size, "micro_batch_size": 1} for size in sizes]
    batch = {"global_batch_size": 24}
    config = write_config(folder, folder, parallel={"layouts": layouts}, train=batch)
    return ranks.run(take_part, len(nodes), config, str(folder / "store"), list(nodes), asked)


def test_ranks_of_an_excluded_node_wait_and_end(ranks, tmp_path):
    """Rank 0 is on the excluded node: it decides, and becomes a spare. The others get consecutive
    numbers."""
    (tmp_path / "run").mkdir()
    exclude(tmp_path / "run", "a", "slow")
    found = parted(ranks, tmp_path, "aabbcc", [6, 3], asked=False)
    assert [found[n] for n in (0, 1, 5)] == [{"status": 0}] * 3
    same = {"WORLD_SIZE": "3", "spares": {"a": 2, "c": 1}}
    assert found[2:5] == [
        {"RANK": str(rank), "LOCAL_WORLD_SIZE": local} | same
        for rank, local in enumerate(("2", "2", "1"))
    ]


@pytest.mark.parametrize(
    ("check", "asked", "status"),
    [
        (lambda _: time.sleep(600), True, "^0$"),
        (lambda _: time.sleep(600), False, "no sign of life"),
        (Mock(side_effect=RuntimeError("gone")), False, "a spare lost rank 0: gone"),
    ],
)
def test_a_spare_does_not_outlive_rank_0(check, asked, status):
    """Its process, which holds the store, is stopped, so nothing answers, or it is gone: the spare
    ends by itself; with an error, so that torchrun tries again, unless it was asked to stop."""
    store = SimpleNamespace(check=check)
    with (
        patch.multiple(elastic, LOST_SECONDS=0.4, LOOK_SECONDS=0.1, AGENT_SECONDS=0.0),
        pytest.raises(SystemExit, match=status),
    ):
        elastic._wait_as_spare(store, signalled(asked))


def test_a_spare_stays_for_the_save(monkeypatch):
    """After USR1, which the job script sends to every step."""
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.05)
    store, signals = dist.HashStore(), signalled(False)
    signals.heard[signal.SIGUSR1] = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        spare = pool.submit(elastic._wait_as_spare, store, signals)
        assert not wait([spare], 0.5).done
        store.set("leave", "ended")
        assert spare.exception(10).code == 0


class Agents(contextlib.AbstractContextManager):
    """Two torchrun agents of one rank each, on this machine: n1 on an excluded node, and n0. n1
    comes first, so its rank is the launcher's rank 0, which decides and then is the spare."""

    def __init__(self, folder: Path, data: Path, *arguments: str) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        exclude(self.run, "n1", "slow")
        config = write_config(folder, data, parallel={"layouts": [{"dp_shard": 1}]})
        endpoint = f"127.0.0.1:{free_port()}"
        self.logs = [folder / "n0.log", folder / "n1.log"]
        self.agents = {}
        for node in (1, 0):
            rendezvous = f"last_call_timeout=3,keep_alive_interval=2,is_host={1 - node}"
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2",
                "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={rendezvous}", "--rdzv-id=x",
                "--local-addr=127.0.0.1", "train.py", config, *arguments,
            ]  # fmt: skip
            more = {"LATTICE_NODE": f"n{node}", "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
            with open(self.logs[node], "wb") as log:
                self.agents[node] = psutil.Popen(
                    command, cwd=ROOT, env={**os.environ, **more}, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip

    def rank(self, node: int) -> int:
        """The process of the node's rank."""
        (rank,) = self.agents[node].children()
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

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*agent.children(recursive=True), agent):
                    process.kill()
            agent.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["nothing", "a stop", "death"])
def test_a_spare_that_was_the_launchers_rank_0(data, tmp_path, what):
    """torchrun's store is in its process. It lives until the run has ended, and both agents end
    with status 0: without a restart, and without waiting for each other. If everyone is signalled,
    as by the job script, the run stops. If its node dies, the run does not notice."""
    steps = {"nothing": 6, "a stop": 100_000, "death": 60}[what]
    with Agents(tmp_path, data, "run.log_interval=1", f"train.steps={steps}") as both:
        if what != "nothing":
            both.until("step      2/" if what == "a stop" else "step  2/")
        if what == "a stop":
            (both.run / "STOP").touch()
            for node in (0, 1):
                os.kill(both.rank(node), signal.SIGUSR1)
        if what == "death":
            for process in (both.rank(1), both.agents[1].pid):
                os.kill(process, signal.SIGKILL)
            # torchrun's agent waits for the dead one for minutes
            wait_until(lambda: not both.agents[0].children(), 120)
        else:
            both.end()
        said = both.said()
    assert "1 of 2 ranks train; spares: 1 on n1" in said
    assert said.count("starting from initial weights") == 1
    assert "Traceback" not in said
    assert status_of(tmp_path)["state"] == ("requeue" if what == "a stop" else "finished")


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["everyone", "one rank"])
def test_a_refusal_ends_torchrun_on_every_node(data, tmp_path, who):
    """Although both agents have restarts left: by all ranks that train, while a spare waits on the
    other node; and by one rank that reads a shard with a broken header, in the middle of the run
    (or by both, if the other one finds it first)."""
    wrong = ["data.path=/nowhere"]
    if who == "one rank":
        copy = shutil.copytree(data, tmp_path / "data")
        for shard in sorted(copy.glob("train-*.safetensors"))[1:]:  # the right size, but no header
            shard.write_bytes(b"\xff" * shard.stat().st_size)
        layout = ["parallel.layouts=[{dp_shard: 2}]", "train.micro_batch_size=1", "train.seq_len=8"]
        wrong = [f"data.path={copy}", "train.steps=500", *layout]
    with Agents(tmp_path, data, *wrong) as both:
        both.end(status=1)
        said = both.said()
    assert said.count("got signal: 15") == 2, "in torchrun's words"
    assert "UserError" not in said, "no traceback of ours"
    if who == "everyone":
        assert "1 of 2 ranks train; spares: 1 on n1" in said
        assert said.count("error: data.path = ") == 1
    else:
        assert 1 <= said.count("error on rank") <= 2, "not in a second start"
        assert "data.path = " in said


def leave(seconds: float) -> tuple[float, float]:
    """Under torchrun and without layouts: when this rank was done, rank 0 so much later; and when
    it left."""
    rank = dist.get_rank()
    time.sleep(0.0 if rank else seconds)
    done = time.monotonic()
    agents = patch.dict(os.environ, RANK=str(rank), TORCHELASTIC_RUN_ID="x")
    with agents, patch.object(dist, "all_reduce"):  # which would wait, too, but not for long enough
        elastic.TrainingRanks().leave(signalled(False))
    return done, time.monotonic()


def test_no_rank_leaves_before_rank_0(ranks):
    """It may wait for a command for longer than torchrun's agents wait for each other."""
    first, second = ranks.run(leave, 2, 1.5)
    assert second[1] >= first[0]


def test_a_rank_that_was_signalled_does_not_join(ranks, tmp_path):
    found = parted(ranks, tmp_path, "ab", [2], asked=True)
    assert found == [{"status": 128 + signal.SIGTERM}] * 2


def test_the_last_rank_may_join_late(tmp_path):
    """Rank 1 has joined, and waits for rank 2 for longer than ranks that have all joined do."""
    store, seconds = dist.HashStore(), elastic.ANSWER_SECONDS
    config = try_config([write_config(tmp_path, tmp_path, parallel={"layouts": [{"dp_shard": 2}]})])
    decided = json.dumps({"ranks": [0, 1], "nodes": NODES[:3], "spares": {"b": 1}})
    with (
        patch.dict(os.environ, RANK="1", WORLD_SIZE="3", LOCAL_WORLD_SIZE="2"),
        patch.object(elastic, "ANSWER_SECONDS", 0.0),
        patch.object(init, "WAIT_SECONDS", 0.05),
        ThreadPoolExecutor(3) as pool,
    ):
        early = pool.submit(training_ranks, config, signalled(False), store)
        first = pool.submit(init.fresh_store, store, 0, 3, {})
        wait([early], 1)  # in vain
        elastic.ANSWER_SECONDS = seconds
        init.fresh_store(store, 2, 3, {})
        first.result().set("chosen", decided)
        assert early.result().spares == {"b": 1}
