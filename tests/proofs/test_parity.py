"""Every layout of the model computes what the unsharded model computes: the quick part of `python
-m proofs.parity`. With experts it compares the experts that each token chooses, the routers' losses
and changed biases too, also with loads as uneven as they can be: all tokens at one expert, an
expert without tokens, a rank that receives no rows, and experts that FSDP must cut. Also here:
layers of several kinds, and that an evaluation leaves gradients alone.

`make test` runs a few of the quick cases, in which every value of every option occurs. `make
test-rest` runs the other quick cases; together they cover every pair of values. `make test-slow`
runs the whole matrix, all layouts of 1 to 8 ranks. test_controls.py shows that this comparison can
fail.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, product
from unittest.mock import patch

import pytest

from errors import UserError
from kinds import kinds_in
from model.kernels.backend import why_not_triton
from parallel.axes import AXES, MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from proofs.parity import __main__ as parity
from proofs.parity.cases import (
    BATCH,
    OPTIMIZER,
    SEQ_LEN,
    STEPS,
    Case,
    has_axis_of,
    meshes_of,
    wanted_pairs,
)
from proofs.parity.chosen import (
    EP,
    EXPERT_STEPS,
    WINDOW,
    context_cases,
    expert_layout_cases,
    extreme_cases,
    kernel_cases,
    kind_cases,
    schedule_cases,
)
from proofs.parity.run import expected
from runtime.checkpoint.load import _start_from
from settings.load import load_config
from settings.sections import OptimizerConfig
from tests.proofs.context_batches import CP2
from tests.proofs.parity_tiers import (
    agrees,
    dense_covering,
    expert_covering,
    strictly,
    thorough_but,
)
from tests.runs import checkpoint_of, trainer_of
from tests.steps import gradients_around_an_evaluation

QUICK, EXPERTS = dense_covering(), expert_covering()
COVERINGS = {"dense": QUICK, "experts": EXPERTS}
# Every schedule with pp 4 without another axis: in `make test` with up to two stages per rank and
# twice as many micro-batches as ranks; in the thorough tests with every number of stages and four
# times as many. The whole matrix has the rest.
ROWS = [
    replace(case, layout=MeshSizes(pp=4))
    for case in schedule_cases((8,))
    if case.layout == MeshSizes(pp=4, tp=2)
]
DEEP = {
    case.schedule: case for case in ROWS if case.stages_per_rank <= 2 and case.num_microbatches == 8
}
DEEPER = [*DEEP.values(), *(case for case in ROWS if case.num_microbatches == 16)]
OVER_GLOO = [DEEP["zb_v"], DEEP["zb_h1"], *EXPERTS.few[-3:]]  # the last three: over several axes


@pytest.mark.parametrize(
    "case", thorough_but([*QUICK.few, *EXPERTS.few], [*QUICK.pairs, *EXPERTS.pairs]), ids=str
)
def test_every_pair_of_options(ranks, case):
    """The few cases of experts run over a strict group, except the last three, over gloo. Cases of
    Muon take two steps: the first limits heads. (`make parity` takes more.)"""
    with strictly(ranks) if case in EXPERTS.few and case not in OVER_GLOO else nullcontext():
        agrees(ranks, case, 1 if case.optimizer == "adamw" else 2)


BASE = Case(MeshSizes(), num_microbatches=2)
TIED = replace(BASE, layout=MeshSizes(pp=2, tp=2), tie_embeddings=True)
IN_3D = replace(BASE, layout=MeshSizes(pp=2, dp_shard=2, tp=2))
CP4 = replace(BASE, layout=MeshSizes(cp=4))
WITH_EXPERTS = [
    replace(BASE, router="softmax", router_losses=True),
    replace(BASE, layout=MeshSizes(dp_shard=2, tp=2, ep=4), router="softmax_renormalised",
            zero_stage=3),
    replace(BASE, layout=MeshSizes(pp=2, tp=2, ep=2), router="sigmoid_bias", router_losses=True),
]  # fmt: skip
QUICK_STEPS = [(replace(TIED, dtype="float32"), 8), (CP2, 2)]
LONG = [(case, STEPS) for case in (BASE, TIED, IN_3D, CP4, *WITH_EXPERTS)]
LONG += [(replace(case, dtype="float32"), STEPS) for case in (BASE, IN_3D, CP2)]
# with heads two elements wide, q's and k's norm weights are sharded over four ranks: two hold none
LONG.append((Case(MeshSizes(dp_shard=4), attention_dim=16, qk_norm=True), 2))
IN_FLOAT32 = [(replace(case, dtype="float32"), STEPS) for case in WITH_EXPERTS]


@pytest.mark.parametrize(
    ("case", "steps"),
    thorough_but(QUICK_STEPS, [*QUICK_STEPS, *LONG, *IN_FLOAT32], IN_FLOAT32),
    ids=str,
)
def test_steps(ranks, case, steps):
    """Losses and gradient norms agree with the unsharded model's over optimizer steps with warmup,
    decay and clipping, and replicated weights (tied embeddings too) stay bitwise equal."""
    agrees(ranks, case, steps)


@pytest.mark.slow
@pytest.mark.parametrize("world", parity.WORLDS)
def test_whole_matrix(world, tmp_path):
    assert parity.main(["--world", str(world), "--json", str(tmp_path / "parity.json")]) == 0


def test_clipping_is_active_in_some_of_the_steps_and_biases_change():
    """Else the steps would compare less than they seem to."""
    for case, steps in (QUICK_STEPS[0], LONG[0]):
        norms = expected(case, steps).norms
        assert min(norms) < OPTIMIZER.grad_clip < max(norms)
    reference = expected(Case(MeshSizes(), router="sigmoid_bias", router_losses=True), EXPERT_STEPS)
    assert min(reference.norms) > OPTIMIZER.grad_clip
    for bias in reference.biases.values():
        assert len(bias.unique()) > 2
    assert min(reference.auxiliary) > 0


@pytest.mark.parametrize("covering", COVERINGS.values(), ids=COVERINGS)
def test_covering_array_covers(covering):
    """Every pair of option values occurs in a case, except for pairs that contradict each other,
    and for options of an axis that a layout of several ranks does not have; and every value occurs
    in `make test`."""
    wanted = set(wanted_pairs(covering.values))
    assert (("layout", MeshSizes(tp=8)), ("zero_stage", 2)) not in wanted
    assert (("layout", MeshSizes()), ("zero_stage", 2)) in wanted or covering is not QUICK
    assert wanted - set().union(*covering.pairs.values()) == set(covering.impossible)
    for case, pairs in covering.pairs.items():
        options = {name for pair in pairs if pair[0][0] != "layout" for name, _ in pair}
        assert all(has_axis_of(case.layout, name) for name in options), "a pair without effect"
    for (option, given), (name, value) in covering.impossible:
        if (option, name) == ("layout", "zero_stage"):  # shards, where there are to be none
            assert (value, given.dp_shard > 1) == (0, True), given
        elif (option, name) == ("layout", "num_microbatches"):  # too few sequences
            assert given.dp * value > BATCH
        else:
            assert (option, given[0]) == ("pipeline", "dualpipe_v")
            assert (name, value) in {("num_microbatches", 1), ("num_microbatches", 2)}
    values = {(name, value) for name in covering.values for value in covering.values[name]}
    found = set().union(*(covering.effective[case] for case in covering.few))
    assert found == values
    assert {schedule for schedule, _ in QUICK.values["pipeline"]} == set(SCHEDULES)


@pytest.mark.parametrize("wrong", ["--world=0", "--jobs=0", "--json=nowhere/at/all.json"])
def test_wrong_options(wrong):
    with pytest.raises(UserError, match=wrong.partition("=")[0]):
        parity.main([wrong])


def test_schedules_at_every_depth():
    """Every schedule is checked with pp 2, 4 and 8, with one, two and four stages per rank where it
    allows a choice, and with fewer and up to four times as many micro-batches as ranks."""
    cases = schedule_cases(parity.WORLDS)
    assert DEEP.keys() == SCHEDULES.keys(), "in `make test`"
    for schedule in SCHEDULES:
        mine = [case for case in cases if case.schedule == schedule]
        assert {case.layout.pp for case in mine} == {2, 4, 8}
        assert {case.num_microbatches / case.layout.pp for case in mine} >= {2, 4}
        if schedule != "dualpipe_v":
            assert any(case.num_microbatches < case.layout.pp for case in mine)
    for schedule in ("interleaved_1f1b", "breadth_first"):
        assert {case.stages_per_rank for case in cases if case.schedule == schedule} == {1, 2, 4}


@pytest.mark.parametrize("case", thorough_but(DEEP.values(), DEEPER), ids=str)
def test_every_schedule(ranks, case):
    """With stages in the order of ranks, around the ranks in a circle, and forth and back. In a
    strict group a send completes only when its receive has begun: none may rely on buffers. Two of
    them run over gloo, as training on CPUs does: with four ranks an exchange has two peers, and
    gloo, unlike NCCL and the strict group, returns a work for each message."""
    with nullcontext() if case in OVER_GLOO else strictly(ranks):
        agrees(ranks, case)


# --- kinds ---


def test_every_kind_is_compared():
    """`make parity` has cases of every kind; of a new one only once it has a reference."""
    elsewhere = {"attention": set(), "feed_forward": {"experts", "swiglu"}}  # in other cases
    for key, kinds in elsewhere.items():
        tried = {getattr(case, key) for case in kind_cases()} - {getattr(Case, key)}
        assert kinds.union(*tried) == set(kinds_in(f"model.{key}")), key
    with (
        patch("proofs.parity.chosen.kinds_in", lambda package: ["relu"]),
        pytest.raises(UserError, match=r"write proofs/parity/reference_relu\.py, with a class Att"),
    ):
        kind_cases()
    with (  # nor can a router be left out because no case of it is valid
        patch("proofs.parity.cases.keys_to_try", lambda key, kind: WINDOW["keys"]),
        pytest.raises(UserError, match="nothing is of kind sliding_window"),
    ):
        kind_cases()


IN_EVERY_SECOND_LAYER = Case(MeshSizes(tp=2), feed_forward=("swiglu", "experts"), router="softmax")
KINDS = [*kind_cases(), IN_EVERY_SECOND_LAYER]


@pytest.mark.parametrize("case", thorough_but([*KINDS[1:3], KINDS[-1]], KINDS), ids=str)
def test_kinds_agree(ranks, case):
    agrees(ranks, case)


def test_layers_take_kinds_in_turn():
    """As Gemma's do."""
    model = Case(MeshSizes(pp=2), **WINDOW).config().model
    assert [model.attention_of(layer) for layer in range(4)] == ["sliding_window", "causal"] * 2
    assert IN_EVERY_SECOND_LAYER.config().model.feed_forward == ("swiglu", "experts")


