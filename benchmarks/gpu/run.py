"""The first hour with a GPU, in three parts of at most eight minutes: `make bench-gpu PART=…`.

    python -m benchmarks.gpu.run right   is it right: kernels, training, resuming, memory
    python -m benchmarks.gpu.run fast    how fast: kernels, training, where the time of a step goes
    python -m benchmarks.gpu.run open    what is open: kernels of attention

A part runs tests and benchmarks (PARTS) by pytest (plugin.py), each group in its own process,
because an error of a kernel ends a process's use of the GPU. It writes two files, again every
second, so that nothing is lost if it is killed:

    FOLDER/right.json   every row, the estimates beside them
    FOLDER/right.md     the same as a page, which is also printed at the end

FOLDER is --out, or $OUT, or benchmarks/results/gpu. Without a GPU everything runs with tiny sizes
in Triton's interpreter, which measures nothing; files are then written only where --out or $OUT
says. What does not fit into the time is listed as not measured. The exit status is 1 if something
was wrong or failed, and 2 if a package without which nothing runs is not installed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import ROOT, about
from benchmarks.gpu.page import NEEDS, NO_GPU, compared, page, wrong
from runtime.files import write_whole
from tools.command import CommandParser, run_command

PART_SECONDS = 460.0  # of eight minutes; the rest is for starting and for writing the page
WRITE_SECONDS = 1.0
GRACE_SECONDS = 30.0  # beyond its own budget, before a program is killed
LOG_CHARACTERS = 6000  # of a program's output that are printed, from its end
# Those of requirements.txt that training imports, Triton, and pytest, which runs everything.
NEEDED = ("torch", "numpy", "pydantic", "yaml", "safetensors", "sentencepiece", "tqdm", "triton",
          "pytest")  # fmt: skip
# Without xdist, kernels are compiled one after the other; the others are compared with.
OPTIONAL = ("pytest-xdist", "transformers", "liger_kernel", "flash-attn-3")


class Task(NamedTuple):
    """A group of rows: the seconds after which it begins no further one, and pytest's arguments."""

    name: str
    seconds: float
    arguments: tuple[str, ...]
    writes: bool = True  # whether its rows count


def parallel(processes: int) -> tuple[str, ...]:
    return ("-n", str(processes)) if find_spec("xdist") else ()


def model(what: str, seconds: float) -> Task:
    return Task(f"model, {what}", seconds, ("benchmarks/gpu/model.py", "-k", f"bench_{what}"))


SPEED, ATTENTION = "benchmarks/gpu/kernels.py", "benchmarks/gpu/attention.py"
AT_SIZE = Task("kernels at full size", 150, ("tests/gpu/test_kernels_at_size.py",))
OF_KERNELS = "tests/kernels/test_"
KERNELS = tuple(f"{OF_KERNELS}{name}.py" for name in ("kernels", "bit_hash", "kernel_adamw"))
HEAD = f"{OF_KERNELS}linear_cross_entropy.py::test_the_weight_gradient_is_summed_in_float32"
GROUPED = f"{OF_KERNELS}grouped_matmul.py::test_on_a_gpu"
ROWS = f"{OF_KERNELS}grouped_matmul.py::test_the_sum_of_each_token_s_rows"

# For each part: lanes side by side; in each, programs one after the other, the most important
# first. Nothing runs beside a program that measures time.
PARTS: dict[str, list[list[Task]]] = {
    "right": [
        [Task("training", 240, ("tests/gpu/test_training.py",))],
        [AT_SIZE, Task("memory", 200, ("tests/gpu/test_memory.py",))],
        [Task("kernels", 300, (*parallel(6), *KERNELS))],
        [Task("resume", 200, ("tests/gpu/test_resume.py",))],
        [Task("head and runs", 300, (HEAD, GROUPED, ROWS, "tests/gpu/test_runs.py"))],
    ],
    "fast": [
        [
            AT_SIZE,
            model("profile", 50),
            model("step or bench_ours", 220),
            # several processes fill the compilers' caches
            Task("compile", 60, (*parallel(4), SPEED), writes=False),
            Task("kernels", 110, (SPEED,)),
        ]
    ],
    "open": [
        [
            Task("attention", 50, (ATTENTION,)),
            model("attention or bench_ours", 300),
        ]
    ],
}


