"""The first hour with a GPU, in three parts of at most eight minutes: `make bench-gpu PART=…`.

    python -m benchmarks.gpu_hour right   is it right: kernels, training, resuming, memory
    python -m benchmarks.gpu_hour fast    how fast: kernels, training, where the time of a step goes
    python -m benchmarks.gpu_hour open    what is open: attention, overlap, FSDP over one rank,
                                          sums of gradients

A part runs programs (PARTS), each in its own process, because an error of a kernel ends a process's
use of the GPU. It writes two files, again after every row, so that nothing is lost if it is killed:

    FOLDER/right.json   every row, the estimates beside them, power and clock every five seconds
    FOLDER/right.md     the same as a page, which is also printed at the end

FOLDER is --out, or $OUT, or benchmarks/results/gpu. Without a GPU the same programs run with tiny
sizes in Triton's interpreter, which measures nothing; files are then written only where --out or
$OUT says. What does not fit into the time is listed as not measured. The exit status is 1 if
something was wrong or failed, and 2 if a package without which nothing runs is not installed.
"""

import json
import os
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_estimates import FAST, OPEN, RIGHT
from benchmarks.gpu_machine import Meter, about
from benchmarks.gpu_page import as_json, findings, page, wrong_rows
from benchmarks.gpu_process import ROOT
from benchmarks.gpu_tasks import Lane, Task
from tools.command import CommandParser, run_command

PART_SECONDS = 460.0  # of eight minutes; the rest is for starting and for writing the page
LOOK_SECONDS = 0.2
# Those of requirements.txt that training imports, and Triton.
NEEDED = ("torch", "numpy", "pydantic", "yaml", "safetensors", "sentencepiece", "tqdm", "triton")
OPTIONAL = {
    "pytest": "the tests of kernels and runs are skipped",
    "xdist": "the tests run one after the other (pytest-xdist)",
    "transformers": "no comparison with Hugging Face's models",
    "liger_kernel": "no comparison with Liger-Kernel",
    "flash_attn_interface": "no comparison with flash attention 3",
}
COMPILERS = 4  # processes that fill the compilers' caches before anything is timed

# For each part: stages, one after the other; in each, lanes side by side; in each, programs one
# after the other, the most important first. Nothing runs beside a program that measures time.
PARTS: dict[str, list[list[list[Task]]]] = {
    RIGHT: [
        [
            [Task("training", "benchmarks.gpu_training", 240)],
            [
                Task("kernels", "benchmarks.gpu_kernels", 150, ("--checks",)),
                Task("memory", "benchmarks.gpu_memory", 200),
            ],
            [Task("tests of kernels", "benchmarks.gpu_tests", 300, ("--only", "kernel"))],
            [Task("resume", "benchmarks.gpu_resume", 200)],
            [
                Task("tests of the head", "benchmarks.gpu_tests", 60, ("--only", "head")),
                Task("tests of runs", "benchmarks.gpu_tests", 240, ("--only", "runs")),
            ],
        ]
    ],
    FAST: [
        [
            [
                Task("profile", "benchmarks.gpu_profile", 50),
                Task("model", "benchmarks.gpu_model", 220),
            ]
        ],
        [
            [Task(f"compile {i}", "benchmarks.gpu_kernels", 60, ("--compile", f"{i}/{COMPILERS}"))]
            for i in range(COMPILERS)
        ],
        [[Task("kernels", "benchmarks.gpu_kernels", 110)]],
    ],
    OPEN: [
        [
            [
                Task("attention", "benchmarks.gpu_attention", 50),
                Task("accumulation", "benchmarks.gpu_accumulation", 40),
                Task("overlap", "benchmarks.gpu_overlap", 90),
                Task("fsdp", "benchmarks.gpu_fsdp", 130),
                Task("model with each attention", "benchmarks.gpu_model", 150, ("--attention",)),
            ]
        ]
    ],
}


class Part:
    """Runs one part and keeps what it found.

    Args:
        name: a key of PARTS.
        folder: for the files; None: write none.
        tiny: whether only tiny sizes run.
        seconds: the limit of the part.
    """

    def __init__(self, name: str, folder: Path | None, tiny: bool, seconds: float) -> None:
        self.name, self.folder, self.tiny = name, folder, tiny
        self.end = time.monotonic() + seconds
        self.meter = Meter()
        self.about = about(tuple(OPTIONAL))
        self.absent = {name: what for name, what in OPTIONAL.items() if find_spec(name) is None}
        self.lanes: list[Lane] = []

    def run(self) -> int:
        """Runs everything, prints the page, and returns the exit status."""
        for package, what in self.absent.items():
            print(f"{package} is not installed: {what}", flush=True)
        with tempfile.TemporaryDirectory() as temporary, self.meter:
            stages = [
                [Lane(tasks, Path(temporary), self.tiny) for tasks in stage]
                for stage in PARTS[self.name]
            ]
            self.lanes = [lane for stage in stages for lane in stage]
            try:
                for stage in stages:
                    self.run_stage(stage)
            finally:
                for lane in self.lanes:
                    lane.stop("the part was ended")
                self.write()
        result, rows = self.result()
        print("\n" + page(result, rows), flush=True)
        if self.folder is not None:
            print(f"written to {self.folder}/{self.name}.json and .md", flush=True)
        crashed = any(lane.crashed for lane in self.lanes)
        return 1 if crashed or wrong_rows(rows) else 0

    def run_stage(self, lanes: list[Lane]) -> None:
        """Runs the lanes side by side, and writes what is new."""
        busy = True
        while busy:
            busy = sum(lane.advance(self.end) for lane in lanes) > 0  # all of them, not just one
            if sum(lane.has_news() for lane in lanes):
                self.write()
            time.sleep(LOOK_SECONDS)

    def result(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the JSON file holds, and its rows."""
        rows = [row for lane in self.lanes for row in lane.rows()]
        result = {
            "part": self.name,
            "measurement": not self.tiny,
            "about": self.about,
            "absent": self.absent,
            "tasks": [task for lane in self.lanes for task in lane.summary()],
        }
        return result, rows

    def write(self) -> None:
        if self.folder is None:
            return
        result, rows = self.result()
        found = findings(result, rows)
        text = page(result, rows)
        everything = {
            **result,
            "estimates": [as_json(each) for each in found],
            "rows": rows,
            "power": self.meter.samples,
        }
        for name, content in ((".json", json.dumps(everything, indent=1) + "\n"), (".md", text)):
            partial = self.folder / f".{self.name}{name}.partial"
            partial.write_text(content, encoding="utf-8")
            partial.rename(self.folder / f"{self.name}{name}")


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; always without a GPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the results")
    limit = "the limit of the part (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help=limit)
    parsed = parser.parse_args(arguments)
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        print(f"not installed, and nothing runs without it: {', '.join(missing)}", file=sys.stderr)
        return 2
    import torch  # not needed to say what is missing

    tiny = parsed.tiny or not torch.cuda.is_available()
    folder = parsed.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    if folder is None and not tiny:
        folder = ROOT / "benchmarks/results/gpu"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # so that the programs end too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return Part(parsed.part, folder, tiny, parsed.seconds).run()


if __name__ == "__main__":
    run_command(main)
