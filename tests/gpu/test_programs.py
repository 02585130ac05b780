"""The GPU benchmarks at tiny sizes: every row is there, and a failure in one row does not affect
the others."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import model, operations
from benchmarks.gpu.page import MEASURED, NEEDS, NO_TIME, OUT_OF_MEMORY, why_wrong
from benchmarks.gpu.programs import WIDE
from model.kernels.attention_choice import BY_REQUEST
from model.kernels.backend import why_not_triton
from tests.gpu.bench import rows_of

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
OURS = {"model": WIDE, "program": "lattice"}  # a row
OPTIONAL = {"liger": "liger_kernel", "hugging face": "transformers"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "some"),
    [
        ("kernels", ""),
        ("model", "bench_profile or bench_step or bench_ours"),
        ("attention", ""),
    ],
)
def test_every_row_of_a_program_is_measured(tmp_path: Path, program: str, some: str) -> None:
    """Or needs a package that is not there, or a GPU, and says so."""
    status, planned, rows = rows_of(tmp_path, f"benchmarks/gpu/{program}.py", "-k", some)
    assert (status, list(rows)) == (0, planned)
    needs = {f"attention, {kernel}": f"{NEEDS}: {kernel}: there is no GPU" for kernel in BY_REQUEST}
    for name, row in rows.items():
        packages = [package for word, package in OPTIONAL.items() if word in name]
        if any(find_spec(package) is None for package in packages):
            assert row["status"].startswith("not installed: ")
        elif name in needs and not torch.cuda.is_available():
            assert row["status"] == needs[name]
        else:
            assert row["status"] == MEASURED, row
            assert all(time > 0 for time in row.get("milliseconds", {}).values()), row


def test_bytes_are_those_of_the_kernels_tables() -> None:
    """In bfloat16, rms_norm.py has 4 and 6 bytes per element, and so on."""
    # q and k of (4 + 2) heads, read and written, and 4 cosines and 4 sines in float32
    rotary = (4 * 6 * 8 + 4 * 8) * 5
    for case, forward, backward in (
        (operations.norm_case(6, 64), 4 * 6 * 64, 6 * 6 * 64),
        (operations.add_norm_case(6, 64), 8 * 6 * 64, 8 * 6 * 64),
        (operations.swiglu_case(6, 64), 6 * 6 * 64, 10 * 6 * 64),
        (operations.rotary_case(5, (4, 2, 8)), rotary, rotary),
    ):
        assert case.passes == {"forward": forward, "backward": backward}, case.name


# name of a benchmark → its body, its row's status, and what makes the exit status 1
BODIES = {
    "right": ("record({'a': float('nan')})", MEASURED, ""),
    "wrong": ("record({'a': 1}); assert False, 'planted'", MEASURED, "is wrong"),
    "fails": ("raise ValueError('one\\ntwo')", *["failed: ValueError: one"] * 2),
    "of theirs": ("raise ValueError('one')", "failed: ValueError: one", ""),
    "memory": ("raise torch.OutOfMemoryError", OUT_OF_MEMORY, ""),
    "absent": ("import no_such_package", "not installed: no_such_package", ""),
    "after": ("record(found['right'])", MEASURED, ""),
    "after none": ("record(found['no such row'])", f"{NEEDS}: there is no no such row", ""),
}


def test_a_row_says_what_became_of_it(tmp_path: Path) -> None:
    source = ["import pytest, torch"]
    for name, (body, _, _) in BODIES.items():
        source += ["@pytest.mark.theirs"] * (name == "of theirs")
        source += [f"def bench_{name.replace(' ', '_')}(found, record):", f"    {body}"]
    file = tmp_path / "planted_rows.py"
    file.write_text("\n".join(source))
    status, planned, rows = rows_of(tmp_path, str(file))
    assert (status, planned) == (1, list(BODIES))
    said = {name: (row["status"], why_wrong(row)) for name, row in rows.items()}
    assert said == {name: (status, why) for name, (_, status, why) in BODIES.items()}
    assert rows["right"]["a"] == rows["after"]["a"] == "nan"  # JSON has no such number
    status, planned, rows = rows_of(tmp_path, str(file), "--budget-seconds=0")
    assert (status, list(rows)) == (0, planned)
    assert {row["status"] for row in rows.values()} == {NO_TIME}


def test_programs_that_begin_with_a_wrong_value_are_named() -> None:
    alike = OURS | {"longer": False, "kernels": "triton", "checkpointing": "none",
                    "first_loss": 4.0, "first_grad_norm": 1.0}  # fmt: skip
    found = {
        "ours": alike,
        "by torch": alike | {"kernels": "torch", "first_loss": 4.01},
        "bfloat16": alike | {"first_loss": 4.4},
        "full": alike | {"checkpointing": "full", "first_grad_norm": math.nan},
        "theirs": alike | {"program": "hugging face", "first_loss": 9.0},
        "another model": alike | {"model": "1B", "first_loss": 9.0},
    }
    with pytest.raises(AssertionError) as wrong:
        model.bench_ours_begin_alike(found)
    assert str(wrong.value).split("; ") == [
        "bfloat16: first_loss 4.40000, expected 4.01000",
        "full: first_grad_norm nan, expected 1.00000",
    ]
