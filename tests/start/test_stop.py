"""Planned stops: however, whenever and on whichever rank a stop is requested, all ranks stop after
the same step, and no step is lost."""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import proofs.ranks
import train
from errors import LOST
from proofs.ranks import RankError
from runtime import all_listeners, signals, stop
from runtime.exit import LostConnection, describe, fail
from runtime.signals import Signals
from runtime.stop import StopRequests
from settings.load import load_config
from tests import runs
from tests.planted import planted


def config_of(folder: Path, data: Path, steps: int) -> str:
    """Write a configuration in which an evaluation has 4 batches; return its path."""
    folder.mkdir(exist_ok=True)
    sizes = {"steps": steps, "micro_batch_size": 4, "eval_samples": 32}
    model, checkpoint = {"num_layers": 2}, {"keep_last": steps}
    return runs.write_config(folder, data, model=model, train=sizes, checkpoint=checkpoint)


# --- helpers that run on each rank ----------------------------------------------------------------


class Known(StopRequests):
    """It keeps its most recent instance."""

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
    if how == "SIGTERM twice":
        hear(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    elif how.startswith("SIG"):
        hear(signal.Signals[how])
    elif how == "job":
        Path(os.environ["LATTICE_STOP_FILE"]).touch()
    else:
        (Known.last.folder / how).touch()


WHERE = {
    "step": (train.TrainStep, "__call__"),
    "evaluation": (train.TrainStep, "evaluate"),
    "save": (all_listeners.Saver, "save"),
}


@contextlib.contextmanager
def calling(actions: dict[tuple[str, int], Callable[[], None]]) -> Iterator[dict[str, int]]:
    """Call each action before this rank reaches its place, in WHERE, for this time, counted from 0.
    Yields how often it has reached each place."""
    reached = dict.fromkeys(WHERE, 0)

    def counted(place: str) -> Any:
        def count(honest: Any, *arguments: Any) -> Any:
            action = actions.get((place, reached[place]), lambda: None)
            reached[place] += 1
            action()
            return honest(*arguments)

        return planted(*WHERE[place])(count)()

    with contextlib.ExitStack() as stack:
        for place in WHERE:
            stack.enter_context(counted(place))
        yield reached


@dataclass(frozen=True)
class Request:
    """A start of a run, the rank and the kind of a request to it, when it comes (before the
    `call`th time that the rank reaches `where`), and what follows."""

    is_first: bool  # whether the rank is the first one, or the last
    how: str
    where: str = "step"
    call: int = 1
    more: tuple[str, ...] = ()
    # how often each rank steps, reads a batch of an evaluation, and saves, in this start; a request
    # in the second step stops all ranks after the third, with one checkpoint
    reached: tuple[int, int, int] = (3, 0, 1)
    saved: tuple[int, ...] = (3,)  # counted, like `reached`, from where this start begins
    state: str = "requeue"


def handled() -> tuple[list[Any], set[signal.Signals]]:
    handlers = [signal.getsignal(number) for number in signals.requests()]
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, [])


def train_and_ask(arguments: list[str], asked: Request) -> tuple[int, ...]:
    """Train, with the request. Returns how often this rank reached each place in WHERE."""
    before_it, rank = handled(), 0 if asked.is_first else dist.get_world_size() - 1
    action = {(asked.where, asked.call): lambda: ask(asked.how)} if dist.get_rank() == rank else {}
    with (
        patch.dict(os.environ, LATTICE_STOP_FILE=f"{arguments[0]}.stop"),
        patch.object(train, "StopRequests", Known),
        patch.object(stop, "LOOK_SECONDS", 0.0),
        patch.object(signals, "STARTED", time.monotonic() - 11 * 60),  # between 10 and 20 minutes
        patch.object(signals, "SAME_REQUEST_SECONDS", 1e9),
        calling(action) as reached,
    ):
        assert runs.train_run([*arguments, *asked.more]) == ""
    assert handled() == before_it
    assert "signals" not in [thread.name for thread in threading.enumerate()]
    return tuple(reached.values())


# --- planned stops --------------------------------------------------------------------------------

REASONS = {
    "STOP": "the file STOP was found",
    "job": "the job script requested a stop",
    "time": "train.max_minutes was reached",
}
LAYOUTS = {2: [], 4: ["parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=2"]}
STEPS = 15


