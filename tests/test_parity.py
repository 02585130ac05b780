"""Every split of the model computes what the unsharded model computes: the quick part of `python -m tools.parity`.

The whole matrix, all layouts of 1 to 8 ranks, is `make test-slow`. test_controls.py shows that this comparison can fail.
"""

from itertools import combinations
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist

from model.kernels.backend import why_not_triton
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.pipeline.schedules import SCHEDULES
from tools.parity import __main__ as parity
from tools.parity.cases import (
    OPTIMIZER,
    STEPS,
    Case,
    base_layouts,
    covering_cases,
    kernel_cases,
    option_values,
    pairs_of,
    schedule_cases,
)
from tools.parity.row import line
from tools.parity.run import assemble, check, expected, parts, run_on_ranks
from training.build import build_stages
from training.step import TrainStep

QUICK, IMPOSSIBLE = parity.plan(parity.WORLDS, quick=True)


@pytest.mark.parametrize("case", [case for case, _ in QUICK], ids=str)
def test_every_pair_of_options(ranks, case):
    row = check(ranks, case)
    assert not row.failures(), line(row, 0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 2)])
def test_twenty_steps(ranks, layout, dtype):
    """Loss and norm stay together over 20 optimizer steps with warmup, decay and clipping; copies stay bitwise the same."""
    row = check(ranks, Case(layout, dtype=dtype), STEPS)
    assert not row.failures(), line(row, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", parity.WORLDS)
def test_whole_matrix(world, tmp_path):
    assert parity.main(["--world", str(world), "--json", str(tmp_path / "parity.json")]) == 0


def test_clipping_is_active_in_some_of_the_steps():
    for stages in (1, 2, 4, 8):
        norms = expected(Case((stages, 1, 1, 1)), STEPS).norms
        assert min(norms) < OPTIMIZER.grad_clip < max(norms)


def test_covering_array_covers():
    """Every pair of values meets in a case, but for the pairs that contradict each other."""
    met = {pair for case, _ in QUICK for pair in pairs_of(case)}
    layouts = {case.layout for case, _ in QUICK}
    values = {"layout": layouts, **option_values()}
    wanted = {((a, x), (b, y)) for a, b in combinations(values, 2) for x in values[a] for y in values[b]}
    assert wanted - met == set(IMPOSSIBLE)
    for (option, given), (name, value) in IMPOSSIBLE:
        contradiction = (option, name) == ("pipeline", "num_microbatches") and given[0] == "dualpipe_v" and value == 1
        if option == "layout":
            _, dp_replicate, dp_shard, _ = given
            contradiction = (name == "zero_stage" and value == 0 and dp_shard > 1) or (
                name == "num_microbatches" and dp_replicate * dp_shard * value > 32
            )
        assert contradiction, (option, given, name, value)


def test_schedules_at_every_depth():
    """pp 2, 4 and 8, one, two and four stages per rank, fewer micro-batches than ranks and four times as many."""
    cases = schedule_cases(parity.WORLDS)
    assert {case.schedule for case in cases} == set(SCHEDULES)
    for schedule in SCHEDULES:
        mine = [case for case in cases if case.schedule == schedule]
        assert {case.layout[0] for case in mine} == {2, 4, 8}
        assert {case.num_microbatches / case.layout[0] for case in mine} >= {2, 4}
        if schedule != "dualpipe_v":
            assert any(case.num_microbatches < case.layout[0] for case in mine)
    for schedule in ("interleaved_1f1b", "breadth_first"):
        assert {case.stages_per_rank for case in cases if case.schedule == schedule} == {1, 2, 4}


# One row of each schedule and number of stages per rank, on three axes; the others are in the whole matrix.
DEEP = {(c.schedule, c.stages_per_rank): c for c in schedule_cases((8,)) if c.layout in ((2, 1, 2, 2), (4, 1, 1, 2))}


@pytest.mark.parametrize("case", DEEP.values(), ids=str)
def test_every_schedule(ranks, case):
    row = check(ranks, case)
    assert not row.failures(), line(row, 0)


@pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")
@pytest.mark.parametrize("case", kernel_cases(parity.WORLDS), ids=str)
def test_triton_kernels(ranks, case):
    row = check(ranks, case)
    assert not row.failures(), line(row, 0)


def test_heads_narrower_than_dp_shard(ranks):
    """Their norms' two numbers are cut over four ranks: two of them, and their tp groups, have none."""
    case = Case((1, 1, 4, 2), attention_dim=16, qk_norm=True, sequence_parallel=False)
    row = check(ranks, case, steps=3)
    assert not row.failures(), line(row, 3)


def test_covering_array_is_the_same_every_time():
    assert covering_cases([(1, 1, 1, 2), (2, 1, 1, 1)]) == covering_cases([(1, 1, 1, 2), (2, 1, 1, 1)])


def test_every_option_of_the_code_is_combined():
    options = option_values()
    assert {schedule for schedule, _ in options["pipeline"]} == set(SCHEDULES)
    assert set(options["zero_stage"]) == set(get_args(get_type_hints(ParallelConfig)["zero_stage"]))


def test_base_layouts_are_all_layouts():
    # The number of ordered ways to write 2^k as a product of four factors is C(k + 3, 3).
    assert [len(base_layouts(world)) for world in parity.WORLDS] == [1, 4, 10, 20]


def full_tensors(case):
    """Gradients gathered by DTensor itself, and this rank's parts of them."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_shape(dist.get_world_size()), "cpu")
    stages = build_stages(config, mesh)
    step = TrainStep(config, mesh, stages)
    tokens = torch.arange(32 * 16).view(32, 16) * 7 % case.vocab_size
    local = tokens.chunk(mesh.dp_size)[mesh.dp_rank]
    step.forward_backward(local, local)
    gradients = {name: p.grad for stage in stages.values() for name, p in stage.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}, parts(gradients.items())


def test_full_tensor_gathers_uneven_shards_too(ranks):
    """`DTensor.full_tensor` is what tools use; 251 rows over tp 2 and then dp_shard 4 leave uneven parts everywhere."""
    results = ranks.run(full_tensors, 8, Case((1, 1, 4, 2)))
    gathered = results[0][0]
    whole, spread = assemble([mine for _, mine in results], {name: tensor.shape for name, tensor in gathered.items()})
    assert spread == 0
    assert whole.keys() == gathered.keys()
    for name, tensor in gathered.items():
        assert torch.equal(tensor, whole[name]), name


def test_missing_parts_are_found(ranks):
    case = Case((1, 1, 1, 2))
    runs = ranks.run(run_on_ranks, 2, case, 0)
    whole, _ = assemble([runs[0].gradients], {name: g.shape for name, g in expected(case, 0).gradients.items()})
    assert whole["embedding.weight"].isnan().any()
