"""Every layout of a mixture of experts computes what a plain loop over the experts computes
(proofs/parity/reference_experts.py): gradients, the experts that each token chooses, the routers'
losses, and optimizer steps with clipping and changed biases. Also with loads as uneven as they can
be: all tokens at one expert, an expert without tokens, a rank that receives no rows, and experts
that FSDP must cut.

`make test` runs a few cases, in which every value of every option occurs, and `make test-rest` the
others, which together cover every pair of values, each for one step with a clipped update (of the
few cases, those that have biases). Several steps, in which biases change, are those of uneven loads
and the twenty of three layouts. `python -m proofs.parity` has all layouts. test_controls.py shows
that this comparison can fail.
"""

from dataclasses import replace

import pytest

from parallel.axes import MeshSizes
from proofs.parity import cases
from proofs.parity.cases import BATCH, OPTIMIZER, SEQ_LEN, Case, meshes_of
from proofs.parity.chosen import EP, EXPERT_STEPS, expert_layout_cases, extreme_cases
from proofs.parity.run import expected
from tests.proofs.parity_tiers import agrees, expert_covering, thorough_but

COVERING = expert_covering()


@pytest.mark.parametrize("case", thorough_but(COVERING.few, COVERING.pairs), ids=str)
def test_every_pair_of_options(ranks, case):
    agrees(ranks, case)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case(MeshSizes(), router="softmax", router_losses=True),
        Case(MeshSizes(dp_shard=2, tp=2, ep=4), router="softmax_renormalised", zero_stage=3),
        Case(MeshSizes(pp=2, tp=2, ep=2), router="sigmoid_bias", router_losses=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_twenty_steps(ranks, case, dtype):
    agrees(ranks, replace(case, dtype=dtype), cases.STEPS)


def test_every_layout_with_every_ep():
    """`python -m proofs.parity` has them, with every kind of router and zero_stage."""
    found = {case.layout for case in expert_layout_cases((1, 2, 4, 8))}
    for world in (1, 2, 4, 8):
        for sizes in meshes_of(world):
            for ep in EP:
                if sizes.dp_shard * sizes.cp * sizes.tp % ep == 0:
                    assert replace(sizes, ep=ep) in found
    assert {(case.router, case.zero_stage) for case in expert_layout_cases((8,))} == {
        (router, zero_stage) for router in COVERING.values["router"] for zero_stage in (1, 2, 3)
    }


def test_steps_are_clipped_and_biases_change():
    """Else the steps would compare less than they seem to."""
    reference = expected(Case(MeshSizes(), router="sigmoid_bias", router_losses=True), EXPERT_STEPS)
    assert min(reference.norms) > OPTIMIZER.grad_clip
    for bias in reference.biases.values():
        assert len(bias.unique()) > 2
    assert min(reference.auxiliary) > 0


EXTREMES = extreme_cases()
FOUR, TWO = MeshSizes(dp_shard=2, tp=2, ep=4), MeshSizes(tp=2, ep=2)
BIASED = [case for case in EXTREMES if case.first_bias]
FEW = [case for case in EXTREMES if case not in BIASED]
# a rank that receives no rows needs ep 4; all tokens at one of its experts, in three steps
QUICK = [
    *(case for case in BIASED if case.layout == FOUR
      and case.schedule == "1f1b" and sum(bias < 0 for bias in case.first_bias) == 2),
    *(case for case in BIASED if case.layout == TWO and case.schedule != "1f1b"
      and case.experts_per_token == 1),
    FEW[4],
]  # fmt: skip


# every load over four ranks with 1F1B, and over two with a schedule that defers weight gradients;
# `make parity` has each load over each layout with both
PARITY_ONLY = [
    case for case in BIASED if (case.layout, case.schedule) not in {(FOUR, "1f1b"), (TWO, "zb_h1")}
]


@pytest.mark.parametrize("case", thorough_but(QUICK, EXTREMES, PARITY_ONLY), ids=str)
def test_extremes(ranks, case):
    agrees(ranks, case, 1 if case in QUICK and case.world > 2 else EXPERT_STEPS)


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
