"""Compares data parallelism over one rank, with FSDP2 and without.

    python -m benchmarks.gpu_fsdp                  part of `make bench-gpu PART=open`

Over one rank there is nothing to shard, and training runs without FSDP (parallel/whole.py). With
FSDP the numbers are the same; FSDP adds a second copy of every weight, and passes every gradient
through two buffers. Each row is a whole step of the wide model, as train.py runs it, or with FSDP
forced on. The rows that compare give the difference in points of MFU of the step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp import FSDPModule

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
from benchmarks.gpu_timing import Clock, Work, peak_flops
from costs.summary import flops_per_token
from tools.command import run_command
from tools.rehearse.rank import rows as batch_of

DIFFERENCE = "what FSDP adds over one rank"
# The first one is that of the estimate (gpu_estimates.py).
SETTINGS = {
    "": Variant(zero_stage=0),
    ", zero_stage 1": Variant(zero_stage=1),
    ", pure bfloat16": Variant(zero_stage=0, bfloat16=True),
}


def forced() -> AbstractContextManager[Any]:
    """A context in which stages are wrapped in FSDP although no rank shares their weights."""
    return patch("parallel.fsdp_units.shares_weights", lambda *_: True)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with FSDP": forced,
    "without FSDP": nullcontext,
}


def measure(way: str, variant: Variant, size: Size, clock: Clock, peak: float | None) -> dict:
    """Builds a step in this way and times it."""
    with WAYS[way]():
        train = build(config_of(size, variant))
    wrapped = [isinstance(stage, FSDPModule) for stage in train.stages.values()]
    assert wrapped == [way == "with FSDP"] * len(wrapped), f"the step is not {way}"
    batch = batch_of(train.config, train.mesh)
    times = clock.milliseconds(Work(lambda: batch, lambda given: train(0, *given)))
    flops = flops_per_token(size.model, size.seq_len) * size.microbatches * size.seq_len
    rate = flops / times["median"] * 1e3
    return {"milliseconds": times, "mfu": rate / peak if peak else None}


def difference(rows: dict[str, dict], size: Size, peak: float | None) -> dict[str, Any]:
    """What the step with FSDP takes longer. `rows`: by way."""
    missing = [way for way in WAYS if way not in rows]
    if missing:
        raise Cannot(f"there is no step {missing[0]}")
    with_fsdp, without = (rows[way]["milliseconds"]["median"] for way in WAYS)
    saved = with_fsdp - without
    row = {"milliseconds": {"median": saved}, "share": saved / with_fsdp, "mfu": None}
    if peak is None:
        return row
    tokens, each = size.microbatches * size.seq_len, flops_per_token(size.model, size.seq_len)
    mfu = rows["with FSDP"]["mfu"]
    return {**row, "points": mfu_points(each, saved / 1e3, tokens, mfu, peak)}


def describe(row: dict[str, Any]) -> str:
    mfu = f"{row['mfu']:7.1%} MFU" if row.get("mfu") is not None else ""
    points = f"{row['points']:6.2f} points of MFU" if "points" in row else ""
    return f"{row['name']:46}{row['milliseconds']['median']:12.3f} ms{mfu}{points}"


def measurements(size: Size, clock: Clock, peak: float | None) -> list[Measurement]:
    """For each setting a row for each way, and one that compares them."""
    rows = []
    for setting, variant in SETTINGS.items():
        found: dict[str, dict] = {}

        def kept(way: str, variant: Variant = variant, found: dict[str, dict] = found) -> dict:
            found[way] = measure(way, variant, size, clock, peak)
            return found[way]

        rows += [Measurement(f"step {way}{setting}", 15, partial(kept, way)) for way in WAYS]
        compared = partial(difference, found, size, peak)
        rows.append(Measurement(f"{DIFFERENCE}{setting}", 0, compared))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=110), arguments)
    peak = None if parsed.tiny else peak_flops()
    clock = Clock.of_steps(parsed.tiny)
    rows = measurements(sizes(parsed.tiny)[WIDE], clock, peak)
    return exit_status(run_training(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
