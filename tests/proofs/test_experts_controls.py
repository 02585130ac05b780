"""Controls for mixtures of experts: each entry of a table plants a known fault of such code
in the ranks, and the comparison with the reference must report it.

Mistakes that were found in public codebases, and what finds them (test_experts.py unless said):

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
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import model.initialise
import model.router._base
import parallel.pipeline.runner
import training.gradient
import training.step
from model.feed_forward.experts import Experts
from model.router import BaseRouter
from parallel.axes import MeshSizes
from parallel.kept import KeptOutputs
from proofs.parity.cases import Case
from proofs.parity.chosen import EXPERT_STEPS
from proofs.parity.run import check, run_on_ranks
from tests.planted import from_table, name_of, nothing_wrong, planting
from tests.proofs.parity_tiers import is_found, thorough_but
from training.balance import Balance
from training.guard import UpdateGuard

BASE = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, num_microbatches=2)
TP = replace(BASE, layout=MeshSizes(tp=2, ep=2))
CP = replace(BASE, layout=MeshSizes(cp=2, ep=2))
DP = replace(BASE, layout=MeshSizes(dp_shard=2, ep=2))
SHARDED = replace(BASE, layout=MeshSizes(dp_shard=4, ep=2))
REPLICAS = replace(BASE, layout=MeshSizes(dp_replicate=2, tp=2, ep=2))
ZB_H1 = replace(BASE, layout=MeshSizes(pp=2, dp_shard=2, ep=2), schedule="zb_h1")


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


BALANCE = {"gradient", "balance"}
# What takes the place of which method (it gets the original as its first argument); and in which
# cases the comparison must report which quantities, with the worst gradient in which parameter.
MISTAKES = {
    "gradients of experts are multiplied by ep, as if each rank had its mean":
        (FSDPModule, "set_gradient_divide_factor", lambda divide, self, factor:
         divide(self, factor / 2 if isinstance(self, Experts) else factor),
         (SHARDED, {"gradient", "norm"}, ".experts.")),
    "losses are divided by the micro-batch":
        (Balance, "__init__", losses_divided_by_the_microbatch, (BASE, BALANCE, ".feed_forward")),
    "balance of the whole micro-batch":
        (BaseRouter, "losses", balance_of_the_whole_microbatch, (BASE, BALANCE, ".feed_forward")),
    "each tp rank takes its partial gradient of the router for the whole":
        (model.router._base, "WeightSpec",
         lambda spec, *given, **more: spec(*given, **{**more, "gradient_is_partial": False}),
         (TP, {"gradient", "spread"}, ".router.weight")),
    "job of experts dropped": (parallel.pipeline.runner, "run_jobs", job_of_experts_dropped,
         (ZB_H1, {"gradient", "norm"}, ".experts.")),
    "the recomputation makes the same choice, and counts its tokens again":
        (KeptOutputs, "once", lambda _, self, compute: compute(),
         *((replace(DP, activation_checkpointing=mode), {"routes", "balance"}, "")
           for mode in ("full", "selective"))),
    "counts of a sequence are not summed over the ranks that share it":
        (model.router._base, "all_reduce", lambda _, counts, group: counts,
         *((case, BALANCE, ".feed_forward") for case in (TP, CP))),
    "experts numbered by rank": (model.initialise, "local_region", experts_numbered_by_rank,
         (DP, {"weights", "gradient", "loss"}, "")),
    # as if each rank had another part of them
    "replicas of experts count in the norm":
        (training.gradient, "shards_of", lambda shards_of, gradient:
         gradient.device_mesh.size() if gradient.ndim == 3 else shards_of(gradient),
         (REPLICAS, {"norm"}, "")),
    # as part of their block and as a unit of their own
    "the norm has experts twice":
        (training.step, "gradient_norm", lambda gradient_norm, gradients, *arguments:
         gradient_norm([*gradients, *(g for g in gradients if g.ndim == 3)], *arguments),
         (DP, {"norm"}, "")),
    "counts of one rank": (Balance, "update", counts_of_one_rank),
    # biases, of which the reference has neither skipped steps nor large counts
    "every step is skipped": (UpdateGuard, "__call__", lambda _, self, loss, norm:
         norm * torch.inf),
    "biases change in every step":
        (Balance, "update", lambda update, self, loads, _: update(self, loads, torch.ones(()))),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("bug", "case", "where", "parameter"),
    [
        *((name, *each) for name, (_, _, _, *found) in MISTAKES.items() for each in found),
        (recomputation_routes_anew, replace(BASE, activation_checkpointing="full"),
         {"gradient", "routes"}, ""),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where, parameter):
    row = check(ranks, case, sabotage=planting(bug, __name__))
    is_found(row, where, parameter)


def test_biases_of_one_ranks_counts_are_found(ranks):
    row = check(
        ranks, DP, EXPERT_STEPS, sabotage=partial(from_table, __name__, "counts of one rank")
    )
    assert "bias" in row.failures()


@pytest.mark.parametrize("mode", thorough_but({"full"}, ["none", "selective", "full"]))
def test_without_a_bug_nothing_is_found(ranks, mode):
    """The planting itself has no effect."""
    case = replace(SHARDED, activation_checkpointing=mode)
    assert check(ranks, case, EXPERT_STEPS, sabotage=nothing_wrong).failures() == []


def test_a_skipped_step_changes_no_bias(ranks):
    """With a control: a bias that follows every step differs."""
    bugs = ["every step is skipped", "biases change in every step"]
    for run in ranks.run(run_on_ranks, 2, DP, 2, partial(from_table, __name__, bugs[0])):
        assert run.biases
        assert not any(bias.any() for bias in run.biases.values())
        for (_, _, first), (_, _, last) in zip(run.weights, run.final_weights, strict=True):
            assert torch.equal(first, last)
    for run in ranks.run(run_on_ranks, 2, DP, 2, partial(from_table, __name__, *bugs)):
        assert all(bias.any() for bias in run.biases.values())
