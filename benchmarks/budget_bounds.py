"""The least number of launches, and of floating-point operations, that a case needs, with reasons.

"Least" is what a step needs if every operation that can be part of another one is part of it, and
if nothing is computed or copied twice, with the arithmetic and the memory that the case asks for. A
kind that a pass does not name needs none. Some of it would need a kernel that does not exist yet:
the table says what is there to gain, not what is easy.
"""

from math import prod
from typing import NamedTuple

from torch.distributed.tensor import Shard

from benchmarks.budget_cases import Case
from costs.setting import Setting
from costs.units import LocalWeight, kind_of, unit


class Least(NamedTuple):
    """The least number of launches of one kind in one pass, and why."""

    launches: int
    reason: str


def least_launches(case: Case) -> dict[tuple[str, str], Least]:
    """(pass, kind) → the least number of launches of the case."""
    if not case.is_block:
        return _of_step(case) | _after_backward(case)
    least = _of_block(case)
    return least | _of_experts() if case.config().model.has_experts else least


def _of_block(case: Case) -> dict[tuple[str, str], Least]:
    config = case.config()
    tp, mode = config.parallel.tp, config.train.activation_checkpointing
    least = {
        ("forward", "product"): Least(7, "query, key, value, output, gate, up, down"),
        ("forward", "attention"): Least(1, "one call"),
        ("forward", "Triton"): Least(4, "2 norms (the second adds the residual), rotary, SwiGLU"),
        ("backward", "product"): Least(14, "for each product of forward, its two gradients"),
        ("backward", "attention"): Least(1, "one call"),
        ("backward", "Triton"): Least(4, "those of forward"),
        ("backward", "pointwise"): Least(2, "2 norms add up the parts of their weight's gradient"),
        ("FSDP", "copy"): Least(1, "cast the weights (products can write float32 gradients)"),
    }
    if tp > 1:
        least |= {
            ("forward", "collective"): Least(4, "2 gathers of x, 2 reduce-scatters of y"),
            ("backward", "collective"): Least(
                6, "2 gathers of dy, 2 of x (keeping x whole takes memory), 2 scatters of dx"
            ),
        }
    if mode == "selective":
        least["recomputation", "Triton"] = Least(4, "what is not kept: all but products, attention")
    if mode == "selective" and tp > 1:
        why = "the output projection: its sum over tp is the input of the second norm"
        least["recomputation", "product"] = Least(1, why)
        least["recomputation", "collective"] = Least(1, "the reduce-scatter of that product")
    if mode == "full":
        why = "all of forward but down: nothing in backward needs its result"
        least["recomputation", "product"] = Least(6, why)
        least["recomputation", "attention"] = Least(1, "its result and statistics")
        least["recomputation", "Triton"] = Least(4, "those of forward")
        if tp > 1:
            least["recomputation", "collective"] = Least(3, "those of forward but the last")
    return least


def _of_experts() -> dict[tuple[str, str], Least]:
    """What differs in a block with one expert on each rank, without recomputation or with selective
    recomputation."""
    return {
        ("forward", "product"): Least(
            8, "query, key, value, output, router; gate, up, down of all experts"
        ),
        ("forward", "pointwise"): Least(
            3, "choice, weights and order of rows; gather the rows; sum each token's results"
        ),
        ("forward", "collective"): Least(3, "numbers of rows; rows with their weights; results"),
        ("backward", "product"): Least(16, "for each product of forward, its two gradients"),
        ("backward", "pointwise"): Least(
            5,
            "2 norms; the router's weights; gather gradients of results; sum those of each token",
        ),
        ("backward", "collective"): Least(
            2, "gradients of results; those of rows with their weights"
        ),
        ("FSDP", "copy"): Least(
            4, "experts: cast; the rest: for a gather cast in and copy out, for a reduction copy in"
        ),
        ("FSDP", "collective"): Least(2, "one gather and one reduction of all but the experts"),
    }


