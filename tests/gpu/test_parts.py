"""The three parts of `make bench-gpu`: what they find is kept, a failure or the end of time stops
nothing else, and the page answers every estimate."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kernels, run
from benchmarks.gpu.operations import FULL
from benchmarks.gpu.page import MEASURED, NO_GPU, Estimate, compared, estimates, find, page
from benchmarks.gpu.run import PARTS, Task
from model.kernels.backend import why_not_triton
from tests import ROOT
from tests.gpu.bench import rows_of

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")

SOURCES = {
    "quick": "def bench_first(record): record({'points': 1.0})",
    "hangs": "import time\ndef bench_soon(record): record({})\ndef bench_hangs(): time.sleep(600)\n"
    "def bench_later(): pass",
    "crashes": "import os\ndef bench_before(record): record({})\ndef bench_crash(): os.abort()",
    # loaded with the tests of kernels
    "wrong_kernel": "from benchmarks.gpu import operations\nright = operations.rms_norm\n"
    "operations.rms_norm = lambda x, w, eps, kernels: right(x, w, 0.1, kernels)",
}
WRONG_KERNEL = (
    "-p",
    "wrong_kernel",
    "tests/gpu/test_kernels_at_size.py",
    "-k",
    "full and norm and 4096",
)
AT_SIZE = "gpu/test_kernels_at_size.py::test_a_kernel_at_full_size[{}]".format


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """A part in which one kernel is wrong, a program crashes, and one hangs at the end: its exit
    status, and both of its files."""
    folder = tmp_path_factory.mktemp("part")
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    task = lambda name: Task(name, 150, (str(folder / f"{name}.py"),))  # noqa: E731
    lanes = [[Task("wrong kernel", 200, WRONG_KERNEL)], [task("crashes"), task("quick")],
             [task("hangs")._replace(seconds=45), task("quick")._replace(name="late")]]  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        patched.setattr(run, "GRACE_SECONDS", 5)
        patched.setattr(run, "PARTS", {"right": lanes})
        status = run.main(["right", "--out", str(folder), "--seconds", "400"])
    files = (folder / f"right.{ending}" for ending in ("json", "md"))
    result, text = (file.read_text() for file in files)
    return status, json.loads(result), text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "status"),
    [
        (AT_SIZE("rms_norm 4096"), MEASURED),
        (AT_SIZE("add_rms_norm 4096"), MEASURED),
        ("before", MEASURED),
        ("crash", "not measured (crashes: exit status -6 (SIGABRT))"),
        ("first", MEASURED),
        ("soon", MEASURED),
        ("hangs", "not measured (hangs: killed after 50 s)"),
        ("later", "not measured (hangs: killed after 50 s)"),
    ],
)
def test_a_part_says_what_became_of_each_row(ended: Any, name: str, status: str) -> None:
    assert {row["name"]: row["status"] for row in ended[1]["rows"]}[name] == status


@pytest.mark.thorough
def test_a_part_fails_by_what_is_wrong_and_by_what_crashes(ended: Any) -> None:
    status, _, text = ended
    assert status == 1
    wrong = text.partition("## Wrong or failed\n\n")[2].partition("\n\n")[0].splitlines()
    assert wrong == [
        f"- {AT_SIZE('rms_norm 4096')}: is wrong",
        "- crashes: exit status -6 (SIGABRT)",
    ]


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


def test_absent_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PARTS", {"right": []})
    monkeypatch.setattr(run, "OPTIONAL", ("pytest", "no-such-package"))
    assert run.main(["right", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "right.md").read_text()
    assert f"pytest {version('pytest')}, no-such-package not installed" in text
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "pydantic" else name)
    assert run.main(["right"]) == 2
    assert "nothing runs without it: pydantic\n" in capsys.readouterr().err


IMPORT_ALL = """
import importlib, sys
sys.modules.update(dict.fromkeys({absent}))  # as if they were not installed
for name in {modules}:
    importlib.import_module(name)
