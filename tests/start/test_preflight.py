"""The preflight draws the right conclusions from the nodes' reports; and several nodes run it for
real, on this machine over gloo.

tests/slurm/slurm_scenarios.py tests it on a real Slurm.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from runtime.health.excluded import exclude
from runtime.trainer_state import state_bytes
from settings.load import load_config
from tests import ROOT
from tests.monitor.alert_helpers import free_port, wait_until
from tests.runs import FIXTURE, forked, status, write_config
from tools.preflight import __main__ as command
from tools.preflight import links, node
from tools.preflight.__main__ import choose, odd_ones, slow_ones
from tools.preflight.links import judge_links, rounds
from tools.preflight.node import _sources, addresses, judge_addresses, judge_gpus

# one row of nvidia-smi, without the index
GOOD = ["NVIDIA H100 80GB HBM3", "4", "1980", "Enabled", "0"]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 11])
def test_every_node_is_in_two_pairs_and_in_one_at_a_time(num_nodes):
    partners = {node: set() for node in range(num_nodes)}
    alone, *pairs = rounds([*range(num_nodes)])
    assert alone == [(node,) for node in range(num_nodes)]
    for together in pairs:
        nodes = [node for pair in together for node in pair]
        assert len(nodes) == len(set(nodes))
        for one, other in together:
            partners[one].add(other)
            partners[other].add(one)
    assert {len(found) for found in partners.values()} == {min(2, num_nodes - 1)}


def test_all_code_that_trains_is_compared():
    """Everything of this repository that is loaded where a run is started, as here."""
    loaded = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    inside = {Path(file) for file in loaded if file and ROOT in Path(file).parents}
    others = (".venv", "benchmarks", "docs", "proofs", "tests")
    ours = {path for path in inside if path.relative_to(ROOT).parts[0] not in others}
    assert ROOT / "settings" / "config.py" in ours
    assert ours <= {*_sources()}


def test_what_differs_and_what_is_slow_is_named():
    """And the neighbours of a slow node are not."""
    common = {"packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "within": 400e9, "across": 45e9}
    reports = {node: dict(common) for node in range(6)} | {6: {"packages": common["packages"]}}
    assert odd_ones(reports, "packages") == slow_ones(reports) == {}
    reports[2]["packages"] = {"torch": "2.11.0", "extra": "1", "numpy": "2.4.6"}
    assert odd_ones(reports, "packages") == {2: "extra, torch"}
    reports[4]["across"] = 20e9
    assert slow_ones(reports) == {4: "all-reduce across nodes at 44% of the job's median"}


def test_spares_are_the_excluded_then_slow_then_last():
    assert choose(range(5), set(), set(), 4) == [0, 1, 2, 3]
    assert choose([0, 2, 3, 4], set(), {3}, 3) == [0, 2, 4]
    assert choose(range(5), {4}, {0, 2}, 3) == [0, 1, 3]
    assert choose(range(5), {4}, {0, 2}, 4) == [0, 1, 2, 3]
    assert choose(range(4), set(), set(), 5) == []


def test_sick_busy_missing_and_unlike_gpus():
    rows = [[str(index), *GOOD] for index in range(8)]
    found = judge_gpus(rows, [], 8)
    assert (found["problems"], found["warnings"]) == ([], [])
    assert found["gpus"] == "8 H100 80GB HBM3"
    rows[3][2], rows[4][5], rows[5][4] = "40000", "2", "Disabled"
    found = judge_gpus(rows, [["4711", "512"]], 9)
    assert found["problems"] == [
        "8 of 9 GPUs are visible",
        "GPU 3 is not idle: 40,000 MiB are in use",
        "GPU 4 has 2 uncorrected memory errors since it was last reset",
        "GPUs are in use by processes 4711",
    ]
    assert found["warnings"] == [
        "the GPUs differ in ecc.mode.current: {'Enabled': 7, 'Disabled': 1}"
    ]
    assert judge_gpus([], [], 8)["problems"] == ["0 of 8 GPUs are visible"]


def test_a_node_fails_if_its_own_ranks_or_all_its_pairs_fail():
    good, error = {0: 3e9, 1: 2e9}, {0: 3e9, 1: "RuntimeError: no route"}
    faster = {"within": 2e9, "across": 4e9}
    assert judge_links(2, [good, good, {0: 4e9, 1: 5e9}]) == faster
    for bad in ({}, {0: 9e9}, error):  # the pair with a bad neighbour
        assert judge_links(2, [good, bad, {0: 4e9, 1: 5e9}]) == faster
    assert judge_links(2, [good]) == {"within": 2e9, "across": None}
    assert judge_links(1, [{0: None}, {0: 4e9}]) == {"within": None, "across": 4e9}
    silent = {"problems": ["it sent no measurement in time"]}
    assert judge_links(2, [{0: 3e9}, good]) == judge_links(2, [good, {}, {1: 2e9}]) == silent
    other = {0: "RuntimeError: reset", 1: "RuntimeError: reset"}
    for answers in ([error, good, good], [good, error, {}]):
        (why,) = judge_links(2, answers)["problems"]
        assert why == "1 ranks could not communicate: RuntimeError: no route"
    (why,) = judge_links(2, [good, error, other])["problems"]
    assert why == "2 ranks could not communicate: RuntimeError: no route"


def test_an_address_that_is_reachable_from_outside():
    private = ["127.0.0.1", "10.1.2.3", "fe80::1", "fd00::7"]
    assert judge_addresses(private) == []
    (warning,) = judge_addresses([*private, "8.8.8.8", "2600:1f18::7"])
    assert warning.startswith("8.8.8.8, 2600:1f18::7 can be reached from outside")
    assert sys.platform != "linux" or "127.0.0.1" in addresses()


def on_node(
    node: int, num_nodes: int, unfit: int | None, broken: int | None, arguments: list[str]
) -> None:
    slurm = {"SLURM_NNODES": str(num_nodes), "SLURM_NODEID": str(node)}
    os.environ.update(slurm | {"SLURMD_NODENAME": f"node{node}", "OMP_NUM_THREADS": "1"})
    bandwidth, look = links._bandwidth, command.look_at_node

    def looked(*about: Any) -> dict[str, Any]:
        return look(*about) | ({"problems": ["unfit"]} if node == unfit else {})

    def chatty(device: str, num_ranks: int) -> float | None:
        if node == 0:
            os.write(1, b"NCCL INFO, as with NCCL_DEBUG=INFO\n")
        if broken is not None and num_ranks > 2:
            dist.barrier()  # while gloo connects, it does not notice that a peer has ended
            if node == broken:
                raise RuntimeError("no route")
        return bandwidth(device, num_ranks)

    with (
        patch.object(links, "_bandwidth", chatty),
        patch.object(command, "look_at_node", looked),
    ):
        sys.exit(command.main(arguments))


def preflight(
    folder: Path, data: Path, nodes: int, unfit: int | None = None, broken: int | None = None
) -> list[tuple[int | None, str, str]]:
    """Run the preflight on so many nodes; return the status, standard output and standard error of
    each. A broken one cannot communicate with others."""
    config, port = write_config(folder, data, train={"global_batch_size": 48}), free_port()
    spares = str(sum(bad is not None for bad in (unfit, broken)))
    arguments = ["--meet", f"127.0.0.1:{port}", "--device", "cpu", "--ranks-per-node", "2",
                 "--seconds", "300", "--spare-nodes", spares, config]  # fmt: skip
    files = [(folder / f"answer-{node}", folder / f"report-{node}") for node in range(nodes)]
    started = [
        forked(answer, on_node, node, nodes, unfit, broken, arguments, errors=report)
        for node, (answer, report) in enumerate(files)
    ]
    return [
        (status(process), answer.read_text(), report.read_text())
        for process, (answer, report) in zip(started, files, strict=True)
    ]


@pytest.mark.parametrize(
    ("nodes", "unfit"), [(2, None), pytest.param(4, 1, marks=pytest.mark.thorough)]
)
def test_nodes_meet_and_measure(data, tmp_path, nodes, unfit):
    """An unfit node is left out. Of the three that remain, one has no partner in each round."""
    (code, answer, report), *others = preflight(tmp_path, data, nodes, unfit)
    assert code == 0, report
    names = [f"node{node}" for node in range(nodes) if node != unfit]
    assert answer == f"{','.join(names)} {tmp_path}/run\n"
    assert f"preflight passed: {len(names)} nodes" in report
    assert ("FAILED   node1: unfit" in report) == (unfit == 1)
    rows = [line.split() for line in report.splitlines() if line.split()[0] in names]
    assert [row[0] for row in rows] == names
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows), report  # within and across
    assert others == [(0, "", "")] * (nodes - 1)
    assert not (tmp_path / "run").exists()


def test_neighbours_of_a_broken_node_do_not_fail(data, tmp_path):
    """They measure with their other neighbours: node 0 after its pair with node 1 has failed."""
    (code, answer, report), *others = preflight(tmp_path, data, 5, broken=1)
    assert code == 0, report
    assert answer == f"node0,node2,node3,node4 {tmp_path}/run\n"
    assert report.count("FAILED") == 1
    assert "FAILED   node1: 2 ranks could not communicate: RuntimeError: no route" in report
    assert [code for code, *_ in others] == [0] * 4


def test_a_rank_that_hangs_takes_part_in_the_next_round():
    """Node 0 hangs by itself; node 3 waits for node 2, which never comes. Then they are a pair."""
    address, deadline = f"127.0.0.1:{free_port()}", time.monotonic() + 300
    member = 0  # at each fork

    def hangs(_: str, num_ranks: int) -> bool:
        if num_ranks == 1 and member == 0:
            signal.pause()
        if num_ranks > 1:
            dist.barrier()  # else one could leave while the other still connects
        return True

    never = patch.object(links, "_bandwidth", hangs)
    with contextlib.ExitStack() as running:
        running.enter_context(patch.object(links, "SHARE", 0.99))  # of 200 s, 2 until round 2
        running.enter_context(never)
        for member in (0, 3):
            running.enter_context(links.Links("cpu", 1, address, member, deadline).running())
        meeting = command.Meeting(address, 0, 4, deadline)
        meeting.write("members", [[0, 1, 2, 3], 200])
        assert meeting.gather("link/0/2", [0], deadline) == {0: True}
        assert meeting.gather("link/3/2", [0], deadline) == {0: True}
        assert not meeting.store.check(["link/0/0/0"])


def test_what_stands_in_a_nodes_way_is_said(data, tmp_path, monkeypatch):
    """A folder that cannot be looked at is a problem; an editor's lock is no code."""
    there = {"dir": str(tmp_path / ("x" * 300))}
    on_disk = {"offload": "disk", "offload_dir": "/proc"}
    config = load_config(write_config(tmp_path, data, run=there, parallel=on_disk), [])
    assert _sources()
    monkeypatch.setattr(node, "ROOT", tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / ".#train.py").symlink_to("me@host.4711")
    report = node.look_at_node("n0", config, "cpu", 1, 1)
    assert report["problems"][0].startswith("run.dir cannot be read")
    assert report["problems"][1].startswith("parallel.offload_dir cannot be written")
    assert [*report["code"]] == ["train.py"]


