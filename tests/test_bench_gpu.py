"""The GPU benchmarks at tiny sizes: every row is present, a wrong kernel is found, and a failure in
one row does not affect the others."""

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_aims,
    gpu_head,
    gpu_kernels,
    gpu_model,
    gpu_operations,
    gpu_optimizer,
    gpu_rows,
    gpu_timing,
)
from benchmarks.gpu_check import Check
from benchmarks.gpu_programs import SMALL, WIDE, Size, Step, Variant, sizes
from benchmarks.gpu_rows import Report, attempt
from benchmarks.gpu_status import MEASURED, NO_TIME, OUT_OF_MEMORY
from costs.summary import flops_per_token
from model.kernels import linear_cross_entropy
from model.kernels.backend import why_not_triton

pytestmark = pytest.mark.skipif(
    why_not_triton(gpu_timing.DEVICE) is not None, reason="needs Triton"
)

FOUR = {"triton", "torch", "compile", "liger"}
BOTH = ("forward", "backward")
KERNEL_ROWS = {
    **{
        (case, p): FOUR
        for case in ("rms_norm 64", "add_rms_norm 64", "rms_norm 96", "add_rms_norm 96")
        for p in BOTH
    },
    **{(case, p): FOUR for case in ("rotary", "swiglu 100", "cross_entropy") for p in BOTH},
    ("linear_cross_entropy", "forward + backward"): FOUR | {"matmul"},
    ("gradient_norm", "step"): {"triton", "torch", "compile"},
    ("adamw float32", "step"): {"triton", "torch", "compile"},
    ("adamw bfloat16", "step"): {"triton", "torch"},
}
OPTIONAL = {"liger": "liger_kernel", "hugging face": "transformers"}


def run(program: Any, folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a benchmark at tiny size; return its exit status and its rows, which are those that it
    planned, and what it found out from them."""
    file = folder / f"{len(list(folder.iterdir()))}.rows"
    status = program.main(["--tiny", "--out", str(file), *arguments])
    refuse = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
    entries = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    rows = [entry["row"] for entry in entries if "row" in entry]
    names = [row["name"] for row in rows]
    assert names[: len(entries[0]["planned"])] == entries[0]["planned"]
    assert len(set(names)) == len(names)
    return status, rows


def may_be_missing(name: str) -> bool:
    return any(word in name and find_spec(package) is None for word, package in OPTIONAL.items())


def assert_measured(row: dict[str, Any], name: str, *numbers: float) -> None:
    if may_be_missing(name):
        assert row["status"].startswith("not installed: ")
        return
    assert row["status"] == MEASURED, row
    assert all(math.isfinite(x) and x > 0 for x in (*row["milliseconds"].values(), *numbers))


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_kernel_is_checked_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(gpu_kernels, tmp_path)
    assert status == 0
    assert gpu_rows.NO_MEASUREMENT in capsys.readouterr().out
    assert rows[0]["bytes_per_second"] > 0
    assert rows[1]["flops_per_second"] > 0
    cases = [row for row in rows if "case" in row]
    checks = {row["case"]: row for row in cases if row["pass"] == "check"}
    timed = [row for row in cases if row["pass"] != "check"]
    found: dict[tuple[str, str], set[str]] = {}
    for row in timed:
        found.setdefault((row["case"], row["pass"]), set()).add(row["implementation"])
        assert_measured(
            row,
            row["implementation"],
            *(row[key] for key in ("bytes", "bytes_per_second") if key in row),
        )
    assert found == KERNEL_ROWS
    assert checks.keys() == {case for case, _ in KERNEL_ROWS}
    for row in checks.values():
        assert row["right"]
        assert all(
            check["passed"] and check["error"] <= check["bound"] for check in row["against_float64"]
        )
        assert row["against_float64"]


def test_bytes_are_those_of_the_kernels_tables() -> None:
    """The benchmarks' byte counts equal those of the tables in the kernels' files: in bfloat16,
    rms_norm.py has 4 and 6 bytes per element, and so on."""
    elements = 6 * 64
    assert gpu_operations.norm_case(6, 64).passes == {
        "forward": 4 * elements,
        "backward": 6 * elements,
    }
    assert gpu_operations.add_norm_case(6, 64).passes == {
        "forward": 8 * elements,
        "backward": 8 * elements,
    }
    assert gpu_operations.swiglu_case(6, 64).passes == {
        "forward": 6 * elements,
        "backward": 10 * elements,
    }
    # q and k of (4 + 2) heads, read and written, and 4 cosines and 4 sines in float32
    both = (4 * 6 * 8 + 4 * 8) * 5
    assert gpu_operations.rotary_case(5, (4, 2, 8)).passes == {"forward": both, "backward": both}


def test_aims_are_held_against_what_was_measured() -> None:
    """Speed and memory are compared with their aims correctly. 1 MB in 1 µs is 1 TB/s. Memory
    excludes the weight's gradient, which takes 4 · D · V bytes, and half of that in eager."""
    for bandwidth, fraction, reached in ((1.25e12, 0.8, False), (1.0e12, 1.0, True)):
        row = gpu_kernels.speed(1e-3, 1e6, bandwidth)
        assert row["bytes_per_second"] == pytest.approx(1e12)
        assert row["fraction_of_copy"] == pytest.approx(fraction)
        assert ("MISSED" in gpu_aims.bandwidth_aim(row)) is not reached
        assert row["aims"]["fraction_of_copy"] == {"at_least": 0.85, "met": reached}
    case = gpu_head.head_case(4, 10, 100, group=None)
    for milliseconds, memory, reached in ((2.2, 4100, True), (2.3, 4200, False)):
        rows = {
            name: {"status": MEASURED, "milliseconds": {"median": t}, "peak_memory_bytes": peak}
            for name, t, peak in (
                ("triton", milliseconds, memory),
                ("matmul", 2.05, None),
                ("torch", 4.0, 2000 + 800),
            )
        }
        said = gpu_aims.head_aims(rows, case, at_full_size=True)
        aims = rows["triton"]["aims"]
        assert aims["over_three_products"]["found"] == pytest.approx(milliseconds / 2.05)
        assert aims["memory_over_eager"]["found"] == pytest.approx((memory - 4000) / 800)
        assert aims["memory_over_eager"]["with_weight_gradient"] == pytest.approx(memory / 2800)
        assert [aim["met"] for aim in aims.values()] == [reached, reached]
        assert said.count("MISSED") == (0 if reached else 2)


def wrong_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: str) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 0.1)


