"""Controls for the parity comparison: each entry of a table plants a classic bug in the ranks, and
the comparison must report it in the quantities that the bug affects.

A comparison that never fails proves nothing. A training run would hide these bugs, because the loss
still falls with each of them.
"""

import contextlib
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import model.linear_cross_entropy
import model.positions
import parallel.context
import parallel.pipeline.runner
import parallel.weight_gradient
import training.step
from model.mask import Mask
from model.norm import RMSNorm
from parallel.axes import MeshSizes
from parallel.context import KeysAndValues, SplitAttention
from parallel.data import FSDPSwitches
from parallel.parameter import NamedWeight
from parallel.pipeline.runner import PipelineRunner
from parallel.weight_gradient import WeightGradient
from proofs.parity.cases import Case
from proofs.parity.run import assemble, check, expected, run_on_ranks
from tests.planted import (
    from_table,
    gradients_averaged,
    name_of,
    nothing_wrong,
    planted,
    planting,
    replicas_counted_in_the_norm,
)
from tests.proofs.context_batches import CP2, WINDOW, check_batch, other_keys_in_backward
from tests.proofs.parity_tiers import is_found
from tests.runs import said_by
from tokens import IGNORE
from training.optimizers import ShardedOptimizer
from training.step import TrainStep

ONE, TP, PP = Case(MeshSizes()), Case(MeshSizes(tp=2)), Case(MeshSizes(pp=2))
SHARED_KV = Case(MeshSizes(tp=4), num_kv_heads=2, sequence_parallel=False)
DP = Case(MeshSizes(dp_shard=2))
ZB_H1 = Case(MeshSizes(pp=2, dp_shard=2), schedule="zb_h1")
DEFERRED = replace(PP, schedule="zb_h1")
DOCUMENTS = replace(CP2, document_mask=True)


def mean_per_rank(step, self, program, microbatches, record):
    """The loss is averaged per data-parallel rank first, then over ranks."""
    mine = sum((m.targets != IGNORE).sum() for m in microbatches)
    scale = 1 / (mine * dist.get_world_size()).double()
    return step(self, program, [replace(m, loss_scale=scale) for m in microbatches], record)


def mean_per_microbatch(step, self, program, microbatches, record):
    """The loss is averaged per micro-batch first, then over micro-batches."""
    counts = [(m.targets != IGNORE).sum().clamp(min=1).double() for m in microbatches]
    scales = [1 / count / len(microbatches) for count in counts]
    scaled = [replace(m, loss_scale=s) for m, s in zip(microbatches, scales, strict=True)]
    return step(self, program, scaled, record)


HELD = []


def jobs_of_another_microbatch(run_jobs, jobs):
    """Jobs of the fourth and then the first micro-batch run; the second's and third's are lost."""
    HELD.append(jobs)
    if len(HELD) == 4:
        for _ in range(3):
            run_jobs(HELD[-1])
        run_jobs(HELD[0])
        HELD.clear()


def norm_of_one_stage(gradient_norm, gradients, mesh, kernels):
    """The gradient norm is summed over the ranks of one pipeline stage only."""
    groups = [dist.new_group(list(map(int, ranks.flatten()))) for ranks in mesh.root.mesh]
    all_reduce = partial(dist.all_reduce, group=groups[mesh.pp.rank])
    with patch.object(dist, "all_reduce", all_reduce):
        return gradient_norm(gradients, mesh, kernels)


def softmax_over_own_columns(normaliser, logits, *arguments):
    """The softmax's denominator is not summed over tp: the loss is about log(tp) too small."""
    whole = normaliser(logits, *arguments)
    return whole._replace(total=(logits - whole.peak.unsqueeze(-1)).exp().sum(-1))


# --- of context parallelism ---


def labels_shifted_after_the_cut(microbatches, *rows, **settings):
    """A token's target is the next token of the rank's part: another one where a chunk ends."""

    def local(one):
        shifted = torch.cat((one.tokens[1:], one.targets[-1:]))
        return replace(one, targets=torch.where(one.targets == IGNORE, IGNORE, shifted))

    return [local(one) for one in microbatches(*rows, **settings)]


def documents_found_after_the_cut(find_documents, tokens, bos_id, device, parts, *compiled):
    """Each rank finds the documents of its own tokens, as if its part were a sequence."""
    mine = torch.cat([tokens[:, part] for part in map(list, parts)], dim=1)
    local, _ = find_documents(mine, bos_id, device, [range(mine.shape[1])])
    positions, documents = find_documents(tokens, bos_id, device, parts, *compiled)
    positions[[i for part in parts for i in part]] = local
    return positions, documents


def loss_of_one_rank(sum_over_ranks, self, loss):
    """A rank's loss is not summed over cp."""
    with patch.object(self, "mesh", replace(self.mesh, loss=self.mesh.batch)):
        return sum_over_ranks(self, loss)


def gradients_of_one_chunk(start_gradients, self, *gradients):
    """The gradients of keys and values that come from a rank's low chunk are lost."""
    lost = [torch.zeros_like(gradient) for gradient in gradients[:-2]]
    start_gradients(self, *lost, *gradients[-2:])


