"""Measures what FSDP2 costs where it has nothing to shard: over one rank.

    python -m benchmarks.gpu_fsdp                  part of `make bench-gpu PART=open`

The step of the wide model with FSDP over one rank is compared with the sum of parts that contain no
FSDP: forward and backward of the same model on plain bfloat16 weights, whose gradients autograd
sums in bfloat16; the gradients' norm; and the optimizer. The difference is what FSDP adds: casts of
the weights, and sums, copies and reductions of gradients in float32. Two of these are measured by
themselves, as the fewest bytes that they must move.

The row that compares gives the difference in points of MFU of the step.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_programs import (
    WIDE,
    Size,
    Variant,
    build,
    config_of,
    mfu_points,
    sizes,
)
from benchmarks.gpu_rows import (
    Cannot,
    Measurement,
    exit_status,
    options,
    parse,
    run_training,
)
from benchmarks.gpu_timing import DEVICE, Clock, Work, peak_flops
from costs.summary import flops_per_token
from model.transformer import Batch, Transformer
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from tools.command import run_command
from tools.rehearse.rank import draw_on_device
from training.gradient import gradient_norm

Run = Callable[[], Any]
DIFFERENCE = "what FSDP adds over one rank"


def step_of(size: Size, variant: Variant) -> Run:
    """A whole training step, as train.py runs it."""
    train, batch = build(config_of(size, variant)), batch_of(size)
    return lambda: train(0, *batch)


# Each row is one way to run the same step: a name, and a function that builds it. To compare two
# implementations of data parallelism, add the other one here; the first is compared with the parts.
WAYS: dict[str, Callable[[Size], Run]] = {
    "step, zero_stage 0": partial(step_of, variant=Variant(zero_stage=0)),
    "step, zero_stage 1": partial(step_of, variant=Variant(zero_stage=1)),
    "step, zero_stage 0, pure bfloat16": partial(
        step_of, variant=Variant(zero_stage=0, bfloat16=True)
    ),
}


def batch_of(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(size.model.vocab_size, (size.microbatches, size.seq_len))
    return tokens, tokens.roll(-1, 1)


def plain_model(size: Size) -> Run:
    """Forward and backward of every micro-batch on bfloat16 weights that nothing wraps."""
    config = config_of(size, Variant())
    tp = TensorParallel.of(build_mesh(config.parallel.mesh_sizes(1), DEVICE).tp, True)
    layers = range(size.model.num_layers)
    stage = Transformer(config.model, layers, first=True, last=True, tp=tp).to(torch.bfloat16)
    stage.to_empty(device=DEVICE)
    draw_on_device(stage, 0)
    positions = torch.arange(size.seq_len, device=DEVICE).unsqueeze(1)
    scale = torch.tensor(1 / (size.microbatches * size.seq_len), device=DEVICE)
    rows = (t.to(DEVICE).T.split(1, dim=1) for t in batch_of(size))
    batches = [
        Batch(t.contiguous(), y.contiguous(), positions, scale) for t, y in zip(*rows, strict=True)
    ]

    def run() -> None:
        for batch in batches:
            stage(None, batch).backward()
        for each in stage.parameters():
            each.grad = None

    return run


def optimizer_alone(size: Size) -> Run:
    """The norm of float32 gradients, and the update of float32 weights."""
    train = build(config_of(size, Variant(zero_stage=0)))
    train.forward_backward(*batch_of(size))
    gradients = [each.gradient for each in train.weights]

    def run() -> None:
        norm = gradient_norm(gradients, train.mesh, train.config.model.kernels)
        train.optimizer.update(1e-4, [g.to_local() for g in gradients], norm, 1.0)

    return run


def casts(size: Size) -> Run:
    """Every weight from float32 to bfloat16, once."""
    shapes = [each.spec.shape for each in weights_of(whole_model(size))]
    master = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    compute = [torch.empty_like(w, dtype=torch.bfloat16) for w in master]
    return lambda: torch._foreach_copy_(compute, master)


def sums(size: Size) -> Run:
    """Every bfloat16 gradient added to a float32 one, for each micro-batch after the first."""
    shapes = [each.spec.shape for each in weights_of(whole_model(size))]
    total = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    gradients = [torch.zeros_like(t, dtype=torch.bfloat16) for t in total]

    def run() -> None:
        for _ in range(size.microbatches - 1):
            torch._foreach_add_(total, gradients)

    return run


def whole_model(size: Size) -> Transformer:
    """The whole model on the meta device, for the shapes of its weights."""
    layers = range(size.model.num_layers)
    return Transformer(size.model, layers, first=True, last=True, tp=TensorParallel())


# What contains no FSDP; the first two add up to a step.
PARTS: dict[str, Callable[[Size], Run]] = {
    "part, forward and backward without FSDP": plain_model,
    "part, norm and optimizer": optimizer_alone,
    "part, weights to bfloat16": casts,
    "part, sums of gradients in float32": sums,
}


def measure(build_run: Callable[[Size], Run], size: Size, clock: Clock, peak: float | None) -> dict:
    run = build_run(size)
    times = clock.milliseconds(Work(lambda: None, lambda _: run()))
    flops = flops_per_token(size.model, size.seq_len) * size.microbatches * size.seq_len
    rate = flops / times["median"] * 1e3
    return {"milliseconds": times, "mfu": rate / peak if peak else None}


def difference(found: dict[str, dict], size: Size, peak: float | None) -> dict[str, Any]:
    """The first way minus the parts of a step."""
    whole, *parts = (next(iter(WAYS)), *itertools.islice(PARTS, 2))
    missing = [name for name in (whole, *parts) if name not in found]
    if missing:
        raise Cannot(f"there is no {missing[0]}")
    step, *rest = (found[name]["milliseconds"]["median"] for name in (whole, *parts))
    row = {"milliseconds": {"median": step - sum(rest)}, "share": 1 - sum(rest) / step, "mfu": None}
    if peak is None:
        return row
    tokens, each = size.microbatches * size.seq_len, flops_per_token(size.model, size.seq_len)
    saved = row["milliseconds"]["median"] / 1e3
    return {**row, "points": mfu_points(each, saved, tokens, found[whole]["mfu"], peak)}


def describe(row: dict[str, Any]) -> str:
    mfu = f"{row['mfu']:7.1%} MFU" if row.get("mfu") is not None else ""
    points = f"{row['points']:6.2f} points of MFU" if "points" in row else ""
    return f"{row['name']:46}{row['milliseconds']['median']:12.3f} ms{mfu}{points}"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=110), arguments)
    size, peak = sizes(parsed.tiny)[WIDE], None if parsed.tiny else peak_flops()
    clock = Clock(samples=1 if parsed.tiny else 3, warm_up=1 if parsed.tiny else 2, flush=False)
    found: dict[str, dict] = {}

    def kept(name: str, build_run: Callable[[Size], Run]) -> dict:
        found[name] = measure(build_run, size, clock, peak)
        return found[name]

    first, *others = WAYS.items()
    rows = [
        Measurement(name, 15, partial(kept, name, build_run))
        for name, build_run in (first, *PARTS.items())
    ]
    rows.append(Measurement(DIFFERENCE, 0, lambda: difference(found, size, peak)))
    rows += [Measurement(name, 15, partial(kept, name, build_run)) for name, build_run in others]
    return exit_status(run_training(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