def forgetful_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: str) -> torch.Tensor:
    """Correct except for one row that is never written. Reused memory could by chance hold the
    right numbers there."""
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    never_written = torch.empty_like(y[:1])
    return torch.cat((never_written + 0 * y[:1], y[1:]))


def broken_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: str) -> torch.Tensor:
    raise RuntimeError("planted")


@pytest.mark.parametrize("planted", [wrong_norm, forgetful_norm, broken_norm])
def test_a_wrong_kernel_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    planted: Callable[..., torch.Tensor],
) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: str) -> torch.Tensor:
        return (planted if kernels == "triton" else torch.nn.functional.rms_norm)(
            x, *((weight, eps, kernels) if kernels == "triton" else (weight.shape, weight, eps))
        )

    monkeypatch.setattr(gpu_operations, "rms_norm", norm)
    status, rows = run(gpu_kernels, tmp_path, "--only", "rms_norm 64")
    right = {row["case"]: row["right"] for row in rows if row.get("pass") == "check"}
    assert right == {"rms_norm 64": False, "add_rms_norm 64": True}
    assert status == 1
    assert "WRONG: rms_norm 64" in capsys.readouterr().out
    others = [row for row in rows if row.get("implementation") in ("torch", "compile")]
    assert len(others) == 8
    assert all(row["status"] == MEASURED for row in others)


def test_a_wrong_sum_and_wrong_random_bits_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    square_sum, adamw = gpu_optimizer.square_sum, gpu_optimizer.adamw

    def other_bits(
        p: Any, g: Any, m: Any, v: Any, decays: Any, places: list[Any], *rest: Any
    ) -> None:
        if rest[-1] == "triton":
            places = [
                type(place)(place.key + 1, place.first, place.width, place.global_width)
                for place in places
            ]
        adamw(p, g, m, v, decays, places, *rest)

    monkeypatch.setattr(
        gpu_optimizer, "square_sum", lambda *arguments: square_sum(*arguments) * (1 + 1e-9)
    )
    monkeypatch.setattr(gpu_optimizer, "adamw", other_bits)
    for only, what in (("gradient_norm", ["norm"]), ("adamw bfloat16", ["bits"])):
        status, rows = run(gpu_kernels, tmp_path, "--only", only)
        assert status == 1
        assert [
            check["what"] for check in check_of(rows)["against_float64"] if not check["passed"]
        ] == what