# The starts of one run, of which the last ends it.
REQUESTS = [
    Request(True, "time", "start", more=("train.max_minutes=10",), reached=(0, 0, 0), saved=()),
    Request(False, "SIGINT"),
    Request(True, "job"),
    # of 4 batches, the current one and one more; one SIGTERM from Slurm, one forwarded by torchrun
    Request(False, "SIGTERM twice", "evaluation", 0, ("train.eval_interval=7",), (1, 2, 1), (1,)),
    # one step follows the save
    Request(False, "SIGUSR1", "save", 0, ("checkpoint.interval=9",), (3, 0, 2), (2, 3)),
    Request(True, "STOP", "start", reached=(0, 0, 0), saved=()),
    Request(True, "SAVE", "step", 1, ("train.eval_interval=14",), (5, 8, 1), (3,), "finished"),
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_all_stop_after_the_same_step(ranks, data, tmp_path, world):
    """After each start: how often each rank reached what, new checkpoints, files that are not
    removed, and the status. No step is lost: the run has the losses of an undisturbed one."""
    folder, whole, at = tmp_path / "asked", tmp_path / "whole", 0
    runs.run(ranks, world, config_of(whole, data, STEPS), *LAYOUTS[world])
    arguments = [config_of(folder, data, STEPS), *LAYOUTS[world], "train.max_minutes=20"]
    for asked in REQUESTS:
        before_it = runs.saved_steps(folder)
        if (asked.how, asked.where) == ("STOP", "start"):
            (folder / "run" / "STOP").touch()
        assert ranks.run(train_and_ask, world, arguments, asked) == [asked.reached] * world, asked
        Path(f"{arguments[0]}.stop").unlink(missing_ok=True)  # it is of that start only
        new = [step for step in runs.saved_steps(folder) if step not in before_it]
        assert new == [at + step for step in asked.saved], asked
        assert not [name for name in ("STOP", "SAVE") if (folder / "run" / name).exists()], asked
        at += asked.reached[0]
        reason = REASONS.get(asked.how, f"{asked.how.split(' ')[0]} was received")
        reason = reason if asked.state == "requeue" else "all steps done"
        assert runs.status_of(folder) == {"state": asked.state, "step": at, "reason": reason}, asked
    assert runs.losses(folder) == runs.losses(whole)
    # the evaluation of step 7 was abandoned
    assert [*runs.evaluations(folder)] == [14, 15]


@pytest.mark.parametrize(("how", "call"), [("SIGTERM", 1), ("STOP", 2)], ids=["agreed", "too late"])
def test_a_run_that_makes_its_last_step_is_finished(ranks, data, tmp_path, how, call):
    ranks.run(train_and_ask, 2, [config_of(tmp_path, data, 3)], Request(True, how, call=call))
    assert runs.status_of(tmp_path) == {"state": "finished", "step": 3, "reason": "all steps done"}
    assert not (tmp_path / "run" / "STOP").exists()


def test_a_refused_run_leaves_the_file(ranks, data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    arguments = [config_of(tmp_path, data, 6), "train.max_minutes=-1"]
    message = ranks.run(runs.train_run, 2, arguments)[0]
    assert message.startswith("train.max_minutes = ")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["STOP"]


# --- failures during a stop -----------------------------------------------------------------------


def lose_a_peer(arguments: list[str], folder: Path) -> None:
    """Train; rank 0 gets a signal in its third step, and then rank 1 dies."""

    def asked() -> None:
        hear(signal.SIGTERM)
        (folder / "heard").touch()

    def die() -> None:
        while not (folder / "heard").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    is_first = dist.get_rank() == 0
    if is_first:
        with open(folder / "said", "w") as said:
            os.dup2(said.fileno(), 2)
    with (
        patch.object(train, "StopRequests", Known),
        calling({("step", 2): asked if is_first else die}),
    ):
        try:
            runs.train_run(arguments)
        except Exception as error:
            fail(error, Known.last.signals)


def test_a_peer_that_dies(ranks, data, tmp_path):
    """One of two ranks gets a request to stop, and the other dies in the same step: the first exits
    without saving, with one message, and the run has failed."""
    saves = ["checkpoint.interval=2", "checkpoint.async_save=false"]
    with (
        patch.object(proofs.ranks, "GRACE_SECONDS", 200),  # the first ends by itself
        pytest.raises(RankError, match=r"rank 0: .*code 1\nrank 1: .*code -9"),
    ):
        ranks.run(lose_a_peer, 2, [config_of(tmp_path, data, 6), *saves], tmp_path)
    assert runs.saved_steps(tmp_path) == [2]
    said = (tmp_path / "said").read_text()
    assert said.count("rank 0 exits after SIGTERM without saving: ") == 1
    assert "Traceback" not in said
    end = runs.status_of(tmp_path)
    assert end["state"] == "failed"
    assert "lost connection to another rank after step" in end["reason"]


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process "
            "exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call "
            "failed possibly due to a network error or a remote process exiting prematurely.",
            True,
        ),
        (
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got error: Connection reset by peer",
            True,
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda "
            "error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.",
            False,
        ),
    ],
)
def test_what_nccl_says_of_a_peer_that_died(said, is_lost):
    """The survivors leave it to the rank that failed to say why. Control: an own failure."""
    assert describe(dist.DistBackendError(said)).startswith(LOST) == is_lost


