"""The GPU benchmarks at tiny sizes: every row is there, and a failure in one row does not affect
the others."""

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import head, kernels, model, operations, questions
from benchmarks.gpu.page import MEASURED, NEEDS, NO_TIME, OUT_OF_MEMORY, why_wrong
from benchmarks.gpu.programs import WIDE, Size, Variant, sizes
from costs.summary import flops_per_token
from model.kernels.attention_choice import BY_REQUEST
from model.kernels.backend import why_not_triton
from tests.gpu.bench import rows_of
from tests.planted import planted

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
OPTIONAL = {"liger": "liger_kernel", "hugging face": "transformers"}


def assert_measured(row: dict[str, Any], *numbers: str) -> None:
    """Its times and `numbers` are positive, unless it needs a package that is not there."""
    name = row["name"]
    if any(word in name and find_spec(package) is None for word, package in OPTIONAL.items()):
        assert row["status"].startswith("not installed: ")
        return
    assert row["status"] == MEASURED, row
    found = [*row["milliseconds"].values(), *(row[number] for number in numbers)]
    assert all(math.isfinite(x) and x > 0 for x in found)


def recorded(bench: Callable[..., None], *arguments: Any) -> list[dict[str, Any]]:
    """The rows of a benchmark that is called in this process group."""
    rows: list[dict[str, Any]] = []
    bench(*arguments, rows.append)
    return rows


# --- one smoke of each program --------------------------------------------------------------------


@pytest.mark.thorough
def test_every_kernel_is_timed(tmp_path: Path) -> None:
    status, planned, rows = rows_of(tmp_path, "benchmarks/gpu/kernels.py")
    assert (status, list(rows)) == (0, planned)
    assert rows["copy"]["bytes_per_second"] > 0
    assert rows["product"]["flops_per_second"] > 0
    assert rows["head compared"]["over_three_products"] > 0
    timed = [row for name, row in rows.items() if ", " in name]
    for row in timed:
        assert_measured(row, *("bytes_per_second", "fraction_of_copy") * ("bytes" in row))
    passes = {row["name"].rpartition(", ")[0] for row in timed}
    assert len(passes) == 18
    assert {f"{each}, {name}" for each in passes for name in ("triton", "torch")} <= rows.keys()


@pytest.mark.thorough
def test_every_program_trains(tmp_path: Path) -> None:
    some = "bench_profile or bench_step or bench_best or bench_ours"
    status, planned, rows = rows_of(tmp_path, "benchmarks/gpu/model.py", "-k", some)
    assert (status, list(rows)) == (0, planned)
    assert rows[f"best of ours at {WIDE}"]["status"] == f"{NEEDS}: no row has an MFU"
    assert rows["ours begin alike"]["right"]
    for key, variant in model.ROWS:
        row = rows[f"{key}, {variant.name}"]
        assert_measured(row, "tokens_per_second", "flops_per_second", "first_grad_norm")
        if row["status"] == MEASURED:
            assert row["first_loss"] == pytest.approx(math.log(96), rel=0.05), "random weights"
            size = sizes()[row["model"]]
            flops = flops_per_token(size.model, size.seq_len) * row["tokens_per_second"]
            assert row["flops_per_second"] == pytest.approx(flops)
    for key, variant in model.PROFILED:
        assert "kernels by kind" in rows[f"profile, {key}, {variant.name}"]["text"]


@pytest.mark.thorough
def test_every_question_has_its_rows(tmp_path: Path) -> None:
    """And a kernel that cannot run here is skipped with the reason."""
    status, planned, rows = rows_of(tmp_path, "benchmarks/gpu/questions.py")
    assert (status, list(rows)) == (0, planned)
    unmeasured = {name: row["status"] for name, row in rows.items() if row["status"] != MEASURED}
    if not torch.cuda.is_available():
        why = f"{NEEDS}: {{0}}: there is no GPU".format
        assert unmeasured == {f"attention, {kernel}": why(kernel) for kernel in BY_REQUEST}
    for setting in questions.SETTINGS:
        names = (f"step with FSDP{setting}", f"step without FSDP{setting}",
                 f"what FSDP adds over one rank{setting}")  # fmt: skip
        longer, shorter, saved = (rows[name]["milliseconds"]["median"] for name in names)
        assert saved == pytest.approx(longer - shorter)