@pytest.mark.parametrize(("lost", "gone"), [(0, "data/index.json"), (2, "mount/runs")])
def test_a_node_without_a_mount_is_left_out(tmp_path, monkeypatch, capsys, lost, gone):
    """Also if it is the first node, which then does not read the data. The mount point is there."""
    run = {"dir": str(tmp_path / "mount" / "runs" / "new")}
    config = load_config(write_config(tmp_path, tmp_path / "data", run=run), [])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").touch()
    (tmp_path / "mount" / "runs").mkdir(parents=True)
    reports = {n: node.look_at_node(f"n{n}", config, "cpu", 1, 1) for n in range(3)}
    (tmp_path / gone).rename(tmp_path / "gone")
    reports[lost] = node.look_at_node(f"n{lost}", config, "cpu", 1, 1)
    opened: list[object] = []
    monkeypatch.setattr(command, "open_data_stages", opened.append)
    meeting = command.Meeting("127.0.0.1:0", 0, 3, time.monotonic() + 60)
    meeting.deadline = time.monotonic()
    for number in (1, 2):
        meeting.write(f"report/{number}", reports[number])
    options = SimpleNamespace(seconds=0, node_names="", ranks_per_node=1, spare_nodes=1)
    command.lead(meeting, reports[0], options, config, range(1))
    assert json.loads(meeting.store.get("members"))[0] == [n for n in range(3) if n != lost]
    why = f"FAILED   n{lost}: other folders than most nodes: {tmp_path / gone}"
    assert why in capsys.readouterr().err
    assert bool(opened) == (lost != 0)


