"""The head's projection and loss, computed in pieces over tp, have the loss and gradients of whole
logits on one rank. (Parity has cases with a sequence in pieces over tp, and a control for them.)"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from errors import UserError
from model.kernels.backend import cdiv, why_not_triton
from model.linear_cross_entropy import linear_cross_entropy
from model.matmul import Matmul
from parallel.axes import MeshSizes
from parallel.layer import Atoms, TensorParallel
from parallel.mesh import build_mesh
from parallel.placement import chunk_range
from parallel.weight_gradient import Place, WeightGradient
from tests.counting import Listener
from tests.kernels.device import DEVICE
from tests.proofs.parity_tiers import thorough_but
from tokens import IGNORE

S, B, D = 20, 2, 24
DOUBLE = torch.float64
needs_triton = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
KERNELS = [pytest.param("triton", marks=needs_triton), "torch"]


def operands(vocab, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (S, B), generator=generator)
    targets[1, 0] = targets[7, 1] = IGNORE
    return x, weight, targets


def expected(vocab, dtype, z_loss):
    """Loss, dx and dw in float64, computed from whole logits."""
    x, weight, targets = operands(vocab, dtype)
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    z = (x @ weight.T).flatten(0, 1)
    loss = F.cross_entropy(z, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    loss = (loss + z_loss * (z.logsumexp(-1).square() * (targets.flatten() != IGNORE)).sum()) / 7
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def in_pieces(vocab, dtype, sequence_parallel, z_loss, kernels, sizes):
    """For each size of a piece's logits in bytes: this rank's loss, dx and dw, the collectives of
    forward and backward, and the largest tensor of both."""
    mesh = build_mesh(MeshSizes(tp=dist.get_world_size()), "cpu")
    tp, rank = mesh.tp.size, mesh.tp.rank
    x, weight, targets = operands(vocab, dtype)
    rows = chunk_range(vocab, tp, rank)
    x = x.chunk(tp)[rank] if sequence_parallel else x
    weight = weight[rows.start : rows.stop]
    scale = torch.tensor(1 / 7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    results = []
    for piece_bytes in sizes:
        x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
        head = partial(
            linear_cross_entropy, x, weight, targets, scale, rows.start,
            TensorParallel.of(mesh, sequence_parallel), matmul=Matmul(), vocab_size=vocab,
            z_loss=z_loss, kernels=kernels, piece_bytes=piece_bytes,
        )  # fmt: skip
        with Listener(mesh) as forward:
            loss = head()
        with Listener(mesh) as backward:
            loss.backward()
        with torch.no_grad():
            assert torch.equal(head(), loss), "without gradients the loss is the same"
        travelled = forward.count(), backward.count(), max(forward.largest, backward.largest)
        results.append((loss.detach(), x.grad, weight.grad, *travelled))
    return results


def relative(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def errors(results, exact, sequence_parallel=True):
    """Of the loss, dx and dw that the ranks' results are together; all ranks have the same loss."""
    assert all(torch.equal(r[0], results[0][0]) for r in results)
    dx = torch.cat([r[1] for r in results]) if sequence_parallel else results[-1][1]
    found = results[0][0], dx, torch.cat([r[2] for r in results])
    return [relative(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]


F64, BF16 = torch.float64, torch.bfloat16
BOUNDS = {F64: (1e-14, 1e-14, 1e-14), BF16: (1e-2, 2e-2, 1e-2)}  # logits of up to 20, 1/256 off


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "dtype"),
    thorough_but(
        [(1, True, F64), (2, True, F64), (2, False, F64), (2, True, BF16)],
        [(tp, parts, dtype) for tp in (1, 2, 4) for parts in (True, False) for dtype in BOUNDS],
    ),
)
def test_is_what_whole_logits_give(ranks, tp, sequence_parallel, dtype, kernels):
    """The loss and gradients in three pieces of unequal size equal those of whole logits; in
    float64 also in one piece, and in pieces of one row (not in the slow interpreter). Tested with
    z_loss, and a vocabulary that tp does not divide."""
    vocab, z_loss = 51, 1e-2
    exact = expected(vocab, dtype, z_loss)
    sizes = [14 * cdiv(vocab, tp) * dtype.itemsize]
    if dtype == torch.float64:
        sizes += [1 << 20, 1] if kernels == "torch" else [1 << 20]
    of_ranks = ranks.run(in_pieces, tp, vocab, dtype, sequence_parallel, z_loss, kernels, sizes)
    for results in zip(*of_ranks, strict=True):
        assert all(r[1].dtype == r[2].dtype == dtype for r in results)
        found = errors(results, exact, sequence_parallel)
        assert all(error <= bound for error, bound in zip(found, BOUNDS[dtype], strict=True)), found


