"""Controls for the parity comparison: each entry of a table plants a classic bug in the ranks, and
the comparison must report it in the quantities that the bug affects.

A comparison that never fails proves nothing. A training run would hide these bugs, because the loss
still falls with each of them.

Mistakes with experts that were found in public codebases, and what finds them (test_parity.py
unless said):

    gradients of experts ep times too large, or divided twice: pytorch 160285, Megatron-LM 5956.
        Parity of every gradient; the factors that are planted below
    experts left out of the gradient norm, or counted more than once: Megatron-LM 5916, Automodel
        3816, DeepSpeed 8478. Parity of the norm, and of steps that are clipped
    a gradient of unwritten memory for an expert without rows: pytorch 172439, 174314, MSLK 158.
        Experts without rows (test_grouped_matmul.py); a bias that no token can overcome
    a rank without rows fails, or skips a collective: TransformerEngine 3019, pytorch 126616.
        All tokens to one expert; the number of collectives (test_expert_collectives.py)
    the rest of a buffer longer than its rows is read: transformers 48205. There are no such buffers
    a recomputation chooses other experts: Automodel 2635, torchtitan 3336. Choices and gradients
        under every mode; routes that are found again (test_expert_collectives.py)
    a recomputation counts the load again: Automodel 3247. Counts equal the reference's
    the balance loss scaled by micro-batches or ranks, or averaged: Megatron-LM 5047, 3768.
        Its value and gradient over micro-batches, dp, cp, tp and pp
    the balance loss without a gradient, or lost on a middle stage: Automodel 1412. The same parity
    counts in bfloat16 wrong above 256, and a bias that moves the wrong way: Megatron-LM 7081.
        Counts are integers; biases after all steps equal the reference's bit for bit
    the router's gradient not summed over tp: torchtitan 2416. Parity of it
    one expert per token with weights divided by their sum: minimind 859. settings/checks.py refuses
    a deferred weight gradient of overwritten rows: TransformerEngine 3089, 2142. Zero-bubble
        schedules with several micro-batches and ZeRO stages
    a checkpoint with one rank's experts only: KempnerForge 202. Experts are global tensors
    a checkpoint with zeros for the bias: torchtitan 1226. A resumed run continues bit for bit
"""

import contextlib
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import model.initialise
import model.linear_cross_entropy
import model.positions
import model.router._base
import parallel.context
import parallel.pipeline.runner
import parallel.weight_gradient
import training.gradient
import training.step
from model.feed_forward.experts import Experts
from model.mask import Mask
from model.norm import RMSNorm
from model.router import BaseRouter
from parallel.axes import MeshSizes
from parallel.context import KeysAndValues, SplitAttention
from parallel.data import FSDPSwitches
from parallel.kept import KeptOutputs
from parallel.parameter import NamedWeight
from parallel.pipeline.runner import PipelineRunner
from parallel.weight_gradient import WeightGradient
from proofs.parity.cases import Case
from proofs.parity.chosen import EXPERT_STEPS, WINDOW
from proofs.parity.run import assemble, check, expected, run_on_ranks
from tests.planted import (
    from_table,
    gradients_averaged,
    name_of,
    nothing_wrong,
    planting,
    replicas_counted_in_the_norm,
)
from tests.proofs.context_batches import CP2, check_batch, other_keys_in_backward
from tests.proofs.parity_tiers import is_found
from tests.runs import said_by
from tokens import IGNORE
from training.balance import Balance
from training.guard import UpdateGuard
from training.optimizers import ShardedOptimizer
from training.step import TrainStep

ONE, TP, PP = Case(MeshSizes()), Case(MeshSizes(tp=2)), Case(MeshSizes(pp=2))
SHARED_KV = Case(MeshSizes(tp=4), num_kv_heads=2, sequence_parallel=False)
DP = Case(MeshSizes(dp_shard=2))
ZB_H1 = Case(MeshSizes(pp=2, dp_shard=2), schedule="zb_h1")
DEFERRED = replace(PP, schedule="zb_h1")
DOCUMENTS = replace(CP2, document_mask=True)

EXPERTS = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, num_microbatches=2)
EXPERTS_TP = replace(EXPERTS, layout=MeshSizes(tp=2, ep=2))
EXPERTS_CP = replace(EXPERTS, layout=MeshSizes(cp=2, ep=2))
EXPERTS_DP = replace(EXPERTS, layout=MeshSizes(dp_shard=2, ep=2))
EXPERTS_SHARDED = replace(EXPERTS, layout=MeshSizes(dp_shard=4, ep=2))
EXPERTS_REPLICAS = replace(EXPERTS, layout=MeshSizes(dp_replicate=2, tp=2, ep=2))
EXPERTS_ZB_H1 = replace(EXPERTS, layout=MeshSizes(pp=2, dp_shard=2, ep=2), schedule="zb_h1")


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


