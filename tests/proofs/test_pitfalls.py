"""Known mistakes of other training codebases, collected from their issue threads: one test for each
mistake that affects the mathematics and that no parity case (test_parity.py) shows.

The others (a loss scaled per rank or micro-batch, gradients of norms averaged or not reduced,
replicated weights or tied embeddings counted twice in the norm, a norm local to a stage, gate and
up permuted) are planted in test_controls.py, where the comparison of parity finds them. Most
mistakes do not show in a loss curve. (Loader state, signals and background saves have their own
test files.)
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from model.kernels.cross_entropy import vocab_parallel_cross_entropy
from model.transformer import Batch
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from parallel.placement import chunk_range
from proofs.parity.cases import BATCH, SEQ_LEN, Case
from proofs.parity.run import global_batch
from tests.steps import make_step, named_parameters, rows_of
from tokens import IGNORE
from training.gradient import gradient_norm


def loss_and_norm(case):
    """Of one forward and backward on a batch whose first half has no targets."""
    step = make_step(case)
    tokens, targets = global_batch(case.vocab_size, 3)
    targets[: BATCH // 2] = IGNORE
    mine = (t.chunk(step.mesh.dp_size)[step.mesh.dp_rank] for t in (tokens, targets))
    return [number.item() for number in step.forward_backward(*mine)]


def test_rank_without_a_target(ranks):
    """A data-parallel rank whose rows are all padding causes no division by zero, and does not
    change the loss or the norm."""
    alone, split = (ranks.run(loss_and_norm, w, Case(MeshSizes(dp_shard=w)))[0] for w in (1, 2))
    assert math.isfinite(split[0])
    assert split == pytest.approx(alone, rel=1e-13)


def norm_of_the_same(dtype):
    """The norms of the same fixed numbers sharded by rows, sharded by columns and replicated; and
    the expected norm, computed in float64."""
    mesh = build_mesh(MeshSizes(tp=dist.get_world_size()), "cpu")
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(1024, 512, generator=generator) * torch.logspace(-3, 3, 512)).to(dtype)
    norms = []
    for placement in (Shard(0), Shard(1), Replicate()):
        local = numbers
        if isinstance(placement, Shard):
            local = numbers.chunk(dist.get_world_size(), placement.dim)[
                dist.get_rank()
            ].contiguous()
        cut = DTensor.from_local(local, mesh.tp, [placement], run_check=False)
        norms.append(gradient_norm([cut, cut], mesh).item())
    truth = math.sqrt(2) * numbers.double().norm().item()
    return norms, truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_that_depends_on_the_partition(ranks, dtype):
    """The norm does not depend on how gradients are sharded. If it were summed in the gradients'
    dtype, half a million bfloat16 numbers would round differently for every sharding."""
    for world in (1, 2, 4):
        for norms, truth in ranks.run(norm_of_the_same, world, dtype):
            assert norms == pytest.approx([truth] * 3, rel=1e-12)


def tied_copies_after(case, steps):
    """This rank's copies of the tied embedding, with what they were at first."""
    step = make_step(case)
    copies = [
        p for name, p in named_parameters(step) if name in ("embedding.weight", "head.weight")
    ]
    first = [p.to_local().clone() for p in copies]
    for index in range(steps):
        step(index, *rows_of(step, index))
    return first, [p.to_local().clone() for p in copies]


@pytest.mark.parametrize("layout", [MeshSizes(), MeshSizes(pp=2)], ids=str)
def test_tied_copies_drift_apart(ranks, layout):
    """After updates with weight decay and clipping, both copies of a tied embedding are still
    bitwise equal."""
    case = Case(layout, tie_embeddings=True, dtype="float32")
    found = ranks.run(tied_copies_after, case.world, case, 4)
    first, last = (torch.stack([t for rank in found for t in rank[when]]) for when in (0, 1))
    assert torch.equal(last, last[:1].expand_as(last))
    assert not torch.equal(last, first)


def probabilities(case):
    """This rank's logits, and the global shapes of head and embedding."""
    step = make_step(case)
    (stage,) = step.stages.values()
    tokens, _ = global_batch(case.vocab_size, 0)
    positions = torch.arange(SEQ_LEN).unsqueeze(1)
    with torch.no_grad():
        logits = stage(None, Batch(tokens.T.contiguous(), None, positions))
    weights = dict(named_parameters(step))
    return logits, weights["head.weight"].shape, weights["embedding.weight"].shape


def test_padded_vocabulary_rows_win_probability(ranks):
    """A vocabulary of 251 rows on 4 ranks is not padded, so softmax cannot give probability to a
    column beyond the vocabulary."""
    case = Case(MeshSizes(tp=4), vocab_size=251)
    results = ranks.run(probabilities, 4, case)
    assert [logits.shape[-1] for logits, _, _ in results] == [63, 63, 63, 62]
    assert all(head == embedding == (251, 32) for _, head, embedding in results)


def loss_of_equal_logits(vocab):
    mesh = build_mesh(MeshSizes(tp=dist.get_world_size()), "cpu")
    columns = chunk_range(vocab, mesh.tp.size(), mesh.tp.get_local_rank())
    logits = torch.full((3, 2, len(columns)), 7.0, dtype=torch.float64)
    targets = torch.tensor([[0, vocab - 1], [5, IGNORE], [vocab // 2, 1]])
    return vocab_parallel_cross_entropy(logits, targets, columns.start, mesh.tp.get_group()).item()


@pytest.mark.parametrize("vocab", [251, 256])
def test_loss_off_by_log_tp(ranks, vocab):
    """With all logits equal, each of the five targets has the loss log V, on any number of
    ranks."""
    for tp in (1, 2, 4):
        for loss in ranks.run(loss_of_equal_logits, tp, vocab):
            assert loss == pytest.approx(5 * math.log(vocab), rel=1e-14)


def gradients_around_an_evaluation(case):
    """For each parameter, whether three gradients are equal: right after backward, after a
    subsequent evaluation, and of a second step that follows an evaluation."""
    step = make_step(case)
    parameters = [p for _, p in named_parameters(step)]

    def gradients():
        return [p.grad.to_local().clone() for p in parameters]

    step.forward_backward(*rows_of(step))
    before = gradients()
    step.evaluate(*rows_of(step, 1))
    after = gradients()
    for p in parameters:
        p.grad = None
    step.evaluate(*rows_of(step))
    step.forward_backward(*rows_of(step))
    return [
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(before, after, gradients(), strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "zero_stage"),
    [(MeshSizes(pp=2, dp_shard=2), 1), (MeshSizes(dp_shard=2), 2), (MeshSizes(dp_shard=2), 3)],
    ids=str,
)
def test_accumulated_gradients_wiped_when_a_stage_is_used_again(ranks, layout, zero_stage):
    """An evaluation on the same stages neither erases accumulated gradients nor adds to later
    ones."""
    case = Case(layout, zero_stage=zero_stage)
    for same in ranks.run(gradients_around_an_evaluation, case.world, case):
        assert all(same)
