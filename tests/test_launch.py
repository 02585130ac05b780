"""`python -m tools.launch`, which `make train` calls, is not reachable from other machines, loses
no step when stopped, and leaves no files or processes.

The complete matrix of requests to stop, `python -m benchmarks.stop_matrix`, takes minutes; `make
test` runs a part of it.
"""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from benchmarks.stop_matrix import PHASES, SIGNALS, TARGETS, stop
from errors import UserError
from runtime.records.events import read_events
from tests.runs import LAYOUT_3D, status_of, write_config
from tools import launch
from training.load_config import load_config

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith("MALLOC_") and key != "OMP_NUM_THREADS"
}


def run_launcher(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.launch", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a launcher whose ranks are training, with its output in `folder`/log and its temporary
    files in `folder`/tmp."""
    (folder / "tmp").mkdir(exist_ok=True)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.launch", *arguments, "train.steps=1000000",
             "run.log_interval=1"],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**ENVIRONMENT, "TMPDIR": str(folder / "tmp")},
        )  # fmt: skip
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 300
        while "\nstep " not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks = psutil.Process(process.pid).children()
        yield process
    finally:
        process.kill()
        process.wait()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


def test_it_trains_and_it_refuses(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, parallel=LAYOUT_3D)
    done = run_launcher(config, "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 processes on this machine: train.py")
    assert "88,352 parameters on 8 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × tp 2" in done.stdout
    assert status_of(tmp_path)["state"] == "finished"
    assert done.stderr == ""

    done = run_launcher(
        "--nproc-per-node", "2", config, "parallel.tp=3", f"run.dir={tmp_path / 'refused'}"
    )
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "parallel.tp = 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc to see what processes listen on"
)
def test_it_listens_on_loopback_only_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", write_config(tmp_path, data)) as launcher:
        parent = psutil.Process(launcher.pid)
        processes = [parent, *parent.children(recursive=True)]
        assert len(processes) == 3
        listening = [
            [c.laddr.ip for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            for p in processes
        ]
        assert listening[0] == [], "the launcher itself"
        assert all(listening[1:]), "gloo's"
        assert {address for each in listening for address in each} <= {"127.0.0.1", "::1"}
        (folder,) = (tmp_path / "tmp").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(300) == 128 + signal.SIGTERM
    assert list((tmp_path / "tmp").iterdir()) == []


# --- requests to stop -----------------------------------------------------------------------------

COVERING = {
    ("SIGINT", "launcher", "start-up"),
    ("SIGHUP", "group", "step"),
    ("SIGTERM", "launcher", "save"),
    ("SIGINT", "one rank", "evaluation"),
}
THOROUGH = {
    ("SIGINT", "torchrun", "step"),
    ("SIGTERM", "torchrun", "save"),
    ("SIGHUP", "torchrun", "evaluation"),
}


def tier(case: tuple[str, str, str]) -> list[pytest.MarkDecorator]:
    return (
        [] if case in COVERING else [pytest.mark.thorough if case in THOROUGH else pytest.mark.slow]
    )


ALL = [(number, target, phase) for target in TARGETS for phase in PHASES for number in SIGNALS]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says when ranks listen")
@pytest.mark.parametrize("case", [pytest.param(c, id="-".join(c), marks=tier(c)) for c in ALL])
def test_a_request_to_stop(data: Path, tmp_path: Path, case: tuple[str, str, str]) -> None:
    """After a request to stop, every step is saved, the request is announced once, and the exit
    status keeps commands that follow a finished run from running."""
    number, target, phase = case
    found = stop(number, target, phase, write_config(tmp_path, data), tmp_path)
    log = (tmp_path / "log").read_text()
    assert (found.state, found.steps_lost, found.announced) == ("requeue", 0, 1), log
    if phase != "start-up":
        assert found.steps_made > 0
    if target != "torchrun":
        assert found.exit_status == 128 + signal.Signals[number]
        assert found.not_ours == 0, log
    saved = log.count("saved step-")
    if phase == "save":  # it saves every second step, and may reach another before it stops
        assert saved >= 2
    else:
        assert saved == (0 if phase == "start-up" else 1)


def test_a_second_request_ends_it_at_once(data: Path, tmp_path: Path) -> None:
    """A second request ends the launcher at once, even if its ranks are suspended."""
    with running(tmp_path, "--nproc-per-node", "2", write_config(tmp_path, data)) as launcher:
        ranks = psutil.Process(launcher.pid).children()
        for rank in ranks:
            rank.suspend()
        launcher.send_signal(signal.SIGINT)
        time.sleep(1.5)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 128 + signal.SIGINT
        assert not any(rank.is_running() for rank in ranks)
    assert (tmp_path / "log").read_text().count("SIGINT again: exiting now, without saving") == 1
    assert status_of(tmp_path)["reason"] == "SIGINT was received twice"


def test_it_hears_no_hang_up_under_nohup(data: Path, tmp_path: Path) -> None:
    heard = "from runtime.signals import requests; print(*(number.name for number in requests()))"
    command = ["sh", "-c", f"trap '' HUP; exec {sys.executable} -c '{heard}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "SIGTERM SIGUSR1 SIGINT\n"


def test_during_its_imports_it_leaves_with_one_line() -> None:
    """A signal during the imports, as soon as the launcher's first line has run, ends it with one
    line of output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.launch", "missing.yaml"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    blocked_by_us = 1 << (signal.SIGUSR1 - 1)
    try:
        while not int(_status_line(process.pid, "SigCgt:"), 16) & blocked_by_us:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    expected = "SIGINT was received before the run was started\n"
    assert (process.returncode, said, out) == (130, expected, "")


def _status_line(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(name)).split()[1]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_rank_is_named_once_and_last(data: Path, tmp_path: Path, victim: int) -> None:
    config = write_config(tmp_path, data)
    with running(tmp_path, "--nproc-per-node", "2", config) as launcher:
        ranks = sorted(psutil.Process(launcher.pid).children(), key=lambda rank: rank.pid)
        ranks[victim].kill()
        assert launcher.wait(300) == 1
        assert not any(rank.is_running() for rank in ranks)
    why = f"rank {victim} was killed by signal 9 (SIGKILL)"
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1] == f"{why}; the others were stopped"
    assert all(line.startswith("step ") for line in lines[6:-1]), "there are no other messages"
    assert (status_of(tmp_path)["state"], status_of(tmp_path)["reason"]) == ("failed", why)
    assert status_of(tmp_path)["step"] > 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.thorough