def without_softmax(z: torch.Tensor, onehot: torch.Tensor) -> torch.Tensor:
    return -onehot


def softmax_twice(z: torch.Tensor, onehot: torch.Tensor) -> torch.Tensor:
    return 2 * (z + onehot) - onehot


def without_targets(z: torch.Tensor, onehot: torch.Tensor) -> torch.Tensor:
    return z + onehot


@pytest.mark.parametrize("planted", [without_softmax, softmax_twice, without_targets])
def test_a_wrong_gradient_of_the_head_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Each planted gradient replaces the right one, scale · (p − onehot). Even a head that still
    learns, but only from its targets, is found to be wrong."""
    right = linear_cross_entropy.gradient_over_logits_

    def gradient_over_logits_(
        z: torch.Tensor, targets: torch.Tensor, row: Any, scale: torch.Tensor, *rest: Any
    ) -> None:
        right(z, targets, row, scale, *rest)
        onehot = scale * torch.nn.functional.one_hot(targets, z.shape[1])
        z.copy_(planted(z.float(), onehot))

    monkeypatch.setattr(linear_cross_entropy, "gradient_over_logits_", gradient_over_logits_)
    assert wrong_of_the_head(tmp_path) == ["dx", "dw"]


def test_a_wrong_loss_of_the_head_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear_cross_entropy.token_losses
    monkeypatch.setattr(
        linear_cross_entropy, "token_losses", lambda *arguments: 1.01 * right(*arguments)
    )
    assert wrong_of_the_head(tmp_path) == ["loss"]


def wrong_of_the_head(tmp_path: Path) -> list[str]:
    status, rows = run(gpu_kernels, tmp_path, "--only", "linear_cross_entropy")
    assert status == 1
    return [check["what"] for check in check_of(rows)["against_float64"] if not check["passed"]]


@pytest.mark.parametrize("program", [gpu_kernels, gpu_model])
def test_without_time_every_row_says_so(program: Any, tmp_path: Path) -> None:
    status, rows = run(program, tmp_path, "--budget-seconds", "0")
    assert status == 0
    rates = [row for row in rows if row["name"] in (gpu_kernels.COPY, gpu_kernels.PRODUCT)]
    left = [row for row in rows if row not in rates]
    assert {row["status"] for row in left} == {NO_TIME}
    checks = len({case for case, _ in KERNEL_ROWS})
    expected = {
        gpu_model: len(gpu_model.ROWS),
        gpu_kernels: checks + sum(map(len, KERNEL_ROWS.values())),
    }
    assert len(left) == expected[program]


def test_only_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every implementation of each pass of every n-th case runs once."""
    ran: list[str] = []
    once = gpu_kernels.once
    monkeypatch.setattr(gpu_kernels, "once", lambda work: ran.append(once(work)))
    cases = 11
    arguments = ["--tiny", "--compile", f"2/{cases}", "--budget-seconds"]
    assert gpu_kernels.main([*arguments, "60"]) == 0
    assert len(ran) == 2 * (3 + (find_spec("liger_kernel") is not None))
    ran.clear()
    assert gpu_kernels.main([*arguments, "0"]) == 0
    assert ran == []


def test_only_the_checks(tmp_path: Path) -> None:
    status, rows = run(gpu_kernels, tmp_path, "--checks", "--only", "rms_norm 64")
    assert status == 0
    assert {row["name"]: row["right"] for row in rows} == {
        "rms_norm 64, check": True,
        "add_rms_norm 64, check": True,
    }