def test_every_rank_has_rows_of_the_vocabulary():
    with pytest.raises(UserError, match="the last tp rank would have no row"):
        Atoms(3, "model.vocab_size", uneven=True).check(4)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_travels_and_what_is_held(ranks, sequence_parallel):
    """Any number of pieces communicates the same bytes, and nothing in backward. No tensor is
    larger than a piece's logits, a weight or the input. (Whole logits would be: 40 · 512
    elements.)"""
    tp, vocab, hidden, tokens = 2, 1024, S * B * D * 8, S * B
    sizes = {1: 1 << 20, 5: vocab // tp * 8 * tokens // 5}
    for of_rank in ranks.run(
        in_pieces, tp, vocab, torch.float64, sequence_parallel, 0.0, "torch", list(sizes.values())
    ):
        for pieces, (*_, forward, backward, largest) in zip(sizes, of_rank, strict=True):
            statistics = pieces, tp * 3 * tokens * 8
            if sequence_parallel:
                gathers = 2 * pieces, hidden + statistics[1]
                assert forward == {"all_gather": gathers, "reduce_scatter": (pieces, hidden)}
            else:
                assert forward == {"all_gather": statistics, "all_reduce": (pieces, hidden)}
            assert backward == {}
            assert largest == max(vocab // tp * D, tokens // pieces * vocab // tp)


def test_the_weight_gradient_is_summed_in_float32():
    """Over 64 pieces in bfloat16, the weight gradient is summed in float32; a sum in bfloat16 would
    be rounded at every piece. Runs on a GPU if there is one, whose product takes bfloat16 and
    returns float32; on a CPU the operands are converted first."""
    dy, x = (
        torch.randn(64 * 16, n, generator=torch.Generator().manual_seed(n)).bfloat16().to(DEVICE)
        for n in (8, 12)
    )
    exact = dy.double().T @ x.double()
    wide = narrow = None
    for a, b in zip(dy.split(16), x.split(16), strict=True):
        wide = Matmul().add_weight_gradient(a, b, into=wide, dtype=torch.float32)
        narrow = Matmul().add_weight_gradient(a, b, into=narrow, dtype=torch.bfloat16)
    assert relative(wide, exact) < 2e-6
    assert relative(narrow, exact) > 1e-3


def test_forward_adds_to_a_sum_and_nothing_may_follow_the_loss():
    x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in operands(31, DOUBLE))
    gradient = WeightGradient(weight.shape)
    gradient.sum_in(Place(), DOUBLE)
    scale = torch.tensor(1 / 7, dtype=DOUBLE)
    head = partial(
        linear_cross_entropy, x, weight, targets, scale, 0, TensorParallel(), matmul=Matmul(),
        vocab_size=31, kernels="torch", piece_bytes=1000, gradient=gradient,
    )  # fmt: skip
    losses = [head() for _ in range(2)]
    torch.testing.assert_close(gradient.total, 2 * expected(31, DOUBLE, 0.0)[2])
    sum(losses).backward()
    with pytest.raises(RuntimeError, match="nothing may follow the loss"):
        (2 * head()).backward()
