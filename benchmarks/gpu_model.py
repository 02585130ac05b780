"""Measures whole training steps on one GPU: tokens per second, model FLOP utilisation and peak
memory, compared with Hugging Face's Llama.

    python -m benchmarks.gpu_model                 (the second half of `make bench-gpu`)

There are two models of Llama 3's shapes, trained on sequences of 8192 random tokens, with four
micro-batches of one sequence per step: one with the 8-billion model's width and as many layers as
fit, and the complete 1-billion model. (With only four micro-batches the optimizer takes a tenth of
a step; a real step has more of them.) All programs do the same: forward and backward of every
micro-batch, the gradients' norm, clipping, AdamW. A step includes nothing else: no data loading, no
logging.

    MFU = tokens per second · flops_per_token(S) / dense bf16 peak of the device
    (runtime/metrics.py)
    aim: at least 62 % at the 8-billion model's width, that is, 613 of 989 TFLOP/s

Dtypes of computation and storage:
    lattice         train.dtype=bfloat16: FSDP casts float32 weights once per step; moments and
                    summed gradients are float32
    hugging face    the same arithmetic with PyTorch's means: float32 weights, gradients and
                    moments, autocast to bfloat16; SDPA, fused AdamW, the model's own loss
    … bfloat16      weights and moments stored in bfloat16: lattice rounds stochastically
                    (optimizer.pure_bfloat16), the other to nearest. These need less memory and
                    bandwidth, and are not comparable with the other rows.
Our programs are those that train.py runs: build_stages and TrainStep, on a mesh of one process.
Only the weights differ: they are drawn on the device, because drawing the usual ones, which are the
same for every layout, takes minutes on a CPU.

The exit status is 1 if training with our kernels fails, or begins with another loss or gradient
norm than with PyTorch's operations.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_timing import (
    DEVICE,
    MEASURED,
    NO_TIME,
    ON_GPU,
    Clock,
    Deadline,
    Report,
    Work,
    attempt,
    compiled,
    free_memory,
    milliseconds_or_why,
    parse,
)
from costs.summary import flops_per_token
from data.config import DataConfig
from hardware import data_sheet_of
from model.config import ModelConfig
from model.kernels.backend import why_not_triton
from model.transformer import Transformer, num_parameters
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.parameter import Constant, weights_of
from runtime.init_distributed import init_distributed
from training.build import build_stages
from training.config import Config
from training.sections import (
    CheckpointConfig,
    GuardConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from training.step import TrainStep

MFU_AIM = 0.62
WIDE, SMALL = "8B width", "1B"
SAME = {"first_loss": 2**-8, "first_grad_norm": 2**-6}  # relative; 2⁻⁸ is one rounding to bfloat16
SECONDS = {"compile": 60, "": 15}  # expected time of a row


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    model: ModelConfig
    seq_len: int
    microbatches: int = 4  # of one sequence


def sizes(tiny: bool) -> dict[str, Size]:
    """The sizes to measure. A parameter takes about 22 bytes in training, so 12 layers at the
    8-billion width take 81 GB, plus 17 GB of activations."""
    if tiny:
        model = ModelConfig(
            dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=64, vocab_size=96
        )
        return {WIDE: Size(model, 8, 2), SMALL: Size(replace(model, tie_embeddings=True), 8, 2)}
    layers = 12 if torch.cuda.get_device_properties(0).total_memory > 120e9 else 4
    wide = ModelConfig(
        dim=4096, num_layers=layers, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256
    )
    small = replace(wide, dim=2048, num_layers=16, ffn_dim=8192, tie_embeddings=True)
    return {WIDE: Size(wide, 8192), SMALL: Size(small, 8192)}


@dataclass(frozen=True)
class Variant:
    """A program and how it runs."""

    program: Literal["lattice", "hugging face"] = "lattice"
    kernels: Literal["triton", "torch"] = "triton"  # lattice only
    checkpointing: Literal["none", "selective", "full"] = "none"  # lattice only
    compile: bool = False
    liger: bool = False  # hugging face only
    bfloat16: bool = False  # whether weights and moments are stored in bfloat16

    @property
    def name(self) -> str:
        kernels = ", liger" if self.liger else ""
        if self.program == "lattice":
            kernels = f", {self.kernels}"
        mode = self.checkpointing
        checkpointing = f", {mode} checkpointing" if mode != "none" else ""
        compiled, stored = ", compiled" * self.compile, ", bfloat16" * self.bfloat16
        return self.program + kernels + checkpointing + compiled + stored


THEIRS = Variant("hugging face")
# The most important come first, because time may not suffice for all. Liger modifies Hugging Face's
# classes permanently, and so comes last.
ROWS = [
    *(
        (size, variant)
        for size in (WIDE, SMALL)
        for variant in (Variant(), Variant(kernels="torch"), THEIRS)
    ),
    (WIDE, Variant(checkpointing="selective")),
    (WIDE, Variant(checkpointing="full")),
    (WIDE, Variant(compile=True)),
    (WIDE, replace(THEIRS, compile=True)),
    (WIDE, Variant(bfloat16=True)),
    (WIDE, replace(THEIRS, bfloat16=True)),
    (SMALL, Variant(compile=True)),
    (WIDE, replace(THEIRS, liger=True)),
    (SMALL, replace(THEIRS, liger=True)),
]

# rows of tokens [microbatches, S + 1] → loss and gradient norm
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


def lattice(size: Size, variant: Variant) -> Step:
    config = Config(
        model=replace(size.model, kernels=variant.kernels),
        parallel=ParallelConfig(zero_stage=1),
        train=TrainConfig(
            steps=100,
            seq_len=size.seq_len,
            global_batch_size=size.microbatches,
            micro_batch_size=1,
            compile=variant.compile,
            activation_checkpointing=variant.checkpointing,
        ),
        optimizer=OptimizerConfig(lr=1e-4, pure_bfloat16=variant.bfloat16),
        data=DataConfig(path="-"),
        checkpoint=CheckpointConfig(),
        guard=GuardConfig(),
        run=RunConfig(dir="-"),
    )
    config.validate(1)
    mesh = build_mesh(config.parallel.mesh_sizes(1), DEVICE)
    with patch("training.build.initialise", draw_on_device), compiler():
        train = TrainStep(config, mesh, build_stages(config, mesh))
    steps = itertools.count()

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        result = train(next(steps), rows[:, :-1], rows[:, 1:])
        return result.loss, result.grad_norm

    return step


@torch.no_grad()
def draw_on_device(stage: Transformer, seed: int) -> None:
    """Initialises weights on the device instead of by model/initialise.py, with the same scale; the
    same in all our programs."""
    torch.manual_seed(seed)
    for each in weights_of(stage):
        local, initial = each.sharded.to_local(), each.spec.initial
        if isinstance(initial, Constant):
            local.fill_(initial.value)
        else:
            local.normal_(std=initial.std)


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Without a GPU, makes torch.compile run the traced graphs without compiling them, because
    compiling them for a CPU would prove nothing more."""
    with contextlib.nullcontext() if ON_GPU else patch.object(torch, "compile", compiled):
        yield


