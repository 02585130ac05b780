"""The GPU benchmarks at tiny sizes: every row is present, a wrong kernel is found, and a failure in
one row does not affect the others."""

import dataclasses
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

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
from benchmarks.gpu_programs import SMALL, WIDE, Variant, sizes
from benchmarks.gpu_rows import Report, attempt
from benchmarks.gpu_status import MEASURED, NO_TIME, OUT_OF_MEMORY
from costs.summary import flops_per_token
from model.kernels import linear_cross_entropy
from model.kernels.backend import why_not_triton
from tests.benchmark_rows import tiny_rows
from tests.planted import planted

pytestmark = pytest.mark.skipif(
    why_not_triton(gpu_timing.DEVICE) is not None, reason="needs Triton"
)

OPTIONAL = {"liger": "liger_kernel", "hugging face": "transformers"}


def assert_measured(row: dict[str, Any], name: str, *numbers: float) -> None:
    """Its times and `numbers` are positive, unless it needs a package that is not there."""
    if any(word in name and find_spec(package) is None for word, package in OPTIONAL.items()):
        assert row["status"].startswith("not installed: ")
        return
    assert row["status"] == MEASURED, row
    assert all(math.isfinite(x) and x > 0 for x in (*row["milliseconds"].values(), *numbers))


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_kernel_is_checked_and_timed(tmp_path, capsys):
    status, rows = tiny_rows(gpu_kernels, tmp_path)
    assert status == 0
    assert gpu_rows.NO_MEASUREMENT in capsys.readouterr().out
    assert rows[gpu_kernels.COPY]["bytes_per_second"] > 0
    assert rows[gpu_kernels.PRODUCT]["flops_per_second"] > 0
    checks = {row["case"]: row for row in rows.values() if row.get("pass") == "check"}
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows.values():
        if "implementation" in row:
            found.setdefault((row["case"], row["pass"]), set()).add(row["implementation"])
            rates = [row[key] for key in ("bytes", "bytes_per_second") if key in row]
            assert_measured(row, row["implementation"], *rates)
    assert len(found) == 18, "passes"
    assert all({"triton", "torch"} <= beside for beside in found.values())
    assert checks.keys() == {case for case, _ in found}
    for row in checks.values():
        assert row["right"]
        assert row["against_float64"]
        for check in row["against_float64"]:
            assert check["passed"]
            assert check["error"] <= check["bound"]


# q and k of (4 + 2) heads, read and written, and 4 cosines and 4 sines in float32
ROTARY = (4 * 6 * 8 + 4 * 8) * 5


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (gpu_operations.norm_case(6, 64), 4 * 6 * 64, 6 * 6 * 64),
        (gpu_operations.add_norm_case(6, 64), 8 * 6 * 64, 8 * 6 * 64),
        (gpu_operations.swiglu_case(6, 64), 6 * 6 * 64, 10 * 6 * 64),
        (gpu_operations.rotary_case(5, (4, 2, 8)), ROTARY, ROTARY),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_are_those_of_the_kernels_tables(case, forward, backward):
    """In bfloat16, rms_norm.py has 4 and 6 bytes per element, and so on."""
    assert case.passes == {"forward": forward, "backward": backward}


@pytest.mark.parametrize(
    ("bandwidth", "fraction", "reached"), [(1.25e12, 0.8, False), (1.0e12, 1.0, True)]
)
def test_speed_is_held_against_its_aim(bandwidth, fraction, reached):
    row = gpu_kernels.speed(1e-3, 1e6, bandwidth)
    assert row["bytes_per_second"] == pytest.approx(1e12), "1 MB in 1 µs"
    assert row["fraction_of_copy"] == pytest.approx(fraction)
    assert ("MISSED" in gpu_aims.bandwidth_aim(row)) is not reached
    assert row["aims"]["fraction_of_copy"] == {"at_least": 0.85, "met": reached}


@pytest.mark.parametrize(
    ("milliseconds", "memory", "reached"), [(2.2, 4100, True), (2.3, 4200, False)]
)
def test_the_head_is_held_against_its_aims(milliseconds, memory, reached):
    """Memory excludes the weight's gradient, which takes 4 · D · V bytes, and half of that in
    eager."""
    rows = {
        name: {"status": MEASURED, "milliseconds": {"median": t}, "peak_memory_bytes": peak}
        for name, t, peak in (
            ("triton", milliseconds, memory),
            ("matmul", 2.05, None),
            ("torch", 4.0, 2000 + 800),
        )
    }
    case = gpu_head.head_case(4, 10, 100, group=None)
    said = gpu_aims.head_aims(rows, case, at_full_size=True)
    aims = rows["triton"]["aims"]
    assert aims["over_three_products"]["found"] == pytest.approx(milliseconds / 2.05)
    assert aims["memory_over_eager"]["found"] == pytest.approx((memory - 4000) / 800)
    assert aims["memory_over_eager"]["with_weight_gradient"] == pytest.approx(memory / 2800)
    assert [aim["met"] for aim in aims.values()] == [reached, reached]
    assert said.count("MISSED") == (0 if reached else 2)


