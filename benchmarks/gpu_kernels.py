"""Checks every kernel on a GPU against float64, and compares its speed with PyTorch, its compiler
and Liger-Kernel.

    python -m benchmarks.gpu_kernels   (`make bench-gpu`: tests on the device first; then gpu_model)

Operations that are bound by memory are compared with its bandwidth: the bytes they must move (see
the table in each kernel's file) per second, as a fraction of the rate of a large copy on the same
device, counting bytes read and written.
    aim: at least 85 %, forward and backward
The head's projection with its loss is compared with the three matrix products that it contains. Its
memory, without the weight and the weight's gradient (ours is summed in float32: V · D · 4 bytes),
is compared with that of eager PyTorch.
    aims: at most 1.1 times the products; at most 1/8 of the memory (also printed: with the weight's
    gradients)

The exit status is 1 if a kernel was wrong or did not run.
"""

import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_operations import (
    FULL,
    HEAD_PASS,
    TINY,
    Case,
    Sizes,
    add_norm_case,
    head_case,
    loss_case,
    norm_case,
    rotary_case,
    swiglu_case,
)
from benchmarks.gpu_optimizer import optimizer_cases
from benchmarks.gpu_timing import (
    DEVICE,
    MEASURED,
    NO_TIME,
    Clock,
    Deadline,
    Report,
    Work,
    attempt,
    copy_bandwidth,
    free_memory,
    milliseconds_or_why,
    parse,
    peak_bytes,
)
from model.kernels.backend import why_not_triton
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from runtime.init_distributed import init_distributed

BANDWIDTH_AIM, PRODUCTS_AIM, MEMORY_AIM = 0.85, 1.1, 1 / 8
COLUMNS = ("triton", "torch", "compile", "liger")
SECONDS_FOR_A_CASE = 15  # expected time of a case, mostly for its compilers
EXPECTED_SECONDS = {"compile": 10}  # expected time of a row; other rows take one second


