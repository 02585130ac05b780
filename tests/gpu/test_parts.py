"""The three parts of `make bench-gpu`: what they find is kept, a failure or the end of time stops
nothing else, and the page answers every estimate."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kernels, run
from benchmarks.gpu.operations import FULL
from benchmarks.gpu.page import MEASURED, NO_GPU, Estimate, estimates, find
from benchmarks.gpu.run import PARTS, Task
from model.kernels.backend import why_not_triton
from tests import ROOT
from tests.gpu.bench import rows_of

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")

SOURCES = {
    "quick": "def bench_first(record): record({'mfu': 1.0})",
    "late": "def bench_last(record): record({})",
    "hangs": "import time\ndef bench_soon(record): record({})\ndef bench_hangs(): time.sleep(600)\n"
    "def bench_later(): pass",
    "crashes": "import os\ndef bench_before(record): record({})\ndef bench_crash(): os.abort()",
    # loaded with the tests of kernels
    "wrong_kernel": "from benchmarks.gpu import operations\nright = operations.rms_norm\n"
    "operations.rms_norm = lambda x, w, eps, kernels: right(x, w, 0.1, kernels)",
}
WRONG_KERNEL = ("-p", "wrong_kernel", "tests/gpu/test_kernels_at_size.py", "-k", "4096")
AT_SIZE = "gpu/test_kernels_at_size.py::test_a_kernel_at_full_size[{}]".format


@pytest.mark.thorough
def test_a_part_says_what_became_of_each_row(tmp_path: Path, monkeypatch: Any) -> None:
    """One kernel is wrong, a program crashes, and one hangs at the end. The part fails by what is
    wrong and by what crashes, and its page has every estimate."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    task = lambda name: Task(name, 150, (str(tmp_path / f"{name}.py"),))  # noqa: E731
    # "hangs" must have begun before its limit, also on a busy machine
    lanes = [[task("crashes"), task("quick"), Task("wrong kernel", 200, WRONG_KERNEL)],
             [task("hangs")._replace(seconds=45), task("late")]]  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "GRACE_SECONDS", 5)
    monkeypatch.setattr(run, "PARTS", {"right": lanes})
    assert run.main(["right", "--out", str(tmp_path), "--seconds", "400"]) == 1
    result = json.loads((tmp_path / "right.json").read_text())
    assert {row["name"]: row["status"] for row in result["rows"]} == {
        AT_SIZE("rms_norm 4096"): MEASURED,
        AT_SIZE("add_rms_norm 4096"): MEASURED,
        "before": MEASURED,
        "crash": "not measured (crashes: exit status -6 (SIGABRT))",
        "first": MEASURED,
        "soon": MEASURED,
        "hangs": "not measured (hangs: killed after 50 s)",
        "later": "not measured (hangs: killed after 50 s)",
        "last": MEASURED,
    }
    text = (tmp_path / "right.md").read_text()
    wrong = text.partition("## Wrong or failed\n\n")[2].partition("\n\n")[0]
    crashes = "- crashes: exit status -6 (SIGABRT)"
    assert wrong.splitlines() == [f"- {AT_SIZE('rms_norm 4096')}: is wrong", crashes]
    assert all(f"| {each.what} | " in text for each in estimates() if each.part == "right")


