"""Checks every kernel on a GPU against float64, and compares its speed with PyTorch, its compiler
and Liger-Kernel.

    python -m benchmarks.gpu_kernels               part of `make bench-gpu PART=fast`
    python -m benchmarks.gpu_kernels --checks      part of `make bench-gpu PART=right`
    python -m benchmarks.gpu_kernels --compile 0/4 every fourth case, run once and not timed: fills
                                                   the caches of Triton and of torch.compile

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

import argparse
from typing import Any

import torch

from benchmarks.gpu_aims import bandwidth_aim, head_aims
from benchmarks.gpu_head import HEAD_PASS, head_case
from benchmarks.gpu_operations import (
    FULL,
    TINY,
    Case,
    Sizes,
    add_norm_case,
    loss_case,
    norm_case,
    rotary_case,
    swiglu_case,
)
from benchmarks.gpu_optimizer import optimizer_cases
from benchmarks.gpu_rows import (
    Deadline,
    Report,
    attempt,
    check_triton,
    exit_status,
    milliseconds_or_why,
    options,
    parse,
    process_group,
)
from benchmarks.gpu_status import MEASURED, NO_TIME
from benchmarks.gpu_timing import (
    DEVICE,
    Clock,
    Work,
    copy_bandwidth,
    free_memory,
    peak_bytes,
    peak_flops,
)
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from tools.command import run_command

COLUMNS = ("triton", "torch", "compile", "liger")
SECONDS_FOR_A_CASE = 15  # expected time of a case, mostly for its compilers
EXPECTED_SECONDS = {"compile": 10}  # expected time of a row; other rows take one second
COPY, PRODUCT, CHECK = "copy", "product", "check"


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


def passes_of(case: Case, parsed: argparse.Namespace) -> list[tuple[str, float | None]]:
    """The passes to time, with the bytes that each must move."""
    return [] if parsed.checks else list(case.passes.items())


def names_of(case: Case, parsed: argparse.Namespace) -> list[str]:
    """The names of a case's rows."""
    timed = [
        row_name(case, name_of_pass, implementation)
        for name_of_pass, _ in passes_of(case, parsed)
        for implementation in case.implementations
    ]
    return [row_name(case, CHECK), *timed]


def row_name(case: Case, *parts: str) -> str:
    return ", ".join((case.name, *parts))


def measure(
    case: Case,
    clock: Clock,
    deadline: Deadline,
    report: Report,
    parsed: argparse.Namespace,
    bandwidth: float | None,
) -> None:
    """Checks a case and times it, with a row for each pass and implementation."""
    subject: Any
    subject, status = (
        attempt(case.build) if deadline.allows(SECONDS_FOR_A_CASE) else (None, NO_TIME)
    )
    report.add(check_row(case, subject, status))
    for name_of_pass, moved in passes_of(case, parsed):
        rows = {}
        for implementation in case.implementations:
            row: dict[str, Any] = {
                "name": row_name(case, name_of_pass, implementation),
                "ours": implementation == "triton",
                "case": case.name,
                "shape": case.shape,
                "pass": name_of_pass,
                "implementation": implementation,
            }
            found, state = None, status
            if state == MEASURED and not deadline.allows(EXPECTED_SECONDS.get(implementation, 1)):
                state = NO_TIME
            if state == MEASURED:
                found, state = attempt(
                    lambda name=implementation, p=name_of_pass: time_work(
                        subject.work(name, p), clock
                    )
                )
            rows[implementation] = {**row, "status": state, **(found or {})}
            if moved and state == MEASURED:
                rows[implementation] |= speed(found["milliseconds"]["median"], moved, bandwidth)
        aims = (
            head_aims(rows, case, bandwidth is not None)
            if name_of_pass == HEAD_PASS
            else bandwidth_aim(rows["triton"])
        )
        for row in rows.values():
            report.add(row)
        print(line(case, name_of_pass, rows, aims), flush=True)
    if subject is not None:
        del subject
        free_memory()


