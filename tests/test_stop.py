"""Planned stops: however, whenever and on whichever rank a stop is requested, all ranks stop after
the same step, and no step is lost."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train
from benchmarks.stop_matrix import catches
from runtime import all_listeners, signals, stop
from runtime.messages import LostConnection, fail
from runtime.signals import Signals
from runtime.stop import StopRequests
from tests.runs import losses, metrics_of, status_of, train_run, write_config
from tools.ranks import RankError, Ranks
from training.load_config import load_config

ROOT = Path(__file__).parent.parent
STEPS = 6
# world → 2 × 2, 2 × 2 × 2
LAYOUTS = {4: ["parallel.tp=2"], 8: ["parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=2"]}


@pytest.fixture(scope="module")
def whole(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[int, float]]:
    """World size → losses of an undisturbed run."""
    found = {}
    for world in LAYOUTS:
        folder = tmp_path_factory.mktemp(f"whole{world}")
        assert (
            ranks.run(train_run, world, [config_of(folder, data), *LAYOUTS[world]]) == [""] * world
        )
        found[world] = losses(folder)
    return found


def config_of(folder: Path, data: Path) -> str:
    """Write a configuration in which an evaluation has 4 batches; return its path."""
    sizes = {"steps": STEPS, "micro_batch_size": 4, "eval_samples": 32}
    return write_config(folder, data, train=sizes, checkpoint={"keep_last": STEPS})


def saved_steps(folder: Path) -> list[int]:
    return sorted(
        int(path.name[5:])
        for path in (folder / "run" / "checkpoints").glob("step-*")
        if not path.suffix
    )


# --- helpers that run on each rank ----------------------------------------------------------------


class Known(StopRequests):
    """StopRequests that keeps its most recent instance in `Known.last`."""

    last: StopRequests

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Known.last = self


def hear(number: int) -> None:
    """Send this process a signal, and return when it has been received."""
    os.kill(os.getpid(), number)
    while number not in Known.last.signals.heard:
        time.sleep(0.001)


def ask(how: str) -> None:
    if how == "SIGTERM twice":  # one from Slurm, one forwarded by torchrun
        hear(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    elif how.startswith("SIG"):
        hear(signal.Signals[how])
    elif how == "time":
        signals.STARTED = float("-inf")
    elif how == "job":
        Path(os.environ["LATTICE_STOP_FILE"]).touch()
    else:
        (Known.last.folder / how).touch()


@contextlib.contextmanager
def before(owner: type, method: str, call: int, action: Any):
    """Run `action()` before the `call`th call of `owner.method`, counted from 0. Yields a list that
    gets one item per call."""
    original, calls = getattr(owner, method), []

    def wrapped(*arguments: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == call:
            action()
        return original(*arguments)

    with patch.object(owner, method, wrapped):
        yield calls


WHERE = {
    "step": (train.TrainStep, "__call__"),
    "evaluation": (train.TrainStep, "evaluate"),
    "save": (all_listeners.Saver, "save"),
}


def train_and_ask(
    arguments: list[str], rank: int, how: str, where: str, call: int
) -> dict[str, Any]:
    """Train; `rank` gets a request to stop when it reaches `where` for the `call`th time. Returns
    how often this rank reached each place in WHERE."""
    mine = dist.get_rank() == rank
    before_it = (
        [signal.getsignal(n) for n in signals.requests()],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, LATTICE_STOP_FILE=f"{arguments[0]}.stop"))
        stack.enter_context(patch.object(all_listeners, "StopRequests", Known))
        stack.enter_context(patch.object(stop, "LOOK_SECONDS", 0.0))
        stack.enter_context(patch.object(signals, "STARTED", signals.STARTED))
        stack.enter_context(patch.object(signals, "SAME_REQUEST_SECONDS", 1e9))
        counts = {}
        for name, place in WHERE.items():
            action = (lambda: ask(how)) if name == where and mine else (lambda: None)
            counts[name] = stack.enter_context(before(*place, call, action))
        assert train_run(arguments) == ""
    after_it = (
        [signal.getsignal(n) for n in signals.requests()],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )
    assert after_it == before_it
    assert "signals" not in [thread.name for thread in threading.enumerate()]
    return {name: len(calls) for name, calls in counts.items()}


# --- planned stops --------------------------------------------------------------------------------

ASKED = [  # world size, rank that gets the request, kind of request, reason in status.json
    (4, 2, "SIGTERM", "SIGTERM was received"),
    (4, 1, "SIGUSR1", "SIGUSR1 was received"),
    (4, 3, "SIGTERM twice", "SIGTERM was received"),
    (4, 2, "SIGINT", "SIGINT was received"),
    (4, 1, "SIGHUP", "SIGHUP was received"),
    (4, 0, "STOP", "the file STOP was found"),
    (4, 0, "job", "the job script requested a stop"),
    (4, 0, "time", "train.max_minutes was reached"),
    (8, 5, "SIGTERM", "SIGTERM was received"),
]
# (rank, kind) to leave out of `make test`, which tests SIGTERM on 8 ranks, SIGUSR1 during a
# save, STOP before the first step; SIGHUP is handled like SIGINT.
THOROUGH = [(2, "SIGTERM"), (1, "SIGUSR1"), (3, "SIGTERM twice"), (1, "SIGHUP"), (0, "STOP")]


@pytest.mark.parametrize(
    ("world", "rank", "how", "reason"),
    [
        pytest.param(
            *a, id=f"{a[2]}-{a[0]}", marks=pytest.mark.thorough if a[1:3] in THOROUGH else ()
        )
        for a in ASKED
    ],
)
def test_all_stop_after_the_same_step_and_go_on(
    ranks: Ranks,
    data: Path,
    tmp_path: Path,
    whole: dict,
    world: int,
    rank: int,
    how: str,
    reason: str,
) -> None:
    """A request in the second step stops all ranks after the third, with one checkpoint. The
    resumed run has the losses of an undisturbed one."""
    arguments = [config_of(tmp_path, data), *LAYOUTS[world], "train.max_minutes=1e6"]
    counts = ranks.run(train_and_ask, world, arguments, rank, how, "step", 1)
    assert counts == [{"step": 3, "evaluation": 0, "save": 1}] * world
    assert saved_steps(tmp_path) == [3]
    assert status_of(tmp_path) == {"state": "requeue", "step": 3, "reason": reason}
    assert not (tmp_path / "run" / "STOP").exists()
    assert ranks.run(train_run, world, arguments) == [""] * world
    assert losses(tmp_path) == whole[world]
    assert status_of(tmp_path)["state"] == "finished"


def test_an_evaluation_is_abandoned(ranks: Ranks, data: Path, tmp_path: Path, whole: dict) -> None:
    arguments = [config_of(tmp_path, data), *LAYOUTS[4], "train.eval_interval=2"]
    counts = ranks.run(train_and_ask, 4, arguments, 2, "SIGTERM", "evaluation", 0)
    assert counts == [{"step": 2, "evaluation": 2, "save": 1}] * 4, (
        "of 4 batches, the current one and one more"
    )
    assert saved_steps(tmp_path) == [2]
    assert status_of(tmp_path)["state"] == "requeue"
    assert ranks.run(train_run, 4, arguments) == [""] * 4
    assert losses(tmp_path) == whole[4]
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 6]


def test_asked_during_a_save(ranks: Ranks, data: Path, tmp_path: Path, whole: dict) -> None:
    arguments = [config_of(tmp_path, data), *LAYOUTS[4], "checkpoint.interval=3"]
    counts = ranks.run(train_and_ask, 4, arguments, 1, "SIGUSR1", "save", 0)
    assert [count["step"] for count in counts] == [4] * 4, "one step follows the save"
    assert saved_steps(tmp_path) == [3, 4]
    assert status_of(tmp_path)["step"] == 4
    assert ranks.run(train_run, 4, arguments) == [""] * 4
    assert losses(tmp_path) == whole[4]


def test_save_saves_once_and_goes_on(ranks: Ranks, data: Path, tmp_path: Path, whole: dict) -> None:
    arguments = [config_of(tmp_path, data), *LAYOUTS[4]]
    counts = ranks.run(train_and_ask, 4, arguments, 0, "SAVE", "step", 1)
    assert counts == [{"step": STEPS, "evaluation": 0, "save": 1}] * 4
    assert saved_steps(tmp_path) == [3]
    assert not (tmp_path / "run" / "SAVE").exists()
    assert status_of(tmp_path)["state"] == "finished"
    assert losses(tmp_path) == whole[4]


@pytest.mark.parametrize("call", [STEPS - 2, STEPS - 1], ids=["agreed", "too late"])
@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("STOP", marks=pytest.mark.thorough)])
def test_a_run_that_makes_its_last_step_is_finished(
    ranks: Ranks, data: Path, tmp_path: Path, how: str, call: int
) -> None:
    ranks.run(train_and_ask, 2, [config_of(tmp_path, data)], 0, how, "step", call)
    assert status_of(tmp_path) == {"state": "finished", "step": STEPS, "reason": "all steps done"}
    assert not (tmp_path / "run" / "STOP").exists()


def test_asked_before_the_first_step(ranks: Ranks, data: Path, tmp_path: Path, whole: dict) -> None:
    """A run that is asked to stop before its first step trains and saves nothing, also if it has
    resumed from a checkpoint."""
    arguments = [config_of(tmp_path, data), *LAYOUTS[4]]
    assert ranks.run(train_run, 4, [*arguments, "train.max_minutes=1e-9"]) == [""] * 4
    assert status_of(tmp_path) == {
        "state": "requeue",
        "step": 0,
        "reason": "train.max_minutes was reached",
    }
    assert not saved_steps(tmp_path)
    ranks.run(train_and_ask, 4, arguments, 0, "STOP", "step", 0)
    assert saved_steps(tmp_path) == [2]
    (tmp_path / "run" / "STOP").touch()
    assert ranks.run(train_run, 4, arguments) == [""] * 4
    reason = "the file STOP was found"
    assert status_of(tmp_path) == {"state": "requeue", "step": 2, "reason": reason}
    assert saved_steps(tmp_path) == [2]
    assert ranks.run(train_run, 4, arguments) == [""] * 4, "the file is gone"
    assert losses(tmp_path) == whole[4]


def test_a_refused_run_leaves_the_file(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    message = ranks.run(train_run, 2, [config_of(tmp_path, data), "train.max_minutes=-1"])[0]
    assert message.startswith("train.max_minutes = ")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["STOP"]


# --- signals during start-up ----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="needs Linux's /proc to know when a process is ready",
)
def test_a_signal_during_the_imports(data: Path, tmp_path: Path) -> None:
    """Two processes run train.py, and one gets a signal long before it has imported torch. Both
    exit with status 0, and the run is marked for requeueing."""
    config = config_of(tmp_path, data)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "WORLD_SIZE": "2",
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "train.py", config],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        while not catches(processes[1].pid):
            assert processes[1].poll() is None
            time.sleep(0.002)
        processes[1].send_signal(signal.SIGTERM)
        assert not (tmp_path / "run").exists()
        said = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0][0].count("stopped after step 0/6: SIGTERM was received") == 1
    assert "Traceback" not in said[0][1] + said[1][1]
    assert status_of(tmp_path) == {"state": "requeue", "step": 0, "reason": "SIGTERM was received"}


# --- failures during a stop -----------------------------------------------------------------------


def lose_a_peer(arguments: list[str], folder: str, where: str, call: int) -> None:
    """Train; rank 0 gets a signal in its third step, then rank 1 dies before `where`."""
    heard = Path(folder) / "heard"
    if dist.get_rank() == 0:
        with open(Path(folder) / "said", "w") as said:
            os.dup2(said.fileno(), 2)

        def signalled() -> None:
            hear(signal.SIGTERM)
            heard.touch()

        with (
            patch.object(all_listeners, "StopRequests", Known),
            before(train.TrainStep, "__call__", 2, signalled),
        ):
            try:
                train_run(arguments)
            except Exception as error:
                fail(error, Known.last.signals)
    else:

        def die() -> None:
            while not heard.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        with before(*WHERE[where], call, die):
            train_run(arguments)


@pytest.mark.parametrize(("where", "call"), [("step", 2), ("save", 1)])
def test_a_dead_peer(data: Path, tmp_path: Path, where: str, call: int) -> None:
    """One of two ranks gets a request to stop and the other dies, in the same step or at the save
    that follows. The first exits without saving, with one message, and the run has failed."""
    arguments = [config_of(tmp_path, data), "checkpoint.interval=2", "checkpoint.async_save=false"]
    with Ranks(2) as pool, pytest.raises(RankError) as error:
        pool.run(lose_a_peer, 2, arguments, str(tmp_path), where, call)
    assert "rank 0: died with exit code 1\n" in str(error.value)
    assert "rank 1: died with exit code -9" in str(error.value)
    assert saved_steps(tmp_path) == [2]
    said = (tmp_path / "said").read_text()
    assert said.count("rank 0 exits after SIGTERM without saving: ") == 1
    assert "Traceback" not in said
    assert status_of(tmp_path)["state"] == "failed"
    assert "lost connection to another rank after step" in status_of(tmp_path)["reason"]


def meet_a_silent_peer(arguments: list[str]) -> None:
    """Rank 1 sends rank 0 a signal and then takes part in no more collectives, for which rank 0
    waits."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with Signals(speaks=False) as heard, patch.object(signals, "PATIENCE_SECONDS", 1):
        try:
            with StopRequests(load_config(arguments[0], []), heard) as requests:
                while True:
                    requests.agree()
                    if dist.get_rank() == 1:
                        os.kill(pids[0], signal.SIGTERM)
                        time.sleep(1000)
        except LostConnection as error:
            fail(error, heard)


def test_a_silent_peer(data: Path, tmp_path: Path) -> None:
    with Ranks(2) as pool, pytest.raises(RankError, match="rank 0: died with exit code 1"):
        pool.run(meet_a_silent_peer, 2, [config_of(tmp_path, data)])


def wait_for_ever(arguments: list[str]) -> None:
    """Rank 0 waits in a collective that rank 1 never enters, and gets signals from rank 1."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with patch.object(signals, "SAME_REQUEST_SECONDS", 0.1), Signals(speaks=False):
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()
        while True:
            os.kill(pids[0], signal.SIGTERM)
            time.sleep(0.5)


def test_a_second_signal_ends_it_at_once(data: Path, tmp_path: Path) -> None:
    with (
        Ranks(2) as pool,
        pytest.raises(RankError, match=f"rank 0: died with exit code {128 + signal.SIGTERM}"),
    ):
        pool.run(wait_for_ever, 2, [config_of(tmp_path, data)])