@pytest.mark.thorough  # tests/settings/test_refusals.py tests the errors themselves
def test_data_that_training_would_refuse(tmp_path):
    (code, answer, report), other = preflight(tmp_path, tmp_path / "none", 2)
    assert (code, answer) == (2, "")
    assert report.startswith("error: data.path")
    assert other == (1, "", "")


@pytest.mark.parametrize(("nodes", "layouts"), [("1", True), ("0", True), ("3", False)])
def test_a_minimum_below_the_smallest_layout_is_refused(
    data, tmp_path, monkeypatch, capsys, nodes, layouts
):
    """torchrun would go on with so few nodes, and the ranks would refuse to."""
    parallel = {"layouts": [{"dp_shard": 4}, {"dp_shard": 8}]} if layouts else {"dp_shard": -1}
    config = write_config(tmp_path, data, parallel=parallel)
    monkeypatch.setenv("SLURM_NNODES", "4")
    asked = ["--meet", "localhost:1", "--ranks-per-node", "2", "--min-nodes", nodes, config]
    assert command.main(asked) == 2
    assert f"MIN_NODES = {nodes}: the smallest layout needs {2 if layouts else 4} nodes" in (
        capsys.readouterr().err
    )


LAYOUTS = [{"dp_shard": 8, "micro_batch_size": 1}, {"dp_shard": 4}]


