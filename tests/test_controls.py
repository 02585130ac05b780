"""Controls for the parity comparison: each test plants a classic bug in the ranks, and the
comparison must report it in the quantities that the bug affects.

A comparison that never fails proves nothing. A training run would hide these bugs, because the loss
still falls with each of them.
"""

import ast
import contextlib
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

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
from tests.mutants import MUTANTS, ROOT
from tokens import IGNORE
from tools.parity.cases import Case
from tools.parity.run import check

TP = Case(MeshSizes(tp=2))
SHARED_KV = Case(MeshSizes(tp=4), num_kv_heads=2, sequence_parallel=False)
DP = Case(MeshSizes(dp_shard=2))
ZB_H1 = Case(MeshSizes(pp=2, dp_shard=2), schedule="zb_h1")


@contextlib.contextmanager
def partial_gradients_not_summed():
    """Plant: each tp rank takes its partial gradient of a norm, or of shared key/value heads, for
    the whole gradient."""
    with patch.object(PartialGradients, "sum_over_tp", lambda self: None):
        yield


@contextlib.contextmanager
def norm_gradients_summed_in_vain():
    """Plant: sum norm gradients over tp without sequence parallelism, where every tp rank already
    has the whole gradient, so that it counts tp times."""
    build = RMSNorm.__init__

    def all_partial(self, config, width, tp, gradient_is_partial):
        build(self, config, width, tp, gradient_is_partial=True)

    with patch.object(RMSNorm, "__init__", all_partial):
        yield


@contextlib.contextmanager
def head_norm_gradients_not_summed():
    """Plant: each tp rank takes its gradient of q's and k's norms, which covers only its own heads,
    for the whole gradient."""
    build = RMSNorm.__init__

    def of_stream_alone(self, config, width, tp, gradient_is_partial):
        build(self, config, width, tp, gradient_is_partial and width == config.dim)

    with patch.object(RMSNorm, "__init__", of_stream_alone):
        yield


@contextlib.contextmanager
def gradients_averaged():
    """Plant: FSDP averages gradients over ranks instead of summing them."""
    divide = FSDPModule.set_gradient_divide_factor
    with patch.object(
        FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2.0)
    ):
        yield


@contextlib.contextmanager
def mean_per_rank():
    """Plant: average the loss per data-parallel rank first, then over ranks."""
    step = PipelineRunner.step

    def biased(self, program, microbatches, record):
        mine = sum((m.targets != IGNORE).sum() for m in microbatches)
        scale = 1 / (mine * dist.get_world_size()).double()
        return step(self, program, [replace(m, loss_scale=scale) for m in microbatches], record)

    with patch.object(PipelineRunner, "step", biased):
        yield


@contextlib.contextmanager
def mean_per_microbatch():
    """Plant: average the loss per micro-batch first, then over micro-batches."""
    step = PipelineRunner.step

    def biased(self, program, microbatches, record):
        counts = [(m.targets != IGNORE).sum().clamp(min=1).double() for m in microbatches]
        scales = [1 / count / len(microbatches) for count in counts]
        return step(
            self,
            program,
            [replace(m, loss_scale=s) for m, s in zip(microbatches, scales, strict=True)],
            record,
        )

    with patch.object(PipelineRunner, "step", biased):
        yield


@contextlib.contextmanager
def last_backward_forgotten():
    # Plant: no backward is completed as the last one, so that FSDP reduces no gradients.
    with patch.object(FSDPSwitches, "_complete", lambda self, module: None):
        yield


@contextlib.contextmanager
def last_backward_forgotten_and_unchecked():
    # Plant: the same, with the check that would report it removed.
    with (
        last_backward_forgotten(),
        patch.object(training.step, "check_reduced", lambda parameters: None),
    ):
        yield


@contextlib.contextmanager
def weight_gradients_not_reduced():
    """Plant: form weight gradients after backward without notifying FSDP."""
    with patch.object(FSDPSwitches, "after_weight_gradients", lambda self, module, last: None):
        yield


@contextlib.contextmanager
def weight_gradients_overwrite():
    """Plant: each micro-batch's weight gradient replaces the sum so far."""
    with patch.object(GradientSum, "get", lambda self, weight: None):
        yield


