"""The operators of a block and of a step: the host waits only for the counts of experts, no large
result is for nothing, and launches stay within a bound. `tools.rehearse --operators` shows every
operator, with the line that causes it."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from model.kernels.swiglu import swiglu
from parallel.axes import MeshSizes
from settings.load import load_config
from tools.rehearse.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.rehearse.operators import ATTENTION, COLLECTIVE, PRODUCT, TRITON, recording
from tools.rehearse.rank import alone, rehearse
from training.gradient import gradient_norm


class Case(NamedTuple):
    """A rank of a job. A block is the middle stage of a pipeline of three blocks, so that nothing
    but one block is on the rank; a step has an embedding, two blocks, the head and two
    micro-batches."""

    name: str
    configuration: str
    keys: str
    world: int
    rank: int = 0
    launches: int = 0  # of a block, at most
    waits: int = 0


PIPELINE = ("parallel.schedule=1f1b parallel.stages_per_rank=1 parallel.tp_pieces=1 "
            "train.seq_len=8192 train.micro_batch_size=1 ")  # fmt: skip
BLOCK = (f"{PIPELINE} parallel.pp=3 parallel.layers_per_stage=[1,1,1] model.num_layers=3 "
         "parallel.dp_shard=1 parallel.zero_stage=0 train.global_batch_size=1 ")  # fmt: skip
STEP = (f"{PIPELINE} parallel.pp=1 model.num_layers=2 parallel.dp_shard=8 "
        "train.global_batch_size=16 train.activation_checkpointing=none ")  # fmt: skip
# a block of Mixtral 8x7B, with each of its 8 experts on a rank of its own
EXPERTS = ("parallel.dp_shard=8 parallel.ep=8 parallel.zero_stage=1 train.global_batch_size=8 "
           "model.experts.count=8 model.experts.per_token=2 ")  # fmt: skip
# Launches at most: about a tenth more than there are, so that a change which adds one or two is not
# refused. (docs/profiling.md: the least that a block needs.)
BLOCKS = [
    Case("8B block, full", "llama3_8b",
         f"{BLOCK} parallel.tp=1 train.activation_checkpointing=full", 3, 1, launches=69),
    Case("70B block, selective", "llama3_70b",
         f"{BLOCK} parallel.tp=8 train.activation_checkpointing=selective", 24, 8, launches=75),
    Case("8x7B block, none", "llama3_8b",
         f"{BLOCK} {EXPERTS} parallel.tp=1 train.activation_checkpointing=none", 24, 8,
         launches=126, waits=1),
    # 128 experts on each rank: a kernel for all of them, and no wait, because all rows stay
    Case("30B-A3B block, full", "qwen3_30b_a3b",
         f"{BLOCK} parallel.tp=1 train.activation_checkpointing=full model.experts.count=128", 3, 1,
         launches=166),
]  # fmt: skip
STEPS = [
    Case("8B step, ZeRO-2", "llama3_8b", f"{STEP} parallel.tp=1 parallel.zero_stage=2", 8),
    Case("70B step, ZeRO-3", "llama3_70b", f"{STEP} parallel.tp=8 parallel.zero_stage=3", 64),
]


def rows_of(case: Case, more: str = "") -> list[dict[str, Any]]:
    keys = f"{case.keys} {more}".split()
    config = load_config(f"configs/{case.configuration}.yaml", keys)
    return alone(rehearse, config, case.world, case.rank, 2, recording)["operators"]


@pytest.mark.parametrize("case", [*BLOCKS, *STEPS], ids=lambda case: case.name)
def test_a_rank_waits_and_computes_no_more_than_it_must(case: Case) -> None:
    """The host waits only for the counts of experts; no product or collective is for nothing; and a
    block launches no more than its bound."""
    rows = rows_of(case)
    waits = [(row["file"], row["function"]) for row in rows if row["waits"]]
    assert waits == [("parallel/dispatch/__init__.py", "counts_on_host")] * case.waits
    kinds = (PRODUCT, ATTENTION, TRITON, COLLECTIVE)
    assert not [row for row in rows if row["for_nothing"] and row["kind"] in kinds]
    passes = ("forward", "recomputation", "backward", "FSDP")
    launches = sum(row["launches"] for row in rows if row["pass"] in passes)
    assert not case.launches or launches <= case.launches


def with_clone_and_product(gate: Tensor, up: Tensor, kernels: str) -> Tensor:
    gate[0].detach() @ up[0].detach().t()
    return swiglu(gate.clone(), up, kernels)


def with_item(*args: Any) -> Tensor:
    norm = gradient_norm(*args)
    return norm * 2 if norm.item() > 1 else norm


SMALL = ("model.dim=64 model.num_heads=4 model.num_kv_heads=2 model.ffn_dim=96 "
         "model.vocab_size=128 train.seq_len=32 train.activation_checkpointing=full")  # fmt: skip


def test_a_clone_a_wait_and_a_product_for_nothing_are_found() -> None:
    """With their pass, bytes and line, at small widths, in each of two blocks and micro-batches."""
    with (
        patch("model.feed_forward.swiglu.swiglu", with_clone_and_product),
        patch("training.step.gradient_norm", with_item),
    ):
        rows = rows_of(STEPS[0], SMALL)
    mine = [row for row in rows if row["file"] == "tests/rehearse/test_operators.py"]
    assert len(mine) == 5, "two clones, two products and a wait; views launch nothing"
    passes = ["forward", "recomputation"]
    clones = [row for row in mine if row["name"] == "clone"]
    assert [row["pass"] for row in clones] == passes
    assert {row["function"] for row in clones} == {"with_clone_and_product"}
    assert {row["line"] for row in clones} == {with_clone_and_product.__code__.co_firstlineno + 2}
    # [S, 1, F] in bfloat16, read and written
    assert {(row["launches"], row["bytes"]) for row in clones} == {(4, 4 * 2 * 2 * 32 * 96)}
    (waits,) = [row for row in mine if row["waits"]]
    assert (waits["name"], waits["function"]) == ("_local_scalar_dense", "with_item")
    products = [row for row in mine if row["kind"] == PRODUCT]
    assert [row["pass"] for row in products] == passes
    assert (products[1]["launches"], products[1]["for_nothing"]) == (4, 4)


def operations_of(call: Callable[[], Any]) -> list[tuple[str, int, bool]]:
    """(name, launches, waits) of each operator of `call`, in a process of its own."""
    with (
        one_rank(MeshSizes(), 0, DEVICE) as mesh,
        fake_gpu() as device,
        recording(mesh, device) as ledger,
    ):
        device.here.in_step = True
        call()
    return [(each.name, each.launches, each.waits) for each in ledger.operators]


def waiting() -> None:
    x = torch.zeros(4, device=DEVICE)
    x.tolist()
    x.nonzero()
    x[x > 0]
    bool(x[0])
    torch.equal(x, x)
    torch.tensor([1.0], device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.Event().synchronize()
    x.cpu()
    torch.ones(4).to(DEVICE)
    x[torch.tensor([0])]
    x.copy_(torch.ones(4))


def not_waiting() -> None:
    x = torch.ones(4).to(DEVICE, non_blocking=True)
    torch.where(x > 0, x, 0.0)
    x.masked_fill(x > 0, 1.0)
    x.copy_(torch.ones(4), non_blocking=True)
    torch.ones(4).tolist()
    torch.tensor([1.0]).item()


def test_everything_that_waits_is_found() -> None:
    waits = [name for name, _, waits in alone(operations_of, waiting) if waits]
    assert waits == [
        "_to_copy", "nonzero", "index", "_local_scalar_dense", "equal",
        "tensor() copies to the device", "synchronize()", "Event.synchronize()", "_to_copy",
        "_to_copy", "index", "copy_",
    ]  # fmt: skip
    others = alone(operations_of, not_waiting)
    assert not [name for name, _, waits in others if waits]
    # it clones, and fills the clone
    assert ("masked_fill", 2, False) in others
