"""Pauses and kills several concurrent starts of one run at random: `python -m
benchmarks.lease_drill`

In each of fifty rounds, up to three starts with different settings write to one run folder. They
are started, stopped (SIGSTOP), continued and killed (SIGKILL) at random moments. Each also stops
itself at random right before a rename, that is, between checking that it holds the lease and the
operation that the check permits. A stop often outlasts the lease, so that another start takes over,
and the displaced one later continues where it was. In the end a last start finishes the run. Then

- whenever a start printed "saved step-N", the folder's step-N must be complete, and identical to
  what this start wrote, file by file;
- no two starts may have printed this for the same step, and `latest` must name the newest;
- metrics.jsonl must have every step once, in order, so a displaced start has written nothing;
- no start may have ended with a traceback, and nothing uncommitted may be left.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.about import about
from runtime.checkpoints.manifest import MANIFEST, Manifest, read_manifest, verify
from runtime.checkpoints.names import complete_checkpoints
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
PRELOAD = ["train", "torch._dynamo"]
# seconds, instead of the lease's own, so that a round takes seconds
RENEW, TRUST, EXPIRE = 0.2, 0.5, 1.5
STEPS, INTERVAL = 16, 2
STEP_SECONDS = 0.1  # more than such a small model takes, so that a round has something to disturb
PAUSED_RENAMES = 0.3  # fraction of renames before which a start stops itself
SAVED = re.compile(r"^saved (step-\d{8}): ", re.MULTILINE)


# --- one start, in a separate process -------------------------------------------------------------


def start(arguments: list[str], log: Path, seed: int, pauses: bool) -> None:
    """Runs train.py; its output goes to `log`, and the files it is about to commit are listed in
    LOG.STEP.json."""
    import torch

    import runtime.checkpoints.save
    import train
    import training.step
    from runtime.checkpoints import lease
    from runtime.signals import Signals

    torch.set_num_threads(1)
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    draw = random.Random(seed)
    rename, write_manifest = os.replace, runtime.checkpoints.save.write_manifest
    learning_rate = training.step.learning_rate

    def paused(source: Any, target: Any) -> None:
        if pauses and "checkpoints" in str(source) and draw.random() < PAUSED_RENAMES:
            os.kill(os.getpid(), signal.SIGSTOP)
        rename(source, target)

    def slow(*about: Any) -> float:
        time.sleep(STEP_SECONDS)
        return learning_rate(*about)

    def noted(folder: Path, manifest: Manifest) -> None:
        write_manifest(folder, manifest)
        Path(f"{log}.{folder.name}.json").write_text(json.dumps(manifest.files))

    with (
        patch.multiple(lease, RENEW_SECONDS=RENEW, TRUST_SECONDS=TRUST, EXPIRE_SECONDS=EXPIRE),
        patch.object(os, "replace", paused),
        patch.object(runtime.checkpoints.save, "write_manifest", noted),
        patch.object(training.step, "learning_rate", slow),
    ):
        train.main(arguments, Signals(speaks=True).listen())
    sys.stdout.flush()


# --- a round --------------------------------------------------------------------------------------


@dataclass
class Round:
    """Up to `most` starts at a time in one run folder."""

    folder: Path
    config: Path
    seed: int
    most: int
    logs: list[Path] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.alive: list[Any] = []

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def begin(self, pauses: bool = True) -> Any:
        log = self.folder / f"start-{len(self.logs)}.log"
        log.touch()  # a start may be killed before it has printed anything
        settings = [f"optimizer.lr={1e-3 * (1 + len(self.logs))}", f"run.dir={self.run}"]
        arguments = ([str(self.config), *settings], log, self.draw.getrandbits(32), pauses)
        process = self.context.Process(target=start, args=arguments)
        process.start()
        self.logs.append(log)
        self.counts["starts"] += 1
        return process

    def disturb(self, events: int) -> None:
        """Causes random events; in the end all remaining starts are continued until they end."""
        for _ in range(events):
            self.alive = [process for process in self.alive if process.is_alive()]
            actions: list[Callable[[], None]] = [
                lambda: self._signal(signal.SIGSTOP),
                lambda: self._signal(signal.SIGCONT),
            ]
            actions += [lambda: self._signal(signal.SIGKILL)] * (self.draw.random() < 0.4)
            if len(self.alive) < self.most:
                actions = [lambda: self.alive.append(self.begin())] * (
                    2 if self.alive else 9
                ) + actions
            self.draw.choice(actions)()
            time.sleep(self.draw.choice((0.05, 0.2, 0.5, EXPIRE * 1.2)))
        while self.alive:
            for process in self.alive:
                self._send(process, signal.SIGCONT)
            self.alive = [process for process in self.alive if process.is_alive()]
            time.sleep(0.05)

    def finish(self) -> None:
        last = self.begin(pauses=False)
        last.join()
        assert last.exitcode == 0, self.logs[-1].read_text()

    def _signal(self, number: int) -> None:
        if self.alive:
            self.counts[signal.Signals(number).name] += 1
            self._send(self.draw.choice(self.alive), number)

    @staticmethod
    def _send(process: Any, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if process.is_alive():
                os.kill(process.pid, number)

    def check(self) -> list[str]:
        """The problems found in the logs and the run folder."""
        wrong = []
        checkpoints = self.run / "checkpoints"
        claims: dict[str, Path] = {}
        for log in self.logs:
            said = log.read_text(encoding="utf-8")
            self.counts["displaced"] += said.count("was displaced")
            self.counts["refused"] += said.count(" is writing there and renewed ")
            if "Traceback" in said:
                wrong.append(f"{log.name}: {said[-2000:]}")
            for step in SAVED.findall(said):
                self.counts["saved"] += 1
                if step in claims:
                    wrong.append(f"{step}: saved by {claims[step].name}, and by {log.name}")
                claims[step] = log
        for step, log in claims.items():
            noted = json.loads(Path(f"{log}.{step}.json").read_text())
            found = (
                read_manifest(checkpoints / step).files
                if (checkpoints / step / MANIFEST).exists()
                else {}
            )
            if {name: list(entry) for name, entry in found.items()} != noted:
                wrong.append(f"{step} is not what {log.name} said it has saved")
        complete = complete_checkpoints(checkpoints)
        for path in complete:
            verify(path)
        expected = [f"step-{step:08d}" for step in range(INTERVAL, STEPS + 1, INTERVAL)]
        if sorted(path.name for path in checkpoints.iterdir()) != ["latest", *expected]:
            wrong.append(f"there are {sorted(path.name for path in checkpoints.iterdir())}")
        if (checkpoints / "latest").read_text() != complete[-1].name:
            wrong.append("latest does not name the newest")
        steps = [
            json.loads(line)["step"]
            for line in (self.run / "metrics.jsonl").read_text().splitlines()
        ]
        if steps != list(range(1, STEPS + 1)):
            wrong.append(f"metrics.jsonl has the steps {steps}")
        return wrong


def one_round(
    folder: Path, config: Path, seed: int, most: int, events: int
) -> tuple[Counter[str], list[str]]:
    """One round in an empty folder: the number of each kind of event, and the problems found."""
    drill = Round(folder, config, seed, most)
    drill.disturb(events)
    drill.finish()
    return drill.counts, drill.check()


def tiny(path: Path, data: Path, vocab_size: int) -> Path:
    """Writes the configuration of a run of one process that saves often and keeps everything."""
    raw = yaml.safe_load((ROOT / "configs/laptop.yaml").read_text())
    raw["model"] |= {"dim": 16, "ffn_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
                     "vocab_size": vocab_size}  # fmt: skip
    raw["parallel"] = {}
    raw["train"] |= {
        "steps": STEPS,
        "seq_len": 32,
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "eval_interval": 0,
    }
    raw["optimizer"] |= {"warmup_steps": 2}
    raw["checkpoint"] = {"interval": INTERVAL, "keep_last": STEPS}
    raw["data"] = {"path": str(data)}
    raw["run"] = {"log_interval": 1}
    path.write_text(yaml.safe_dump(raw))
    return path


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--events", type=int, default=12, help="number of random events per round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/lease_drill.json")
    options = parser.parse_args()
    data = ROOT / "prepared/laptop"
    if not data.exists():
        sys.exit("the data is missing: run `make data` first")
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="lease-drill-") as name:
            config = tiny(Path(name) / "config.yaml", data, vocab_size=4096)
            found, problems = one_round(
                Path(name), config, options.seed + number, 2 + number % 2, options.events
            )
        counts += found
        wrong += [f"round {number}: {problem}" for problem in problems]
        print(f"round {number}: {dict(found)}", *problems, sep="\n  ", flush=True)
    seconds = time.monotonic() - began
    result = {"rounds": options.rounds, "seconds": seconds, **counts, "wrong": wrong}
    print(json.dumps(result, indent=1))
    if wrong:
        sys.exit("the drill failed")
    options.json.write_text(
        json.dumps({**about(), "seed": options.seed, **result}, indent=1) + "\n"
    )


if __name__ == "__main__":
    run_command(main)