# --- of experts ---


def losses_divided_by_the_microbatch(build, self, config, mesh, stages):
    """The routers' losses are means over a micro-batch, and add up over micro-batches."""
    build(self, config, mesh, stages)
    for router in self.routers.values():
        router.load.global_sequences = config.train.micro_batch_size * mesh.batch.size


def balance_of_the_whole_microbatch(losses, self, logits, counts, global_sequences):
    """The balance loss counts all sequences of a micro-batch together."""
    together = counts.double().mean(0, keepdim=True).expand_as(counts)
    return losses(self, logits, together, global_sequences)


CALLS = []


def job_of_experts_dropped(run_jobs, jobs):
    """The deferred weight gradients of experts are lost in the second micro-batch."""
    CALLS.append(len(jobs))
    if len(CALLS) == 2:
        CALLS.clear()
        jobs[:] = [job for job in jobs if not is_of_experts(job)]
    run_jobs(jobs)


def is_of_experts(job):
    x, *_ = job.tensors
    return bool(job.gather_over) and x.ndim == 2  # [R, D], not [S, B, D]


def experts_numbered_by_rank(local_region, tensor):
    """Each ep rank numbers its experts from 0, so all have the same ones."""
    rows, *others = local_region(tensor)
    return (range(len(rows)) if tensor.ndim == 3 else rows, *others)


def counts_of_one_rank(update, self, loads, norm):
    """Biases follow the counts of each rank's own tokens."""
    mine = loads.counts.clone()
    for layer, router in self.routers.items():
        mine[layer] = router.load.counts
    update(self, replace(loads, counts=mine), norm)


LOSS = {"gradient", "loss", "norm"}
PARTIAL = {"gradient", "spread"}
NORM = {"gradient", "norm"}
BALANCE = {"gradient", "balance"}
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
    "the last update changes nothing":
        (ShardedOptimizer, "step", lambda *_: None, (TP, {"updated"}, "")),
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
    # --- of experts ---
    "gradients of experts are multiplied by ep, as if each rank had its mean":
        (FSDPModule, "set_gradient_divide_factor", lambda divide, self, factor:
         divide(self, factor / 2 if isinstance(self, Experts) else factor),
         (EXPERTS_SHARDED, {"gradient", "norm"}, ".experts.")),
    "losses are divided by the micro-batch":
        (Balance, "__init__", losses_divided_by_the_microbatch,
         (EXPERTS, BALANCE, ".feed_forward")),
    "balance of the whole micro-batch":
        (BaseRouter, "losses", balance_of_the_whole_microbatch,
         (EXPERTS, BALANCE, ".feed_forward")),
    "each tp rank takes its partial gradient of the router for the whole":
        (model.router._base, "WeightSpec",
         lambda spec, *given, **more: spec(*given, **{**more, "gradient_is_partial": False}),
         (EXPERTS_TP, {"gradient", "spread"}, ".router.weight")),
    "job of experts dropped": (parallel.pipeline.runner, "run_jobs", job_of_experts_dropped,
         (EXPERTS_ZB_H1, {"gradient", "norm"}, ".experts.")),
    "the recomputation makes the same choice, and counts its tokens again":
        (KeptOutputs, "once", lambda _, self, compute: compute(),
         *((replace(EXPERTS_DP, activation_checkpointing=mode), {"routes", "balance"}, "")
           for mode in ("full", "selective"))),
    "counts of a sequence are not summed over the ranks that share it":
        (model.router._base, "all_reduce", lambda _, counts, group: counts,
         *((case, BALANCE, ".feed_forward") for case in (EXPERTS_TP, EXPERTS_CP))),
    "experts numbered by rank": (model.initialise, "local_region", experts_numbered_by_rank,
         (EXPERTS_DP, {"weights", "gradient", "loss"}, "")),
    # as if each rank had another part of them
    "replicas of experts count in the norm":
        (training.gradient, "shards_of", lambda shards_of, gradient:
         gradient.device_mesh.size() if gradient.ndim == 3 else shards_of(gradient),
         (EXPERTS_REPLICAS, {"norm"}, "")),
    # as part of their block and as a unit of their own
    "the norm has experts twice":
        (training.step, "gradient_norm", lambda gradient_norm, gradients, *arguments:
         gradient_norm([*gradients, *(g for g in gradients if g.ndim == 3)], *arguments),
         (EXPERTS_DP, {"norm"}, "")),
    "counts of one rank": (Balance, "update", counts_of_one_rank),
    # biases, of which the reference has neither skipped steps nor large counts
    "every step is skipped": (UpdateGuard, "__call__", lambda _, self, loss, norm:
         norm * torch.inf),
    "biases change in every step":
        (Balance, "update", lambda update, self, loads, _: update(self, loads, torch.ones(()))),
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


