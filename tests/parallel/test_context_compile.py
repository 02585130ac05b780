"""Compiled blocks with context parallelism: two graphs, and between them attention with its
collectives as without the compiler."""

import contextlib
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import parallel.collectives
import parallel.compiled
import parallel.context
from errors import UserError
from model.attention.causal import Attention
from parallel.activation import PRODUCTS
from parallel.axes import MeshSizes
from parallel.collectives import Pending
from parallel.context import SplitAttention
from proofs.parity.cases import Case
from proofs.parity.row import Row
from proofs.parity.run import compare, expected, heads_in_pieces, run_on_ranks
from proofs.ranks import RankError
from settings.checks import validate
from tests.planted import planted
from tests.proofs.context_batches import with_rows
from tests.steps import make_step, rows_of

CP2 = MeshSizes(cp=2)


class Compiled(Case):
    """A case with train.compile=true."""

    def config(self):
        config = super().config()
        config = replace(config, train=replace(config.train, compile=True))
        validate(config, self.world)
        return config


def products(graph, _):
    """The number of matrix products in a graph goes to `counters`; the graph runs as it is."""
    found = sum(node.target in PRODUCTS for node in graph.graph.nodes)
    counters["products"][found] += 1
    return make_boxed_func(graph.forward)


@contextlib.contextmanager
def traced(bug=contextlib.nullcontext):
    """Blocks are captured, forward and backward, but not translated to C++."""
    torch._dynamo.reset()
    counters.clear()
    backend = aot_autograd(fw_compiler=products, bw_compiler=products)
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)), bug():
        yield


def run_traced(case, bug):
    run = run_on_ranks(case, 1, partial(traced, bug))
    return run, counters["stats"]["unique_graphs"], dict(counters["products"])


def compiled_row(ranks, case, bug=contextlib.nullcontext):
    try:
        found = ranks.run(run_traced, case.world, case, bug)
    except RankError as error:
        return Row(case, crash=str(error)), []
    row = compare(case, [run for run, *_ in found], expected(case, 1))
    return row, [rest for _, *rest in found]


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        thorough(Compiled(CP2, document_mask=True), 4),
        (Compiled(CP2, activation_checkpointing="selective", qk_norm=True, document_mask=True), 8),
        thorough(Compiled(CP2, document_mask=True), 1),
        thorough(Compiled(CP2, activation_checkpointing="full", zero_stage=2), 2),
        thorough(Compiled(CP2, zero_stage=0), 2),
        thorough(Compiled(CP2, activation_checkpointing="selective", zero_stage=3), 1),
        thorough(Compiled(CP2, activation_checkpointing="full", document_mask=True), 1),
        thorough(Compiled(MeshSizes(dp_replicate=2, cp=2), document_mask=True, num_kv_heads=1), 2),
        thorough(Compiled(MeshSizes(pp=2, cp=2), activation_checkpointing="selective"), 1),
        thorough(Compiled(MeshSizes(cp=4), activation_checkpointing="full"), 1),
    ],
    ids=str,
)
def test_parts_of_a_block_are_graphs(ranks, case, rows):
    """Gradients and a step are right. All blocks share two graphs, and a graph has the products of
    its own part only: q, k, v, and output, gate, up, down; backward has twice as many."""
    row, found = compiled_row(ranks, with_rows(case, rows))
    assert not row.failures(), str(row)
    for graphs, products in found:
        assert graphs == 2
        assert products == {3: 1, 6: 1, 4: 1, 8: 1}


def test_a_whole_block_is_one_graph_without_cp(ranks):
    row, found = compiled_row(ranks, Compiled(MeshSizes(dp_shard=2)))
    assert not row.failures(), str(row)
    assert found == [[1, {7: 1, 14: 1}]] * 2


# --- controls -------------------------------------------------------------------------------------


@planted(parallel.compiled, "_with")
def attention_is_not_differentiated(honest, attend, inputs):
    """The second graph gets the result of attention without its history."""
    return honest(lambda *qkv: attend(*qkv).detach(), inputs)


@planted(Attention, "forward")
def the_graph_breaks(forward, *inputs):
    """Something in the block is not traced by the compiler."""
    torch._dynamo.graph_break()
    return forward(*inputs)


def test_a_lost_gradient_is_found(ranks):
    row, _ = compiled_row(ranks, Compiled(CP2), attention_is_not_differentiated)
    assert "gradient" in row.failures()


def test_another_break_is_an_error(ranks):
    row, _ = compiled_row(ranks, Compiled(CP2), the_graph_breaks)
    assert row.crash is not None
    assert "graph_break" in row.crash


# --- collectives ----------------------------------------------------------------------------------


def in_order(case, pieces=parallel.context.PIECES):
    """The starts and waits of collectives over cp, and attention, of a step after the first."""
    seen = []

    def noted(name, honest):
        def note(*args, **kwargs):
            seen.append(name)
            return honest(*args, **kwargs)

        return note

    def patched(owner, name):
        return patch.object(owner, name, noted(name, getattr(owner, name)))

    honest = Pending.wait

    def wait(self):
        seen.extend(["wait"] * len(self._works))  # those of tp wait for nothing
        return honest(self)

    with (
        traced(),
        heads_in_pieces(),
        patch.object(parallel.context, "PIECES", pieces),
        patched(parallel.collectives, "_all_gather_single"),
        patched(parallel.collectives, "_reduce_scatter_single"),
        patch.object(Pending, "wait", wait),
        patched(SplitAttention, "_of"),
    ):
        step = make_step(case)
        step.forward_backward(*rows_of(step))
        seen.clear()
        step.forward_backward(*rows_of(step))
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_collectives_are_those_of_an_eager_block(ranks, mode):
    """In number and order: as many run beside attention. Control: keys in one piece."""
    eager, compiled = (
        with_rows(kind(CP2, activation_checkpointing=mode), 1) for kind in (Case, Compiled)
    )
    (expected, _), (found, _) = (ranks.run(in_order, 2, case) for case in (eager, compiled))
    assert expected.count("_reduce_scatter_single") > 0
    assert found == expected
    assert ranks.run(in_order, 2, compiled, 1)[0] != expected


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Compiled(MeshSizes(cp=2, tp=2)), "parallel.tp > 1"),
        (Compiled(MeshSizes(pp=2, cp=2), schedule="zb_h1"), "zb_h1"),
    ],
    ids=str,
)
def test_what_no_compiled_block_does_is_refused(case, why):
    with pytest.raises(UserError, match=why):
        case.config()