def wait_for_a_silent_peer(config: str) -> None:
    """On rank 0, which has received a signal, the wait for the other's requests ends."""
    heard = Signals(speaks=False)
    requests = StopRequests(load_config(config, []), heard)
    if dist.get_rank() == 0:
        heard.heard[signal.SIGTERM] = time.monotonic()
        silent = "^the other ranks did not respond for 1 s$"
        with (
            patch.object(signals, "PATIENCE_SECONDS", 1),
            pytest.raises(LostConnection, match=silent),
        ):
            requests.open()
    dist.barrier()


def test_a_silent_peer(ranks, data, tmp_path):
    ranks.run(wait_for_a_silent_peer, 2, config_of(tmp_path, data, 6))


def stop_twice(config: str) -> tuple[str, str]:
    """Why all stop after a signal, and then why they did if STOP came meanwhile."""
    heard = Signals(speaks=False)
    requests = StopRequests(load_config(config, []), heard)
    requests.open()
    heard.heard[signal.SIGUSR1] = time.monotonic()
    requests.agree(), requests.agree()
    first = requests.reason
    if dist.get_rank() == 0:
        requests.folder.mkdir()
        (requests.folder / "STOP").touch()
    no_rights = PermissionError(errno.EACCES, "Permission denied")
    with patch.object(Path, "unlink", side_effect=no_rights):
        requests.close(stays=False)
    return first, requests.reason


def test_a_user_who_stops_a_stopping_run_is_heard(ranks, data, tmp_path):
    """Its job does not requeue itself. A file that cannot be removed fails no run."""
    first, other = ranks.run(stop_twice, 2, config_of(tmp_path, data, 6))
    assert first == ("SIGUSR1 was received", REASONS["STOP"])
    assert other == ("SIGUSR1 was received",) * 2


def announce_to_nobody() -> None:
    ear, mouth = os.pipe()
    os.close(ear)
    os.dup2(mouth, 2)
    with Signals(speaks=True) as heard:
        heard.announce(REASONS["STOP"])


def test_a_stop_is_not_lost_with_its_log(tmp_path):
    """The terminal may be closed, or the log's disk full. (The run failed, and saved nothing.)"""
    assert runs.status(runs.forked(tmp_path / "log", announce_to_nobody)) == 0


def hear_again_and_again() -> None:
    """Receive signals in a call that runs no signal handlers of Python."""

    def asking() -> None:
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    with patch.object(signals, "SAME_REQUEST_SECONDS", 0.1), Signals(speaks=True):
        threading.Thread(target=asking, daemon=True).start()
        dist.HashStore().wait(["never"], timedelta(seconds=100))


def test_a_second_signal_ends_it_at_once(tmp_path):
    log = tmp_path / "log"
    assert runs.status(runs.forked(log, hear_again_and_again)) == 128 + signal.SIGTERM
    first, again = log.read_text().splitlines()
    assert first.startswith("SIGTERM was received (send it again to exit at once")
    assert again == "SIGTERM again: exiting now, without saving"
