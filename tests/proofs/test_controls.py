"""Controls for the parity comparison: each test plants a classic bug in the ranks, and the
comparison must report it in the quantities that the bug affects.

A comparison that never fails proves nothing. A training run would hide these bugs, because the loss
still falls with each of them.
"""

import contextlib
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist

import model.kernels.linear_cross_entropy
import model.norm
import parallel.deferred
import parallel.pipeline.runner
import training.step
from model.norm import RMSNorm
from parallel.axes import MeshSizes
from parallel.data import FSDPSwitches
from parallel.parameter import NamedWeight
from parallel.partial import PartialGradients
from parallel.pipeline.runner import PipelineRunner
from parallel.pipeline.tied import TiedEmbedding
from parallel.weight_gradient import GradientSum
from proofs.parity.cases import Case
from proofs.parity.run import check
from tests.planted import (
    gradients_averaged,
    name_of,
    nothing_wrong,
    planted,
    replicas_counted_in_the_norm,
)
from tokens import IGNORE

TP = Case(MeshSizes(tp=2))
SHARED_KV = Case(MeshSizes(tp=4), num_kv_heads=2, sequence_parallel=False)
DP = Case(MeshSizes(dp_shard=2))
ZB_H1 = Case(MeshSizes(pp=2, dp_shard=2), schedule="zb_h1")


@planted(PartialGradients, "sum_over_tp")
def partial_gradients_not_summed(*_):
    """Each tp rank takes its partial gradient (of norms, of shared k and v heads) for the whole."""


@planted(RMSNorm, "__init__")
def norm_gradients_summed_in_vain(build, self, config, width, tp, gradient_is_partial):
    """Norms' gradients are summed over tp where every rank has the whole: they count tp times."""
    build(self, config, width, tp, gradient_is_partial=True)


@planted(RMSNorm, "__init__")
def head_norm_gradients_not_summed(build, self, config, width, tp, gradient_is_partial):
    """Each tp rank takes its own heads' gradient of q's and k's norms for the whole gradient."""
    build(self, config, width, tp, gradient_is_partial and width == config.dim)


@planted(PipelineRunner, "step")
def mean_per_rank(step, self, program, microbatches, record):
    """The loss is averaged per data-parallel rank first, then over ranks."""
    mine = sum((m.targets != IGNORE).sum() for m in microbatches)
    scale = 1 / (mine * dist.get_world_size()).double()
    return step(self, program, [replace(m, loss_scale=scale) for m in microbatches], record)


@planted(PipelineRunner, "step")
def mean_per_microbatch(step, self, program, microbatches, record):
    """The loss is averaged per micro-batch first, then over micro-batches."""
    counts = [(m.targets != IGNORE).sum().clamp(min=1).double() for m in microbatches]
    scales = [1 / count / len(microbatches) for count in counts]
    scaled = [replace(m, loss_scale=s) for m, s in zip(microbatches, scales, strict=True)]
    return step(self, program, scaled, record)


@planted(FSDPSwitches, "_complete")
def last_backward_forgotten(*_):
    """No backward is completed as the last one, so that FSDP reduces no gradients."""


@contextlib.contextmanager
def last_backward_forgotten_and_unchecked():
    """The same, without the check that would report it."""
    with last_backward_forgotten(), patch.object(training.step, "check_reduced", lambda _: None):
        yield


@planted(FSDPSwitches, "after_weight_gradients")
def weight_gradients_not_reduced(*_):
    """Weight gradients are formed after backward without notifying FSDP."""


@planted(GradientSum, "get")
def weight_gradients_overwrite(*_):
    """Each micro-batch's weight gradient replaces the sum so far."""


@contextlib.contextmanager
def weight_gradients_of_another_microbatch():
    """Jobs of the fourth and then the first micro-batch run; the second's and third's are lost."""
    honest = parallel.pipeline.runner.run_jobs
    held = []

    def run_jobs(jobs):
        held.append(jobs)
        if len(held) == 4:
            for _ in range(3):
                honest(held[-1])
            honest(held[0])

    with patch.object(parallel.pipeline.runner, "run_jobs", run_jobs):
        yield


@planted(training.step, "gradient_norm")
def norm_of_one_stage(honest, gradients, mesh, kernels):
    """The gradient norm is summed over the ranks of one pipeline stage only."""
    stage = list(mesh.root.mesh[mesh.pp_rank].flatten())
    groups = [dist.new_group(list(map(int, ranks.flatten()))) for ranks in mesh.root.mesh]
    assert dist.get_rank() in stage
    all_reduce = partial(dist.all_reduce, group=groups[mesh.pp_rank])
    with patch.object(dist, "all_reduce", all_reduce):
        return honest(gradients, mesh, kernels)


@planted(TiedEmbedding, "sum_gradients")
def tied_gradients_not_combined(*_):
    """The gradients of embedding and head are not added when they are tied."""


def tied_embedding_counted_twice():
    """Both copies of a tied embedding count in the gradient norm."""
    return patch.object(NamedWeight, "is_copy", False)


@planted(model.kernels.linear_cross_entropy, "normaliser")
def softmax_over_own_columns(honest, logits, *arguments):
    """The softmax's denominator is not summed over tp: the loss is about log(tp) too small."""
    whole = honest(logits, *arguments)
    return whole._replace(total=(logits - whole.peak.unsqueeze(-1)).exp().sum(-1))