def gradients_in_the_order_of_the_sequence(_, gradients, total, ranks):
    """The gradients of keys and values are scattered as if ranks' parts were contiguous."""
    total.zero_()
    for gradient in gradients:
        total[: len(gradient)].add_(gradient)


LOSS = {"gradient", "loss", "norm"}
PARTIAL = {"gradient", "spread"}
NORM = {"gradient", "norm"}
# What takes the place of which method (it gets the original as its first argument); and in which
# cases the comparison must report which quantities, with the worst gradient in which parameter.
MISTAKES = {
    # of norms, and of shared k and v heads
    "each tp rank takes its partial gradient for the whole":
        (training.step, "sum_over_tp", lambda *_: None,
         (TP, PARTIAL, "norm.weight"), (SHARED_KV, PARTIAL, "attention.")),
    "norms' gradients are summed over tp where every rank has the whole":
        (RMSNorm, "__init__", lambda build, self, config, width, tp, gradient_is_partial:
         build(self, config, width, tp, gradient_is_partial=True),
         (replace(TP, sequence_parallel=False), {"gradient"}, "norm.weight")),
    "each tp rank takes its own heads' gradient of q's and k's norms for the whole":
        (RMSNorm, "__init__", lambda build, self, config, width, tp, gradient_is_partial:
         build(self, config, width, tp, gradient_is_partial and width == config.dim),
         *((replace(case, qk_norm=True), PARTIAL, "attention.") for case in (TP, SHARED_KV))),
    "the loss is averaged per rank": (PipelineRunner, "run", mean_per_rank, (DP, LOSS, "")),
    "the loss is averaged per micro-batch":
        (PipelineRunner, "run", mean_per_microbatch, (ONE, LOSS, "")),
    "each micro-batch's weight gradient replaces the sum":
        (WeightGradient, "_begun", lambda *_: None, (ONE, NORM, ""), (DEFERRED, NORM, ".weight")),
    "weight gradients of another micro-batch":
        (parallel.pipeline.runner, "run_jobs", jobs_of_another_microbatch,
         (DEFERRED, NORM, ".weight")),
    "norm of one stage":
        (training.step, "gradient_norm", norm_of_one_stage, (PP, {"norm", "spread"}, "")),
    "the gradients of embedding and head are not added when they are tied":
        (training.step, "sum_tied_gradients", lambda *_: None,
         *((replace(case, tie_embeddings=True), PARTIAL, "embedding.weight")
           for case in (ONE, PP, replace(PP, schedule="zb_v", stages_per_rank=2)))),
    "softmax over own columns":
        (model.linear_cross_entropy, "normaliser", softmax_over_own_columns,
         (TP, {"gradient", "loss"}, "")),
    "the head takes a rank's rows for one contiguous part of the sequence":
        (model.linear_cross_entropy, "by_rank",
         lambda by_rank, x, ranks, pieces: by_rank(x, ranks, 1),
         (replace(TP, tp_pieces=2), {"gradient", "loss"}, "")),
    "jobs gather x and dy in the order of the ranks":
        (parallel.weight_gradient, "start_all_gather",
         lambda start_all_gather, x, group, pieces: start_all_gather(x, group),
         (replace(TP, tp_pieces=2, schedule="zb_h1"), {"gradient"}, ".weight")),
    "every layer attends to all earlier tokens":
        (model.positions, "make_mask", lambda make_mask, positions, documents, window, *rest:
         make_mask(positions, documents, None, *rest), (replace(TP, **WINDOW), LOSS, "")),
    # --- of context parallelism ---
    "labels shifted after the cut":
        (TrainStep, "microbatches", labels_shifted_after_the_cut, (CP2, LOSS, "")),
    "each rank counts the positions of its own tokens from 0":
        (model.positions, "rotary_angles", lambda rotary_angles, positions, *arguments:
         rotary_angles(torch.arange(len(positions)).unsqueeze(1), *arguments), (CP2, LOSS, "")),
    # as torch's `is_causal` does
    "query i of a chunk sees keys 0 to i":
        (model.positions, "make_mask", lambda *_: Mask(), (CP2, LOSS, "")),
    "documents found after the cut":
        (training.step, "find_documents", documents_found_after_the_cut, (DOCUMENTS, LOSS, "")),
    "a rank's queries see only the keys of that rank":
        (SplitAttention, "__call__", lambda _, self, q, k, v: Mask()(q, k, v), (CP2, LOSS, "")),
    "the loss is a mean over cp ranks":
        (TrainStep, "count_targets", lambda count_targets, self, targets:
         count_targets(self, targets) * self.cp.size, (CP2, LOSS, "")),
    "loss of one rank":
        (TrainStep, "sum_over_ranks", loss_of_one_rank, (CP2, {"loss", "spread"}, "")),
    "gradients of one chunk":
        (KeysAndValues, "start_gradients", gradients_of_one_chunk, (CP2, NORM, "")),
    "gathered keys and values are not put in the order of the sequence":
        (parallel.context, "in_order", lambda _, gathered, ranks: gathered, (CP2, LOSS, "")),
    "gradients in the order of the sequence":
        (parallel.context, "sum_by_rank", gradients_in_the_order_of_the_sequence, (CP2, NORM, "")),
    "the pieces of the heads change places in backward":
        (parallel.context, "join_gradients", lambda join_gradients, pieces, *about:
         join_gradients(pieces[::-1], *about), (CP2, NORM, "")),
    # --- no weight would be updated ---
    "no backward is completed as the last":
        (FSDPSwitches, "_switch", lambda switch, self, module, last: switch(self, module, False)),
    "FSDP is not told of weight gradients after backward":
        (FSDPSwitches, "after_weight_gradients", lambda *_, last: None),
}  # fmt: skip
NOT_REDUCED = [
    "no backward is completed as the last",
    "FSDP is not told of weight gradients after backward",
]


