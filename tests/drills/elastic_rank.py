"""A rank of test_elastic_drill.py: train.py, with a record of the rows that it reads.

Each line of DRILL_ROWS/PID.jsonl has the time, the step (0-based), the first row's place in the
global batch, and a digest of each row. From the step in DRILL_ROWS/target on, each step takes
seconds longer: the drill makes a change then, and a fast machine must not finish meanwhile.
"""

import os
import sys

from runtime.signals import Signals

if __name__ == "__main__":  # as in train.py, before the imports that take seconds
    listening = Signals(speaks=os.environ["RANK"] == "0").listen()

import hashlib
import json
import time
from pathlib import Path

from torch import Tensor

import train
from runtime.listener import Run

LONGEST_SECONDS = 5  # a stop takes two steps, and torchrun kills after 30 s


def record(folder: Path) -> None:
    """From now on, every batch that this process reads is recorded in `folder`."""
    honest = Run.next_batch
    file = open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - until the end

    def next_batch(self: Run) -> tuple[Tensor, Tensor]:
        if (beyond := self.step - int((folder / "target").read_text())) >= 0:
            time.sleep(min(1 + beyond, LONGEST_SECONDS))
        tokens, targets = honest(self)
        rows = [hashlib.sha1(row.numpy().tobytes()).hexdigest() for row in tokens]
        first = self.loader._mine.start
        line = {"time": time.time(), "step": self.step, "first": first, "rows": rows}
        file.write(json.dumps(line) + "\n")
        file.flush()
        return tokens, targets

    Run.next_batch = next_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(os.environ["DRILL_ROWS"]))
    train.main(sys.argv[1:], listening)