def list_cases(sizes: Sizes) -> list[Case]:
    """The cases, most important first, because time may not suffice for all."""
    group = build_mesh(MeshSizes(), DEVICE).tp.get_group()
    elements = sizes.norm_tokens * sizes.widths[0]
    narrow, *wider = sizes.widths
    return [
        norm_case(sizes.norm_tokens, narrow),
        add_norm_case(sizes.norm_tokens, narrow),
        rotary_case(sizes.rotary_tokens, sizes.heads),
        swiglu_case(*sizes.swiglu_shape),
        head_case(*sizes.head_shape, group),
        loss_case(*sizes.logits_shape, group),
        *optimizer_cases(sizes),
        *(case(elements // width, width) for width in wider for case in (norm_case, add_norm_case)),
    ]


def measure(
    case: Case, clock: Clock, deadline: Deadline, report: Report, bandwidth: float | None
) -> bool:
    """Checks a case and times it, with a row for each pass and implementation. Returns whether ours
    ran and is right."""
    subject: Any
    subject, status = (
        attempt(case.build) if deadline.allows(SECONDS_FOR_A_CASE) else (None, NO_TIME)
    )
    right = True
    if status == MEASURED:
        checks, checked = attempt(subject.check)
        right = checked == MEASURED and all(check.passed for check in checks)
        found = [{**check._asdict(), "passed": check.passed} for check in checks or []]
        report.add(
            {
                "case": case.name,
                "pass": "check",
                "status": checked,
                "right": right,
                "against_float64": found,
            }
        )
        said = ", ".join(
            f"{c.what} off by {c.error:.2g} (bound {c.bound:.2g})"
            for c in checks or []
            if not c.passed
        )
        if not right:
            print(f"WRONG: {case.name}: {said or checked}", flush=True)
    for name_of_pass, moved in case.passes.items():
        rows = {}
        for implementation in case.implementations:
            row: dict[str, Any] = {
                "case": case.name,
                "shape": case.shape,
                "pass": name_of_pass,
                "implementation": implementation,
            }
            state = status
            if state == MEASURED and not deadline.allows(EXPECTED_SECONDS.get(implementation, 1)):
                state = NO_TIME
            if state == MEASURED:
                found, state = attempt(
                    lambda name=implementation, p=name_of_pass: time_work(
                        subject.work(name, p), clock
                    )
                )
                row |= found or {}
            rows[implementation] = row | {"status": state}
            if moved and state == MEASURED:
                rows[implementation] |= speed(row["milliseconds"]["median"], moved, bandwidth)
        aims = (
            head_aims(rows, case, bandwidth is not None)
            if name_of_pass == HEAD_PASS
            else bandwidth_aim(rows["triton"])
        )
        for row in rows.values():
            report.add(row)
        right &= rows["triton"]["status"] in (MEASURED, NO_TIME)
        print(line(case, name_of_pass, rows, aims), flush=True)
    if subject is not None:
        del subject
        free_memory()
    return right and status in (MEASURED, NO_TIME)


def time_work(work: Work, clock: Clock) -> dict:
    times = clock.milliseconds(work)
    return {"milliseconds": times, "peak_memory_bytes": peak_bytes(work)}


def speed(milliseconds: float, moved: float, bandwidth: float | None) -> dict:
    per_second = moved / milliseconds * 1e3
    return {
        "bytes": moved,
        "bytes_per_second": per_second,
        "fraction_of_copy": per_second / bandwidth if bandwidth is not None else None,
    }


def bandwidth_aim(row: dict) -> str:
    """Adds the aim to the row of our kernel, and returns a description of it for the table."""
    fraction = row.get("fraction_of_copy")
    if fraction is None:
        return ""
    row["aims"] = {
        "fraction_of_copy": {"at_least": BANDWIDTH_AIM, "met": fraction >= BANDWIDTH_AIM}
    }
    return f"{fraction:.0%} of a copy: {verdict(fraction >= BANDWIDTH_AIM)}"


def head_aims(rows: dict[str, dict], case: Case, at_full_size: bool) -> str:
    """The same for projection and loss: time compared with that of the products, and memory with
    that of eager PyTorch."""
    ours, said = rows["triton"], []
    if ours["status"] != MEASURED or not at_full_size:
        return ""
    ours["aims"] = {}
    if rows["matmul"]["status"] == MEASURED:
        ratio = ours["milliseconds"]["median"] / rows["matmul"]["milliseconds"]["median"]
        ours["aims"]["over_three_products"] = {
            "found": ratio,
            "at_most": PRODUCTS_AIM,
            "met": ratio <= PRODUCTS_AIM,
        }
        said.append(f"{ratio:.3f} of three products: {verdict(ratio <= PRODUCTS_AIM)}")
    if rows["torch"]["status"] == MEASURED and ours["peak_memory_bytes"] is not None:
        peaks = {name: rows[name]["peak_memory_bytes"] for name in ("triton", "torch")}
        beyond = {name: peak - case.weight_gradient_bytes[name] for name, peak in peaks.items()}
        ratio, with_gradient = (
            bytes_of["triton"] / bytes_of["torch"] for bytes_of in (beyond, peaks)
        )
        ours["aims"]["memory_over_eager"] = {
            "found": ratio,
            "at_most": MEMORY_AIM,
            "met": ratio <= MEMORY_AIM,
            "bytes_beyond_weight_gradient": beyond,
            "with_weight_gradient": with_gradient,
        }
        said.append(
            f"1/{1 / ratio:.1f} of eager's memory: {verdict(ratio <= MEMORY_AIM)}"
            f" (with the weight's gradients 1/{1 / with_gradient:.1f})"
        )
    return ", ".join(said)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def line(case: Case, name_of_pass: str, rows: dict[str, dict], aims: str) -> str:
    times = "".join(f"{milliseconds_or_why(rows[c]) if c in rows else '':>10}" for c in COLUMNS)
    rate = rows["triton"].get("bytes_per_second")
    speed = f"{rate / 1e9:8.0f} GB/s" if rate else ""
    return f"{case.name:21}{name_of_pass:19}{times}{speed:>14}  {aims}"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(__doc__, arguments, budget_seconds=150)
    why = why_not_triton(DEVICE)
    if why is not None:
        print(f"nothing to measure: {why}")
        return 1
    deadline = Deadline(parsed.budget_seconds)
    sizes = TINY if parsed.tiny else FULL
    clock = Clock(samples=2, warm_up=1, flush=False) if parsed.tiny else Clock(samples=25)
    settings = {
        "sizes": asdict(sizes),
        "samples": clock.samples,
        "warm_up": clock.warm_up,
        "dtype": "bfloat16",
    }
    report = Report("gpu_kernels", parsed, settings)
    torch.manual_seed(0)
    times, bandwidth = copy_bandwidth(clock, sizes.copy_bytes)
    report.results["copy"] = {
        "bytes": 2 * sizes.copy_bytes,
        "milliseconds": times,
        "bytes_per_second": bandwidth,
    }
    print(f"a copy of {sizes.copy_bytes:,} bytes: {bandwidth / 1e9:.0f} GB/s, read and written\n")
    print(
        f"{'median milliseconds':40}"
        + "".join(f"{name:>10}" for name in COLUMNS)
        + "    triton's rate and aim"
    )
    init_distributed()
    right = True
    try:
        for case in list_cases(sizes):
            if parsed.only in case.name:
                right &= measure(case, clock, deadline, report, None if parsed.tiny else bandwidth)
    finally:
        dist.destroy_process_group()
    report.results["right"] = right
    report.write()
    print(
        "\nevery kernel that was checked is right"
        if right
        else "\na kernel is WRONG or did not run"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