"""


@pytest.mark.thorough
def test_the_programs_need_only_what_they_say() -> None:
    """No program or test of a part imports an optional package, or one of training's that these
    parts do not need, except where it uses it."""
    files = [*(ROOT / "benchmarks/gpu").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")]
    modules = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    absent = ["xdist", "transformers", "liger_kernel", "flash_attn_interface", "psutil", "datasets",
              "wandb", "tensorboard", "matplotlib", "tokenizers", "hypothesis"]  # fmt: skip
    source = IMPORT_ALL.format(absent=absent, modules=modules)
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)
    control = IMPORT_ALL.format(absent=["sentencepiece"], modules=modules)  # needed
    done = subprocess.run([sys.executable, "-c", control], cwd=ROOT, capture_output=True, text=True)
    assert "import of sentencepiece halted" in done.stderr


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


# --- the page -------------------------------------------------------------------------------------


def files_of(part: str) -> set[str]:
    """The files that a part runs."""
    words = {word for lane in PARTS[part] for task in lane for word in task.arguments}
    return {word for word in words if ".py" in word}


def test_every_file_of_a_part_is_there() -> None:
    for part in PARTS:
        for file in files_of(part):
            assert (ROOT / file.partition("::")[0]).exists(), file


@pytest.mark.thorough
def test_every_estimate_has_a_row_or_says_why_not(tmp_path: Path) -> None:
    """Names of rows are the same at full size, but for those of kernels."""
    names = {}
    for part in PARTS:
        files = [file for file in files_of(part) if "/gpu/" in file]
        names[part] = {*rows_of(tmp_path, *files, "--collect-only")[1]}
    names["fast"] |= {each.id for each in kernels.passes(FULL)}
    for estimate in estimates():
        assert bool(estimate.row) != bool(estimate.why_not), estimate
        assert estimate.source
        assert estimate.least <= estimate.most
        assert not estimate.row or estimate.row in names[estimate.part], estimate
    assert len({(e.part, e.what) for e in estimates()}) == len(estimates())


def result_of(*rows: dict[str, Any], device: str = "NVIDIA H200", **changes: Any) -> dict[str, Any]:
    about = {"device": device, "torch": "2.11"}
    return {"part": "fast", "about": about, "tasks": [], "rows": rows} | changes


ESTIMATE = Estimate("fast", "MFU", "a source", 0.57, 0.58, "a row", "mfu", "H200")


@pytest.mark.parametrize(
    ("mfu", "ratio", "verdict"),
    [(0.5, 0.5 / 0.57, "below"), (0.575, 1.0, "within"), (0.7, 0.7 / 0.58, "above")],
)
def test_an_estimate_beside_its_measurement(mfu: float, ratio: float, verdict: str) -> None:
    row = {"name": "a row", "status": MEASURED, "mfu": mfu}
    found = find(ESTIMATE, result_of(row))
    assert (found["measured"], found["verdict"]) == (mfu, verdict)
    assert found["ratio"] == pytest.approx(ratio)
    other = find(ESTIMATE, result_of(row, device="NVIDIA H100"))
    assert other["verdict"].startswith(f"{verdict} (another device")


KILLED = {"name": "model", "ended": "killed after 9 s", "seconds": 9.0}
ROW = {"name": "a row", "status": MEASURED, "mfu": 0.575}


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (result_of(ROW | {"status": "out of memory"}), "out of memory"),
        (result_of(tasks=[KILLED]), "not measured: model killed after 9 s"),
        (result_of(ROW | {"mfu": None}), "not measured: no mfu (is the device in hardware.py?)"),
        (result_of(ROW, device=NO_GPU), "not measured: needs a GPU and full sizes"),
    ],
)
def test_an_estimate_without_a_measurement_says_why(result: dict[str, Any], why: str) -> None:
    found = find(ESTIMATE, result)
    assert (found["measured"], found["verdict"]) == (None, why)


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_every_estimate_of_its_part(part: str) -> None:
    result = result_of(part=part)
    text = page(result | {"estimates": compared(result)})
    mine = [estimate for estimate in estimates() if estimate.part == part]
    assert mine
    assert all(f"| {estimate.what} | " in text for estimate in mine)