def check_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if row.get("pass") == "check")


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_program_trains(tmp_path: Path) -> None:
    status, rows = run(gpu_model, tmp_path)
    assert status == 0
    assert [row["name"] for row in rows] == [f"{key}, {v.name}" for key, v in gpu_model.ROWS]
    for row in rows:
        numbers = [
            row.get(key, 0)
            for key in ("tokens_per_second", "flops_per_second", "first_loss", "first_grad_norm")
        ]
        assert_measured(row, row["name"], *numbers)
        if row["status"] == MEASURED:
            assert row["first_loss"] == pytest.approx(math.log(96), rel=0.05), (
                "random weights have the loss log 96"
            )
            size = sizes(True)[row["model"]]
            flops = flops_per_token(size.model, size.seq_len) * row["tokens_per_second"]
            assert row["flops_per_second"] == pytest.approx(flops)


@pytest.mark.parametrize("wrong", ["first_loss", "first_grad_norm"])
def test_trouble_of_one_program_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    """One program runs out of memory, a second computes a wrong value and is reported, and the
    others are measured as usual."""
    build = gpu_model.lattice

    def lattice(size: Size, variant: Variant) -> Step:
        if variant.checkpointing == "full":
            raise torch.OutOfMemoryError("planted")
        step = build(size, variant)
        if variant.checkpointing == "selective":
            factors = (1.1, 1.0) if wrong == "first_loss" else (1.0, 1.1)
            return lambda rows: tuple(
                value * factor for value, factor in zip(step(rows), factors, strict=True)
            )
        return step

    monkeypatch.setattr(gpu_model, "lattice", lattice)
    plain = Variant(kernels="torch")
    modes = [Variant(kernels="torch", checkpointing=mode) for mode in ("full", "selective")]
    monkeypatch.setattr(
        gpu_model, "ROWS", [(WIDE, modes[0]), (WIDE, modes[1]), (WIDE, plain), (SMALL, plain)]
    )
    status, rows = run(gpu_model, tmp_path)
    assert [row["status"] for row in rows[:4]] == [OUT_OF_MEMORY, MEASURED, MEASURED, MEASURED]
    assert status == 1
    name = "8B width, lattice, torch, selective checkpointing"
    assert [row["name"] for row in rows if row.get("right") is False] == [f"{name}: begins alike"]
    assert f"WRONG: {name}: {wrong}" in capsys.readouterr().out
    monkeypatch.setattr(gpu_model, "ROWS", [(WIDE, modes[0]), (WIDE, plain)])
    assert run(gpu_model, tmp_path)[0] == 0, "running out of memory is not an error"


@pytest.mark.parametrize(("mfu", "reached"), [(0.62, True), (0.61, False)])
def test_the_best_of_ours_is_held_against_the_aim(
    capsys: pytest.CaptureFixture[str], mfu: float, reached: bool
) -> None:
    """The aim is compared with our best result on the wide model, not with the small model's and
    not with another program's."""
    found = {
        "a": (WIDE, "lattice", mfu - 0.1),
        "b": (WIDE, "lattice", mfu),
        "c": (SMALL, "lattice", 0.9),
    }
    found |= {"d": (WIDE, "hugging face", 0.8), "e": (WIDE, "lattice", None)}
    same = {"status": MEASURED, "first_loss": 4.0, "first_grad_norm": 1.0, "longer": False}
    options = gpu_rows.options(None, 1.0)
    report = Report(gpu_rows.parse(options, ["--tiny"]), [])
    for name, (m, p, u) in found.items():
        report.add({"name": name, "model": m, "program": p, "variant": name, "mfu": u, **same})
    gpu_model.conclude(report)
    best = report.rows[-1]
    assert (best["name"], best["of"], best["mfu"]) == (gpu_model.BEST, "b", mfu)
    assert best["met"] is reached
    assert ("MISSED" in capsys.readouterr().out) is not reached


# --- shared by both -------------------------------------------------------------------------------


def test_an_error_that_is_no_number_is_no_small_error() -> None:
    assert Check("y", 0.5, 0.5).passed
    assert not Check("y", math.nan, 0.5).passed
    assert not Check("y", 0.5, math.nan).passed


def test_an_attempt_says_why_there_is_nothing() -> None:
    def fail() -> None:
        raise ValueError("first line\nsecond line")

    assert attempt(lambda: 3) == (3, MEASURED)
    assert attempt(fail) == (None, "failed: ValueError: first line")
    assert attempt(lambda: __import__("no_such_package")) == (
        None,
        "not installed: no_such_package",
    )