def test_a_checkpoint_of_another_optimizer_is_refused(saved):
    checkpoint = checkpoint_of(saved, 2)
    assert trainer_of(saved, 2)["optimizer"] == "adamw"
    config = load_config(str(saved / "config.yaml"), [])
    with patch.object(OptimizerConfig, "select"):
        other = replace(config.optimizer, name="lion")
    with pytest.raises(UserError, match=r"has optimizer\.name='adamw'"):
        _start_from(checkpoint, replace(config, optimizer=other), None, None)


# --- Triton's kernels ---


# A cheap selection: each kernel runs forward and backward, with and without tp.
KERNELS_ONCE = [
    case
    for case in kernel_cases()
    if case.layout in (MeshSizes(tp=2), MeshSizes(cp=2))
    and (not case.sequence_parallel or case.layout.tp == 1)
]


@pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
@pytest.mark.parametrize("case", thorough_but(KERNELS_ONCE, kernel_cases()), ids=str)
def test_triton_kernels(ranks, case):
    agrees(ranks, case)


# --- experts ---


def test_every_layout_of_a_world_with_every_ep():
    """`python -m proofs.parity` has them, with every kind of router and zero_stage."""
    # 2^k has C(k + n − 1, n − 1) ordered factorizations into n factors, one per axis.
    n = len(AXES)
    meshes = [meshes_of(world) for world in parity.WORLDS]
    assert [*map(len, meshes)] == [math.comb(k + n - 1, n - 1) for k in range(4)]
    assert {case.layout for case in expert_layout_cases(parity.WORLDS)} == {
        replace(sizes, ep=ep)
        for sizes, ep in product(chain(*meshes), EP)
        if sizes.dp_shard * sizes.cp * sizes.tp % ep == 0
    }
    assert {(case.router, case.zero_stage) for case in expert_layout_cases((8,))} == {
        (router, zero_stage) for router in EXPERTS.values["router"] for zero_stage in (1, 2, 3)
    }


