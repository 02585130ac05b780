"""Several concurrent starts of one run are paused and killed at random.

In each round, up to three starts with different settings write to one run folder. They are started,
stopped (SIGSTOP), continued and killed (SIGKILL) at random moments. Each also stops itself at
random right before a rename, that is, between checking that it holds the lease and the operation
that the check permits. A stop often outlasts the lease, so that another start takes over, and the
displaced one later continues where it was. In the end a last start finishes the run. Then

- whenever a start printed "saved step-N", the folder's step-N must be complete, and identical to
  what this start wrote, file by file;
- no two starts may have printed this for the same step, and `latest` must name the newest;
- metrics.jsonl must have every step once, in order, so a displaced start has written nothing;
- no start may have ended with a traceback, and nothing uncommitted may be left.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import runtime.checkpoint.save
import train
import training.step
from runtime.checkpoint import lease
from runtime.checkpoint.folder import complete_checkpoints
from runtime.checkpoint.manifest import Manifest, read_manifest
from runtime.checkpoint.verify import verify_checkpoint
from runtime.signals import Signals
from tests.planted import planted
from tests.runs import forked, metrics_of, names, status, write_config

# seconds, instead of the lease's own, so that a round takes seconds
RENEW, TRUST, EXPIRE = 0.2, 0.5, 1.5
STEPS, INTERVAL, EVENTS = 16, 2, 12
STEP_SECONDS = 0.1  # more than such a small model takes, so that a round has something to disturb
PAUSED_RENAMES = 0.3  # fraction of renames before which a start stops itself
SAVED = re.compile(r"^saved (step-\d{8}): ", re.MULTILINE)


@planted(training.step, "learning_rate")
def slow_steps(learning_rate, *about):
    time.sleep(STEP_SECONDS)
    return learning_rate(*about)


def start(arguments: list[str], log: Path, seed: int, pauses: bool) -> None:
    """Run train.py; the files it is about to commit are listed in LOG.STEP.json."""
    torch.set_num_threads(1)
    draw = random.Random(seed)

    @planted(os, "replace")
    def paused(rename: Any, source: Any, target: Any) -> None:
        if pauses and "checkpoints" in str(source) and draw.random() < PAUSED_RENAMES:
            os.kill(os.getpid(), signal.SIGSTOP)
        rename(source, target)

    @planted(runtime.checkpoint.save, "write_manifest")
    def noted(write_manifest: Any, folder: Path, manifest: Manifest) -> None:
        write_manifest(folder, manifest)
        Path(f"{log}.{folder.name}.json").write_text(json.dumps(manifest.files))

    seconds = {"RENEW_SECONDS": RENEW, "TRUST_SECONDS": TRUST, "EXPIRE_SECONDS": EXPIRE}
    with patch.multiple(lease, **seconds), paused(), noted(), slow_steps():
        train.main(arguments, Signals(speaks=True).listen())
    sys.stdout.flush()


class Round:
    """Up to `most` starts at a time in one run folder."""

    def __init__(self, folder: Path, config: str, seed: int, most: int) -> None:
        self.folder, self.config, self.most = folder, config, most
        self.draw = random.Random(seed)
        self.logs: list[Path] = []
        self.alive: list[Any] = []

    def begin(self, pauses: bool = True) -> Any:
        log = self.folder / f"start-{len(self.logs)}.log"
        log.touch()  # a start may be killed before it has printed anything
        arguments = [self.config, f"optimizer.lr={1e-3 * (1 + len(self.logs))}"]
        self.logs.append(log)
        return forked(log, start, arguments, log, self.draw.getrandbits(32), pauses)

    def disturb(self) -> None:
        """Cause random events; in the end all remaining starts are continued until they end."""
        for _ in range(EVENTS):
            self.alive = [process for process in self.alive if process.is_alive()]
            actions = [lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT)]
            actions += [lambda: self._signal(signal.SIGKILL)] * (self.draw.random() < 0.4)
            if len(self.alive) < self.most:
                actions += [lambda: self.alive.append(self.begin())] * (2 if self.alive else 9)
            self.draw.choice(actions)()
            time.sleep(self.draw.choice((0.05, 0.2, 0.5, EXPIRE * 1.2)))
        while self.alive:
            for process in self.alive:
                self._send(process, signal.SIGCONT)
            self.alive = [process for process in self.alive if process.is_alive()]
            time.sleep(0.05)

    def _signal(self, number: int) -> None:
        if self.alive:
            self._send(self.draw.choice(self.alive), number)

    @staticmethod
    def _send(process: Any, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if process.is_alive():
                os.kill(process.pid, number)

    def check(self) -> None:
        """Check the logs and the run folder."""
        checkpoints = self.folder / "run" / "checkpoints"
        claims: dict[str, Path] = {}
        for log in self.logs:
            said = log.read_text(encoding="utf-8")
            assert "Traceback" not in said, f"{log.name}: {said[-2000:]}"
            for step in SAVED.findall(said):
                assert step not in claims, f"saved by {claims[step].name}, and by {log.name}"
                claims[step] = log
        assert claims, "no start has printed a line that SAVED finds"
        for step, log in claims.items():
            noted = json.loads(Path(f"{log}.{step}.json").read_text())
            found = read_manifest(checkpoints / step).files
            assert {name: [*entry] for name, entry in found.items()} == noted, log.name
        for path in complete_checkpoints(checkpoints):
            verify_checkpoint(path)
        expected = [f"step-{step:08d}" for step in range(INTERVAL, STEPS + 1, INTERVAL)]
        assert names(checkpoints) == ["latest", *expected]
        assert (checkpoints / "latest").read_text() == expected[-1]
        assert [line["step"] for line in metrics_of(self.folder)] == [*range(1, STEPS + 1)]


ROUNDS = [  # fifty take ten minutes; the first odd one has three starts at a time
    pytest.param(seed, marks=pytest.mark.thorough if seed == 1 else pytest.mark.slow)
    for seed in range(50)
]


@pytest.mark.parametrize("seed", ROUNDS)
def test_starts_that_are_paused_and_killed(data, tmp_path, seed):
    small = {"dim": 16, "ffn_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    config = write_config(
        tmp_path, data, model=small, checkpoint={"interval": INTERVAL, "keep_last": STEPS},
        train={"steps": STEPS, "global_batch_size": 2}, run={"log_interval": 1},
    )  # fmt: skip
    drill = Round(tmp_path, config, seed, most=2 + seed % 2)
    drill.disturb()
    assert status(drill.begin(pauses=False)) == 0, drill.logs[-1].read_text()
    drill.check()
    assert len(drill.logs) > 1
