"""What expert parallelism sends, how often the host waits for it, and what it leaves behind."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import model.router._base
import parallel.expert
from costs.operators import needs_value
from parallel.axes import MeshSizes
from parallel.expert import Exchange, TokenDispatch
from proofs.parity.cases import Case
from tests.proofs.parity_tiers import thorough_but
from tests.steps import make_step, rows_of

D, X, K = 32, 8, 3  # of the parity proof's model


@dataclass
class Found:
    """What one rank did."""

    messages: int = 0
    leaves: int = 0  # bytes, to other ranks
    expected: int = 0  # the same, by the table in parallel/expert.py
    routes: int = 0  # how often they were found, in forward …
    routes_again: int = 0  # … and in backward or recomputation
    waits: int = 0  # of the host, likewise
    waits_again: int = 0
    other_waits: tuple[str, ...] = ()


class Messages(TorchDispatchMode):
    """Counts the all-to-alls, and notes operators whose result the host must read."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "c10d::alltoall_base_":
            rows, _, send = args[1], args[3], args[4]
            others = sum(send) - send[rank_in(args[2])]
            self.found.messages += 1
            self.found.leaves += others * rows[:1].numel() * rows.itemsize
        elif needs_value(func, args, kwargs or {}):
            self.found.other_waits += (func.name(),)
        return func(*args, **(kwargs or {}))


def rank_in(group):
    return dist.ProcessGroup.unbox(group).rank()


def in_backward():
    return torch._C._current_graph_task_id() != -1


@contextmanager
def noted(found, case, training):
    """Count routes and waits, and add up what each layer's routes say that it will send."""
    find, wait = model.router._base.find_routes, parallel.expert.counts_on_host

    def find_routes(chosen, sequences, num_experts, ep, whole):
        routes = find(chosen, sequences, num_experts, ep, whole)
        if in_backward():
            found.routes_again += 1
        else:
            found.routes += 1
        found.expected += by_the_table(routes, ep, case, training) if ep.size > 1 else 0
        return routes

    def counts_on_host(counts):
        if in_backward():
            found.waits_again += 1
        else:
            found.waits += 1
        return wait(counts)

    with (
        patch.object(model.router._base, "find_routes", find_routes),
        patch.object(parallel.expert, "counts_on_host", counts_on_host),
        Messages(found),
    ):
        yield


def by_the_table(routes, ep, case, training):
    """The bytes that leave a rank, for one layer and micro-batch."""
    b = {"float64": 8, "float32": 4, "bfloat16": 2}[case.dtype]
    weight = max(b, 4)
    there = sum(routes.send) - routes.send[ep.rank]
    back = sum(routes.receive) - routes.receive[ep.rank]
    forward = 8 * X * (ep.size - 1) // ep.size + there * (D * b + weight) + back * D * b
    if not training:
        return forward
    again = there * (D * b + weight) if case.activation_checkpointing == "full" else 0
    return forward + there * D * b + back * (D * b + weight) + again


def found_by(case, training=True, again=False):
    """What a step's forward and backward do, or an evaluation. again: plant that the recomputation
    finds routes again."""
    step = make_step(case)
    rows, found = rows_of(step), Found()
    twice = patch.object(TokenDispatch, "once", lambda _, compute: compute())
    with twice if again else nullcontext(), noted(found, case, training):
        step.forward_backward(*rows) if training else step.evaluate(*rows)
    return found


def passes_of(case):
    """How often a rank runs a layer of experts forward."""
    config = case.config()
    stages = case.layout.pp
    layers = config.model.num_layers - config.model.num_dense_layers
    return layers // stages * config.num_microbatches(case.layout.dp)


