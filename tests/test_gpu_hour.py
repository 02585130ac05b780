"""The three parts of `make bench-gpu`: what they find is kept, a failure or the end of time stops
nothing else, and the page answers every estimate."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    gpu_accumulation,
    gpu_attention,
    gpu_fsdp,
    gpu_hour,
    gpu_kernels,
    gpu_memory,
    gpu_model,
    gpu_overlap,
    gpu_page,
    gpu_profile,
    gpu_resume,
    gpu_status,
    gpu_tasks,
    gpu_timing,
    gpu_training,
)
from benchmarks.gpu_estimates import ESTIMATES, FAST, OPEN, RIGHT, Estimate
from benchmarks.gpu_tasks import Task
from model.kernels.backend import why_not_triton
from runtime.start.init_distributed import init_distributed

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    why_not_triton(gpu_timing.DEVICE) is not None, reason="needs Triton"
)
# A quick program after the one that a test is about.
AFTER = Task("after", "benchmarks.gpu_attention", 30, ("--only", "attention, auto"))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces what a part runs by a program with this source, and then AFTER."""

    def replace(source: str) -> None:
        folder = tmp_path / "modules"
        folder.mkdir()
        (folder / "planted.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        task = Task("planted", "planted", 60)
        monkeypatch.setattr(gpu_hour, "PARTS", {RIGHT: [[[task, AFTER]]]})

    return replace


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the part `right`; returns its exit status and both files."""
    status = gpu_hour.main([RIGHT, "--tiny", "--out", str(folder), *arguments])
    return (
        status,
        json.loads((folder / "right.json").read_text()),
        (folder / "right.md").read_text(),
    )


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["status"] for row in result["rows"]}


WRONG_KERNEL = """
import sys
import torch
from benchmarks import gpu_kernels, gpu_operations
right = gpu_operations.rms_norm
gpu_operations.rms_norm = lambda x, w, eps, kernels: right(x, w, 0.1, kernels)
sys.exit(gpu_kernels.main(["--checks", "--only", "rms_norm 64", *sys.argv[1:]]))
"""


def test_a_wrong_kernel_fails_the_part_by_name(planted: Any, tmp_path: Path) -> None:
    planted(WRONG_KERNEL)
    status, result, text = run(tmp_path)
    assert status == 1
    assert "- rms_norm 64, check: is wrong" in text
    assert "add_rms_norm 64, check: is wrong" not in text
    assert statuses(result)["attention, auto"] == gpu_status.MEASURED


HANGS = """
import sys, time
from benchmarks.gpu_rows import Measurement, options, parse, run_all
rows = [Measurement(name, 0, measure) for name, measure in
        (("quick", dict), ("hangs", lambda: time.sleep(600)), ("later", dict))]
run_all(rows, parse(options("", 1), sys.argv[1:]), lambda row: row["name"])
"""


@pytest.mark.thorough
def test_at_the_deadline_the_rest_is_listed_as_not_measured(
    planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(HANGS)
    monkeypatch.setattr(gpu_tasks, "GRACE_SECONDS", 5)
    began = time.monotonic()
    status, result, text = run(tmp_path, "--seconds", "25")
    assert time.monotonic() - began < 60
    assert status == 0
    found = statuses(result)
    assert found["quick"] == gpu_status.MEASURED
    assert found["hangs"] == found["later"] != gpu_status.MEASURED
    assert found["later"].startswith("not measured (planted: killed after")
    assert [task["ended"] for task in result["tasks"]][1] == "not started (time)"
    assert "| after | 0 | not started (time) |" in text


CRASHES = """
import os, sys
from benchmarks.gpu_rows import Measurement, options, parse, run_all
rows = [Measurement("first", 0, dict), Measurement("crash", 0, os.abort)]
run_all(rows, parse(options("", 1), sys.argv[1:]), lambda row: row["name"])
"""


@pytest.mark.thorough
def test_a_program_that_crashes_stops_no_other(planted: Any, tmp_path: Path) -> None:
    planted(CRASHES)
    status, result, _ = run(tmp_path)
    assert status == 1
    found = statuses(result)
    assert found["first"] == found["attention, auto"] == gpu_status.MEASURED
    assert "SIGABRT" in found["crash"]


@pytest.mark.thorough
def test_what_was_found_is_there_while_the_part_runs(tmp_path: Path) -> None:
    """The part is ended from outside as soon as its file has a measured row. The file is whole, and
    none of the part's programs is left."""
    command = [sys.executable, "-m", "benchmarks.gpu_hour", OPEN, "--tiny", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    file, measured = tmp_path / "open.json", []
    while not measured:
        assert process.poll() is None
        time.sleep(0.1)
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        measured = [row for row in rows if row["status"] == gpu_status.MEASURED]
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    result = json.loads(file.read_text())
    rows, ends = result["rows"], [task["ended"] for task in result["tasks"]]
    assert "the part was ended" in ends
    assert [row for row in rows if row["name"] == measured[0]["name"]] == measured[:1]
    alive = [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert alive == []


def test_absent_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_hour, "PARTS", {RIGHT: []})
    hidden = {"transformers", "xdist"}
    monkeypatch.setattr(gpu_hour, "find_spec", lambda n: None if n in hidden else find_spec(n))
    status, _, text = run(tmp_path)
    assert status == 0
    for package in hidden:
        assert f"- {package}: {gpu_hour.OPTIONAL[package]}" in text
    monkeypatch.setattr(gpu_hour, "find_spec", lambda name: None if name == "pydantic" else name)
    assert gpu_hour.main([RIGHT]) == 2
    assert "nothing runs without it: pydantic\n" in capsys.readouterr().err


IMPORT_ALL = """
import importlib, sys
sys.modules.update(dict.fromkeys({absent}))  # as if they were not installed
for name in {modules}:
    importlib.import_module(name)
"""


def test_the_programs_need_only_what_they_say() -> None:
    """No program imports an optional package, or one of training's that these parts do not need,
    except where it uses it."""
    modules = sorted(f"benchmarks.{p.stem}" for p in (ROOT / "benchmarks").glob("gpu_*.py"))
    absent = [*gpu_hour.OPTIONAL, "psutil", "datasets", "wandb", "tensorboard", "matplotlib",
              "tokenizers", "hypothesis"]  # fmt: skip
    source = IMPORT_ALL.format(absent=absent, modules=modules)
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)
    control = IMPORT_ALL.format(absent=["sentencepiece"], modules=modules)  # needed
    done = subprocess.run([sys.executable, "-c", control], cwd=ROOT, capture_output=True, text=True)
    assert "import of sentencepiece halted" in done.stderr


# --- the page -------------------------------------------------------------------------------------


def planned_names(tmp_path: Path) -> dict[str, set[str]]:
    """The names of each part's rows at full size. Only those of kernels depend on the size."""

    def names(program: Any, *arguments: str) -> set[str]:
        file = tmp_path / "rows"
        file.unlink(missing_ok=True)
        program.main(["--tiny", "--budget-seconds", "0", "--out", str(file), *arguments])
        return set(json.loads(file.read_text().splitlines()[0])["planned"])

    parsed = gpu_kernels.options("", 0)
    parsed.add_argument("--checks", action="store_true")
    init_distributed()
    try:
        cases = gpu_kernels.list_cases(gpu_kernels.FULL)
        kernels = {n for c in cases for n in gpu_kernels.names_of(c, parsed.parse_args([]))}
    finally:
        dist.destroy_process_group()
    others = (gpu_attention, gpu_accumulation, gpu_overlap, gpu_fsdp)
    return {
        RIGHT: names(gpu_memory),
        FAST: kernels
        | names(gpu_kernels)
        | names(gpu_model)
        | names(gpu_profile)
        | {gpu_model.BEST},
        OPEN: set().union(*map(names, others)) | names(gpu_model, "--attention"),
    }


def test_every_estimate_has_a_row_or_says_why_not(tmp_path: Path) -> None:
    names = planned_names(tmp_path)
    for estimate in ESTIMATES:
        assert bool(estimate.row) != bool(estimate.why_not), estimate
        assert estimate.source
        assert estimate.least <= estimate.most
        assert not estimate.row or estimate.row in names[estimate.part], estimate
    assert len({(e.part, e.what) for e in ESTIMATES}) == len(ESTIMATES)


def result_of(**changes: Any) -> dict[str, Any]:
    about = {"device": "NVIDIA H200", "torch": "2.11"}
    return {"part": FAST, "measurement": True, "about": about, "absent": {},
            "tasks": []} | changes  # fmt: skip


@pytest.mark.parametrize(
    ("mfu", "ratio", "verdict"),
    [(0.5, 0.5 / 0.57, "below"), (0.575, 1.0, "within"), (0.7, 0.7 / 0.58, "above")],
)
def test_an_estimate_beside_its_measurement(mfu: float, ratio: float, verdict: str) -> None:
    estimate = Estimate(FAST, "MFU", 0.57, 0.58, "a source", "a row", "deep.mfu", "H200")
    rows = [{"name": "a row", "status": gpu_status.MEASURED, "deep": {"mfu": mfu}}]
    found = gpu_page.find(estimate, result_of(), rows)
    assert (found.measured, found.verdict) == (mfu, verdict)
    assert found.ratio == pytest.approx(ratio)
    other = result_of(about={"device": "NVIDIA H100"})
    assert gpu_page.find(estimate, other, rows).verdict.startswith(f"{verdict} (another device")


def test_an_estimate_without_a_measurement_says_why() -> None:
    estimate = Estimate(FAST, "MFU", 0.57, 0.58, "a source", "a row", "mfu")
    said = lambda result, rows: gpu_page.find(estimate, result, rows).verdict  # noqa: E731
    row = {"name": "a row", "status": "out of memory"}
    assert said(result_of(), [row]) == "out of memory"
    killed = [{"name": "model", "ended": "killed after 9 s", "seconds": 9.0}]
    assert said(result_of(tasks=killed), []) == "not measured: model killed after 9 s"
    assert "hardware.py" in said(result_of(), [row | {"status": gpu_status.MEASURED, "mfu": None}])
    measured = [row | {"status": gpu_status.MEASURED, "mfu": 0.575}]
    assert "needs a GPU" in said(result_of(measurement=False), measured)


def test_the_page_has_every_estimate_of_its_part() -> None:
    for part in gpu_hour.PARTS:
        text = gpu_page.page(result_of(part=part), [])
        mine = [estimate for estimate in ESTIMATES if estimate.part == part]
        assert mine
        assert all(f"| {estimate.what} | " in text for estimate in mine)


# --- right ----------------------------------------------------------------------------------------


def rows_of(program: Any, folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    file = folder / "program.rows"
    status = program.main(["--tiny", "--out", str(file), *arguments])
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return status, [entry["row"] for entry in entries if "row" in entry]


def test_a_wrong_tensor_is_found_in_every_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = {"gradient of w": torch.randn(100, generator=generator, dtype=torch.float64)}
    rounded = {name: tensor.bfloat16() for name, tensor in exact.items()}
    for factor, same in ((1 + 1e-10, True), (1 + 1e-8, False), (float("nan"), False)):
        (check,) = gpu_training.compare({k: t * factor for k, t in exact.items()}, exact, None)
        assert check.passed is same
    for factor, same in ((1.0, True), (1.05, False)):
        found = {name: tensor * factor for name, tensor in rounded.items()}
        (check,) = gpu_training.compare(found, exact, rounded)
        assert check.passed is same
    with pytest.raises(AssertionError, match="there is no gradient of w"):
        gpu_training.compare({}, exact, None)


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [1.0, 1.0 + 1e-7])
def test_training_is_compared_with_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """One mechanism, right and with a gradient that is slightly wrong."""
    train = gpu_training.train

    def slightly_wrong(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = train(*arguments, **options)
        found["gradient of blocks.1.attention.key.weight"] *= factor
        return found

    monkeypatch.setattr(gpu_training, "train", slightly_wrong)
    status, (row,) = rows_of(gpu_training, tmp_path, "--only", "qk_norm, float64")
    assert (status, row["right"]) == ((0, True) if factor == 1 else (1, False))
    if factor != 1:
        assert [c["what"] for c in row["wrong"]] == ["gradient of blocks.1.attention.key.weight"]


@pytest.mark.parametrize(("factor", "status"), [(1.04, 0), (1.06, 1), (0.94, 1)])
def test_memory_that_differs_from_the_rehearsal_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, status: int
) -> None:
    report = {"peak_memory_bytes": 1000, "peak_in": "F0.0", "memory": {},
              "planned": {"peak_memory_bytes": 1001}}  # fmt: skip
    monkeypatch.setattr(gpu_memory, "predicted", lambda config, folder: report)
    monkeypatch.setattr(gpu_memory, "measured_peak", lambda config: int(1000 * factor))
    found, rows = rows_of(gpu_memory, tmp_path, "--only", "zero_stage 3")
    assert found == status
    assert [row["right"] for row in rows] == [status == 0]


def test_a_step_is_compared_with_fsdp_and_without(tmp_path: Path) -> None:
    status, rows = rows_of(gpu_fsdp, tmp_path)
    assert (status, {row["status"] for row in rows}) == (0, {gpu_status.MEASURED})
    assert [row["name"] for row in rows[:3]] == [
        "step with FSDP", "step without FSDP", gpu_fsdp.DIFFERENCE,
    ]  # fmt: skip
    times = [row["milliseconds"]["median"] for row in rows]
    assert times[2] == pytest.approx(times[0] - times[1])


@pytest.mark.parametrize("way", gpu_fsdp.WAYS)
def test_a_step_that_does_not_run_as_its_row_says_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """FSDP is not forced where it should be, or is where it should not be."""
    (other,) = gpu_fsdp.WAYS.keys() - {way}
    monkeypatch.setitem(gpu_fsdp.WAYS, way, gpu_fsdp.WAYS[other])
    status, rows = rows_of(gpu_fsdp, tmp_path, "--only", "step")
    assert status == 1
    failed = [row for row in rows if row["status"].startswith(gpu_status.FAILED)]
    assert len(failed) == len(rows) / 2
    assert all(f"the step is not {way}" in row["status"] for row in failed)


@pytest.mark.parametrize(
    ("off", "same", "status"), [(0.0, True, 0), (1e-7, True, 1), (0.0, False, 1)]
)
def test_a_resumed_run_with_other_bits_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, same: bool, status: int
) -> None:
    def train(folder: Path, data: Path, **sections: Any) -> dict[int, float]:
        again = "resume" in sections["checkpoint"]
        return dict.fromkeys(range(4 if again else 1, 7), 2.0 * (1 + off * again))

    monkeypatch.setattr(gpu_resume, "train", train)
    monkeypatch.setattr(gpu_resume, "tensors", lambda folder: {"a": "x" if same else folder.name})
    found, (row,) = rows_of(gpu_resume, tmp_path, "--only", "pure_bfloat16")
    assert (found, row["right"]) == (status, status == 0)


@pytest.mark.thorough
def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    status, rows = rows_of(gpu_resume, tmp_path, "--only", "resume, deterministic")
    assert status == 0
    assert all(row["same_bytes"] and row["loss_off"] == 0 for row in rows)


# two of the parts take minutes, and other tests run their programs
@pytest.mark.parametrize(
    "part",
    [pytest.param(OPEN, marks=pytest.mark.thorough)]
    + [pytest.param(part, marks=pytest.mark.slow) for part in (RIGHT, FAST)],
)
def test_each_part_runs_to_its_end(part: str, tmp_path: Path) -> None:
    """As `make bench-gpu PART=…` without a GPU; what does not fit into the time is listed."""
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_hour", part, "--tiny", "--seconds", "240"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / f"{part}.json").read_text())
    tasks = [task for stage in gpu_hour.PARTS[part] for lane in stage for task in lane]
    assert {task["name"] for task in result["tasks"]} == {task.name for task in tasks}
    assert any(row["status"] == gpu_status.MEASURED for row in result["rows"])
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{part}.json", f"{part}.md"]
