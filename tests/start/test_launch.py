"""`python -m tools.launch`, which `make train` calls, is not reachable from other machines, loses
no step when stopped, and leaves no files or processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from errors import UserError
from runtime.log.log_lines import read_records
from runtime.log.status import write_status
from runtime.start.init import init_distributed
from settings.checks import validate
from settings.load import load_config
from tests import ROOT, runs
from tests.monitor.alert_helpers import wait_until
from tests.runs import LAYOUT_3D, forked, status, status_of, write_config
from tools import launch

SMALL = {"num_layers": 1}
OUR_LINES = re.compile(
    r"saved step-|stopped after step|SIG\w+ was received|step +\d+/|processes on this machine|"
    r"[\d,]+ parameters on|all 2 ranks|attention: |starting |changed since|"
    r"warning: checkpoint.interval is never"
)


def launched(folder: Path, arguments: list[str], torchrun: bool) -> None:
    """Be `python -m tools.launch` or torchrun, with temporary files in `folder`/tmp."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # background processes ignore Ctrl-C
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    if torchrun:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(ROOT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
        os.execv(sys.executable, command)
    sys.argv = ["launch", *arguments]
    sys.exit(launch.main())


def started(folder: Path, *arguments: str, errors: str = "log", torchrun: bool = False) -> Any:
    """A launcher with its output in `folder`/log."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "log").write_text("")
    about = folder, list(arguments), torchrun
    return forked(folder / "log", launched, *about, errors=folder / errors)


def catches(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR1, as ranks that handle signals do (Linux)."""
    try:
        said = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", said, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


# phase → settings, and whether it has begun, by the run folder, what was said and the ranks
PHASES = {
    "start-up": ([], lambda _, said, ranks: sum(catches(rank.pid) for rank in ranks) == 2),
    "step": ([], lambda _, said, ranks: re.search(r"^step +3/", said, re.MULTILINE)),
    "save": (["checkpoint.interval=2"],
             lambda run, said, ranks: any((run / "checkpoints").glob("partial-*"))),
}  # fmt: skip


@contextlib.contextmanager
def running(
    folder: Path, data: Path, phase: str = "step", torchrun: bool = False
) -> Iterator[tuple[Any, list[psutil.Process]]]:
    """Run a launcher with two ranks, which are in this phase."""
    config, (overrides, has_begun) = write_config(folder, data, model=SMALL), PHASES[phase]
    arguments = ["--nproc-per-node", "2", *(["train.py"] if torchrun else []), config, *overrides,
                 "train.steps=1000000", "run.log_interval=1"]  # fmt: skip
    process, ranks = started(folder, *arguments, torchrun=torchrun), list[psutil.Process]()

    def is_there() -> object:
        ranks[:] = psutil.Process(process.pid).children()
        return has_begun(folder / "run", (folder / "log").read_text(), ranks)

    try:
        wait_until(lambda: not process.is_alive() or is_there(), 300)
        assert process.is_alive(), (folder / "log").read_text()
        yield process, sorted(ranks, key=lambda rank: rank.pid)
    finally:
        process.kill()
        process.join()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


def test_it_trains(data, tmp_path):
    config = write_config(tmp_path, data, parallel=LAYOUT_3D, train={"steps": 2})
    assert status(started(tmp_path, "--nproc-per-node", "4", config, errors="errors")) == 0
    said = (tmp_path / "log").read_text()
    assert said.startswith("4 processes on this machine: train.py")
    assert "88,352 parameters on 4 ranks = pp 2 × dp_replicate 1 × dp_shard 1 × tp 2" in said
    assert "finished after 2 steps; checkpoint.interval=never: saved only on request" in said
    assert status_of(tmp_path)["state"] == "finished"
    assert (tmp_path / "errors").read_text() == ""
    assert list((tmp_path / "tmp").iterdir()) == []


# --- requests to stop -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says when ranks listen")
@pytest.mark.parametrize(
    ("number", "target", "phase"),
    [
        (signal.SIGINT, "launcher", "start-up"),
        (signal.SIGHUP, "group", "step"),
        (signal.SIGKILL, "launcher", "step"),  # the ranks hear of it by Linux's prctl
        pytest.param(signal.SIGTERM, "launcher", "step", marks=pytest.mark.thorough),
        # train.py listens before it imports torch
        pytest.param(signal.SIGTERM, "torchrun", "start-up", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, "one rank", "save", marks=pytest.mark.thorough),
        pytest.param(signal.SIGHUP, "torchrun", "step", marks=pytest.mark.thorough),
    ],
)
def test_a_request_to_stop(data, tmp_path, number, target, phase):
    """Every step is saved, the request is announced once, and the exit status keeps commands that
    follow a finished run from running."""
    log = tmp_path / "log"
    with running(tmp_path, data, phase, target == "torchrun") as (launcher, ranks):
        before = log.read_text()
        if target == "group":
            os.killpg(launcher.pid, number)
        else:
            os.kill((ranks[-1] if target == "one rank" else launcher).pid, number)
        exit_status = status(launcher)
        _, alive = psutil.wait_procs(ranks, timeout=300)
        assert not alive
    said = log.read_text().removeprefix(before)
    assert said.count("all ranks stop after") == 1, said
    assert status_of(tmp_path)["state"] == "requeue"
    made = max((line["step"] for line in read_records(tmp_path / "run")), default=0)
    assert (made > 0) == (phase != "start-up")
    assert runs.saved_steps(tmp_path)[-1:] == ([made] if made else []), "no step is lost"
    saved = log.read_text().count("saved step-")
    # in the phase `save` it saves every second step, and may reach another before it stops
    assert saved >= 2 if phase == "save" else saved == (phase != "start-up")
    if target != "torchrun":
        assert exit_status == (-number if number == signal.SIGKILL else 128 + number)
        assert [line for line in said.splitlines() if not OUR_LINES.match(line)] == []


def test_the_status_tells_of_a_request_to_one_rank(tmp_path):
    write_status(tmp_path, "requeue", 3, "SIGTERM was received")
    assert launch.finish(launch.Ending(), tmp_path) == 128 + signal.SIGTERM


def test_a_second_request_ends_it_at_once(data, tmp_path):
    """A second request ends the launcher at once, even if its ranks are suspended."""
    with running(tmp_path, data) as (launcher, ranks):
        for rank in ranks:
            rank.suspend()
        os.kill(launcher.pid, signal.SIGINT)
        time.sleep(1.5)
        os.kill(launcher.pid, signal.SIGINT)
        assert status(launcher) == 128 + signal.SIGINT
        assert not any(rank.is_running() for rank in ranks)
    assert (tmp_path / "log").read_text().count("SIGINT again: exiting now, without saving") == 1
    assert status_of(tmp_path)["reason"] == "SIGINT was received twice"


def test_it_hears_no_hang_up_under_nohup():
    heard = "from runtime.signals import requests; print(*(number.name for number in requests()))"
    command = ["sh", "-c", f"trap '' HUP; exec {sys.executable} -c '{heard}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "SIGTERM SIGUSR1 SIGINT\n"


def test_during_its_imports_it_leaves_with_one_line():
    """A signal during the imports, as soon as the launcher's first line has run, ends it with one
    line of output."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.launch", "missing.yaml"], cwd=ROOT, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        while not catches(process.pid):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=100)
    expected = "SIGINT was received before the run was started\n"
    assert (process.returncode, said, out) == (130, expected, "")


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what processes listen on")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_rank_is_named_once_and_last(data, tmp_path, rank):
    """It leaves nothing. Before that, ranks listen on loopback only, and only this user may enter
    the folder with their rendezvous."""
    with running(tmp_path, data) as (launcher, ranks):
        for process in (psutil.Process(launcher.pid), *ranks):
            sockets = process.net_connections("inet")
            listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
            assert bool(listening) == (process in ranks)  # gloo's
            assert listening <= {"127.0.0.1", "::1"}
        (folder,) = (tmp_path / "tmp").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        ranks[rank].kill()
        assert status(launcher) == 1
        assert not any(each.is_running() for each in ranks)
    assert not folder.exists()
    why = f"rank {rank} was killed by signal 9 (SIGKILL)"
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1] == f"{why}; the others were stopped"
    assert all(line.startswith("step ") for line in lines[6:-1]), "there are no other messages"
    end = status_of(tmp_path)
    assert (end["state"], end["reason"]) == ("failed", why)
    assert end["step"] > 0


def start_two(rank: Callable[..., None]) -> None:
    """Be a launcher of two ranks that do this."""
    os.environ.pop("OMP_NUM_THREADS", None)
    # the threads that torch starts must not take the signal from the launcher's sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    torch.set_num_threads(3)
    ending = launch.start_processes(2, rank)
    sys.exit(ending.why() if ending.failure else 0)


def wait_for_a_dead_one(heard: Any, store: Any) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    init_distributed(heard, store)


@pytest.mark.thorough
def test_a_rank_that_waits_for_a_dead_one_is_silent_and_leaves(tmp_path):
    """If a rank is killed during start-up, the other, which waits for it, leaves without a message
    (such as that all ranks will save)."""
    assert status(forked(tmp_path / "log", start_two, wait_for_a_dead_one)) == 1
    assert (tmp_path / "log").read_text() == "rank 1 was killed by signal 9 (SIGKILL)\n"


def test_the_next_start_notes_that_an_end_is_missing(tmp_path):
    """If the launcher and all ranks are killed, nobody else does."""
    assert runs.run_log_of(tmp_path).start(3, 2) == []
    (said,) = runs.run_log_of(tmp_path).start(3, 2)
    assert said.startswith("the previous start was last recorded at step 3: it recorded no end")
    (end,) = runs.events_of(tmp_path, "end")
    assert end["state"] == "failed"


def begun(*words: str) -> tuple[int, list[int]]:
    """The exit status of the launcher, and how many processes it wanted to start."""
    with (
        patch.object(sys, "argv", ["launch", *words]),
        patch.object(launch, "start_processes", return_value=launch.Ending()) as start,
    ):
        return launch.main(), [call.args[0] for call in start.call_args_list]


@pytest.mark.parametrize(
    ("processes", "override", "said"),
    [
        ("0", "parallel.tp=2", "--nproc-per-node = 0: it must be at least 1"),
        ("3", "parallel.tp=2", "does not make the world of 3 processes"),
        ("2", "parallel.tp=3", "parallel.tp = 3"),
    ],
)
def test_nothing_is_started_of_what_is_refused(data, tmp_path, capsys, processes, override, said):
    config = write_config(tmp_path, data)
    assert begun("--nproc-per-node", processes, config, override) == (2, [])
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="one process per GPU")
def test_eight_processes_without_a_gpu(data, tmp_path):
    assert begun(write_config(tmp_path, data, parallel=LAYOUT_3D)) == (0, [8])


# --- the layout for GPUs --------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("path", [*map(str, Path("configs").glob("*[!s].yaml"))])  # no stages
def test_every_configuration_fits_any_number_of_gpus(path):
    for gpus, used in ((1, 1), (2, 2), (7, 4), (16, 8)):
        processes, overrides = launch.layout(gpus, path, [])
        assert processes == used
        validate(load_config(path, overrides), processes)


def test_what_the_configuration_asks_for_is_kept():
    def axes(name: str, gpus: int, *given: str) -> dict[str, int]:
        processes, overrides = launch.layout(gpus, str(ROOT / "configs" / name), list(given))
        config = load_config(str(ROOT / "configs" / name), [*overrides, *given])
        sizes = config.parallel.mesh_sizes(processes).by_axis()
        return {axis: size for axis, size in sizes.items() if size > 1}

    assert axes("llama3_8b_131072.yaml", 8) == {"cp": 4, "tp": 2}
    assert axes("laptop.yaml", 8, "parallel.zero_stage=0") == {"dp_replicate": 2, "tp": 2, "pp": 2}
    assert axes("laptop.yaml", 4, "model.ffn_dim=341") == {"pp": 2, "dp_shard": 2}  # tp 2 cuts it
    with pytest.raises(UserError, match="cp=2 · tp=1 does not make the world of 1 processes"):
        axes("laptop.yaml", 1, "parallel.cp=2")
    with pytest.raises(UserError, match=r"data_stages\.1\.parallel\.tp"):  # its layout is for 64
        axes("llama3_8b_data_stages.yaml", 8)


def say(_: object, store: Any) -> None:
    """Be a rank, which says how it shares the cores."""
    init_distributed(store=store)
    # a rank that leaves before the other has connected would break the connections
    torch.distributed.barrier()
    found = os.sched_getscheduler(0), torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]
    os.write(1, (" ".join(map(str, found)) + "\n").encode())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling")
def test_ranks_share_the_cores(tmp_path):
    """Each rank sets scheduling, threads and network interface itself, so that they are right under
    every launcher."""
    errors = tmp_path / "errors"
    assert status(forked(tmp_path / "log", start_two, say, errors=errors)) == 0, errors.read_text()
    assert (tmp_path / "log").read_text().splitlines() == [f"{os.SCHED_BATCH} 1 lo"] * 2