BASE = Case(MeshSizes(), router="softmax", num_microbatches=2, num_shared_experts=1)
DP = MeshSizes(dp_shard=2, ep=2)
QUICK = [  # layout, options
    (MeshSizes(), {}),
    (DP, {"router": "sigmoid_bias", "router_losses": True}),
    (DP, {"activation_checkpointing": "full", "num_shared_experts": 0}),
    (MeshSizes(dp_shard=2, tp=2, ep=4), {"dtype": "bfloat16"}),
]  # fmt: skip
LAYERS = [
    *QUICK,
    (DP, {"activation_checkpointing": "selective", "num_dense_layers": 1}),
    (DP, {"activation_checkpointing": "full", "dtype": "bfloat16"}),
    (MeshSizes(dp_shard=2), {"activation_checkpointing": "full"}),
    (DP, {"dtype": "float32", "zero_stage": 3}),
    (MeshSizes(dp_shard=4, ep=2), {"activation_checkpointing": "selective"}),
    (MeshSizes(dp_shard=4, ep=4), {"router": "softmax_renormalised"}),
    (MeshSizes(tp=2, ep=2), {"activation_checkpointing": "full", "router_losses": True}),
    (MeshSizes(tp=2, ep=2), {"activation_checkpointing": "selective", "tp_pieces": 2}),
    (MeshSizes(cp=2, ep=2), {"activation_checkpointing": "selective"}),
    (MeshSizes(cp=2, tp=2, ep=4), {"activation_checkpointing": "full"}),
    (MeshSizes(dp_replicate=2, tp=2, ep=2), {"activation_checkpointing": "selective"}),
    (MeshSizes(pp=2, dp_shard=2, ep=2), {"schedule": "zb_h1", "num_microbatches": 4}),
    (MeshSizes(pp=2, tp=2, ep=2),
     {"schedule": "zb_h1", "activation_checkpointing": "full", "num_microbatches": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), thorough_but(QUICK, LAYERS), ids=str)
def test_messages_of_a_layer(ranks, layout, options):
    """Per layer and micro-batch: the counts, rows, weights, results; and gradients of results,
    rows, weights. Full recomputation sends rows and weights again. The bytes are those of the table
    in parallel/expert.py, with the rows of each rank. Routes are found, and the host waits, once in
    each forward and never in backward."""
    case = replace(BASE, layout=layout, **options)
    forwards = passes_of(case)
    for training in (True, False):
        of_a_layer = 0
        if layout.ep > 1:
            of_a_layer = (9 if case.activation_checkpointing == "full" else 7) if training else 4
        for found in ranks.run(found_by, case.world, case, training):
            assert found.messages == of_a_layer * forwards
            assert found.leaves == found.expected
            assert (found.routes, found.routes_again) == (forwards, 0)
            assert (found.waits, found.waits_again) == (forwards, 0)
            assert found.other_waits == ()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_routes_that_are_found_again_are_noticed(ranks, mode):
    """Control of the counts above: without `once`, each recomputation finds routes and waits."""
    case = replace(BASE, layout=DP, activation_checkpointing=mode)
    for found in ranks.run(found_by, 2, case, True, True):
        assert found.routes_again == found.waits_again == found.routes == passes_of(case)


# --- memory ---------------------------------------------------------------------------------------


def left_of_a_step(case, training, keeps_placeholders=False):
    """How many received rows there were, and how many are left after a step, with the exchanges
    that refer to them; Python's collector does not run."""
    step = make_step(case)
    rows = rows_of(step)
    received, exchanges = [], []
    there, send, init = Exchange.there, TokenDispatch.send, Exchange.__init__

    def noted_there(self):
        arrived = there(self)
        received.extend(StorageWeakRef(each.untyped_storage()) for each in arrived)
        return arrived

    def noted_init(self, *arguments):
        init(self, *arguments)
        exchanges.append(weakref.ref(self))

    def keeping_send(self, *arguments):
        sent = send(self, *arguments)
        sent.exchange.sent = sent
        return sent

    gc.collect()
    gc.disable()
    try:
        with (
            patch.object(Exchange, "there", noted_there),
            patch.object(Exchange, "__init__", noted_init),
            patch.object(TokenDispatch, "send", keeping_send)
            if keeps_placeholders
            else nullcontext(),
        ):
            step.forward_backward(*rows) if training else step.evaluate(*rows)
        left = sum(not each.expired() for each in received)
        return len(received), left, sum(each() is not None for each in exchanges)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(DP, {"activation_checkpointing": "none"}, marks=pytest.mark.thorough),
        pytest.param(DP, {"activation_checkpointing": "selective"}, marks=pytest.mark.thorough),
        (DP, {"activation_checkpointing": "full"}),
        pytest.param(MeshSizes(), {}, marks=pytest.mark.thorough),
        pytest.param(MeshSizes(pp=2, tp=2, ep=2), {"schedule": "zb_h1"},
                     marks=pytest.mark.thorough),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_left_of_a_layer(ranks, layout, options):
    """After backward, or an evaluation, neither received rows nor what refers to them."""
    case = replace(BASE, layout=layout, **options)
    for training in (True, False):
        for number, *left in ranks.run(left_of_a_step, case.world, case, training):
            assert number >= passes_of(case)
            assert left == [0, 0]


def test_an_exchange_that_keeps_a_tensor_of_the_graph_stays(ranks):
    """Control: the graph refers to the exchange."""
    case = replace(BASE, layout=DP)
    for _, _, exchanges in ranks.run(left_of_a_step, 2, case, True, True):
        assert exchanges >= passes_of(case)
