"""Measures whole training steps on one GPU: tokens per second, model FLOP utilisation and peak
memory, compared with Hugging Face's Llama and with the planner.

    bench_profile, bench_step      of `make bench-gpu PART=fast`
    bench_attention                of PART=open: each value of model.attention_kernel but auto

The programs and models are those of programs.py. A step has four micro-batches, in which the
optimizer takes a tenth of the time; a long step has sixteen, as a real run has at least.

    MFU = tokens per second · flops_per_token(S) / dense bf16 peak of the device
    (runtime/metrics/metrics.py)
"""

import json
import re
import tempfile
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.programs import (
    AUTO,
    EXPERTS,
    SMALL,
    WIDE,
    Size,
    Variant,
    attention_kernels,
    build,
    config_of,
    hugging_face,
    lattice,
    sizes,
)
from benchmarks.gpu.timing import DEVICE, ON_GPU, Clock, Work, rate
from hardware import DEVICES, data_sheet_of
from model.kernels.attention_choice import BY_REQUEST
from runtime.profiling.profile import axes_of_groups
from runtime.start.attention import describe_attention
from tools.plan.layout import Layout
from tools.plan.time import StepTime
from tools.profile import describe, events_of, read_trace, summarise
from tools.rehearse.rank import rows as batch_of

pytestmark = pytest.mark.usefixtures("fresh")
SAME = {"first_loss": 2**-8, "first_grad_norm": 2**-6}  # relative; 2⁻⁸ is one rounding to bfloat16

OURS, THEIRS = Variant(), Variant("hugging face")
SELECTIVE = Variant(checkpointing="selective", longer=True)
FULL = Variant(checkpointing="full", longer=True)
OF_EXPERTS = Variant(checkpointing="full")
BUT_ATTENTION = "full_but_attention"
# The most important come first, because time may not suffice for all. Liger modifies Hugging Face's
# classes permanently, and so comes last.
ROWS = [
    (WIDE, SELECTIVE),
    (WIDE, OURS),
    (WIDE, THEIRS),
    (EXPERTS, OF_EXPERTS),
    (EXPERTS, replace(OF_EXPERTS, checkpointing=BUT_ATTENTION)),
    (WIDE, FULL),
    (WIDE, replace(FULL, checkpointing=BUT_ATTENTION)),
    (WIDE, Variant(kernels="torch")),
    (SMALL, OURS),
    (SMALL, replace(OURS, optimizer="muon")),
    (SMALL, THEIRS),
    (WIDE, Variant(compile=True)),
    (WIDE, Variant(bfloat16=True)),
    (SMALL, Variant(kernels="torch")),
    (WIDE, replace(THEIRS, bfloat16=True)),
    (WIDE, replace(THEIRS, compile=True)),
    (SMALL, Variant(compile=True)),
    (WIDE, replace(THEIRS, liger=True)),
    (SMALL, replace(THEIRS, liger=True)),
]
ATTENTION_ROWS = [(WIDE, replace(SELECTIVE, attention=kernel)) for kernel in BY_REQUEST]
PROFILED = [(WIDE, Variant(checkpointing="selective")), (SMALL, OURS), (EXPERTS, OF_EXPERTS)]
PROFILED_STEPS = 2
# The kind of a kernel is the first whose expression its name contains, in lower case.
KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|sdpa|cudnn_generated",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|matmul|weight_gradient",
    "rows of experts: sorted, picked, summed": r"index|scatter|gather|sort|radix|^_sum$",
    "copies and fills": r"copy|fill|memset|cat_|chunk_cat",
    "optimizer": r"adam|square_sum|multi_tensor|foreach",
    "everything else: norms, rotary, SwiGLU, loss": r"",
}


def rows(listed: list[tuple[str, Variant]], what: str = "") -> Any:
    params = [
        pytest.param(key, variant, id=f"{what}{key}, {variant.name}",
                     marks=[pytest.mark.theirs] * (variant.program != "lattice"))
        for key, variant in listed
    ]  # fmt: skip
    return pytest.mark.parametrize(("key", "variant"), params)


@rows(PROFILED, "profile, ")
def bench_profile(key: str, variant: Variant, record: Any) -> None:
    record(profiled(sizes()[key], variant))


@rows(ROWS)
def bench_step(key: str, variant: Variant, record: Any) -> None:
    record(measure(key, variant))