def tied_embedding_counted_twice():
    """Both copies of a tied embedding count in the gradient norm."""
    return patch.object(NamedWeight, "is_copy", False)


@pytest.mark.parametrize(
    ("bug", "case", "where", "parameter"),
    [
        *((name, *each) for name, (_, _, _, *found) in MISTAKES.items() for each in found),
        *((gradients_averaged, case, NORM, "") for case in (DP, CP2)),
        # a bug in the computation of the norm is found there alone
        (replicas_counted_in_the_norm, TP, {"norm"}, ""),
        (replicas_counted_in_the_norm, Case(MeshSizes(dp_replicate=2)), {"norm"}, ""),
        # with zero_stage 0 every cp rank holds all weights
        (replicas_counted_in_the_norm, replace(CP2, zero_stage=0), {"norm"}, ""),
        (tied_embedding_counted_twice, replace(ONE, tie_embeddings=True), {"norm"}, ""),
        (tied_embedding_counted_twice, replace(PP, tie_embeddings=True), {"norm"}, ""),
    ],
    ids=name_of,
)
def test_planted_bug_is_found(ranks, bug, case, where, parameter):
    row = check(ranks, case, sabotage=planting(bug, __name__))
    is_found(row, where, parameter)
    assert "weights" not in row.failures()
    if bug == "softmax over own columns":  # of a loss near log V
        assert row.loss == pytest.approx(math.log(2) / math.log(251), rel=0.2)


@pytest.mark.parametrize(
    ("bug", "case", "rows", "where"),
    [
        ("documents found after the cut", DOCUMENTS, 2, LOSS),
        (other_keys_in_backward, CP2, 1, NORM),
        (other_keys_in_backward, replace(CP2, num_kv_heads=8), 1, NORM),
    ],
    ids=name_of,
)
def test_planted_bug_is_found_in_the_batch_of_documents(ranks, bug, case, rows, where):
    is_found(check_batch(ranks, case, rows, "all", planting(bug, __name__)), where)


def test_wrong_norm_shows_in_the_steps_too(ranks):
    """A wrong norm leads to wrong clipping, so that the losses of later steps are wrong too."""
    row = check(ranks, TP, steps=8, sabotage=replicas_counted_in_the_norm)
    assert "loss_steps" in row.failures()


@planted(ShardedOptimizer, "step")
def update_lost(step, self, *_):
    """The last update changes nothing."""


def test_a_lost_last_update_is_found(ranks):
    is_found(check(ranks, TP, 1, update_lost), {"updated"})


@pytest.mark.parametrize(
    ("bug", "case"), [(NOT_REDUCED[0], DP), *((bug, ZB_H1) for bug in NOT_REDUCED)], ids=name_of
)
def test_gradients_that_are_not_reduced_are_named(ranks, bug, case):
    """No weight would be updated, silently. The training step checks for this and raises an error
    that names the cause."""
    plant = planting(bug, __name__)
    for said in ranks.run(said_by, case.world, run_on_ranks, case, 0, plant):
        assert "no backward was marked as the step's last" in said


@contextlib.contextmanager
def not_reduced_and_unchecked():
    unchecked = patch.object(training.step, "check_reduced", lambda _: None)
    with from_table(__name__, NOT_REDUCED[0]), unchecked:
        yield


def test_gradients_that_are_not_reduced_are_found_without_that_check(ranks):
    assert check(ranks, DP, sabotage=not_reduced_and_unchecked).failures()


def test_without_a_bug_nothing_is_found(ranks):
    """With nothing planted the comparison passes, so the planting itself has no effect."""
    case = Case(MeshSizes(pp=2, tp=2), tie_embeddings=True)
    assert check(ranks, case, steps=2, sabotage=nothing_wrong).failures() == []


def test_missing_parts_are_found(ranks):
    """If one rank's parts are missing, the assembled tensor has NaN in their place."""
    runs = ranks.run(run_on_ranks, 2, TP, 0)
    shapes = {name: g.shape for name, g in expected(TP, 0).gradients.items()}
    assert assemble([runs[0].gradients], shapes)[0]["embedding.weight"].isnan().any()
