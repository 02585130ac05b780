"""Every layout of the model computes what the unsharded model computes: the quick part of `python
-m proofs.parity`.

`make test` runs a few of the quick cases, in which every value of every option occurs. `make
test-rest` runs the other quick cases; together they cover every pair of values. `make test-slow`
runs the whole matrix, all layouts of 1 to 8 ranks. Mixtures of experts are in test_experts.py.
test_controls.py shows that this comparison can fail.
"""

import math

import pytest

from model.kernels.backend import why_not_triton
from parallel.axes import AXES, MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from proofs.parity import __main__ as parity
from proofs.parity.cases import (
    BATCH,
    OPTIMIZER,
    STEPS,
    Case,
    covering_cases,
    option_values,
    wanted_pairs,
)
from proofs.parity.chosen import kernel_cases, schedule_cases
from proofs.parity.run import assemble, expected, run_on_ranks
from tests.proofs.parity_tiers import (
    DEEP,
    DEEPER,
    SHARED,
    agrees,
    dense_covering,
    effective,
    expert_covering,
    thorough_but,
    values_of,
)

QUICK = dense_covering()
COVERINGS = {"dense": QUICK, "experts": expert_covering()}


@pytest.mark.parametrize("case", thorough_but(QUICK.few, QUICK.pairs), ids=str)
def test_every_pair_of_options(ranks, case):
    agrees(ranks, case)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (MeshSizes(), "float64"),
        pytest.param(MeshSizes(), "float32", marks=pytest.mark.thorough),
        (MeshSizes(pp=2, tp=2), "float32"),
        pytest.param(MeshSizes(pp=2, dp_shard=2, tp=2), "float64", marks=pytest.mark.thorough),
        pytest.param(MeshSizes(pp=2, tp=2), "float64", marks=pytest.mark.thorough),
        pytest.param(MeshSizes(pp=2, dp_shard=2, tp=2), "float32", marks=pytest.mark.thorough),
    ],
)
def test_twenty_steps(ranks, layout, dtype):
    """Losses and gradient norms agree with the unsharded model's over 20 optimizer steps with
    warmup, decay and clipping, and replicated weights stay bitwise equal."""
    agrees(ranks, Case(layout, dtype=dtype, num_microbatches=2), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", parity.WORLDS)
def test_whole_matrix(world, tmp_path):
    assert parity.main(["--world", str(world), "--json", str(tmp_path / "parity.json")]) == 0


@pytest.mark.parametrize(
    "stages", [1, 2, *(pytest.param(stages, marks=pytest.mark.thorough) for stages in (4, 8))]
)
def test_clipping_is_active_in_some_of_the_steps(stages):
    norms = expected(Case(MeshSizes(pp=stages)), STEPS).norms
    assert min(norms) < OPTIMIZER.grad_clip < max(norms)


@pytest.mark.parametrize("covering", COVERINGS.values(), ids=COVERINGS)
def test_covering_array_covers(covering):
    """Every pair of option values occurs in a case, except for pairs that contradict each other,
    and for options of an axis that a layout of several ranks does not have."""
    wanted = set(wanted_pairs(covering.values))
    assert (("layout", MeshSizes(tp=8)), ("zero_stage", 2)) not in wanted
    assert (("layout", MeshSizes()), ("zero_stage", 2)) in wanted or covering is not QUICK
    assert wanted - set().union(*covering.pairs.values()) == set(covering.impossible)
    for (option, given), (name, value) in covering.impossible:
        if (option, name) == ("layout", "zero_stage"):  # shards, where there are to be none
            assert (value, given.dp_shard > 1) == (0, True), given
        elif (option, name) == ("layout", "num_microbatches"):  # too few sequences
            assert given.dp * value > BATCH
        else:
            assert (option, given[0], name, value) == (
                *("pipeline", "dualpipe_v"),
                *("num_microbatches", 1),
            )


@pytest.mark.parametrize("covering", COVERINGS.values(), ids=COVERINGS)
def test_every_value_is_in_make_test(covering):
    found = [effective(case, values_of(covering.pairs[case])) for case in covering.few]
    wanted = {(name, value) for name in covering.values for value in covering.values[name]}
    assert set().union(*found) == wanted | ({SHARED} if covering is QUICK else set())


def test_schedules_at_every_depth():
    """Every schedule is checked with pp 2, 4 and 8, with one, two and four stages per rank where it
    allows a choice, and with fewer and up to four times as many micro-batches as ranks."""
    cases = schedule_cases(parity.WORLDS)
    assert {case.schedule for case in cases} == set(SCHEDULES)
    for schedule in SCHEDULES:
        mine = [case for case in cases if case.schedule == schedule]
        assert {case.layout.pp for case in mine} == {2, 4, 8}
        assert {case.num_microbatches / case.layout.pp for case in mine} >= {2, 4}
        if schedule != "dualpipe_v":
            assert any(case.num_microbatches < case.layout.pp for case in mine)
    for schedule in ("interleaved_1f1b", "breadth_first"):
        assert {case.stages_per_rank for case in cases if case.schedule == schedule} == {1, 2, 4}


def test_every_schedule_is_in_make_test():
    assert DEEP.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("case", thorough_but(DEEP.values(), DEEPER), ids=str)
def test_every_schedule(ranks, case):
    agrees(ranks, case)


# A cheap selection of the kernel cases: each kernel runs forward and backward, with and without tp.
KERNELS_ONCE = [
    case
    for case in kernel_cases()
    if not (case.layout.tp > 1 and case.sequence_parallel)
    and (case.layout.dp_replicate, case.world) not in ((1, 1), (2, 2))
]


@pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
@pytest.mark.parametrize("case", thorough_but(KERNELS_ONCE, kernel_cases()), ids=str)
def test_triton_kernels(ranks, case):
    agrees(ranks, case)


def test_heads_narrower_than_dp_shard(ranks):
    """With heads two elements wide, q's and k's norm weights are sharded over four ranks: two of
    these hold none, and the result is still right."""
    agrees(ranks, Case(MeshSizes(dp_shard=4), attention_dim=16, qk_norm=True), steps=2)


def test_covering_array_is_the_same_every_time():
    names = ("zero_stage", "pipeline", "layers", "num_microbatches")
    few = {"layout": [MeshSizes(tp=2), MeshSizes(pp=2)]} | {n: QUICK.values[n] for n in names}
    assert covering_cases(few) == covering_cases(few)


def test_every_schedule_of_the_code_is_combined():
    assert {schedule for schedule, _ in option_values()["pipeline"]} == set(SCHEDULES)


def test_all_layouts_of_a_world():
    # 2^k has C(k + n − 1, n − 1) ordered factorizations into n factors, one per axis.
    n = len(AXES)
    assert [len(MeshSizes.all_of(2**k)) for k in range(4)] == [
        math.comb(k + n - 1, n - 1) for k in range(4)
    ]


def test_missing_parts_are_found(ranks):
    # Control: if one rank's parts are missing, the assembled tensor has NaN in their place.
    case = Case(MeshSizes(tp=2))
    runs = ranks.run(run_on_ranks, 2, case, 0)
    whole, _ = assemble(
        [runs[0].gradients], {name: g.shape for name, g in expected(case, 0).gradients.items()}
    )
    assert whole["embedding.weight"].isnan().any()