@contextlib.contextmanager
def weight_gradients_of_another_microbatch():
    """Plant: run only the deferred jobs of the fourth and then the first micro-batch; those of the
    second and third are lost."""
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


@contextlib.contextmanager
def replicas_counted_in_the_norm():
    """Plant: add the square sums of all ranks, so that replicated parameters count once per
    replica."""

    def gradient_norm(gradients, mesh, kernels):
        total = sum(g.to_local().double().square().sum() for g in gradients)
        dist.all_reduce(total)
        return total.sqrt()

    with patch.object(training.step, "gradient_norm", gradient_norm):
        yield


@contextlib.contextmanager
def norm_of_one_stage():
    """Plant: sum the gradient norm over the ranks of one pipeline stage only."""
    honest = training.step.gradient_norm

    def gradient_norm(gradients, mesh, kernels):
        stage = list(mesh.root.mesh[mesh.pp_rank].flatten())
        groups = [dist.new_group(list(map(int, ranks.flatten()))) for ranks in mesh.root.mesh]
        assert dist.get_rank() in stage
        all_reduce = dist.all_reduce
        with patch.object(
            dist, "all_reduce", lambda tensor: all_reduce(tensor, group=groups[mesh.pp_rank])
        ):
            return honest(gradients, mesh, kernels)

    with patch.object(training.step, "gradient_norm", gradient_norm):
        yield


@contextlib.contextmanager
def tied_gradients_not_combined():
    # Plant: do not add the gradients of embedding and head when they are tied.
    with patch.object(TiedEmbedding, "sum_gradients", lambda self: None):
        yield


@contextlib.contextmanager
def tied_embedding_counted_twice():
    # Plant: count both copies of a tied embedding in the gradient norm.
    with patch.object(NamedWeight, "is_copy", False):
        yield


@contextlib.contextmanager
def softmax_over_own_columns():
    """Plant: do not sum the softmax's denominator over tp, so that probabilities are about tp times
    too large and the loss about log(tp) too small."""
    honest = model.kernels.linear_cross_entropy.normaliser

    def normaliser(logits, *arguments):
        whole = honest(logits, *arguments)
        return whole._replace(total=(logits - whole.peak.unsqueeze(-1)).exp().sum(-1))

    with patch.object(model.kernels.linear_cross_entropy, "normaliser", normaliser):
        yield


@contextlib.contextmanager
def targets_of_a_contiguous_part():
    """Plant: the head takes a rank's rows for one contiguous part of the sequence, as if it were
    not cut into pieces."""
    honest = model.kernels.linear_cross_entropy.by_rank

    def by_rank(x, ranks, pieces):
        return honest(x, ranks, 1)

    with patch.object(model.kernels.linear_cross_entropy, "by_rank", by_rank):
        yield


@contextlib.contextmanager
def deferred_gathers_ignore_pieces():
    """Plant: jobs gather x and dy in the order of the ranks instead of that of the sequence."""
    honest = parallel.deferred.start_all_gather

    def start_all_gather(x, group, pieces):
        return honest(x, group)

    with patch.object(parallel.deferred, "start_all_gather", start_all_gather):
        yield


@contextlib.contextmanager
def nothing_wrong():
    yield


def name_of(value: object) -> str:
    """A test id that is the same in every process; a set is sorted, because its order is not."""
    return getattr(value, "__name__", str(sorted(value) if isinstance(value, set) else value))


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
    assert set(check(ranks, Case(MeshSizes(pp=2)), sabotage=norm_of_one_stage).failures()) == {
        "norm",
        "spread",
    }


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
    assert (
        check(
            ranks, Case(MeshSizes(pp=2, tp=2), tie_embeddings=True), steps=2, sabotage=nothing_wrong
        ).failures()
        == []
    )


def test_every_mutant_can_be_made():
    """The list of tests/mutants.py fits the code: each text that it changes occurs once in its
    file, and what comes of it can be compiled."""
    for mutant in MUTANTS:
        ast.parse(mutant.made_in((ROOT / mutant.file).read_text(encoding="utf-8")))
