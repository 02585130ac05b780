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

from model.attention.causal import Attention
from model.transformer import Block
from parallel.activation import PRODUCTS, wrap_blocks
from parallel.axes import MeshSizes
from parallel.layer import TensorParallel
from proofs.parity.cases import Case
from proofs.parity.run import compare, expected, run_on_ranks
from settings.checks import validate
from tests.planted import planted
from tests.proofs.context_batches import ROWS, given
from tests.proofs.parity_tiers import thorough_but
from tests.runs import said_by

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
    with given("all"):
        run = run_on_ranks(case, 2, partial(traced, bug))
    return run, counters["stats"]["unique_graphs"], dict(counters["products"])


def compiled_row(ranks, case, bug=contextlib.nullcontext):
    found = ranks.run(run_traced, case.world, case, bug)
    with given("all"):  # to the reference too
        row = compare(case, [run for run, *_ in found], expected(case, 2))
    return row, [f[1:] for f in found]


SINGLE = {"num_microbatches": ROWS}  # micro-batches of one sequence
CASES = [
    Compiled(CP2, activation_checkpointing="selective", qk_norm=True, document_mask=True),
    Compiled(CP2, document_mask=True, **SINGLE),
    Compiled(CP2, activation_checkpointing="full", zero_stage=2, num_microbatches=8),
    Compiled(CP2, zero_stage=0),
    Compiled(CP2, activation_checkpointing="selective", zero_stage=3, **SINGLE),
    Compiled(MeshSizes(dp_replicate=2, cp=2), document_mask=True, num_kv_heads=1),
    Compiled(MeshSizes(pp=2, cp=2), activation_checkpointing="selective", **SINGLE),
    Compiled(MeshSizes(cp=4), activation_checkpointing="full", document_mask=True, **SINGLE),
    # without cp, because logits are noted in between
    Compiled(MeshSizes(), optimizer="muon"),
    Compiled(MeshSizes(dp_shard=2), optimizer="muon", activation_checkpointing="selective"),
]


@pytest.mark.parametrize("case", thorough_but([CASES[0], CASES[-2]], CASES), ids=str)
def test_parts_of_a_block_are_graphs(ranks, case):
    """Gradients and a step are right. All blocks share two graphs, and a graph has the products of
    its own part only: q, k, v, and output, gate, up, down; backward has twice as many (one fewer
    if keys and values are narrow: their input gradients are one product)."""
    row, found = compiled_row(ranks, case)
    assert not row.failures(), str(row)
    backward = 5 if case.num_kv_heads == 1 else 6
    assert found == [(2, {3: 1, backward: 1, 4: 1, 8: 1})] * case.world


@planted(Block, "after")
def attention_is_not_differentiated(after, block, y, x):
    """The second graph gets half of the result of attention without its history."""
    return after(block, (y + y.detach()) / 2, x)


@planted(Attention, "project")
def the_graph_breaks(project, *inputs):
    """Something in the block is not traced by the compiler."""
    torch._dynamo.graph_break()
    return project(*inputs)


def test_a_lost_gradient_is_found(ranks):
    row, _ = compiled_row(ranks, Compiled(CP2), attention_is_not_differentiated)
    assert "gradient" in row.failures()


@pytest.mark.parametrize("attention", [None, torch.nn.Identity()], ids=["attends", "does not"])
def test_what_does_not_attend_is_one_graph(attention):
    block = Block(Case(CP2).config().model, 0, TensorParallel())
    block.attention = attention or block.attention
    with patch.object(torch, "compile", wraps=torch.compile) as compiled:
        wrap_blocks([block], "none", True, 1, set(), apart=True)
    assert compiled.call_count == (2 if attention is None else 1)


def test_another_break_is_an_error(ranks):
    for said in ranks.run(said_by, 2, run_traced, Compiled(CP2), the_graph_breaks):
        assert "graph_break" in said
