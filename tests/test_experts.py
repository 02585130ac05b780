"""Every layout of a mixture of experts computes what a plain loop over the experts computes
(tools/parity/reference_experts.py): gradients, the experts that each token chooses, the routers'
losses, and 3 optimizer steps with clipping and changed biases.

`make test` runs a few cases, in which every value of every option occurs, and `make test-rest` the
others, which together cover every pair of values. `python -m tools.parity` has all layouts.
test_experts_controls.py shows that this comparison can fail.
"""

from dataclasses import replace
from itertools import combinations

import pytest

from kinds import kinds_in
from parallel.axes import MeshSizes
from tests.parity_tiers import each_value_once, thorough_but, values_of
from tools.parity import cases
from tools.parity.cases import OPTIMIZER, Case, covering_cases, pairs_of
from tools.parity.expert_cases import (
    EP,
    LAYOUTS,
    STEPS,
    expert_layout_cases,
    expert_values,
)
from tools.parity.row import line
from tools.parity.run import check, expected

VALUES = expert_values(LAYOUTS)
CASES, IMPOSSIBLE = covering_cases(VALUES)
PAIRS = {case: pairs_of(case, VALUES) for case in CASES}
FEW = each_value_once(PAIRS)


@pytest.mark.parametrize("case", thorough_but(FEW, CASES), ids=str)
def test_every_pair_of_options(ranks, case):
    row = check(ranks, case, STEPS)
    assert not row.failures(), line(row, STEPS)


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
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_twenty_steps(ranks, case, dtype):
    row = check(ranks, replace(case, dtype=dtype), cases.STEPS)
    assert not row.failures(), line(row, cases.STEPS)


def test_covering_array_covers():
    wanted = {
        ((a, x), (b, y)) for a, b in combinations(VALUES, 2) for x in VALUES[a] for y in VALUES[b]
    }
    assert wanted - set().union(*PAIRS.values()) == set(IMPOSSIBLE)
    for (option, given), (name, value) in IMPOSSIBLE:
        if option == "layout":  # shards, where there are to be none
            assert (name, value) == ("zero_stage", 0), given
            assert given.dp_shard > 1
        else:
            assert (option, name, value) == ("pipeline", "num_microbatches", 1)
            assert given[0] == "dualpipe_v"


def test_every_value_is_in_make_test():
    assert values_of(set().union(*(PAIRS[case] for case in FEW))) == {
        (name, value) for name in VALUES for value in VALUES[name]
    }
    assert set(VALUES["router"]) == set(kinds_in("model.router"))


def test_every_layout_with_every_ep():
    """`python -m tools.parity` has them, with every kind of router and zero_stage."""
    found = {case.layout for case in expert_layout_cases((1, 2, 4, 8))}
    for world in (1, 2, 4, 8):
        for sizes in MeshSizes.all_of(world):
            for ep in EP:
                if sizes.dp_shard * sizes.cp * sizes.tp % ep == 0:
                    assert replace(sizes, ep=ep) in found
    assert {(case.router, case.zero_stage) for case in expert_layout_cases((8,))} == {
        (router, zero_stage) for router in VALUES["router"] for zero_stage in (1, 2, 3)
    }


def test_steps_are_clipped_and_biases_change():
    """Else the steps would compare less than they seem to."""
    reference = expected(Case(MeshSizes(), router="sigmoid_bias", router_losses=True), STEPS)
    assert min(reference.norms) > OPTIMIZER.grad_clip
    for bias in reference.biases.values():
        assert len(bias.unique()) > 2
    assert min(reference.auxiliary) > 0
