"""What context parallelism sends, and in which dtype."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.context import PIECES, ContextParallel, SplitAttention
from parallel.mesh import build_mesh
from tests.counting import Listener
from tools.parity.cases import BATCH, BOS, SEQ_LEN, Case
from tools.parity.run import global_batch
from training.build import build_stages
from training.step import TrainStep

M = 4  # micro-batches


def sent_over_cp(case, training):
    """The collectives over cp of a step's forward and backward, or of an evaluation."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    step = TrainStep(config, mesh, build_stages(config, mesh), BOS)
    rows = [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, 0)]
    with Listener(mesh) as listener:
        step.forward_backward(*rows) if training else step.evaluate(*rows)
    return listener.count("cp")


def once(case, kv_heads, itemsize):
    """A collective per piece of a layer's key/value heads of one tp rank, over all layers and
    micro-batches of a stage, and their bytes: 2 · S·B·K/tp·E numbers in each layer."""
    model, microbatches = case.config().model, case.num_microbatches
    passes = model.num_layers // case.layout.pp * microbatches
    pieces = max(n for n in range(1, PIECES + 1) if kv_heads % n == 0)
    rows = BATCH // case.layout.dp // microbatches
    size = 2 * SEQ_LEN * rows * kv_heads * model.head_dim * itemsize
    return passes * pieces, passes * size


@pytest.mark.parametrize(
    ("layout", "options", "kv_heads"),
    [
        (MeshSizes(dp_shard=2, cp=2), {"document_mask": True}, 4),
        (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8, "activation_checkpointing": "full"}, 8),
        (MeshSizes(dp_replicate=2, cp=2), {"activation_checkpointing": "selective"}, 4),
        (MeshSizes(dp_shard=2, cp=2, tp=2), {"activation_checkpointing": "selective"}, 2),
        (MeshSizes(dp_shard=2, cp=2, tp=2), {"sequence_parallel": False, "num_kv_heads": 2}, 1),
        (MeshSizes(pp=2, dp_shard=2, cp=2), {"schedule": "zb_h1"}, 4),
    ],
    ids=str,
)
def test_keys_and_values_are_gathered_twice_and_their_gradients_scattered_once(
    ranks, layout, options, kv_heads
):
    """Per layer and micro-batch, in every mode of activation checkpointing, and with a backward in
    two parts. A tp rank sends its own heads. Evaluation gathers once."""
    case = Case(layout, num_microbatches=M, **options)
    number, size = once(case, kv_heads, itemsize=8)
    for sent in ranks.run(sent_over_cp, layout.world, case, True):
        assert sent == {"all_gather": (2 * number, 2 * size), "reduce_scatter": (number, size)}
    for sent in ranks.run(sent_over_cp, layout.world, case, False):
        assert sent == {"all_gather": (number, size)}


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_gradients_travel_in_float32(ranks, dtype, itemsize):
    case = Case(MeshSizes(dp_shard=2, cp=2), dtype=dtype, num_microbatches=M)
    number, size = once(case, 4, itemsize)
    in_float32 = once(case, 4, 4)
    for sent in ranks.run(sent_over_cp, 4, case, True):
        assert sent == {"all_gather": (2 * number, 2 * size), "reduce_scatter": in_float32}


def error_of_the_sum(in_bfloat16):
    """The relative error of a bfloat16 key's gradient, of which each chunk of queries has a term;
    the terms nearly cancel each other."""
    size, length = dist.get_world_size(), 8 * dist.get_world_size()
    cp = ContextParallel(size, dist.get_rank(), dist.group.WORLD)
    torch.manual_seed(0)
    chunks = [ContextParallel(size, rank).chunks(length) for rank in range(size)]
    ends = [part.stop for mine in chunks for part in mine]
    terms = torch.randn(len(ends), 4, 1, 1, 16).bfloat16()  # for the first 4 positions
    terms[-1] = -terms[:-1].double().sum(0).bfloat16()
    mine = [term for term, end in zip(terms, ends, strict=True) if end in ends_of(cp, length)]

    def attend_with(term):
        # the sum over keys of key · term, at one query
        return lambda q, k, v: torch.cat([(k[:4] * term).sum(0, keepdim=True), q[1:] + v[:1]])

    q, k, v = (
        torch.zeros(length // size, 1, 1, 16, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    control = patch("torch.promote_types", lambda a, b: a) if in_bfloat16 else nullcontext()
    with control:
        y = SplitAttention(cp, cp.chunks(length), [attend_with(term) for term in mine])(q, k, v)
        starts = [0, len(cp.chunks(length)[0])][: len(mine)]
        y[starts].sum().backward()
    expected = terms.double().sum(0)
    return ((k.grad[:4].double() - expected).norm() / expected.norm()).item()


def ends_of(cp, length):
    return [part.stop for part in cp.chunks(length)]


def test_gradients_are_summed_in_float32(ranks):
    """The result is rounded to bfloat16 once (2⁻⁹). Control: summed in bfloat16, the error is a
    hundred times as large."""
    assert ranks.run(error_of_the_sum, 4, False)[0] < 2**-8
    assert ranks.run(error_of_the_sum, 4, True)[0] > 100 * 2**-9