@planted(model.kernels.linear_cross_entropy, "by_rank")
def targets_of_a_contiguous_part(by_rank, x, ranks, pieces):
    """The head takes a rank's rows for one contiguous part of the sequence, not for pieces."""
    return by_rank(x, ranks, 1)


@planted(parallel.deferred, "start_all_gather")
def deferred_gathers_ignore_pieces(start_all_gather, x, group, pieces):
    """Jobs gather x and dy in the order of the ranks instead of that of the sequence."""
    return start_all_gather(x, group)


@pytest.mark.parametrize(
    ("bug", "case", "where", "parameter"),
    [
        (partial_gradients_not_summed, TP, {"gradient", "spread"}, "norm.weight"),
        (partial_gradients_not_summed, SHARED_KV, {"gradient", "spread"}, "attention."),
        (norm_gradients_summed_in_vain, Case(MeshSizes(tp=2), sequence_parallel=False),
         {"gradient"}, "norm.weight"),
        (head_norm_gradients_not_summed, Case(MeshSizes(tp=2), qk_norm=True),
         {"gradient", "spread"}, "attention."),
        (head_norm_gradients_not_summed, replace(SHARED_KV, qk_norm=True), {"gradient", "spread"},
         "attention."),
        (gradients_averaged, DP, {"gradient", "norm"}, ""),
        (mean_per_rank, DP, {"gradient", "loss", "norm"}, ""),
        (mean_per_microbatch, Case(MeshSizes()), {"gradient", "loss", "norm"}, ""),
        (last_backward_forgotten, DP, {"crash"}, ""),
        (last_backward_forgotten, ZB_H1, {"crash"}, ""),
        (weight_gradients_not_reduced, ZB_H1, {"crash"}, ""),
        (weight_gradients_overwrite, Case(MeshSizes()), {"gradient", "norm"}, ""),
        (weight_gradients_overwrite, Case(MeshSizes(pp=2), schedule="zb_h1"), {"gradient", "norm"},
         ".weight"),
        (weight_gradients_of_another_microbatch, Case(MeshSizes(pp=2), schedule="zb_h1"),
         {"gradient", "norm"}, ".weight"),
        (tied_gradients_not_combined, Case(MeshSizes(), tie_embeddings=True),
         {"gradient", "spread"}, "embedding.weight"),
        (tied_gradients_not_combined, Case(MeshSizes(pp=2), tie_embeddings=True),
         {"gradient", "spread"}, "embedding.weight"),
        (tied_gradients_not_combined,
         Case(MeshSizes(pp=2), tie_embeddings=True, schedule="zb_v", stages_per_rank=2),
         {"gradient", "spread"}, "embedding.weight"),
        (softmax_over_own_columns, TP, {"gradient", "loss"}, ""),
        (targets_of_a_contiguous_part, replace(TP, tp_pieces=2), {"gradient", "loss"}, ""),
        (deferred_gathers_ignore_pieces, replace(TP, tp_pieces=2, schedule="zb_h1"), {"gradient"},
         ".weight"),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where, parameter):
    # The comparison fails in the quantities that the bug affects, and the worst gradient is that of
    # an affected parameter.
    row = check(ranks, case, sabotage=bug)
    assert where <= set(row.failures()), row.crash
    assert parameter in row.worst


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        (replicas_counted_in_the_norm, TP),
        (replicas_counted_in_the_norm, Case(MeshSizes(dp_replicate=2))),
        (tied_embedding_counted_twice, Case(MeshSizes(), tie_embeddings=True)),
        (tied_embedding_counted_twice, Case(MeshSizes(pp=2), tie_embeddings=True)),
    ],
    ids=name_of,
)
def test_planted_bug_in_the_norm_is_found_there_alone(ranks, bug, case):
    # A bug in the computation of the norm is found in the norm and nowhere else.
    row = check(ranks, case, sabotage=bug)
    assert row.failures() == ["norm"], row.crash


def test_norm_of_one_stage_is_found(ranks):
    row = check(ranks, Case(MeshSizes(pp=2)), sabotage=norm_of_one_stage)
    assert set(row.failures()) == {"norm", "spread"}


def test_wrong_norm_shows_in_the_steps_too(ranks):
    """A wrong norm leads to wrong clipping, so that the losses of later steps are wrong too."""
    row = check(ranks, TP, steps=8, sabotage=replicas_counted_in_the_norm)
    assert "loss_steps" in row.failures()


def test_forgotten_last_backward_is_named(ranks):
    """Without a last backward no weight would be updated, silently. The training step checks for
    this and raises an error that names the cause."""
    found = check(ranks, DP, sabotage=last_backward_forgotten).crash
    assert "no backward was marked as the step's last" in found


def test_forgotten_last_backward_without_the_check_is_found(ranks):
    # Without that check the comparison still finds the bug.
    assert check(ranks, DP, sabotage=last_backward_forgotten_and_unchecked).failures()


def test_loss_off_by_log_tp_is_off_by_log_tp(ranks):
    """The planted bug is the intended one: the mean loss, which should be near log V, is too small
    by about log(tp)."""
    row = check(ranks, TP, sabotage=softmax_over_own_columns)
    assert row.loss == pytest.approx(math.log(2) / math.log(251), rel=0.2)


def test_without_a_bug_nothing_is_found(ranks):
    """Control: with nothing planted the comparison passes, so the planting itself has no effect and
    the pool has recovered from the failures before."""
    case = Case(MeshSizes(pp=2, tp=2), tie_embeddings=True)
    assert check(ranks, case, steps=2, sabotage=nothing_wrong).failures() == []
