"""Requests a real run to stop: SIGINT (Ctrl-C), SIGTERM or SIGHUP, sent to our launcher, to its
process group as by a terminal, to one rank, or to torchrun; while the run starts, in a step, while
a checkpoint is written, or in an evaluation."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import ROOT
from tests.runs import forked, metrics_of
from tools import launch

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
WORLD = 2
PATIENCE_SECONDS = 600
OUR_LINES = re.compile(
    r"saved step-|stopped after step|SIG\w+ was received|step +\d+/|processes on this machine|"
    r"[\d,]+ parameters on|all 2 ranks|attention: |starting |changed since|"
    r"warning: checkpoint.interval is never"
)


@dataclass(frozen=True)
class Stop:
    """The result of one stop request."""

    steps_made: int
    steps_lost: int  # made, but not in the newest checkpoint
    not_ours: int  # lines printed after the signal, but not by Lattice
    announced: int  # those of them that announce the received signal and what happens next
    exit_status: int | None  # -number if a signal ended it, None if it does not end
    state: str  # of status.json


def stop(number: str, target: str, phase: str, config: str, folder: Path) -> Stop:
    """Start `config`, whose run folder is `folder`/run, request a stop in `phase`, and wait until
    it has ended."""
    run, log = folder / "run", folder / "log"
    overrides = ["run.log_interval=1", "train.steps=1000000"]
    overrides += {
        "save": ["checkpoint.interval=2"],
        "evaluation": ["train.eval_interval=2", "train.eval_samples=1000000000"],
    }.get(phase, [])
    program = ["tools.launch", "--nproc-per-node", str(WORLD)]
    if target == "torchrun":
        program = ["torch.distributed.run", "--standalone", *program[1:], "train.py"]
    log.touch()
    fresh = target == "torchrun" or (target, phase) == ("launcher", "save")
    running = forked(log, _begin, [*program, config, *overrides], fresh)
    try:
        _wait_for(PHASES[phase], run, log, running)
        before = log.read_text()
        everyone = [running, *_ranks(running.pid)]
        if target == "group":
            os.killpg(running.pid, signal.Signals[number])
        else:
            victim = everyone[-1] if target == "one rank" else running
            os.kill(victim.pid, signal.Signals[number])
        running.join(PATIENCE_SECONDS)
        psutil.wait_procs(everyone[1:], timeout=PATIENCE_SECONDS)
    finally:
        for process in _ranks(running.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        status = running.exitcode
        running.kill()
    said = log.read_text()[len(before) :].splitlines()
    lines = metrics_of(folder) if (run / "metrics.jsonl").exists() else []
    made = lines[-1]["step"] if lines else 0
    latest, ended = run / "checkpoints" / "latest", run / "status.json"
    return Stop(
        made,
        made - int(latest.read_text()[5:] if latest.exists() else 0),
        sum(not OUR_LINES.match(line) for line in said),
        sum("all ranks stop after" in line for line in said),
        status,
        json.loads(ended.read_text())["state"] if ended.exists() else "",
    )


def _begin(command: list[str], fresh: bool) -> None:
    """Be `python -m` this command, in a session of its own; unless `fresh`, the launcher in a
    process that has imported torch before."""
    os.setsid()
    for name in SIGNALS:  # background processes ignore Ctrl-C
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    if fresh:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", *command])
    sys.argv = command
    sys.exit(launch.main())


def _ranks(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_for(begun: Callable[[Path, str, int], bool], run: Path, log: Path, running: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not begun(run, log.read_text(), running.pid):
        if running.exitcode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not reach this phase:\n{log.read_text()}")
        time.sleep(0.002)


def _imports(run: Path, said: str, pid: int) -> bool:
    """Whether every rank handles signals. The run folder does not exist yet at this point."""
    listening = sum(catches(process.pid) for process in _ranks(pid))
    return listening >= WORLD


def catches(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR1, as ranks that handle signals do (Linux)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def _in_evaluation(run: Path, said: str, pid: int) -> bool:
    """Whether the endless evaluation after the second step has begun. That cannot be observed from
    outside, so this waits 2 s after the first step's line."""
    if not re.search(r"^step +1/", said, re.MULTILINE):
        return False
    time.sleep(2)
    return True


# phase → whether it has begun, by the run folder, what was said and the pid
PHASES: dict[str, Callable[[Path, str, int], bool]] = {
    "start-up": _imports,
    "step": lambda run, said, pid: bool(re.search(r"^step +3/", said, re.MULTILINE)),
    "save": lambda run, said, pid: any((run / "checkpoints").glob("partial-*")),
    "evaluation": _in_evaluation,
}