def check_row(case: Case, subject: Any, status: str) -> dict[str, Any]:
    """Checks a case against float64, unless there is none because of `status`; says what is wrong,
    and returns its row."""
    row = {"name": row_name(case, CHECK), "case": case.name, "pass": CHECK}
    if status != MEASURED:
        return {**row, "status": status}
    checks, status = attempt(subject.check)
    wrong = [check for check in checks or [] if not check.passed]
    right = status == MEASURED and not wrong
    if not right:
        said = ", ".join(f"{c.what} off by {c.error:.2g} (bound {c.bound:.2g})" for c in wrong)
        print(f"WRONG: {case.name}: {said or status}", flush=True)
    found = [{**check._asdict(), "passed": check.passed} for check in checks or []]
    return {**row, "status": status, "right": right, "against_float64": found}


def compile_only(cases: list[Case], share: str, deadline: Deadline) -> None:
    """Runs every pass of each implementation once: those cases whose number is i modulo n, for a
    share i/n."""
    first, step = (int(number) for number in share.split("/"))
    for case in cases[first::step]:
        if not deadline.allows(SECONDS_FOR_A_CASE):
            return
        subject, _ = attempt(case.build)
        for name_of_pass in case.passes:
            for implementation in case.implementations:
                if subject is not None:
                    attempt(lambda s=subject, i=implementation, p=name_of_pass: once(s.work(i, p)))
        del subject
        free_memory()


def once(work: Work) -> None:
    work.run(work.prepare())


def rates(clock: Clock, sizes: Sizes, report: Report, tiny: bool) -> float:
    """Measures what the device reaches: adds rows for a copy and for a matrix product. Returns the
    copy's bytes per second."""
    times, bandwidth = copy_bandwidth(clock, sizes.copy_bytes)
    said = {"bytes": 2 * sizes.copy_bytes, "bytes_per_second": bandwidth}
    report.add({"name": COPY, "status": MEASURED, "milliseconds": times, **said})
    n = sizes.product
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = clock.milliseconds(Work(lambda: None, lambda _: a @ b))
    flops, peak = 2 * n**3 / times["median"] * 1e3, None if tiny else peak_flops()
    row = {"name": PRODUCT, "status": MEASURED, "milliseconds": times, "flops_per_second": flops}
    report.add(row | ({"fraction_of_peak": flops / peak} if peak else {}))
    print(
        f"a copy of {sizes.copy_bytes:,} bytes: {bandwidth / 1e9:.0f} GB/s, read and written; "
        f"a product of {n} cubed: {flops / 1e12:.0f} TFLOP/s\n"
    )
    return bandwidth


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


def line(case: Case, name_of_pass: str, rows: dict[str, dict], aims: str) -> str:
    times = "".join(f"{milliseconds_or_why(rows[c]) if c in rows else '':>10}" for c in COLUMNS)
    rate = rows["triton"].get("bytes_per_second")
    speed = f"{rate / 1e9:8.0f} GB/s" if rate else ""
    return f"{case.name:21}{name_of_pass:19}{times}{speed:>14}  {aims}"


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, budget_seconds=150)
    parser.add_argument("--checks", action="store_true", help="check the kernels, time nothing")
    parser.add_argument("--compile", metavar="I/N", help="only fill the compilers' caches")
    parsed = parse(parser, arguments)
    check_triton()
    sizes = TINY if parsed.tiny else FULL
    clock = Clock(samples=2, warm_up=1, flush=False) if parsed.tiny else Clock(samples=25)
    torch.manual_seed(0)
    with process_group():
        cases = [case for case in list_cases(sizes) if parsed.only in case.name]
        if parsed.compile:
            compile_only(cases, parsed.compile, Deadline(parsed.budget_seconds))
            return 0
        rated = [] if parsed.checks else [COPY, PRODUCT]
        report = Report(parsed, [*rated, *(name for c in cases for name in names_of(c, parsed))])
        deadline = Deadline(parsed.budget_seconds)
        bandwidth = rates(clock, sizes, report, parsed.tiny) if rated else None
        if rated:
            columns = "".join(f"{name:>10}" for name in COLUMNS)
            print(f"{'median milliseconds':40}{columns}    triton's rate and aim")
        for case in cases:
            given = None if parsed.tiny else bandwidth
            measure(case, clock, deadline, report, parsed, given)
    checked = [row for row in report.rows if row.get("pass") == CHECK and "right" in row]
    print(f"\n{sum(row['right'] for row in checked)} of {len(checked)} kernels are right")
    return exit_status(report)


if __name__ == "__main__":
    run_command(main)