EXTREMES = extreme_cases()
FOUR, TWO = MeshSizes(dp_shard=2, tp=2, ep=4), MeshSizes(tp=2, ep=2)
BIASED = [case for case in EXTREMES if case.first_bias]
FEW = [case for case in EXTREMES if case not in BIASED]
# a rank that receives no rows needs ep 4; all tokens at one of its experts, in three steps
QUICK_EXTREMES = [
    *(case for case in BIASED if case.layout == FOUR
      and case.schedule == "1f1b" and sum(bias < 0 for bias in case.first_bias) == 2),
    *(case for case in BIASED if case.layout == TWO and case.schedule != "1f1b"
      and case.experts_per_token == 1),
    FEW[4],
    FEW[5],  # on two ranks, where FSDP cuts only the experts' weights
]  # fmt: skip


# every load over four ranks with 1F1B, and over two with a schedule that defers weight gradients;
# `make parity` has each load over each layout with both
PARITY_ONLY = [
    case for case in BIASED if (case.layout, case.schedule) not in {(FOUR, "1f1b"), (TWO, "zb_h1")}
]


@pytest.mark.parametrize("case", thorough_but(QUICK_EXTREMES, EXTREMES, PARITY_ONLY), ids=str)
def test_extremes(ranks, case):
    agrees(ranks, case, 1 if case in QUICK_EXTREMES and case.world > 2 else EXPERT_STEPS)


