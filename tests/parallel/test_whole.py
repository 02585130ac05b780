"""Weights that no other rank shares are trained without FSDP, to the same bits. (That neither
weights nor gradients are copied shows in the memory of a rehearsal: tests/plan/test_plan.py.)"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from parallel.axes import MeshSizes
from parallel.weight_gradient import Place, WeightGradient
from proofs.parity.cases import Case
from proofs.parity.run import run_on_ranks
from tests.proofs.parity_tiers import thorough_but
from tests.runs import said_by
from tests.steps import make_step, rows_of

ONE, PIPELINE = Case(MeshSizes()), Case(MeshSizes(pp=2), schedule="zb_h1")
SETTINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "pure bfloat16": {"dtype": "bfloat16", "pure": True},
}


def step_of(case, dtype, pure=False, compile=False):
    config = case.config()
    train = replace(config.train, dtype=dtype, compile=compile)
    optimizer = replace(config.optimizer, pure_bfloat16=pure)
    return make_step(replace(config, train=train, optimizer=optimizer))


def train(case, setting, fsdp=False):
    """Losses, gradient norms and last weights of two steps."""
    with patch("parallel.fsdp_units.shares_weights", lambda *_: True) if fsdp else nullcontext():
        step = step_of(case, **setting)
    assert all(isinstance(stage, FSDPModule) == fsdp for stage in step.stages.values())
    results = [step(index, *rows_of(step, index)) for index in range(2)]
    # of bfloat16 gradients too: a rounded sum over ranks would depend on the sharding
    assert all(result.grad_norm.dtype == torch.float64 for result in results)
    numbers = [x for result in results for x in (result.loss, result.grad_norm)]
    return numbers + [weight.sharded.to_local().clone() for weight in step.weights]


RUNS = [(name, case) for case in (ONE, PIPELINE) for name in SETTINGS]


@pytest.mark.parametrize(
    ("setting", "case"),
    thorough_but([("bfloat16", ONE), ("pure bfloat16", ONE), ("bfloat16", PIPELINE)], RUNS),
    ids=str,
)
def test_the_same_bits_as_with_fsdp(ranks, case, setting):
    without, with_fsdp = (
        ranks.run(train, case.world, case, SETTINGS[setting], fsdp) for fsdp in (False, True)
    )
    for mine, other in zip(without, with_fsdp, strict=True):
        assert len(mine) > 10
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


EXPERTS = Case(
    MeshSizes(), dtype="bfloat16", router="sigmoid_bias", router_losses=True, qk_norm=True
)
SUMMED = {
    "one rank": EXPERTS,
    "deferred": replace(EXPERTS, layout=MeshSizes(pp=2), schedule="zb_h1"),
    "deferred over tp": replace(EXPERTS, layout=MeshSizes(pp=2, tp=2, ep=2), schedule="zb_h1"),
    "FSDP": replace(EXPERTS, layout=MeshSizes(dp_shard=2, ep=2)),
    "deferred with FSDP": replace(
        EXPERTS, layout=MeshSizes(pp=2, dp_shard=2, ep=2), schedule="zb_h1"
    ),
    "FSDP of experts": replace(EXPERTS, layout=MeshSizes(dp_shard=4, ep=2)),
}


def gradients(case, microbatches, rounded=False):
    """This rank's part of each gradient; `rounded`: those of micro-batches are rounded to bfloat16
    before they are added."""
    add = WeightGradient._add

    def round_first(self, dw):
        add(self, dw.bfloat16())

    def product(self, matmul, dy, x):
        self._add(matmul.weight_gradient(dy, x))

    case = replace(case, num_microbatches=microbatches)
    rounding = patch.multiple(WeightGradient, _add=round_first, add_product=product)
    # oneDNN's products in bfloat16 depend on the number of rows
    with torch.backends.mkldnn.flags(enabled=False), rounding if rounded else nullcontext():
        return [(name, part) for name, _, part in run_on_ranks(case, 1).gradients]


@pytest.mark.parametrize("name", thorough_but(["deferred"], SUMMED))
def test_the_gradient_of_no_weight_is_rounded_before_it_is_added(ranks, name):
    """In small and in large micro-batches activations are the same, so only the order of sums in
    float32 differs. Rounded to bfloat16, each gradient would have a relative error of up to
    2^-9."""
    case = SUMMED[name]
    few = ranks.run(gradients, case.world, case, case.layout.pp)
    for rounded in (False, True):
        many = ranks.run(gradients, case.world, case, 8, rounded)
        for (name, a), (_, b) in zip(chain(*many), chain(*few), strict=True):
            error = ((a - b).norm() / b.norm()).item()
            assert (error > 1e-5) == rounded, name


def turned(case):
    """As `train`, but gradients of the last rank lie in memory column by column, as einsum's do."""
    add = WeightGradient._add

    def add_turned(self, dw):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        add(self, dw.t().contiguous().t() if is_last and dw.ndim == 2 else dw)

    def product(self, matmul, dy, x):
        self._add(matmul.weight_gradient(dy, x))

    with patch.multiple(WeightGradient, _add=add_turned, add_product=product):
        return train(case, SETTINGS["float32"])


def test_gradients_may_have_any_strides(ranks):
    """Also of a tied embedding, whose copies are on two ranks."""
    case = replace(PIPELINE, tie_embeddings=True, num_microbatches=2)
    plain, other = ranks.run(train, 2, case, SETTINGS["float32"]), ranks.run(turned, 2, case)
    for a, b in zip(chain(*plain), chain(*other), strict=True):
        torch.testing.assert_close(a, b)


def forgets(name):
    """Train a step while the sum of one weight's gradients is lost."""
    step = step_of(ONE, "bfloat16")
    lost = step.stages[0].get_submodule(name)
    lost.gradient.sum_in(Place(), torch.float32)
    step.forward_backward(*rows_of(step))


def test_a_lost_sum_is_noticed(ranks):
    (message,) = ranks.run(said_by, 1, forgets, "blocks.0.feed_forward.down")
    assert "no reduced gradient" in message


def compiled_losses(compile):
    """Losses of two steps, and the number of graphs that the compiler captured in each."""
    counters = torch._dynamo.utils.counters["stats"]
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        step = step_of(ONE, "bfloat16", compile=compile)
        losses, graphs = [], []
        for index in range(2):
            before = counters["unique_graphs"]
            losses.append(step(index, *rows_of(step, index)).loss.item())
            graphs.append(counters["unique_graphs"] - before)
    return losses, graphs


def test_compiled_blocks_keep_their_graphs(ranks):
    """A whole block is one graph. A step makes new parameters in the compute dtype; the compiler's
    code takes them as they come, and autograd's gradients join the sums."""
    (eager, _), (compiled, graphs) = (ranks.run(compiled_losses, 1, on)[0] for on in (False, True))
    assert compiled == pytest.approx(eager, rel=2e-3)
    assert graphs == [1, 0]