def test_a_rank_that_waits_for_a_dead_one_is_silent_and_leaves() -> None:
    """If a rank is killed during start-up, the other, which waits for it, leaves without a message
    (such as that all ranks will save)."""
    script = """
import os, signal
import tools.launch as launch
from runtime.start.init_distributed import init_distributed

def rank(store, heard):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    init_distributed(heard, store)

print(launch.start_processes(2, rank).why())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("rank 1 was killed by signal 9 (SIGKILL)\n", "")


@pytest.mark.thorough
def test_the_next_start_notes_that_an_end_is_missing(data: Path, tmp_path: Path) -> None:
    """If the launcher and all ranks are killed, nobody records the end. The next start records it
    as failed, and removes the temporary files."""
    config = write_config(tmp_path, data)
    with running(tmp_path, "--nproc-per-node", "2", config) as launcher:
        ranks = psutil.Process(launcher.pid).children()
        for process in (launcher, *ranks):
            process.kill()
        psutil.wait_procs(ranks, timeout=60)
    assert not (tmp_path / "run" / "status.json").exists()
    assert len(list((tmp_path / "tmp").iterdir())) == 1, "a killed launcher cannot remove its files"
    with running(tmp_path, "--nproc-per-node", "2", config):
        assert len(list((tmp_path / "tmp").iterdir())) == 1, "the next launcher removes them"
    assert "the previous start was last recorded at step" in (tmp_path / "log").read_text()
    (end,) = (event for event in read_events(tmp_path / "run") if event["event"] == "end")
    assert (end["state"], "it recorded no end" in end["reason"]) == ("failed", True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")
def test_ranks_save_when_the_launcher_is_killed(data: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", write_config(tmp_path, data)) as launcher:
        ranks = psutil.Process(launcher.pid).children()
        launcher.kill()
        _, alive = psutil.wait_procs(ranks, timeout=300)
        assert not alive
    assert status_of(tmp_path)["state"] == "requeue"
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(
    ("processes", "override", "said"),
    [
        ("100000", "parallel.tp=2", "--nproc-per-node = 100000: this machine has "),
        ("0", "parallel.tp=2", "--nproc-per-node = 0: this machine has "),
        ("3", "parallel.tp=2", "does not make the world of 3 processes"),
        ("2", "optimizer.lr=.nan", "optimizer.lr = nan"),
    ],
)
def test_nothing_is_started_of_what_is_refused(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    processes: str,
    override: str,
    said: str,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("processes were started")

    words = ["launch", "--nproc-per-node", processes, write_config(tmp_path, data), override]
    with (
        patch.object(sys, "argv", words),
        patch.object(launch, "start_processes", start),
        pytest.raises(SystemExit) as left,
    ):
        launch.main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


# --- the layout for GPUs --------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("path", [*map(str, Path("configs").glob("*[!s].yaml"))])  # no stages
def test_every_configuration_fits_any_number_of_gpus(path: str) -> None:
    for gpus, used in ((1, 1), (2, 2), (7, 4), (16, 8)):
        processes, overrides = launch.layout(gpus, path, [])
        assert processes == used
        load_config(path, overrides).validate(processes)


def test_what_the_configuration_asks_for_is_kept(tmp_path: Path) -> None:
    def axes(name: str, gpus: int, *given: str) -> dict[str, int]:
        processes, overrides = launch.layout(gpus, str(ROOT / "configs" / name), list(given))
        config = load_config(str(ROOT / "configs" / name), [*overrides, *given])
        sizes = config.parallel.mesh_sizes(processes).by_axis()
        return {axis: size for axis, size in sizes.items() if size > 1}

    assert axes("llama3_8b_131072.yaml", 8) == {"cp": 4, "tp": 2}
    two = (ROOT / "configs/laptop.yaml").read_text().replace("tp: 2", "tp: 2\n  dp_replicate: 2")
    (tmp_path / "two.yaml").write_text(two)
    assert axes(str(tmp_path / "two.yaml"), 4) == {"dp_replicate": 2, "tp": 2}
    assert axes("laptop.yaml", 8, "parallel.zero_stage=0") == {"dp_replicate": 2, "tp": 2, "pp": 2}
    assert axes("laptop.yaml", 4, "model.ffn_dim=341") == {"pp": 2, "dp_shard": 2}  # tp 2 cuts it
    with pytest.raises(UserError, match="cp=2 · tp=1 does not make the world of 1 processes"):
        axes("laptop.yaml", 1, "parallel.cp=2")
    with pytest.raises(UserError, match=r"stages\.1\.parallel\.tp"):  # its layout is for 64
        axes("llama3_8b_stages.yaml", 8)


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling")
@pytest.mark.parametrize(
    "program", ["tools.launch", pytest.param("torch.distributed.run", marks=pytest.mark.thorough)]
)
def test_ranks_share_the_cores(tmp_path: Path, program: str) -> None:
    """Each rank sets scheduling, threads and network interface itself, so that they are right under
    tools.launch and torchrun."""
    script = tmp_path / "say.py"
    script.write_text(
        "import os, sys, torch\n"
        "from runtime.start.init_distributed import init_distributed\n"
        "def say(store=None, *_):\n"
        "    init_distributed(store=store)\n"
        # a rank that leaves before the other has connected would break the connections
        "    torch.distributed.barrier()\n"
        "    line = (os.sched_getscheduler(0), torch.get_num_threads(), "
        "os.environ['GLOO_SOCKET_IFNAME'])\n"
        "    os.write(1, (' '.join(map(str, line)) + chr(10)).encode())\n"
        "if __name__ == '__main__' and 'RANK' in os.environ:\n"
        "    say()\n"
        "elif __name__ == '__main__':\n"
        "    from tools.launch import start_processes\n"
        "    raise SystemExit(start_processes(2, say).status())\n"
    )
    command = [str(script)]
    if program != "tools.launch":
        command = ["-m", program, "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.stdout.splitlines() == [f"{os.SCHED_BATCH} 1 lo"] * 2, done.stderr


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator"
)
@pytest.mark.thorough
def test_memory_is_kept_by_the_allocator() -> None:
    """`share_cores` makes the allocator keep freed memory: when activations are freed out of order
    and allocated again, less than half of the page faults remain."""
    program = (
        "import resource, sys, torch\n"
        "from runtime.start.init_distributed import share_cores\n"
        "if sys.argv[1] == 'kept':\n"
        "    share_cores(1)\n"
        "def step():\n"
        "    activations = [torch.ones(n) for n in (2**21, 2**20) * 16]\n"
        "    del activations[::2]\n"
        "step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10):\n"
        "    step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    command = [sys.executable, "-c", program]
    said = [
        subprocess.run(
            [*command, how], cwd=ROOT, capture_output=True, check=True, env=ENVIRONMENT
        ).stdout
        for how in ("given back", "kept")
    ]
    given_back, kept = map(int, said)
    # Memory that happens to be in the way of the heap moves it once, which costs about a tenth.
    assert kept < given_back / 2
