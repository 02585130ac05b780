"""A step leaves nothing in memory but gradients: no tensor refers to itself through its graph, and
none waits for Python's collector."""

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.axes import MeshSizes
from parallel.context import KeysAndValues
from parallel.dispatch.all_to_all import Dispatch
from parallel.layer import LocalTensor
from proofs.parity.cases import Case
from proofs.parity.run import as_in_long_sequences
from tests.counting import short_step
from tests.planted import name_of, planted
from tests.proofs.parity_tiers import thorough_but


class Made(TorchDispatchMode):
    """Notes the memory that operators make."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each._cdata for each in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        new = [each for each in storages(result) if each._cdata not in given]
        self.storages += map(StorageWeakRef, new)
        return result


def storages(tree):
    tensors = [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
    return [each.untyped_storage() for each in tensors if not isinstance(each, DTensor)]


def left_of(storages):
    """Of these, after a while: gloo's threads let go of what they have sent a little later."""
    until = time.monotonic() + 2
    while (left := sum(not each.expired() for each in storages)) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def left_of_a_step(case, plant=nullcontext):
    """How many pieces of memory a second step made, and how many are left, and the same of a second
    evaluation, each of two micro-batches; the collector does not run."""
    step, rows = short_step(case, case.config().train.micro_batch_size)
    found = []
    gc.collect()
    gc.disable()
    try:
        for passes in (step.forward_backward, step.evaluate):
            for _ in range(2):
                with as_in_long_sequences(), plant(), Made() as made:
                    passes(*rows)
                for weight in step.weights:
                    weight.parameter.grad = None
                if step.balance is not None:
                    step.balance.begin(torch.ones(()))  # lets go of the scale of the last step
            found.append((len(made.storages), left_of(made.storages)))
        return found
    finally:
        gc.enable()


WHOLE = Case(MeshSizes(), dtype="bfloat16")  # weights are copied
CONTEXT = Case(MeshSizes(dp_shard=2, cp=2), num_microbatches=16)  # backward gathers again
EXPERTS = Case(
    MeshSizes(dp_shard=2, ep=2), router="softmax", num_microbatches=2, num_shared_experts=1
)
QUICK = [WHOLE, CONTEXT, replace(EXPERTS, activation_checkpointing="full")]
CASES = [
    *QUICK,
    *(Case(MeshSizes(dp_shard=2), activation_checkpointing=m) for m in ("selective", "full")),
    replace(CONTEXT, num_kv_heads=8, activation_checkpointing="selective"),
    replace(CONTEXT, num_kv_heads=1, num_microbatches=8),  # one piece of heads, which is kept
    replace(EXPERTS, activation_checkpointing="selective"),
    EXPERTS,
    replace(EXPERTS, layout=MeshSizes()),
    replace(EXPERTS, layout=MeshSizes(pp=2, tp=2, ep=2), schedule="zb_h1"),
]


@pytest.mark.parametrize("case", thorough_but(QUICK, CASES), ids=str)
def test_nothing_is_left_of_a_step(ranks, case):
    for made, left in chain(*ranks.run(left_of_a_step, case.world, case)):
        assert made > 100
        assert left == 0


def own_tensor(weight, **_):
    """DTensor.to_local in torch 2.11, where no gradients are recorded: not a view."""
    return weight._local_tensor


def with_torch_2_11():
    return patch.object(DTensor, "to_local", own_tensor)


def test_nothing_is_left_with_torch_2_11(ranks):
    assert ranks.run(left_of_a_step, 1, WHOLE, with_torch_2_11)[0][0][1] == 0


@planted(LocalTensor, "forward")
def without_a_view(_, ctx, weight, gradient):
    """The weight's own tensor leads to this node, which leads back to the weight."""
    ctx.weight, ctx.gradient = weight, gradient
    ctx.set_materialize_grads(False)
    return own_tensor(weight)


@planted(KeysAndValues, "up_to_ends")
def a_piece_keeps_its_outputs(up_to_ends, self):
    """The graph refers to the piece."""
    self.outputs = up_to_ends(self)
    return self.outputs


@planted(Dispatch, "send")
def rows_keep_their_link(send, self, *arguments):
    """The graph refers to the rows."""
    rows, link = send(self, *arguments)
    rows.link = link
    return rows, link


MISTAKES = [without_a_view, a_piece_keeps_its_outputs, rows_keep_their_link]


@pytest.mark.parametrize(("case", "mistake"), list(zip(QUICK, MISTAKES, strict=True)), ids=name_of)
def test_a_tensor_that_leads_to_itself_is_found(ranks, case, mistake):
    """Control."""
    for (_, left), _ in ranks.run(left_of_a_step, case.world, case, mistake):
        assert left > 0