class Program:
    """A task, and the rows that its process has written."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.file, self.log = (folder / f"{id(self)}.{kind}" for kind in ("rows", "log"))
        self.began = self.seconds = 0.0
        self.ended = ""  # how it ended; empty: it runs, or has not begun

    async def run(self, end: float) -> None:
        """Runs it until it ends, or until its limit. Then, and if this is cancelled, it is killed
        with everything it started."""
        self.began = time.monotonic()
        limit = min(self.task.seconds + GRACE_SECONDS, end - self.began)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.plugin"]
        command += ["-m", "not slow", f"--budget-seconds={max(0.0, limit - GRACE_SECONDS):.0f}"]
        command += [f"--out={self.file}"] * self.task.writes + [*self.task.arguments]
        with self.log.open("w") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its own processes end with it
            )
        ended = "the part was ended"
        try:
            status = await asyncio.wait_for(process.wait(), limit)
            died = f" ({signal.Signals(-status).name})" if status < 0 else ""
            ended = f"exit status {status}{died}"
        except TimeoutError:
            ended = f"killed after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all of its own have ended
                os.killpg(process.pid, signal.SIGKILL)
            self.seconds, self.ended = time.monotonic() - self.began, ended
            said = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
            print(f"\n--- {self.task.name}: {ended}, {self.seconds:.0f} s\n{said}", flush=True)
            await process.wait()

    def rows(self) -> list[dict[str, Any]]:
        """The rows in the planned order; those that were not reached have a status that says so."""
        if not self.file.exists():
            return []
        whole = self.file.read_text(encoding="utf-8").rpartition("\n")[0]  # it may be writing
        entries = [json.loads(line) for line in whole.splitlines()]
        planned = [name for entry in entries for name in entry.get("planned", [])]
        found = {entry["row"]["name"]: entry["row"] for entry in entries if "row" in entry}
        unreached = f"{NEEDS} ({self.task.name}: {self.ended or 'is running'})"
        names = dict.fromkeys([*planned, *found])
        return [found.get(name, {"name": name, "status": unreached}) for name in names]

    def about(self) -> dict[str, Any]:
        so_far = time.monotonic() - self.began if self.began else 0.0
        ended = self.ended or ("is running" if self.began else "not started (time)")
        return {"name": self.task.name, "seconds": self.seconds or so_far, "ended": ended}


def run_part(name: str, folder: Path | None, seconds: float) -> int:
    """Runs one part, prints the page, and returns the exit status. `folder`: None writes no
    files."""
    end, about = time.monotonic() + seconds, versions()
    with tempfile.TemporaryDirectory() as temporary:
        lanes = [[Program(task, Path(temporary)) for task in lane] for lane in PARTS[name]]
        programs = [program for lane in lanes for program in lane]

        def write() -> dict[str, Any]:
            """Writes both files, each whole or not at all; returns what the JSON file holds."""
            result: dict[str, Any] = {
                "part": name,
                "about": about,
                "tasks": [program.about() for program in programs],
                "rows": [row for program in programs for row in program.rows()],
            }
            result["estimates"] = compared(result)
            if folder is not None:
                write_whole(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
                write_whole(folder / f"{name}.md", page(result))
            return result

        async def run_lane(lane: list[Program]) -> None:
            for program in lane:
                if time.monotonic() < end:
                    await program.run(end)

        async def run_lanes() -> None:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run_lane(lane)) for lane in lanes]
                while not all(each.done() for each in running):
                    write()
                    await asyncio.sleep(WRITE_SECONDS)

        try:
            asyncio.run(run_lanes())
        finally:
            result = write()
    print("\n" + page(result), flush=True)
    if folder is not None:
        print(f"written to {folder}/{name}.json and .md", flush=True)
    return 1 if wrong(result) else 0


def versions() -> dict[str, Any]:
    """The device, and the versions of what is measured and compared."""
    import torch  # not needed to say what is missing

    found = about("triton", *OPTIONAL) | {"device": NO_GPU, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        device, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn.version()
        found |= {"device": device, "cudnn": cudnn}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the results")
    limit = "the limit of the part (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help=limit)
    parsed = parser.parse_args(arguments)
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        print(f"not installed, and nothing runs without it: {', '.join(missing)}", file=sys.stderr)
        return 2
    import torch

    folder = parsed.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    if folder is None and torch.cuda.is_available():
        folder = ROOT / "benchmarks/results/gpu"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # so that the programs end too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return run_part(parsed.part, folder, parsed.seconds)


if __name__ == "__main__":
    run_command(main)