@contextlib.contextmanager
def recomputation_routes_anew():
    """The recomputation chooses again, from logits with another (large) rounding error."""
    once, choose = KeptOutputs.once, BaseRouter.choose

    def honest_but_for_the_choice(self, compute):
        kept = once(self, compute)
        return compute() if self._again and kept is not None else kept  # None: a count

    def rounded(self, logits, sequences):
        if self.kept._again and self.kept._kept is not None:
            logits = logits + 0.1 * torch.linspace(-1, 1, logits.shape[1], dtype=logits.dtype)
        return choose(self, logits, sequences)

    with (
        patch.object(KeptOutputs, "once", honest_but_for_the_choice),
        patch.object(BaseRouter, "choose", rounded),
    ):
        yield


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
        (recomputation_routes_anew, replace(EXPERTS, activation_checkpointing="full"),
         {"gradient", "routes"}, ""),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where, parameter):
    row = check(ranks, case, sabotage=planting(bug, __name__))
    is_found(row, where, parameter)
    assert ("weights" in row.failures()) == ("weights" in where)
    if bug == "softmax over own columns":  # of a loss near log V
        assert row.errors["loss"] == pytest.approx(math.log(2) / math.log(251), rel=0.2)


@pytest.mark.parametrize("case", [CP2, replace(CP2, num_kv_heads=8)], ids=str)
def test_other_keys_in_backward_are_found(ranks, case):
    is_found(check_batch(ranks, case, 1, "all", other_keys_in_backward), NORM)


@pytest.mark.parametrize(
    ("bug", "case"), [(NOT_REDUCED[0], DP), *((bug, ZB_H1) for bug in NOT_REDUCED)], ids=name_of
)
def test_gradients_that_are_not_reduced_are_named(ranks, bug, case):
    """No weight would be updated, silently. The training step checks for this and raises an error
    that names the cause."""
    plant = planting(bug, __name__)
    for said in ranks.run(said_by, case.world, run_on_ranks, case, 1, plant):
        assert "no backward was marked as the step's last" in said


@contextlib.contextmanager
def not_reduced_and_unchecked():
    unchecked = patch.object(training.step, "check_reduced", lambda _: None)
    with from_table(__name__, NOT_REDUCED[0]), unchecked:
        yield


def test_gradients_that_are_not_reduced_are_found_without_that_check(ranks):
    assert check(ranks, DP, sabotage=not_reduced_and_unchecked).failures()


@pytest.mark.parametrize(
    "case",
    [
        Case(MeshSizes(pp=2, tp=2), tie_embeddings=True),
        replace(EXPERTS_SHARDED, activation_checkpointing="full"),
    ],
    ids=str,
)
def test_without_a_bug_nothing_is_found(ranks, case):
    """With nothing planted the comparison passes, so the planting itself has no effect."""
    assert check(ranks, case, EXPERT_STEPS, nothing_wrong).failures() == []


def test_missing_parts_are_found(ranks):
    """If one rank's parts are missing, the assembled tensor has NaN in their place."""
    runs = ranks.run(run_on_ranks, 2, TP, 1)
    shapes = {name: g.shape for name, g in expected(TP, 1).gradients.items()}
    assert assemble([runs[0].gradients], shapes)[0]["embedding.weight"].isnan().any()


def test_biases_of_one_ranks_counts_are_found(ranks):
    plant = planting("counts of one rank", __name__)
    assert "bias" in check(ranks, EXPERTS_DP, EXPERT_STEPS, plant).failures()


def test_a_skipped_step_changes_no_bias(ranks):
    """With a control: a bias that follows every step differs."""
    bugs = ["every step is skipped", "biases change in every step"]
    for run in ranks.run(run_on_ranks, 2, EXPERTS_DP, 2, partial(from_table, __name__, bugs[0])):
        assert run.biases
        assert not any(bias.any() for bias in run.biases.values())
        for (_, _, first), (_, _, last) in zip(run.weights, run.final_weights, strict=True):
            assert torch.equal(first, last)
    for run in ranks.run(run_on_ranks, 2, EXPERTS_DP, 2, partial(from_table, __name__, *bugs)):
        assert all(bias.any() for bias in run.biases.values())