@pytest.mark.thorough
def test_overlap_is_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    status, _, rows = rows_of(tmp_path, "benchmarks/gpu/overlap.py", "-k", "1 and high")
    assert status == 0
    assert rows["overlap, 1 connections, high priority"]["traffic_bytes_per_second"] > 0


# --- rows -----------------------------------------------------------------------------------------

# name of a benchmark → its body, its row's status, and what makes the exit status 1
BODIES = {
    "right": ("record({'a': float('nan')})", MEASURED, ""),
    "wrong": ("record({'a': 1}); assert False, 'planted'", MEASURED, "is wrong"),
    "fails": (
        "raise ValueError('one\\ntwo')",
        "failed: ValueError: one",
        "failed: ValueError: one",
    ),
    "of theirs": ("raise ValueError('one')", "failed: ValueError: one", ""),
    "memory": ("raise torch.OutOfMemoryError", OUT_OF_MEMORY, ""),
    "absent": ("import no_such_package", "not installed: no_such_package", ""),
    "after": ("record(found['right'])", MEASURED, ""),
    "after none": ("record(found['no such row'])", f"{NEEDS}: there is no no such row", ""),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rows")
    source = ["import pytest, torch"]
    for name, (body, _, _) in BODIES.items():
        source += ["@pytest.mark.theirs"] * (name == "of theirs")
        source += [f"def bench_{name.replace(' ', '_')}(found, record):", f"    {body}"]
    file = folder / "planted_rows.py"
    file.write_text("\n".join(source))
    status, planned, rows = rows_of(folder, str(file))
    assert (status, planned) == (1, list(BODIES))
    return rows


@pytest.mark.parametrize("name", BODIES)
def test_a_row_says_what_became_of_it(rows: dict[str, dict[str, Any]], name: str) -> None:
    _, status, wrong = BODIES[name]
    assert (rows[name]["status"], why_wrong(rows[name])) == (status, wrong)


def test_a_number_that_json_does_not_have_is_named(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["right"]["a"] == rows["after"]["a"] == "nan"


def test_without_time_every_row_says_so(tmp_path: Path) -> None:
    files = ("benchmarks/gpu/kernels.py", "benchmarks/gpu/model.py")
    status, planned, rows = rows_of(tmp_path, *files, "--budget-seconds=0")
    assert (status, list(rows)) == (0, planned)
    assert {row["status"] for row in rows.values()} == {NO_TIME}


# --- what is compared -----------------------------------------------------------------------------

# q and k of (4 + 2) heads, read and written, and 4 cosines and 4 sines in float32
ROTARY = (4 * 6 * 8 + 4 * 8) * 5


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (operations.norm_case(6, 64), 4 * 6 * 64, 6 * 6 * 64),
        (operations.add_norm_case(6, 64), 8 * 6 * 64, 8 * 6 * 64),
        (operations.swiglu_case(6, 64), 6 * 6 * 64, 10 * 6 * 64),
        (operations.rotary_case(5, (4, 2, 8)), ROTARY, ROTARY),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_are_those_of_the_kernels_tables(case, forward, backward):
    """In bfloat16, rms_norm.py has 4 and 6 bytes per element, and so on."""
    assert case.passes == {"forward": forward, "backward": backward}


def test_speed_is_the_fraction_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy", lambda: {"bytes_per_second": 1.25e12})
    told = lambda clock, work: {"median": 1e-3}  # noqa: E731
    monkeypatch.setattr(kernels.Clock, "milliseconds", told)
    case = operations.norm_case(6, 64)._replace(passes={"forward": 1e6})
    (row,) = recorded(kernels.bench_pass, case, "forward", "torch")
    assert row["bytes_per_second"] == pytest.approx(1e12), "1 MB in 1 µs"
    assert row["fraction_of_copy"] == pytest.approx(0.8)


def test_the_head_is_compared_with_its_products_and_with_eager() -> None:
    """Memory excludes the weight's gradient, which takes 4 · D · V bytes, and half of that in
    eager."""
    rows = [
        {"milliseconds": {"median": time}, "peak_memory_bytes": peak}
        for time, peak in ((2.2, 4100), (2.05, None), (4.0, 2000 + 800))
    ]
    found = head.compare(10, 100, *rows)
    assert found["over_three_products"] == pytest.approx(2.2 / 2.05)
    assert found["memory_over_eager"] == pytest.approx(100 / 800)
    assert found["memory_with_weight_gradient"] == pytest.approx(4100 / 2800)


@pytest.mark.thorough
def test_trouble_of_one_program_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs run out of memory, which is no error, two begin with a wrong value and are
    named, and the others are measured as usual."""

    def step(size: Size, variant: Variant) -> Any:
        if variant.compile:
            raise torch.OutOfMemoryError
        loss = 4.4 if variant.bfloat16 else 4.0
        norm = 1.1 if variant.checkpointing == "full" else 1.0
        return lambda rows: (torch.tensor(loss), torch.tensor(norm))

    monkeypatch.setattr(model, "lattice", step)
    monkeypatch.setattr(model, "hugging_face", step)
    monkeypatch.setattr(model, "planned", lambda *_: {})
    some = "bench_step or bench_ours"
    status, _, rows = rows_of(tmp_path, "benchmarks/gpu/model.py", "-k", some)
    for key, variant in model.ROWS:
        expected = OUT_OF_MEMORY if variant.compile else MEASURED
        assert rows[f"{key}, {variant.name}"]["status"] == expected
    assert (status, rows["ours begin alike"]["right"]) == (1, False)
    (said,) = (line for line in rows["ours begin alike"]["text"].splitlines() if "Error: " in line)
    assert said.partition("Error: ")[2].split("; ") == [
        "8B width, lattice, triton, full checkpointing, long step: "
        "first_grad_norm 1.10000, expected 1.00000",
        "8B width, lattice, triton, bfloat16: first_loss 4.40000, expected 4.00000",
    ]


def test_the_best_of_ours_is_of_the_wide_model_and_not_another_program() -> None:
    found = {
        name: {"model": key, "program": program, "mfu": mfu}
        for name, key, program, mfu in (
            ("a", WIDE, "lattice", 0.5),
            ("b", WIDE, "lattice", 0.6),
            ("c", "1B", "lattice", 0.9),
            ("d", WIDE, "hugging face", 0.8),
            ("e", WIDE, "lattice", None),
        )
    }
    assert recorded(model.bench_best, WIDE, found) == [{"mfu": 0.6, "of": "b"}]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("way", questions.FSDP)
def test_a_step_that_does_not_run_as_its_row_says_fails(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """FSDP is not forced where it should be, or is where it should not be."""
    (other,) = questions.FSDP.keys() - {way}
    monkeypatch.setitem(questions.FSDP, way, questions.FSDP[other])
    with pytest.raises(AssertionError, match=f"the step is not {way}"):
        recorded(questions.bench_fsdp, way, "")


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_wrong_sum_of_gradients_is_found(factor: float) -> None:
    @planted(questions, "run")
    def run(right, way, dy, x, total):
        right(way, dy, x, total)
        if way == "together":
            total.mul_(factor)

    with run():
        if factor == 1.0:
            recorded(questions.bench_weight_gradient, "down")
        else:
            with pytest.raises(AssertionError, match="together"):
                recorded(questions.bench_weight_gradient, "down")
