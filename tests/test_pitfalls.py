"""Known mistakes of other training codebases, collected from their issue threads: one test for each
mistake that affects the mathematics.

Most do not show in a loss curve. (Loader state, signals and background saves have their own test
files.)
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
from tokens import IGNORE
from tools.parity.cases import BATCH, SEQ_LEN, Case
from tools.parity.run import assemble, error_of, expected, global_batch, parts
from training.build import build_stages
from training.gradient import gradient_norm
from training.step import TrainStep


def prepare(case):
    """This rank's mesh, step and named parameters for a case."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    stages = build_stages(config, mesh)
    named = [named for stage in stages.values() for named in stage.named_parameters()]
    return mesh, TrainStep(config, mesh, stages), named


def rows_of(mesh, batch):
    return [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in batch]


def one_pass(case, batch=None):
    """One forward and backward: the loss, the gradient norm, and this rank's parts of the
    gradients."""
    mesh, step, named = prepare(case)
    loss, norm = step.forward_backward(*rows_of(mesh, batch or global_batch(case.vocab_size, 0)))
    return loss.item(), norm.item(), parts((name, p.grad) for name, p in named)


def gradients(results, case):
    shapes = {name: g.shape for name, g in expected(case, 0).gradients.items()} | {
        "head.weight": (case.vocab_size, 32)
    }
    whole, spread = assemble([mine for _, _, mine in results], shapes)
    assert spread == 0
    return whole