@pytest.mark.thorough
def test_what_was_found_is_there_while_the_part_runs(tmp_path: Path) -> None:
    """The part is ended from outside as soon as its file has a measured row. The file is whole, and
    none of the part's programs is left."""
    command = [sys.executable, "-m", "benchmarks.gpu.run", "open", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    file, measured = tmp_path / "open.json", []
    while not measured:
        assert process.poll() is None
        time.sleep(0.1)
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        measured = [row for row in rows if row["status"] == MEASURED]
    asked = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    children = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    result = json.loads(file.read_text())
    assert "the part was ended" in [task["ended"] for task in result["tasks"]]
    assert "not started (time)" in [task["ended"] for task in result["tasks"]]
    assert [row for row in result["rows"] if row["name"] == measured[0]["name"]] == measured[:1]
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


IMPORT_ALL = """
import importlib, sys
def import_all():
    for name in {modules}:
        importlib.import_module(name)
sys.modules.update(dict.fromkeys([*{absent}, "sentencepiece"]))  # as if they were not installed
try:
    import_all()
except ImportError as error:  # control: sentencepiece is needed
    print(error)
del sys.modules["sentencepiece"]
import_all()
"""


@pytest.mark.thorough
def test_the_programs_need_only_what_they_say() -> None:
    """No program or test of a part imports an optional package, or one of training's that these
    parts do not need, except where it uses it."""
    files = [*(ROOT / "benchmarks/gpu").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")]
    modules = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    absent = ["xdist", "transformers", "liger_kernel", "flash_attn_interface", "psutil", "datasets",
              "wandb", "tensorboard", "matplotlib", "tokenizers", "hypothesis"]  # fmt: skip
    command = [sys.executable, "-c", IMPORT_ALL.format(absent=absent, modules=modules)]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "import of sentencepiece halted" in said


def result_of(*rows: dict[str, Any], device: str = "NVIDIA H200", **changes: Any) -> dict[str, Any]:
    about = {"device": device, "torch": "2.11"}
    return {"part": "fast", "about": about, "tasks": [], "rows": rows} | changes


def test_an_estimate_beside_its_measurement() -> None:
    estimate = Estimate("fast", "MFU", "a source", 0.57, 0.58, "a row", "mfu", "H200")
    row = {"name": "a row", "status": MEASURED, "mfu": 0.575}
    killed = {"name": "model", "ended": "killed after 9 s", "seconds": 9.0}
    no_mfu = "not measured: no mfu (is the device in hardware.py?)"
    other = "within (another device: made for H200)"
    for result, measured, ratio, verdict in (
        (result_of(row | {"mfu": 0.5}), 0.5, 0.5 / 0.57, "below"),
        (result_of(row), 0.575, 1.0, "within"),
        (result_of(row | {"mfu": 0.7}), 0.7, 0.7 / 0.58, "above"),
        (result_of(row, device="NVIDIA H100"), 0.575, 1.0, other),
        (result_of(row | {"status": "out of memory"}), None, None, "out of memory"),
        (result_of(tasks=[killed]), None, None, "not measured: model killed after 9 s"),
        (result_of(row | {"mfu": None}), None, None, no_mfu),
        (result_of(row, device=NO_GPU), None, None, "not measured: needs a GPU and full sizes"),
    ):
        found = find(estimate, result)
        assert (found["measured"], found["verdict"]) == (measured, verdict)
        assert found["ratio"] == pytest.approx(ratio)


@pytest.mark.slow  # one to several minutes a part; other tests run their programs
@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_to_its_end(part: str, tmp_path: Path) -> None:
    """As `make bench-gpu PART=…` without a GPU; what does not fit into the time is listed."""
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.run", part, "--seconds", "300"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / f"{part}.json").read_text())
    tasks = [task for lane in PARTS[part] for task in lane]
    assert {task["name"] for task in result["tasks"]} == {task.name for task in tasks}
    assert any(row["status"] == MEASURED for row in result["rows"])
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{part}.json", f"{part}.md"]


@pytest.mark.thorough
def test_every_estimate_has_a_row_or_says_why_not(tmp_path: Path) -> None:
    """Every file that a part runs is there. Names of rows are the same at full size, but for those
    of kernels."""
    names = {}
    for part, lanes in PARTS.items():
        words = {word for lane in lanes for task in lane for word in task.arguments}
        files = {word for word in words if ".py" in word}
        assert all((ROOT / file.partition("::")[0]).exists() for file in files), files
        of_gpu = [file for file in files if "/gpu/" in file]
        names[part] = {*rows_of(tmp_path, *of_gpu, "--collect-only")[1]}
    names["fast"] |= {each.id for each in kernels.passes(FULL)}
    for estimate in estimates():
        assert bool(estimate.row) != bool(estimate.why_not), estimate
        assert not estimate.row or estimate.row in names[estimate.part], estimate
