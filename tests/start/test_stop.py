"""Planned stops: however, whenever and on whichever rank a stop is requested, all ranks stop after
the same step, and no step is lost."""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

import proofs.ranks
import train
from proofs.ranks import RankError, Ranks
from runtime import all_listeners, signals, stop
from runtime.messages import LostConnection, fail
from runtime.signals import Signals
from runtime.stop import StopRequests
from settings.load import load_config
from tests.planted import planted
from tests.runs import losses, metrics_of, status_of, train_run, write_config

LAYOUTS = {  # world → 2 × 2, 2 × 2 × 2
    4: ["parallel.tp=2", "model.num_layers=1"],
    8: ["parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=2"],
}


def config_of(folder: Path, data: Path, steps: int) -> str:
    """Write a configuration in which an evaluation has 4 batches; return its path."""
    sizes = {"steps": steps, "micro_batch_size": 4, "eval_samples": 32}
    model, checkpoint = {"num_layers": 2}, {"keep_last": steps}
    return write_config(folder, data, model=model, train=sizes, checkpoint=checkpoint)


def saved_steps(folder: Path) -> list[int]:
    folders = (folder / "run" / "checkpoints").glob("step-*")
    return sorted(int(path.name[5:]) for path in folders if not path.suffix)


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
    calls: list[int] = []

    @planted(owner, method)
    def counted(honest: Any, *arguments: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == call:
            action()
        return honest(*arguments)

    with counted():
        yield calls


WHERE = {
    "step": (train.TrainStep, "__call__"),
    "evaluation": (train.TrainStep, "evaluate"),
    "save": (all_listeners.Saver, "save"),
}


def handled() -> tuple[list[Any], set[signal.Signals]]:
    handlers = [signal.getsignal(number) for number in signals.requests()]
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, [])


def train_and_ask(
    arguments: list[str], rank: int, how: str, where: str, call: int
) -> dict[str, int]:
    """Train; `rank` gets a request to stop when it reaches `where` for the `call`th time. Returns
    how often this rank reached each place in WHERE."""
    before_it, counts = handled(), {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, LATTICE_STOP_FILE=f"{arguments[0]}.stop"))
        stack.enter_context(patch.object(train, "StopRequests", Known))
        stack.enter_context(patch.object(stop, "LOOK_SECONDS", 0.0))
        stack.enter_context(patch.object(signals, "STARTED", signals.STARTED))
        stack.enter_context(patch.object(signals, "SAME_REQUEST_SECONDS", 1e9))
        for name, place in WHERE.items():
            asked = name == where and dist.get_rank() == rank
            action = (lambda: ask(how)) if asked else (lambda: None)
            counts[name] = stack.enter_context(before(*place, call, action))
        assert train_run(arguments) == ""
    assert handled() == before_it
    assert "signals" not in [thread.name for thread in threading.enumerate()]
    return {name: len(calls) for name, calls in counts.items()}


# --- planned stops --------------------------------------------------------------------------------

REASONS = {
    "STOP": "the file STOP was found",
    "job": "the job script requested a stop",
    "time": "train.max_minutes was reached",
}


@dataclass(frozen=True)
class Request:
    """A start of a run, the rank and the kind of a request to it, when it comes (before the
    `call`th time that the rank reaches `where`), and what follows."""

    rank: int
    how: str
    where: str = "step"
    call: int = 1
    more: tuple[str, ...] = ()
    # how often each rank steps, reads a batch of an evaluation, and saves, in this start; a request
    # in the second step stops all ranks after the third, with one checkpoint
    reached: tuple[int, int, int] = (3, 0, 1)
    saved: tuple[int, ...] = (3,)  # counted, like `reached`, from where this start begins
    state: str = "requeue"

    def __str__(self) -> str:
        return f"{self.how}, {self.where}"