def _of_step(case: Case) -> dict[tuple[str, str], Least]:
    config = case.config()
    parallel, blocks = config.parallel, config.model.num_layers
    tp, zero, dp = parallel.tp, parallel.zero_stage, parallel.dp_shard
    m = config.num_microbatches(dp)
    units = blocks + 2
    # With ZeRO-3 twice for each micro-batch; but the embedding's backward needs no weight, and the
    # head computes its gradients in forward.
    gathers = m * (2 * units - 2) if zero == 3 else units
    reductions = units * (m if zero >= 2 else 1)
    least = {
        ("forward", "product"): Least(m * (7 * blocks + 3), "7 in a block; 3 of the head"),
        ("forward", "attention"): Least(m * blocks, "1 in a block"),
        ("forward", "Triton"): Least(m * (4 * blocks + 3), "4 in a block; norm and loss: 3"),
        ("forward", "pointwise"): Least(m * 2, "the embedding; the sum of the losses"),
        ("backward", "product"): Least(m * 14 * blocks, "14 in a block"),
        ("backward", "attention"): Least(m * blocks, "1 in a block"),
        ("backward", "Triton"): Least(m * (4 * blocks + 1), "4 in a block; the last norm"),
        ("backward", "pointwise"): Least(
            m * (2 * blocks + 2), "2 in a block; the last norm's weight; the embedding"
        ),
        ("FSDP", "copy"): Least(
            gathers * 2 + reductions if dp > 1 else gathers,
            "for each gather cast in and copy out, for each reduction copy in"
            if dp > 1
            else "cast the weights of a unit (products can write float32 gradients)",
        ),
        ("FSDP", "pointwise"): Least(
            units * (m - 1) if zero >= 2 and dp > 1 else 0,
            "for each micro-batch after the first, add the shards of a unit's gradients"
            if zero >= 2 and dp > 1
            else "products can add to the float32 sum",
        ),
        ("around", "copy"): Least(2 + (2 if tp > 1 else 0), "tokens and targets to the device"),
        ("around", "collective"): Least((dp > 1) * 2 + (tp > 1), "targets, loss; norms over tp"),
    }
    if dp > 1:
        least["FSDP", "collective"] = Least(
            gathers + reductions,
            "as in parallel/data.py; but the backward of embedding and head needs no weights"
            if zero == 3
            else "gathers and reductions: the table in parallel/data.py",
        )
    if tp > 1:
        least |= {
            ("forward", "collective"): Least(
                m * (4 * blocks + 4),
                "4 in a block; embedding: 1; head: gather, statistics, scatter",
            ),
            ("backward", "collective"): Least(m * (6 * blocks + 1), "6 in a block; embedding: 1"),
        }
    return least


def _after_backward(case: Case) -> dict[tuple[str, str], Least]:
    least = {
        ("gradient norm", "copy"): Least(1, "the table of addresses to the device"),
        ("gradient norm", "Triton"): Least(2, "squares, and their sum"),
        ("guard", "pointwise"): Least(1, "everything in it is a few numbers: one kernel could"),
        ("optimizer", "copy"): Least(1, "the table of addresses to the device"),
        ("optimizer", "Triton"): Least(1, "all weights at once"),
    }
    if case.world > 1:
        least["gradient norm", "collective"] = Least(1, "one number over all ranks")
    return least


class Flops(NamedTuple):
    """Floating-point operations of the products of a block, for one micro-batch."""

    forward: float
    backward: float
    recomputation: float


def least_flops(case: Case) -> Flops:
    """The least operations of a block, from the shapes of its weights."""
    config = case.config()
    parallel, train = config.parallel, config.train
    tp, mode = parallel.tp, train.activation_checkpointing
    name = kind_of(config.model, 0)
    weights = unit(Setting(config.model, train.seq_len, tp), name).weights
    tokens = train.seq_len * train.micro_batch_size
    each, output, down = [], 0.0, 0.0
    for weight in weights:
        if len(weight.shape) < 2:
            continue
        # of all experts together, as many rows as leave a rank arrive at it, if they are balanced
        rows = tokens * (config.model.experts_per_token if len(weight.shape) == 3 else 1)
        each.append(2.0 * rows * prod(weight.shape[-2:]))
        output, down = (
            (output or each[-1], each[-1]) if _is_row_parallel(weight) else (output, down)
        )
    down = each[-1] if config.model.has_experts else down
    again = {"none": 0.0, "selective": output if tp > 1 else 0.0, "full": sum(each) - down}
    return Flops(sum(each), 2 * sum(each), again[mode])


def _is_row_parallel(weight: LocalWeight) -> bool:
    placement = weight.spec.placement
    return isinstance(placement, Shard) and placement.dim == 1