def test_loss_scaled_per_rank_or_per_microbatch(ranks):
    """With one target in the first half of the batch and all in the second, every target has the
    same weight, whatever the layout and the number of micro-batches."""
    tokens, _ = global_batch(251, 3)
    targets = tokens.roll(-1, dims=1)
    targets[: BATCH // 2] = IGNORE
    targets[0, 5] = 17
    seen = []
    for layout, m in (
        (MeshSizes(), 1),
        (MeshSizes(), 8),
        (MeshSizes(dp_shard=2), 2),
        (MeshSizes(dp_replicate=2), 4),
        (MeshSizes(dp_shard=4), 4),
    ):
        case = Case(layout, num_microbatches=m)
        results = ranks.run(one_pass, case.world, case, (tokens, targets))
        seen.append((results[0][0], gradients(results, case)))
    loss, reference = seen[0]
    for other_loss, other in seen[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-13)
        assert max(error_of(other[name], reference[name]) for name in reference) < 1e-12


def test_rank_without_a_target(ranks):
    """A data-parallel rank whose rows are all padding causes no division by zero, and does not
    change the loss or the norm."""
    tokens, targets = global_batch(251, 3)
    targets[: BATCH // 2] = IGNORE
    alone, split = (
        ranks.run(one_pass, w, Case(MeshSizes(dp_shard=w)), (tokens, targets))[0] for w in (1, 2)
    )
    assert math.isfinite(split[0])
    assert split[:2] == pytest.approx(alone[:2], rel=1e-13)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_sequence_parallel_norm_gradients_averaged_or_never_reduced(ranks, sequence_parallel):
    """Every tp rank has the whole gradient of each norm: neither 1/tp of it, nor one rank's part of
    it, nor tp times it."""
    for tp in (2, 4):
        case = Case(MeshSizes(tp=tp), sequence_parallel=sequence_parallel)
        whole = gradients(ranks.run(one_pass, tp, case), case)
        norms = [name for name in whole if name.endswith("norm.weight")]
        assert len(norms) == 5
        for name in norms:
            assert error_of(whole[name], expected(case, 0).gradients[name]) < 1e-12, name


@pytest.mark.parametrize(
    "layout",
    [
        MeshSizes(tp=2),
        MeshSizes(tp=8),
        MeshSizes(dp_replicate=2, tp=2),
        MeshSizes(dp_replicate=2, dp_shard=2, tp=2),
    ],
    ids=str,
)
def test_replicated_weights_counted_tp_times_in_the_norm(ranks, layout):
    """Weights that several tp ranks hold count once in the gradient norm: norm weights, and key and
    value weights where tp exceeds the number of key/value heads."""
    case = Case(layout, num_kv_heads=1 if layout.tp == 8 else 4)
    for _, norm, _ in ranks.run(one_pass, case.world, case):
        assert norm == pytest.approx(expected(case, 0).norm, rel=1e-13)


@pytest.mark.parametrize("pp", [2, 4])
def test_norm_local_to_a_stage(ranks, pp):
    """Every stage computes the whole model's norm, bitwise the same; otherwise stages would clip
    differently."""
    case = Case(MeshSizes(pp=pp))
    norms = {norm for _, norm, _ in ranks.run(one_pass, pp, case)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(expected(case, 0).norm, rel=1e-13)


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
    for world in (1, 2, 8):
        for norms, truth in ranks.run(norm_of_the_same, world, dtype):
            assert norms == pytest.approx([truth] * 3, rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [MeshSizes(), MeshSizes(pp=2), MeshSizes(pp=2, dp_shard=2), MeshSizes(pp=4, tp=2)],
    ids=str,
)
def test_tied_embeddings_counted_twice_or_never_combined(ranks, layout):
    """The gradient of a tied embedding is the sum over its two uses; both copies have it, and the
    norm counts it once."""
    case = Case(layout, tie_embeddings=True)
    results = ranks.run(one_pass, case.world, case)
    whole = gradients(results, case)
    assert torch.equal(whole["head.weight"], whole["embedding.weight"])
    reference = expected(case, 0)
    assert error_of(whole["embedding.weight"], reference.gradients["embedding.weight"]) < 1e-12
    assert results[0][1] == pytest.approx(reference.norm, rel=1e-13)


def tied_copies_after(case, steps):
    mesh, step, named = prepare(case)
    for index in range(steps):
        step(index, *rows_of(mesh, global_batch(case.vocab_size, index)))
    return 0.0, 0.0, parts(pair for pair in named if pair[0] in ("embedding.weight", "head.weight"))


@pytest.mark.parametrize("layout", [MeshSizes(), MeshSizes(pp=2, dp_shard=2, tp=2)], ids=str)
def test_tied_copies_drift_apart(ranks, layout):
    """After updates with weight decay and clipping, both copies of a tied embedding are still
    bitwise equal."""
    case = Case(layout, tie_embeddings=True, dtype="float32")
    whole = gradients(ranks.run(tied_copies_after, case.world, case, 4), case)
    assert torch.equal(whole["head.weight"], whole["embedding.weight"])
    assert not torch.equal(whole["head.weight"], expected(case, 0).weights["embedding.weight"])


def probabilities(case):
    """This rank's logits, and the global shapes of head and embedding."""
    _, step, named = prepare(case)
    (stage,) = step.stages.values()
    tokens, _ = global_batch(case.vocab_size, 0)
    positions = torch.arange(SEQ_LEN).unsqueeze(1)
    with torch.no_grad():
        logits = stage(None, Batch(tokens.T.contiguous(), None, positions))
    weights = dict(named)
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
    for tp in (1, 2, 4, 8):
        for loss in ranks.run(loss_of_equal_logits, tp, vocab):
            assert loss == pytest.approx(5 * math.log(vocab), rel=1e-14)


def gradients_around_an_evaluation(case):
    """For each parameter, whether three gradients are equal: right after backward, after a
    subsequent evaluation, and of a second step that follows an evaluation."""
    mesh, step, named = prepare(case)
    rows = rows_of(mesh, global_batch(case.vocab_size, 0))
    step.forward_backward(*rows)
    before = [p.grad.to_local().clone() for _, p in named]
    step.evaluate(*rows_of(mesh, global_batch(case.vocab_size, 1)))
    after = [p.grad.to_local().clone() for _, p in named]
    for _, p in named:
        p.grad = None
    step.evaluate(*rows)
    step.forward_backward(*rows)
    again = [p.grad.to_local().clone() for _, p in named]
    return [
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(before, after, again, strict=True)
    ]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_accumulated_gradients_wiped_when_a_stage_is_used_again(ranks, zero_stage):
    """An evaluation on the same stages neither erases accumulated gradients nor adds to later
    ones."""
    for same in ranks.run(
        gradients_around_an_evaluation, 4, Case(MeshSizes(pp=2, dp_shard=2), zero_stage=zero_stage)
    ):
        assert all(same)


def trained(case, steps):
    mesh, step, named = prepare(case)
    for index in range(steps):
        step(index, *rows_of(mesh, global_batch(case.vocab_size, index)))
    return 0.0, 0.0, parts(named)


@pytest.mark.thorough
def test_gate_and_up_permuted_by_resharding(ranks):
    """The trained global gate and up matrices are the same, row by row, on one rank and on several.
    A fused [gate; up] matrix that was sharded naively would be reassembled interleaved."""
    names = [
        f"blocks.{layer}.feed_forward.{matrix}.weight"
        for layer in range(2)
        for matrix in ("gate", "up", "down")
    ]
    whole = {}
    for layout in (MeshSizes(), MeshSizes(tp=4), MeshSizes(dp_shard=2, tp=2), MeshSizes(tp=8)):
        case = Case(layout)
        whole[layout] = gradients(ranks.run(trained, case.world, case, 3), case)
    alone = whole.pop(MeshSizes())
    for split in whole.values():
        for name in names:
            assert split[name].shape == ((48, 32) if "down" not in name else (32, 48))
            assert error_of(split[name], alone[name]) < 1e-11, name
    assert error_of(alone[names[0]], alone[names[1]]) > 0.1, (
        "gate and up are different tensors: a swap would show"
    )
