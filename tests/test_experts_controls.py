"""Controls for mixtures of experts: each test plants a known fault of such code in the ranks, and
the comparison with the reference must report it."""

import contextlib
from dataclasses import replace
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
from parallel.axes import EXPERT_AXES, MeshSizes
from parallel.expert import TokenDispatch
from tests.test_controls import name_of, nothing_wrong
from tools.parity.cases import Case
from tools.parity.expert_cases import STEPS
from tools.parity.run import check, run_on_ranks
from training.balance import Balance
from training.guard import UpdateGuard

BASE = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, num_microbatches=2)
TP = replace(BASE, layout=MeshSizes(tp=2, ep=2))
CP = replace(BASE, layout=MeshSizes(cp=2, ep=2))
DP = replace(BASE, layout=MeshSizes(dp_shard=2, ep=2))
SHARDED = replace(BASE, layout=MeshSizes(dp_shard=4, ep=2))
REPLICAS = replace(BASE, layout=MeshSizes(dp_replicate=2, tp=2, ep=2))
ZB_H1 = replace(BASE, layout=MeshSizes(pp=2, dp_shard=2, ep=2), schedule="zb_h1")


@contextlib.contextmanager
def expert_gradients_times_ep():
    """Plant: gradients of experts are multiplied by ep, as if each rank had its mean."""
    divide = FSDPModule.set_gradient_divide_factor

    def set_factor(self, factor):
        divide(self, factor / 2 if isinstance(self, Experts) else factor)

    with patch.object(FSDPModule, "set_gradient_divide_factor", set_factor):
        yield


@contextlib.contextmanager
def replicas_of_experts_counted_in_the_norm():
    """Plant: the norm divides by replicas on the axes of the other weights only."""
    honest = training.gradient.replicated_over

    def replicated_over(gradient):
        return [axis for axis in honest(gradient) if axis == "pp" or axis not in EXPERT_AXES]

    with patch.object(training.gradient, "replicated_over", replicated_over):
        yield


@contextlib.contextmanager
def experts_twice_in_the_norm():
    # Plant: the norm has experts twice, as part of their block and as a unit of their own.
    honest = training.step.gradient_norm

    def gradient_norm(gradients, *arguments):
        return honest([*gradients, *(g for g in gradients if g.ndim == 3)], *arguments)

    with patch.object(training.step, "gradient_norm", gradient_norm):
        yield


@contextlib.contextmanager
def losses_divided_by_the_microbatch():
    """Plant: the routers' losses are means over a micro-batch, and add up over micro-batches."""
    build = Balance.__init__

    def init(self, config, mesh, stages):
        build(self, config, mesh, stages)
        for router in self.routers.values():
            router.account.global_sequences = config.train.micro_batch_size * mesh.dp_size

    with patch.object(Balance, "__init__", init):
        yield


@contextlib.contextmanager
def balance_of_the_whole_microbatch():
    """Plant: the balance loss counts all sequences of a micro-batch together."""
    honest = BaseRouter.losses

    def losses(self, logits, routes, global_sequences):
        together = routes.sequence_counts.double().mean(0, keepdim=True)
        together = together.expand_as(routes.sequence_counts)
        return honest(self, logits, replace(routes, sequence_counts=together), global_sequences)

    with patch.object(BaseRouter, "losses", losses):
        yield


@contextlib.contextmanager
def router_gradient_not_summed():
    """Plant: each tp rank takes its partial gradient of the router for the whole gradient."""
    honest = model.router._base.WeightSpec

    def spec(**given):
        return honest(**{**given, "gradient_is_partial": False})

    with patch.object(model.router._base, "WeightSpec", spec):
        yield


@contextlib.contextmanager
def job_of_experts_dropped():
    """Plant: the deferred weight gradients of experts are lost in the second micro-batch."""
    honest = parallel.pipeline.runner.run_jobs
    calls = []

    def run_jobs(jobs):
        calls.append(len(jobs))
        if len(calls) == 2:
            jobs[:] = [job for job in jobs if not is_of_experts(job)]
        honest(jobs)

    def is_of_experts(job):
        return any(each.weight.ndim == 3 for each in getattr(job, "destinations", ()))

    with patch.object(parallel.pipeline.runner, "run_jobs", run_jobs):
        yield


@contextlib.contextmanager
def recomputation_counts_again():
    # Plant: the recomputation finds the same routes again, and counts its tokens again.
    with patch.object(TokenDispatch, "once", lambda self, compute: compute()):
        yield


@contextlib.contextmanager
def recomputation_routes_anew():
    """Plant: the recomputation finds routes again, where near-ties fall the other way: a logit has
    another rounding error, here a large one."""
    once, find = TokenDispatch.once, BaseRouter.find
    again = []

    def honest_but_for_routes(self, compute):
        if self.kept is None or not self.kept.has_result:
            return once(self, compute)
        if once(self, compute) is None:  # a count, not routes
            return None
        again.append(True)
        return compute()

    def rounded(self, logits, sequences):
        if again:
            again.clear()
            logits = logits + 0.1 * torch.linspace(-1, 1, logits.shape[1], dtype=logits.dtype)
        return find(self, logits, sequences)

    with (
        patch.object(TokenDispatch, "once", honest_but_for_routes),
        patch.object(BaseRouter, "find", rounded),
    ):
        yield