# The starts of one run, of which the last ends it.
RUNS = {
    "4 ranks": (4, 18, [
        Request(0, "time", "start", more=("train.max_minutes=1e-9",), reached=(0, 0, 0), saved=()),
        Request(2, "SIGINT"),
        Request(0, "job"),
        Request(0, "time"),
        # of 4 batches, the current one and one more
        Request(2, "SIGTERM", "evaluation", 0, ("train.eval_interval=5",), (1, 2, 1), (1,)),
        # one step follows the save
        Request(1, "SIGUSR1", "save", 0, ("checkpoint.interval=12",), (3, 0, 2), (2, 3)),
        Request(0, "STOP", "start", reached=(0, 0, 0), saved=()),
        Request(0, "SAVE", "step", 1, ("train.eval_interval=17",), (5, 8, 1), (3,), "finished"),
    ]),
    "4 ranks, more": (4, 18, [
        *(Request(rank, how) for rank, how in [
            (2, "SIGTERM"), (1, "SIGUSR1"), (3, "SIGTERM twice"), (1, "SIGHUP"), (0, "STOP")]),
        Request(0, "", reached=(3, 0, 0), saved=(), state="finished"),
    ]),
    "8 ranks": (8, 6, [
        Request(5, "SIGTERM"), Request(0, "", reached=(3, 0, 0), saved=(), state="finished")]),
}  # fmt: skip
IN_TEST = "4 ranks"  # the run in `make test`


def tier(run: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if run == IN_TEST else (pytest.mark.thorough,)


@pytest.fixture(scope="module")
def made(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[tuple], list[tuple], Path, Path]]:
    """Name in RUNS → what each start has left, and what it should; the run's folder, and that of
    the same run without requests."""

    @functools.cache
    def of(name: str) -> tuple[list[tuple], list[tuple], Path, Path]:
        (world, steps, requests), found, expected, at = RUNS[name], [], [], 0
        folder, whole = tmp_path_factory.mktemp("asked"), tmp_path_factory.mktemp("whole")
        undisturbed = [config_of(whole, data, steps), *LAYOUTS[world]]
        assert ranks.run(train_run, world, undisturbed) == [""] * world
        arguments = [config_of(folder, data, steps), *LAYOUTS[world], "train.max_minutes=1e6"]
        for each in requests:
            before_it = saved_steps(folder)
            if each.how == "STOP" and each.where == "start":
                (folder / "run" / "STOP").touch()
            asked = [*arguments, *each.more], each.rank, each.how, each.where, each.call
            reached = ranks.run(train_and_ask, world, *asked)
            Path(f"{arguments[0]}.stop").unlink(missing_ok=True)  # it is of that start only
            saved = [step for step in saved_steps(folder) if step not in before_it]
            files = [file for file in ("STOP", "SAVE") if (folder / "run" / file).exists()]
            found.append((reached, saved, files, status_of(folder)))
            number = REASONS.get(each.how, f"{each.how.split(' ')[0]} was received")
            status = {
                "state": each.state, "step": at + each.reached[0],
                "reason": number if each.state == "requeue" else "all steps done",
            }  # fmt: skip
            reaches = dict(zip(WHERE, each.reached, strict=True))
            expected.append(([reaches] * world, [at + step for step in each.saved], [], status))
            at += each.reached[0]
        return found, expected, folder, whole

    return of


@pytest.mark.parametrize(
    ("run", "n"),
    [
        pytest.param(run, n, id=f"{run}: {request}", marks=tier(run))
        for run, (_, _, requests) in RUNS.items()
        for n, request in enumerate(requests)
    ],
)
def test_all_stop_after_the_same_step(made: Callable, run: str, n: int) -> None:
    """How often each rank reached what, new checkpoints, files that are not removed, status."""
    found, expected, *_ = made(run)
    assert found[n] == expected[n]


@pytest.mark.parametrize("run", [pytest.param(run, marks=tier(run)) for run in RUNS])
def test_no_step_is_lost(made: Callable, run: str) -> None:
    """The run that was stopped again and again has the losses of an undisturbed one."""
    _, _, folder, whole = made(run)
    assert losses(folder) == losses(whole)


def test_an_evaluation_is_abandoned(made: Callable) -> None:
    """That of step 10 is; those of step 17 and of the last step are not, and are logged."""
    lines = metrics_of(made(IN_TEST)[2])
    assert [line["step"] for line in lines if "eval_loss" in line] == [17, 18]


@pytest.mark.parametrize("call", [1, 2], ids=["agreed", "too late"])
@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("STOP", marks=pytest.mark.thorough)])
def test_a_run_that_makes_its_last_step_is_finished(
    ranks: Ranks, data: Path, tmp_path: Path, how: str, call: int
) -> None:
    ranks.run(train_and_ask, 2, [config_of(tmp_path, data, 3)], 0, how, "step", call)
    assert status_of(tmp_path) == {"state": "finished", "step": 3, "reason": "all steps done"}
    assert not (tmp_path / "run" / "STOP").exists()