def wrong_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 0.1)


def forgetful_norm(x, weight, eps):
    """Correct except for one row that is never written. Reused memory could by chance hold the
    right numbers there."""
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    never_written = torch.empty_like(y[:1])
    return torch.cat((never_written + 0 * y[:1], y[1:]))


def broken_norm(x, weight, eps):
    raise RuntimeError("planted")


@pytest.mark.parametrize("mistake", [wrong_norm, forgetful_norm, broken_norm])
def test_a_wrong_kernel_is_found(tmp_path, capsys, mistake):
    @planted(gpu_operations, "rms_norm")
    def norm(_, x, weight, eps, kernels):
        if kernels == "triton":
            return mistake(x, weight, eps)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    with norm():
        status, rows = tiny_rows(gpu_kernels, tmp_path, "--only", "rms_norm 64")
    right = {row["case"]: row["right"] for row in rows.values() if row.get("pass") == "check"}
    assert right == {"rms_norm 64": False, "add_rms_norm 64": True}
    assert status == 1
    assert "WRONG: rms_norm 64" in capsys.readouterr().out
    others = [row for row in rows.values() if row.get("implementation") in ("torch", "compile")]
    assert len(others) == 8
    assert all(row["status"] == MEASURED for row in others)


@planted(gpu_optimizer, "square_sum")
def wrong_sum(square_sum, *arguments):
    return square_sum(*arguments) * (1 + 1e-9)


@planted(gpu_optimizer, "adamw")
def other_random_bits(adamw, p, g, m, v, decays, places, *rest):
    if rest[-1] == "triton":
        places = [dataclasses.replace(place, key=place.key + 1) for place in places]
    adamw(p, g, m, v, decays, places, *rest)


@planted(linear_cross_entropy, "token_losses")
def wrong_loss(token_losses, *arguments):
    return 1.01 * token_losses(*arguments)