@contextlib.contextmanager
def sequences_counted_in_parts():
    """Plant: counts of a sequence are not summed over the ranks that share it."""
    honest = model.router._base.find_routes

    def find_routes(chosen, sequences, num_experts, ep, whole):
        return honest(chosen, sequences, num_experts, replace(ep, sequence=()), whole)

    with patch.object(model.router._base, "find_routes", find_routes):
        yield


@contextlib.contextmanager
def experts_numbered_by_rank():
    """Plant: each ep rank numbers its experts from 0, so all have the same ones."""
    honest = model.initialise.local_region

    def local_region(tensor):
        rows, *others = honest(tensor)
        return (range(len(rows)) if tensor.ndim == 3 else rows, *others)

    with patch.object(model.initialise, "local_region", local_region):
        yield


@contextlib.contextmanager
def counts_of_one_rank():
    """Plant: biases follow the counts of each rank's own tokens."""
    honest = Balance.update

    def update(self, loads, norm):
        mine = loads.counts.clone()
        for layer, router in self.routers.items():
            mine[layer] = router.account.counts
        honest(self, replace(loads, counts=mine), norm)

    with patch.object(Balance, "update", update):
        yield


@pytest.mark.parametrize(
    ("bug", "case", "where", "parameter"),
    [
        (expert_gradients_times_ep, SHARDED, {"gradient", "norm"}, ".experts."),
        (losses_divided_by_the_microbatch, BASE, {"gradient", "balance"}, ".feed_forward"),
        (balance_of_the_whole_microbatch, BASE, {"gradient", "balance"}, ".feed_forward"),
        (router_gradient_not_summed, TP, {"gradient", "spread"}, ".router.weight"),
        (job_of_experts_dropped, ZB_H1, {"gradient", "norm"}, ".experts."),
        (recomputation_counts_again, replace(DP, activation_checkpointing="full"),
         {"routes", "balance"}, ""),
        (recomputation_counts_again, replace(DP, activation_checkpointing="selective"),
         {"routes", "balance"}, ""),
        (recomputation_routes_anew, replace(BASE, activation_checkpointing="full"),
         {"gradient", "routes"}, ""),
        (sequences_counted_in_parts, TP, {"gradient", "balance"}, ".feed_forward"),
        (sequences_counted_in_parts, CP, {"gradient", "balance"}, ".feed_forward"),
        (experts_numbered_by_rank, DP, {"weights", "gradient", "loss"}, ""),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where, parameter):
    """In the quantities that it affects, and the worst gradient is that of an affected
    parameter."""
    row = check(ranks, case, sabotage=bug)
    assert where <= set(row.failures()), row.crash or row.failures()
    assert parameter in row.worst


@pytest.mark.parametrize(
    ("bug", "case"),
    [(replicas_of_experts_counted_in_the_norm, REPLICAS), (experts_twice_in_the_norm, DP)],
    ids=name_of,
)
def test_planted_bug_in_the_norm_is_found_there_alone(ranks, bug, case):
    assert check(ranks, case, sabotage=bug).failures() == ["norm"]


def test_biases_of_one_ranks_counts_are_found(ranks):
    assert "bias" in check(ranks, DP, STEPS, sabotage=counts_of_one_rank).failures()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_without_a_bug_nothing_is_found(ranks, mode):
    # Control: the planting itself has no effect.
    case = replace(SHARDED, activation_checkpointing=mode)
    assert check(ranks, case, STEPS, sabotage=nothing_wrong).failures() == []


# --- biases, of which the reference has neither skipped steps nor large counts ---


@contextlib.contextmanager
def every_step_skipped():
    with patch.object(UpdateGuard, "__call__", lambda self, loss, norm: norm * torch.inf):
        yield


@contextlib.contextmanager
def biases_changed_in_skipped_steps():
    # Plant: biases change in every step.
    honest = Balance.update
    with (
        every_step_skipped(),
        patch.object(Balance, "update", lambda self, loads, _: honest(self, loads, torch.ones(()))),
    ):
        yield


def test_a_skipped_step_changes_no_bias(ranks):
    """With a control: a bias that follows every step differs."""
    for run in ranks.run(run_on_ranks, 2, DP, 2, every_step_skipped):
        assert run.biases
        assert not any(bias.any() for bias in run.biases.values())
        for (_, _, first), (_, _, last) in zip(run.weights, run.final_weights, strict=True):
            assert torch.equal(first, last)
    for run in ranks.run(run_on_ranks, 2, DP, 2, biases_changed_in_skipped_steps):
        assert all(bias.any() for bias in run.biases.values())