def hugging_face(size: Size, variant: Variant) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    shape = size.model
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=size.seq_len,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):  # weights are drawn there too
        model = LlamaForCausalLM(config).to(torch.bfloat16 if variant.bfloat16 else torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = compiled(model) if variant.compile else model

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=DEVICE)
        for row in rows[:, :-1].to(DEVICE, non_blocking=True).split(1):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=not variant.bfloat16):
                # their loss shifts the labels itself
                loss = forward(input_ids=row, labels=row).loss / size.microbatches
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def measure(size: Size, variant: Variant, clock: Clock, peak_flops: float | None) -> dict:
    """Builds, warms up and times one variant."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    step = (lattice if variant.program == "lattice" else hugging_face)(size, variant)
    generator = torch.Generator().manual_seed(0)
    first: list[tuple[Tensor, Tensor]] = []

    def batch() -> Tensor:
        shape = (size.microbatches, size.seq_len + 1)
        return torch.randint(size.model.vocab_size, shape, generator=generator)

    def run(rows: Tensor) -> None:
        result = step(rows)
        if not first:
            first.append(result)

    times = clock.milliseconds(Work(batch, run))
    tokens_per_second = size.microbatches * size.seq_len / times["median"] * 1e3
    flops = tokens_per_second * flops_per_token(size.model, size.seq_len)
    return {
        "milliseconds": times,
        "tokens_per_second": tokens_per_second,
        "flops_per_second": flops,
        "mfu": flops / peak_flops if peak_flops is not None else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "first_loss": first[0][0].item(),
        "first_grad_norm": first[0][1].item(),
    }


def differs(rows: list[dict]) -> list[str]:
    """Descriptions of our rows whose first loss or gradient norm differs from that of PyTorch's
    operations, for the same weights and tokens."""
    ours = [row for row in rows if row["program"] == "lattice" and row["status"] == MEASURED]
    wrong = []
    for row in ours:
        alike = (r for r in ours if r["model"] == row["model"] and r["variant"] == "lattice, torch")
        expected = next(alike, row)
        for key, bound in SAME.items():
            # written so that NaN also differs
            if not abs(row[key] - expected[key]) <= bound * abs(expected[key]):
                wrong.append(
                    f"{row['model']}: {row['variant']}: {key} {row[key]:.5f}, with PyTorch's "
                    f"{expected[key]:.5f}"
                )
    return wrong


def line(row: dict) -> str:
    said = f"{row['model']:10}{row['variant']:42}{milliseconds_or_why(row):>11}"
    if row["status"] != MEASURED:
        return said + (f"   {row['status']}" if row["status"].startswith("failed") else "")
    mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
    peak = row["peak_memory_bytes"]
    memory = f"{peak / 2**30:.1f}" if peak is not None else "-"
    return f"{said}{row['tokens_per_second']:>12,.0f}{mfu:>8}{memory:>8}{row['first_loss']:>9.4f}"


def conclude(rows: list[dict], report: Report) -> bool:
    """Prints our best row at the 8-billion width, compared with the aim. Returns whether everything
    that ran is right."""
    ours = [row for row in rows if row["program"] == "lattice"]
    candidates = [row for row in ours if row["model"] == WIDE and row.get("mfu")]
    best = max(candidates, key=lambda row: row["mfu"], default=None)
    if best is not None:
        met = best["mfu"] >= MFU_AIM
        report.results["best"] = {
            "variant": best["variant"],
            "mfu": best["mfu"],
            "at_least": MFU_AIM,
            "met": met,
        }
        print(
            f"\nbest at {WIDE}: {best['variant']}, {best['mfu']:.1%} MFU; aim {MFU_AIM:.0%}: "
            f"{'met' if met else 'MISSED'}"
        )
    wrong = differs(rows)
    failed = [r["variant"] for r in ours if r["status"].startswith("failed")]
    report.results["right"] = not (wrong or failed)
    report.write()
    said = [*(f"WRONG: {what}" for what in wrong), *(f"FAILED: {what}" for what in failed)]
    print("\n".join(["", *said]).rstrip("\n"))
    return not (wrong or failed)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(__doc__, arguments, budget_seconds=200)
    why = why_not_triton(DEVICE)
    if why is not None:
        print(f"nothing to measure: {why}")
        return 1
    deadline = Deadline(parsed.budget_seconds)
    clock = Clock(samples=1 if parsed.tiny else 3, warm_up=1 if parsed.tiny else 2, flush=False)
    shapes = sizes(parsed.tiny)
    name = torch.cuda.get_device_name() if ON_GPU else ""
    sheet = None if parsed.tiny else data_sheet_of(name)
    peak_flops = sheet.peak_flops if sheet is not None else None
    settings = {
        "sizes": {key: asdict(size) for key, size in shapes.items()},
        "parameters": {key: num_parameters(size.model) for key, size in shapes.items()},
        "flops_per_token": {
            key: flops_per_token(size.model, size.seq_len) for key, size in shapes.items()
        },
        "samples": clock.samples,
        "warm_up": clock.warm_up,
        "peak_flops_per_second": peak_flops,
        "mfu": "tokens_per_second · flops_per_token / peak_flops_per_second",
    }
    report = Report("gpu_model", parsed, settings)
    for key, size in shapes.items():
        count, layers = num_parameters(size.model), size.model.num_layers
        print(
            f"{key}: {layers} layers, {count:,} parameters, "
            f"{flops_per_token(size.model, size.seq_len):.3e} FLOP a token"
        )
    print(
        "MFU = tokens/s · FLOP a token / "
        f"{f'{peak_flops:.3e} FLOP/s' if peak_flops else 'a peak that is not known'}"
    )
    print(f"\n{'':52}{'ms a step':>11}{'tokens/s':>12}{'MFU':>8}{'GiB':>8}{'loss':>9}")
    init_distributed()
    rows = []
    try:
        for key, variant in ROWS:
            if parsed.only not in f"{key}, {variant.name}":
                continue
            found, status = None, NO_TIME
            if deadline.allows(SECONDS["compile" if variant.compile else ""]):
                found, status = attempt(
                    lambda s=shapes[key], v=variant: measure(s, v, clock, peak_flops)
                )
            row: dict[str, Any] = {
                "model": key,
                "variant": variant.name,
                **asdict(variant),
                "status": status,
                **(found or {}),
            }
            rows.append(report.add(row))
            print(line(row), flush=True)
            if found:
                free_memory()
    finally:
        dist.destroy_process_group()
    return 0 if conclude(rows, report) else 1


if __name__ == "__main__":
    sys.exit(main())
