"""What expert parallelism sends, and how often the host waits for it."""

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from costs.operators import needs_value
from model.matmul import GroupedMatmul
from parallel.axes import MeshSizes
from parallel.dispatch import all_to_all
from parallel.dispatch.all_to_all import Dispatch, Rows
from parallel.kept import KeptOutputs
from proofs.parity.cases import Case
from tests.planted import planted
from tests.proofs.parity_tiers import thorough_but
from tests.steps import make_step, rows_of

D, X = 32, 8  # of the parity proof's model
AGAIN = ("full", "full_but_attention")  # the recomputation sends rows again


class Messages(TorchDispatchMode):
    """Counts the all-to-alls, their bytes that leave the rank, and operators whose result the host
    must read."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "c10d::alltoall_base_":
            rows, group, send = args[1], args[2], args[4]
            others = sum(send) - send[dist.ProcessGroup.unbox(group).rank()]
            self.found["messages"] += 1
            self.found["bytes beyond the table"] += others * rows[:1].numel() * rows.itemsize
        elif needs_value(func, args, kwargs or {}):
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(found, case, training):
    """Count routes and waits, and subtract what each layer's routes say that it will send."""
    find, wait = all_to_all.find_routes, all_to_all.counts_on_host

    def note(what):  # in forward, and apart in backward or recomputation
        found[what + (" again" if torch._C._current_graph_task_id() != -1 else "")] += 1

    def find_routes(choice, ep):
        routes = find(choice, ep)
        note("routes")
        if ep.size > 1:
            found["bytes beyond the table"] -= by_the_table(routes, ep, case, training)
        return routes

    def counts_on_host(counts):
        note("waits")
        return wait(counts)

    with (
        patch.object(all_to_all, "find_routes", find_routes),
        patch.object(all_to_all, "counts_on_host", counts_on_host),
        Messages(found),
    ):
        yield


def by_the_table(routes, ep, case, training):
    """The bytes that leave a rank, for one layer and micro-batch (all_to_all.py)."""
    b = {"float64": 8, "float32": 4, "bfloat16": 2}[case.dtype]
    weight = max(b, 4)
    there = sum(routes.send) - routes.send[ep.rank]
    back = sum(routes.receive) - routes.receive[ep.rank]
    forward = 8 * X * (ep.size - 1) // ep.size + there * (D * b + weight) + back * D * b
    if not training:
        return forward
    again = there * (D * b + weight) if case.activation_checkpointing in AGAIN else 0
    return forward + there * D * b + back * (D * b + weight) + again


def found_by(case, plant=nullcontext):
    """What a step's forward and backward do, and an evaluation."""
    step = make_step(case)
    rows, of_step, of_evaluation = rows_of(step), Counter(), Counter()
    with plant(), noted(of_step, case, True):
        step.forward_backward(*rows)
    with plant(), noted(of_evaluation, case, False):
        step.evaluate(*rows)
    return of_step, of_evaluation


@planted(KeptOutputs, "once")
def routes_found_again(once, self, compute):
    """The recomputation finds routes again."""
    return compute()


def passes_of(case):
    """How often a rank runs a layer of experts forward."""
    config = case.config()
    layers = config.model.num_layers - config.model.experts.num_dense_layers
    return layers // case.layout.pp * config.num_microbatches(case.layout.dp)


BASE = Case(MeshSizes(), router="softmax", num_microbatches=2, num_shared_experts=1)
DP = MeshSizes(dp_shard=2, ep=2)
QUICK = [  # layout, options
    (DP, {"router": "sigmoid_bias", "router_losses": True}),
    (DP, {"activation_checkpointing": "full", "num_shared_experts": 0}),
    (MeshSizes(dp_shard=2, tp=2, ep=4),
     {"dtype": "bfloat16", "activation_checkpointing": "selective"}),
]  # fmt: skip
LAYERS = [
    *QUICK,
    (MeshSizes(), {}),
    (DP, {"activation_checkpointing": "selective", "num_dense_layers": 1}),
    (MeshSizes(dp_shard=2), {"activation_checkpointing": "full"}),
    (DP, {"dtype": "float32", "zero_stage": 3, "activation_checkpointing": "full_but_attention"}),
    (MeshSizes(dp_shard=4, ep=2), {"activation_checkpointing": "selective"}),
    (MeshSizes(tp=2, ep=2), {"activation_checkpointing": "selective", "tp_pieces": 2}),
    (MeshSizes(cp=2, tp=2, ep=4), {"activation_checkpointing": "full"}),
    (MeshSizes(pp=2, dp_shard=2, ep=2), {"schedule": "zb_h1", "num_microbatches": 4}),
    (MeshSizes(pp=2, tp=2, ep=2),
     {"schedule": "zb_h1", "activation_checkpointing": "full", "num_microbatches": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), thorough_but(QUICK, LAYERS), ids=str)
def test_messages_of_a_layer(ranks, layout, options):
    """Per layer and micro-batch: the counts, rows, weights, results; and gradients of results,
    rows, weights. Full recomputation sends rows and weights again. The bytes are those of the table
    in all_to_all.py, with the rows of each rank. Routes are found, and the host waits, once in each
    forward and never in backward; with ep 1 it does not wait."""
    case = replace(BASE, layout=layout, **options)
    forwards, sends = passes_of(case), layout.ep > 1
    of_step, of_evaluation = (
        Counter(messages=number * forwards * sends, routes=forwards, waits=forwards * sends)
        for number in (9 if case.activation_checkpointing in AGAIN else 7, 4)
    )
    assert ranks.run(found_by, case.world, case) == [(of_step, of_evaluation)] * case.world


@pytest.mark.parametrize("mode", thorough_but(["full"], ["selective", "full"]))
def test_routes_that_are_found_again_are_noticed(ranks, mode):
    """Control of the counts above: without `once`, each recomputation finds routes and waits."""
    case = replace(BASE, layout=DP, activation_checkpointing=mode)
    for found, _ in ranks.run(found_by, 2, case, routes_found_again):
        assert found["routes again"] == found["waits again"] == found["routes"] == passes_of(case)


def order_of_a_backward(case, leaves=True):
    """What a layer of experts does in backward, in order."""
    step, order = make_step(case), []
    rows = rows_of(step)

    def noting(owner, name, word):
        @planted(owner, name)
        def noted(function, *arguments):
            if torch._C._current_graph_task_id() != -1:
                order.append(word)
            return function(*arguments)

        return noted()

    @planted(Dispatch, "receive")
    def holding_back(receive, *arguments):
        return receive(*arguments)._replace(leave=lambda _: None)

    with ExitStack() as stack:
        stack.enter_context(nullcontext() if leaves else holding_back())
        for name in ("add_weight_gradient", "weight_gradient"):
            stack.enter_context(noting(GroupedMatmul, name, "dw"))
        stack.enter_context(noting(all_to_all, "start_all_to_all", "start"))
        stack.enter_context(noting(Rows, "_wait", "wait"))
        step.forward_backward(*rows)
    return " ".join(order)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_gradient_of_rows_leaves_before_weight_gradients_are_formed(ranks, leaves):
    """Those of results arrive; then the rows' leaves, beside two products, and last the router's
    weights'. Control: without `leave`, nothing hides the rows' way back."""
    case = replace(BASE, layout=DP, num_microbatches=1, num_shared_experts=0)
    back = "start dw dw start" if leaves else "dw dw start start"
    layer = f"start wait dw {back} wait"
    expected = " ".join([layer] * passes_of(case))
    assert ranks.run(order_of_a_backward, 2, case, leaves) == [expected] * 2