def test_a_refused_run_leaves_the_file(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    message = ranks.run(train_run, 2, [config_of(tmp_path, data, 6), "train.max_minutes=-1"])[0]
    assert message.startswith("train.max_minutes = ")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["STOP"]


# --- failures during a stop -----------------------------------------------------------------------


def lose_a_peer(arguments: list[str], folder: Path, where: str, call: int) -> None:
    """Train; rank 0 gets a signal in its third step, then rank 1 dies before `where`."""
    heard = folder / "heard"
    if dist.get_rank() == 0:
        with open(folder / "said", "w") as said:
            os.dup2(said.fileno(), 2)

        def signalled() -> None:
            hear(signal.SIGTERM)
            heard.touch()

        with (
            patch.object(train, "StopRequests", Known),
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


def wait_for_a_silent_peer(arguments: list[str], folder: Path) -> None:
    """Rank 1 takes part in nothing more, and signals the others, which wait for it: rank 0, for its
    requests, once, and when that has ended rank 2, in a collective, until it has ended too."""
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    rank, pair = dist.get_rank(), dist.new_group([1, 2])
    seconds = {"PATIENCE_SECONDS": 1, "SAME_REQUEST_SECONDS": 0.1}
    with patch.multiple(signals, **seconds), Signals(speaks=False) as heard:
        try:
            requests = StopRequests(load_config(arguments[0], []), heard)
            requests.open()
            requests.agree()
            while rank == 0:
                requests.agree()
            if rank == 2:
                dist.barrier(pair)
            os.kill(pids[0], signal.SIGTERM)
            while psutil.pid_exists(pids[0]):
                time.sleep(0.02)
            while psutil.pid_exists(pids[2]):
                os.kill(pids[2], signal.SIGTERM)
                time.sleep(0.5)
            os._exit(0)
        except LostConnection as error:
            fail(error, heard)


FAILURES: dict[str, tuple[int, Callable[..., None]]] = {  # name → number of ranks, what they do
    "step": (2, partial(lose_a_peer, where="step", call=2)),
    "save": (2, partial(lose_a_peer, where="save", call=1)),
    "silent": (3, wait_for_a_silent_peer),
}


def fail_together(folder: Path) -> None:
    """Each of FAILURES, beside the others, in a process group of its own."""
    places = [(name, rank) for name, (size, _) in FAILURES.items() for rank in range(size)]
    name, rank = places[dist.get_rank()]
    size, do = FAILURES[name]
    dist.barrier()  # no rank may hang up while another still connects
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / name / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    saves = ["checkpoint.interval=2", "checkpoint.async_save=false"]
    do([str(folder / name / "config.yaml"), *saves], folder / name)


@pytest.fixture(scope="module")
def failed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of FAILURES, and how each rank ended."""
    folder = tmp_path_factory.mktemp("failed")
    for name in FAILURES:
        (folder / name).mkdir()
        config_of(folder / name, data, 6)
    with (
        Ranks(7) as pool,
        patch.object(proofs.ranks, "GRACE_SECONDS", 200),  # all end by themselves
        pytest.raises(RankError) as error,
    ):
        pool.run(fail_together, 7, folder)
    return folder, [line.partition("code ")[2] for line in str(error.value).splitlines()]


@pytest.mark.parametrize(("where", "first"), [("step", 0), ("save", 2)])
def test_a_dead_peer(failed: tuple[Path, list[str]], where: str, first: int) -> None:
    """One of two ranks gets a request to stop and the other dies, in the same step or at the save
    that follows. The first exits without saving, with one message, and the run has failed."""
    folder, codes = failed[0] / where, failed[1]
    assert codes[first : first + 2] == ["1", "-9"]
    assert saved_steps(folder) == [2]
    said = (folder / "said").read_text()
    assert said.count("rank 0 exits after SIGTERM without saving: ") == 1
    assert "Traceback" not in said
    assert status_of(folder)["state"] == "failed"
    assert "lost connection to another rank after step" in status_of(folder)["reason"]


def test_a_silent_peer(failed: tuple[Path, list[str]]) -> None:
    assert failed[1][4] == "1"


def test_a_second_signal_ends_it_at_once(failed: tuple[Path, list[str]]) -> None:
    assert failed[1][6] == str(128 + signal.SIGTERM)
