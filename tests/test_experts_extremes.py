"""Experts with loads as uneven as they can be, against the reference: all tokens at one expert, an
expert without tokens, a rank that receives no rows, and experts that FSDP must cut."""

import pytest

from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from tests.parity_tiers import thorough_but
from tools.parity.cases import BATCH, SEQ_LEN
from tools.parity.expert_cases import STEPS, extreme_cases
from tools.parity.row import line
from tools.parity.run import check, expected
from training.build import build_stages

CASES = extreme_cases((1, 2, 4, 8))
BIASED = [case for case in CASES if case.first_bias]
FEW = [case for case in CASES if case not in BIASED]
QUICK = [
    *(case for case in BIASED if case.layout == MeshSizes(dp_shard=2, tp=2, ep=4)
      and case.schedule == "1f1b"),
    *(case for case in BIASED if case.layout == MeshSizes(tp=2, ep=2) and case.schedule != "1f1b"
      and case.experts_per_token == 1),
    FEW[2], FEW[4], FEW[7],
]  # fmt: skip


@pytest.mark.parametrize("case", thorough_but(QUICK, CASES), ids=str)
def test_extremes(ranks, case):
    row = check(ranks, case, STEPS)
    assert not row.failures(), line(row, STEPS)


def loads(case):
    """How many tokens chose each expert in the first step, by layer."""
    choices = expected(case, 0).choices
    return [each.flatten().bincount(minlength=case.num_experts).tolist()
            for each in choices.values()]  # fmt: skip


def test_the_loads_are_as_extreme_as_they_should_be():
    tokens = BATCH * SEQ_LEN
    for case in BIASED:
        for counts in loads(case):
            assert sum(counts) == tokens * case.experts_per_token
            favoured, avoided = max(case.first_bias), min(case.first_bias)
            for bias, count in zip(case.first_bias, counts, strict=True):
                if bias == favoured > 0:
                    assert count == tokens
                elif bias == avoided < 0 or case.experts_per_token == 1:
                    assert count == 0
    # two of eight experts, those of the second of four ranks
    assert any(counts[2:4] == [0, 0] for case in BIASED for counts in loads(case))


def local_experts(case):
    """The shape of this rank's shard of each expert weight of layer 0, by name."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(case.world), "cpu", has_experts=True)
    (stage,) = build_stages(config, mesh).values()
    experts = dict(stage.named_parameters())
    return {
        name: tuple(experts[f"blocks.0.feed_forward.experts.{name}.weight"].to_local().shape)
        for name in ("gate", "down")
    }


def test_experts_are_cut_where_a_rank_has_fewer_than_shards(ranks):
    """4 experts over ep 2 × efsdp 4: of both on a rank, a fourth. 6 over ep 2 × efsdp 2: three,
    cut in two and one."""
    cut = ranks.run(local_experts, 8, FEW[0])
    assert cut == [{"gate": (2, 16 // 4, 32), "down": (2, 32 // 4, 16)}] * 8
    uneven = ranks.run(local_experts, 4, FEW[4])
    assert [found["gate"] for found in uneven] == [(2, 16, 32)] * 2 + [(1, 16, 32)] * 2