def bench_ours_begin_alike(found: dict[str, dict]) -> None:
    """For the same weights and tokens, the first loss and gradient norm of each of our rows are
    those of PyTorch's operations, or else of the first row."""
    ours = {name: row for name, row in found.items() if row.get("program") == "lattice"}
    if len(ours) < 2:
        pytest.skip("there are no two rows of ours")
    wrong = []
    for name, row in ours.items():
        alike = [
            r for r in ours.values() if (r["model"], r["longer"]) == (row["model"], row["longer"])
        ]
        expected = min(alike, key=lambda r: (r["kernels"], r["checkpointing"]) != ("torch", "none"))
        # written so that NaN also differs
        wrong += [
            f"{name}: {key} {row[key]:.5f}, expected {expected[key]:.5f}"
            for key, bound in SAME.items()
            if not abs(row[key] - expected[key]) <= bound * abs(expected[key])
        ]
    assert not wrong, "; ".join(wrong)


@rows(ATTENTION_ROWS)
def bench_attention(key: str, variant: Variant, record: Any) -> None:
    record(measure(key, variant))


def measure(key: str, variant: Variant) -> dict[str, Any]:
    """Builds, warms up and times one variant."""
    size, clock = variant.of(sizes()[key]), Clock(3, 2, flush=False)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    first: list[tuple[Tensor, Tensor]] = []

    def batch() -> Tensor:
        shape = (size.rows, size.seq_len + 1)
        return torch.randint(size.model.vocab_size, shape, generator=generator)

    ours = variant.program == "lattice"
    with attention_kernels():
        kernel = describe_attention(config_of(size, variant), DEVICE) if ours else None
        step = (lattice if ours else hugging_face)(size, variant)

        def run(rows: Tensor) -> None:
            result = step(rows)
            if not first:
                first.append(result)

        times = clock.milliseconds(Work(batch, run))
    speed = rate(size.flops, times)
    return {
        "model": key,
        **asdict(variant),
        "kernel": kernel,
        "milliseconds": times,
        "tokens_per_second": size.tokens / times["median"] * 1e3,
        "flops_per_second": speed["flops_per_second"],
        "mfu": speed["fraction_of_peak"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "first_loss": first[0][0].item(),
        "first_grad_norm": first[0][1].item(),
        **planned(size, variant, times["median"]),
    }


def planned(size: Size, variant: Variant, milliseconds: float) -> dict[str, float]:
    """The planner's step, for a program and a device that it can plan, and its quotient with the
    measured one. It plans with one efficiency of attention, and without flash 3."""
    sheet = data_sheet_of(torch.cuda.get_device_name()) if ON_GPU else None
    if variant.program != "lattice" or variant.compile or (sheet and sheet.name not in DEVICES):
        return {}
    device = DEVICES[sheet.name if sheet else "h200"]
    config = config_of(size, replace(variant, attention=AUTO))
    seconds = StepTime(Layout(config, 1, 0), device).step_seconds
    return {"planned_milliseconds": seconds * 1e3, "over_planned": milliseconds / seconds / 1e3}


def profiled(size: Size, variant: Variant) -> dict[str, Any]:
    """The table of run.profile (docs/profiling.md), and one that adds up the kernels by what they
    do, as their names tell."""
    config = config_of(size, variant)
    train = build(config)
    batch = batch_of(config, train.mesh)
    train(0, *batch)  # compiles kernels, takes memory
    synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
    synchronize()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as profiler:
            about = {"rank": 0, "coordinates": train.mesh.coordinates(),
                     "axes": axes_of_groups(train.mesh)}  # fmt: skip
            profiler.add_metadata_json("lattice", json.dumps(about))
            for step in range(1, PROFILED_STEPS + 1):
                with record_function(f"step {step}"):
                    train(step, *batch)
                    if step == PROFILED_STEPS:
                        synchronize()
        profiler.export_chrome_trace(str(Path(folder) / "trace.json"))
        trace = read_trace(Path(folder) / "trace.json")
    summary, shares = summarise(trace), defaultdict[str, float](float)
    whole = summary["step_seconds"] * PROFILED_STEPS * 1e6
    for event in events_of(trace):
        if event.category == "kernel":
            kind = next(k for k, words in KINDS.items() if re.search(words, event.name.lower()))
            shares[kind] += (event.end - event.begin) / whole
    by_kind = [f"{share:>8.1%}  {kind}" for kind, share in shares.items()]
    text = "\n".join([describe(summary), "", "kernels by kind", *sorted(by_kind, reverse=True)])
    idle = summary["idle"] / summary["step_seconds"]
    return {**summary, "idle_share": idle, "shares": shares, "text": text}