@pytest.mark.parametrize(
    ("spares", "layouts", "passes"), [(2, [], True), (1, [], False), (0, LAYOUTS, True)]
)
def test_a_node_that_sends_nothing_has_failed(
    tmp_path, monkeypatch, capsys, spares, layouts, passes
):
    """One does not come, a rank of another is silent; the others train if that leaves enough of
    them, or a layout for so few. A node in excluded.json is named, and used if it is needed."""
    for name in ("open_data_stages", "check_writable"):
        monkeypatch.setattr(command, name, lambda *_: None)
    (tmp_path / "run").mkdir()
    exclude(tmp_path / "run", "n1", "slow since step 7")
    meeting = command.Meeting("127.0.0.1:0", 0, 5, time.monotonic() + 60)
    meeting.deadline = time.monotonic()  # so that it waits for nothing that is missing
    report = {"gpus": "8", "code": {}, "packages": {}, "folders": {}, "free_bytes": 1}
    report |= {"problems": [], "warnings": []}
    for number in (1, 2, 3):
        meeting.write(f"report/{number}", report | {"name": f"n{number}"})
    for number, turn, rank in {*itertools.product(range(4), range(3), range(2))} - {(2, 0, 1)}:
        meeting.write(f"link/{number}/{turn}/{rank}", 1e10)
    batch = {"global_batch_size": 24, "micro_batch_size": 1}
    path = write_config(tmp_path, tmp_path, parallel={"layouts": layouts}, train=batch)
    options = SimpleNamespace(
        seconds=0, node_names="n0,n1,n2,n3,n4", ranks_per_node=2, spare_nodes=spares,
        min_nodes=None, config=path, overrides=[],
    )  # fmt: skip
    config = command.read_config(options, 5)
    exit_status = command.lead(meeting, report | {"name": "n0"}, options, config, range(2))
    assert exit_status == (not passes)
    assert json.loads(meeting.store.get("members"))[0] == [0, 1, 2, 3]
    said = capsys.readouterr()
    assert said.out == (f"n0,n1,n3 {tmp_path}/run\n" if passes else "")
    assert ("4 nodes are needed; sbatch --exclude=n2,n4 …" in said.err) != passes
    assert "FAILED   n2: it sent no measurement in time" in said.err
    assert "FAILED   n4: it sent no report in time" in said.err
    assert "EXCLUDED n1: slow since step 7" in said.err


def test_what_a_killed_start_has_left_is_no_lack_of_space(data, tmp_path, monkeypatch):
    """The next start deletes an unfinished checkpoint, and those beyond checkpoint.keep_last."""
    config = load_config(write_config(tmp_path, data, checkpoint={"interval": 2}), [])
    usage = SimpleNamespace(free=state_bytes(config) // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    partial = tmp_path / "run" / "checkpoints" / "partial-00000004" / "0"
    partial.mkdir(parents=True)
    (partial / "part").write_bytes(bytes(state_bytes(config)))
    report = {"problems": [], "warnings": []}
    node._look_at_disk(config, report)
    assert report["problems"] == []
    for step in (2, 4, 6):
        shutil.copytree(FIXTURE, partial.parents[1] / f"step-{step:08d}")
    partial = partial.rename(partial.parents[1] / "step-00000002" / "0")
    node._look_at_disk(config, report)
    assert report["problems"] == []
    shutil.rmtree(partial)
    node._look_at_disk(config, report)  # control
    assert "but a checkpoint needs" in report["problems"][0]


def hold_links(port: int) -> None:
    """Two ranks that hang."""
    address, deadline = f"127.0.0.1:{port}", time.monotonic() + 600
    with (
        patch.object(links, "_bandwidth", lambda *_: time.sleep(600)),
        links.Links("cpu", 2, address, 0, deadline).running(),
    ):
        meeting = command.Meeting(address, 0, 1, deadline)
        meeting.write("members", [[0], 600])
        time.sleep(600)


def runs_still(process: psutil.Process) -> bool:
    try:  # nobody may reap an orphan
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")
def test_a_preflight_that_is_killed_leaves_no_process(tmp_path):
    """Of each rank: the process that measures, and the one that watches it."""
    process = forked(tmp_path / "log", hold_links, free_port())
    started = psutil.Process(process.pid)
    wait_until(lambda: len(started.children(recursive=True)) == 4)
    ranks = started.children(recursive=True)
    process.kill()
    wait_until(lambda: not any(map(runs_still, ranks)))