def loads(case):
    """How many tokens chose each expert in the first step, by layer."""
    return [
        each.flatten().bincount(minlength=case.num_experts).tolist()
        for each in expected(case, 1).choices.values()
    ]


def test_the_loads_are_as_extreme_as_they_should_be():
    tokens = BATCH * SEQ_LEN
    for case in {(case.first_bias, case.experts_per_token): case for case in BIASED}.values():
        for counts in loads(replace(case, layout=MeshSizes(), schedule="1f1b")):
            assert sum(counts) == tokens * case.experts_per_token
            favoured, avoided = max(case.first_bias), min(case.first_bias)
            for bias, count in zip(case.first_bias, counts, strict=True):
                if bias == favoured > 0:
                    assert count == tokens
                elif bias == avoided < 0 or case.experts_per_token == 1:
                    assert count == 0
            # two of eight experts, those of the second of four ranks
            idle = [bias < 0 for bias in case.first_bias] == [0, 0, 1, 1, 0, 0, 0, 0]
            assert (counts[2:4] == [0, 0]) == (idle or case.experts_per_token == 1)


# test_every_schedule and test_every_pair_of_options run cases over a strict group, too; MORE has
# those that they run over gloo.
STRICT = [
    ("strict", Case(MeshSizes(pp=2, dp_shard=2, tp=2), num_microbatches=2, zero_stage=3), 2),
    # all tokens at one expert
    ("strict", next(case for case in EXTREMES if case.layout.ep == case.world == 4), 2),
]
MORE = [("strict", case, 1) for case in OVER_GLOO]
# with one queue of a rank for all its groups; more cases; and more steps
SLOW = [
    *(("strict_shared", case, 1)
      for case in (*(case for _, case, _ in STRICT), *EXPERTS.few, *DEEPER, *context_cases()[-2:])),
    *(("strict", case, 1) for case in QUICK.few),
    *((backend, case, EXPERT_STEPS)
      for case in BIASED if case.layout.ep == 4 for backend in ("strict", "strict_shared")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "case", "steps"), thorough_but(STRICT, STRICT + MORE + SLOW, SLOW), ids=str
)
def test_over_a_strict_group(ranks, backend, case, steps):
    """`python -m proofs.parity --strict` runs all."""
    with strictly(ranks, backend):
        agrees(ranks, case, steps)


# --- what no case shows ---

# Known mistakes of other training codebases, collected from their issue threads, mostly do not show
# in a loss curve. Those that affect the mathematics (a loss scaled per rank or micro-batch,
# gradients of norms averaged or not reduced, replicated weights or tied embeddings counted twice in
# the norm, or a norm local to a stage) are planted in test_controls.py. A norm that depends on the
# partition, because it is summed in the gradients' dtype, is found in test_kernel_adamw.py and
# test_whole.py.


@pytest.mark.parametrize(
    "case", [Case(MeshSizes(pp=2, dp_shard=2)), Case(MeshSizes(dp_shard=2), zero_stage=3)], ids=str
)
def test_accumulated_gradients_wiped_when_a_stage_is_used_again(ranks, case):
    """An evaluation on the same stages neither erases accumulated gradients nor adds to later
    ones."""
    for same in ranks.run(gradients_around_an_evaluation, case.world, case):
        assert all(same)