def wrong_gradient(mistake: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """Replaces the gradient over logits, scale · (p − onehot), by a wrong one."""

    @planted(linear_cross_entropy, "gradient_over_logits_")
    def gradient_over_logits_(right, z, targets, row, scale, *rest):
        right(z, targets, row, scale, *rest)
        onehot = scale * torch.nn.functional.one_hot(targets, z.shape[1])
        z.copy_(mistake(z.float(), onehot))

    return gradient_over_logits_


# a head that still learns, but only from its targets
without_softmax = wrong_gradient(lambda z, onehot: -onehot)
softmax_twice = wrong_gradient(lambda z, onehot: 2 * (z + onehot) - onehot)
without_targets = wrong_gradient(lambda z, onehot: z + onehot)


@pytest.mark.parametrize(
    ("mistake", "case", "wrong"),
    [
        pytest.param(wrong_sum, "gradient_norm", ["norm"], id="wrong sum"),
        pytest.param(other_random_bits, "adamw bfloat16", ["bits"], id="other random bits"),
        pytest.param(wrong_loss, "linear_cross_entropy", ["loss"], id="wrong loss"),
        pytest.param(without_softmax, "linear_cross_entropy", ["dx", "dw"], id="without softmax"),
        pytest.param(softmax_twice, "linear_cross_entropy", ["dx", "dw"], id="softmax twice"),
        pytest.param(without_targets, "linear_cross_entropy", ["dx", "dw"], id="without targets"),
    ],
)
def test_a_wrong_result_is_found_by_name(tmp_path, mistake, case, wrong):
    with mistake():
        status, rows = tiny_rows(gpu_kernels, tmp_path, "--only", case)
    assert status == 1
    (checked,) = (row for row in rows.values() if row.get("pass") == "check")
    assert [each["what"] for each in checked["against_float64"] if not each["passed"]] == wrong


@pytest.mark.parametrize("program", [gpu_kernels, gpu_model])
def test_without_time_every_row_says_so(program, tmp_path):
    status, rows = tiny_rows(program, tmp_path, "--budget-seconds", "0")
    assert status == 0
    left = rows.keys() - {gpu_kernels.COPY, gpu_kernels.PRODUCT}
    assert {rows[name]["status"] for name in left} == {NO_TIME}


def test_only_the_compilers(monkeypatch):
    """Every implementation of each pass of every n-th case runs once."""
    ran: list[str] = []
    once = gpu_kernels.once
    monkeypatch.setattr(gpu_kernels, "once", lambda work: ran.append(once(work)))
    arguments = ["--tiny", "--compile", "2/11", "--budget-seconds"]  # of 11 cases
    assert gpu_kernels.main([*arguments, "60"]) == 0
    assert len(ran) == 2 * (3 + (find_spec("liger_kernel") is not None))
    ran.clear()
    assert gpu_kernels.main([*arguments, "0"]) == 0
    assert ran == []


def test_only_the_checks(tmp_path):
    status, rows = tiny_rows(gpu_kernels, tmp_path, "--checks", "--only", "rms_norm 64")
    assert status == 0
    assert {name: row["right"] for name, row in rows.items()} == {
        "rms_norm 64, check": True,
        "add_rms_norm 64, check": True,
    }


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_program_trains(tmp_path):
    status, rows = tiny_rows(gpu_model, tmp_path)
    assert status == 0
    assert list(rows) == [f"{key}, {v.name}" for key, v in gpu_model.ROWS]
    for row in rows.values():
        keys = ("tokens_per_second", "flops_per_second", "first_loss", "first_grad_norm")
        assert_measured(row, row["name"], *(row.get(key, 0) for key in keys))
        if row["status"] == MEASURED:
            assert row["first_loss"] == pytest.approx(math.log(96), rel=0.05), "random weights"
            size = sizes(True)[row["model"]]
            flops = flops_per_token(size.model, size.seq_len) * row["tokens_per_second"]
            assert row["flops_per_second"] == pytest.approx(flops)


@pytest.mark.parametrize("wrong", ["first_loss", "first_grad_norm", None])
def test_trouble_of_one_program_is_its_own(tmp_path, monkeypatch, capsys, wrong):
    """One program runs out of memory, which is no error, a second computes a wrong value and is
    reported, and the others are measured as usual."""

    @planted(gpu_model, "lattice")
    def lattice(build, size, variant):
        if variant.checkpointing == "full":
            raise torch.OutOfMemoryError("planted")
        step = build(size, variant)
        if variant.checkpointing == "none":
            return step
        factors = [1.1 if name == wrong else 1.0 for name in ("first_loss", "first_grad_norm")]
        return lambda rows: tuple(x * by for x, by in zip(step(rows), factors, strict=True))

    modes = ("full", "selective", "none")
    wide = [(WIDE, Variant(kernels="torch", checkpointing=mode)) for mode in modes]
    monkeypatch.setattr(gpu_model, "ROWS", [*wide, (SMALL, Variant(kernels="torch"))])
    with lattice():
        status, rows = tiny_rows(gpu_model, tmp_path)
    measured = [row["status"] for row in rows.values()][:4]
    assert measured == [OUT_OF_MEMORY, MEASURED, MEASURED, MEASURED]
    assert status == (1 if wrong else 0)
    wrong_row = "8B width, lattice, torch, selective checkpointing"
    found = [name for name, row in rows.items() if row.get("right") is False]
    assert found == ([f"{wrong_row}: begins alike"] if wrong else [])
    assert (f"WRONG: {wrong_row}: {wrong}" in capsys.readouterr().out) is bool(wrong)


@pytest.mark.parametrize(("mfu", "reached"), [(0.62, True), (0.61, False)])
def test_the_best_of_ours_is_held_against_the_aim(capsys, mfu, reached):
    """The aim is compared with our best result on the wide model, not with the small model's and
    not with another program's."""
    same = {"status": MEASURED, "first_loss": 4.0, "first_grad_norm": 1.0, "longer": False}
    report = Report(gpu_rows.parse(gpu_rows.options(None, 1.0), ["--tiny"]), [])
    for name, model, program, found in (
        ("a", WIDE, "lattice", mfu - 0.1),
        ("b", WIDE, "lattice", mfu),
        ("c", SMALL, "lattice", 0.9),
        ("d", WIDE, "hugging face", 0.8),
        ("e", WIDE, "lattice", None),
    ):
        about = {"name": name, "model": model, "program": program, "variant": name, "mfu": found}
        report.add(about | same)
    gpu_model.conclude(report)
    best = report.rows[-1]
    assert (best["name"], best["of"], best["mfu"]) == (gpu_model.BEST, "b", mfu)
    assert best["met"] is reached
    assert ("MISSED" in capsys.readouterr().out) is not reached


# --- shared by both -------------------------------------------------------------------------------


def test_an_error_that_is_no_number_is_no_small_error():
    assert Check("y", 0.5, 0.5).passed
    assert not Check("y", math.nan, 0.5).passed
    assert not Check("y", 0.5, math.nan).passed


def test_an_attempt_says_why_there_is_nothing():
    def fail() -> None:
        raise ValueError("first line\nsecond line")

    assert attempt(lambda: 3) == (3, MEASURED)
    assert attempt(fail) == (None, "failed: ValueError: first line")
    absent = attempt(lambda: __import__("no_such_package"))
    assert absent == (None, "not installed: no_such_package")
