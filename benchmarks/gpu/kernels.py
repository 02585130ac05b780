"""Compares the speed of every kernel on a GPU with PyTorch, its compiler and Liger-Kernel: part of
`make bench-gpu PART=fast`.

Operations that are bound by memory are compared with its bandwidth: the bytes they must move (see
the table in each kernel's file) per second, as a fraction of the rate of a large copy on the same
device, counting bytes read and written. The head's projection with its loss is compared with the
three matrix products that it contains, and its memory with that of eager PyTorch. The aims are
among the estimates. That the kernels are right, tests/gpu/test_kernels_at_size.py shows.
"""

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.gpu.head import HEAD, HEAD_PASS, compare, head_case
from benchmarks.gpu.operations import (
    SIZES,
    Case,
    Sizes,
    Subject,
    add_norm_case,
    draw,
    loss_case,
    norm_case,
    rotary_case,
    swiglu_case,
)
from benchmarks.gpu.optimizer import optimizer_cases
from benchmarks.gpu.timing import DEVICE, Clock, Work, free_memory, peak_bytes, rate

pytestmark = pytest.mark.usefixtures("world")


def list_cases(sizes: Sizes) -> list[Case]:
    """The cases, most important first, because time may not suffice for all."""
    elements = sizes.norm_tokens * sizes.widths[0]
    narrow, *wider = sizes.widths
    return [
        norm_case(sizes.norm_tokens, narrow),
        add_norm_case(sizes.norm_tokens, narrow),
        rotary_case(sizes.rotary_tokens, sizes.heads),
        swiglu_case(*sizes.swiglu_shape),
        head_case(*sizes.head_shape),
        loss_case(*sizes.logits_shape),
        *optimizer_cases(sizes),
        *(case(elements // width, width) for width in wider for case in (norm_case, add_norm_case)),
    ]


def passes(sizes: Sizes) -> list[Any]:
    """Every pass and implementation of each case."""
    return [
        pytest.param(
            case,
            name_of_pass,
            implementation,
            id=f"{case.name}, {name_of_pass}, {implementation}",
            marks=[pytest.mark.theirs] * (implementation != "triton"),
        )
        for case in list_cases(sizes)
        for name_of_pass in case.passes
        for implementation in case.implementations
    ]


@cache
def clock() -> Clock:
    return Clock(samples=25)


@cache
def copy() -> dict[str, Any]:
    """A large device-to-device copy, counting bytes read and written."""
    source = torch.randint(-128, 128, (SIZES.copy_bytes,), dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    times = clock().milliseconds(Work(lambda: None, lambda _: target.copy_(source)))
    return {"milliseconds": times, "bytes_per_second": 2 * len(source) / times["median"] * 1e3}


def bench_copy(record: Any) -> None:
    record(copy())


def bench_product(record: Any) -> None:
    n = SIZES.product
    a, b = draw(n, n), draw(n, n)
    times = clock().milliseconds(Work(lambda: None, lambda _: a @ b))
    record({"milliseconds": times, **rate(2 * n**3, times)})


_current: dict[str, Subject] = {}


def subject_of(case: Case) -> Subject:
    """The tensors of one case at a time."""
    if case.name not in _current:
        _current.clear()
        free_memory()
        torch.manual_seed(0)
        _current[case.name] = case.build()
    return _current[case.name]


@pytest.mark.parametrize(("case", "name_of_pass", "implementation"), passes(SIZES))
def bench_pass(case: Case, name_of_pass: str, implementation: str, record: Any) -> None:
    work = subject_of(case).work(implementation, name_of_pass)
    times = clock().milliseconds(work)
    row = {"shape": case.shape, "milliseconds": times, "peak_memory_bytes": peak_bytes(work)}
    if moved := case.passes[name_of_pass]:
        speed = moved / times["median"] * 1e3
        fraction = speed / copy()["bytes_per_second"]
        row |= {"bytes": moved, "bytes_per_second": speed, "fraction_of_copy": fraction}
    record(row)


def bench_head_compared(found: Any, record: Any) -> None:
    rows = (found[f"{HEAD}, {HEAD_PASS}, {name}"] for name in ("triton", "matmul", "torch"))
    record(compare(*SIZES.head_shape[1:], *rows))
