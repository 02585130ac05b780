"""Muon orthogonalises whole matrices, wherever their parts are."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from parallel.axes import MeshSizes
from parallel.whole_matrices import Hop, Matrix, interleave, rounds_of
from proofs.parity.cases import Case
from proofs.parity.run import check
from settings.load import load_config
from tests import ROOT, runs
from tests.health.faulty_runs import run_with_bad_steps
from tests.planted import name_of, planted
from tests.proofs.parity_tiers import agrees, is_found, thorough_but
from tools.rehearse.__main__ import beside_the_plan
from tools.rehearse.rank import alone, rehearse
from training.optimizers import muon
from training.optimizers.muon import COEFFICIENTS, Optimizer, orthogonalise

DENSE = Case(MeshSizes(dp_shard=2, tp=2), optimizer="muon")
# of few experts, each is cut; ep and many experts leave them whole
EXPERTS = Case(
    MeshSizes(dp_shard=4), optimizer="muon", router="softmax", num_experts=2, experts_per_token=1
)
QUICK = [DENSE, EXPERTS]
CASES = [
    *QUICK,
    replace(EXPERTS, layout=MeshSizes(dp_shard=4, ep=2), num_experts=8, num_shared_experts=1),
    replace(EXPERTS, layout=MeshSizes(dp_replicate=2, tp=2, ep=2), num_experts=8),
]


@pytest.mark.parametrize("case", thorough_but(QUICK, CASES), ids=str)
def test_the_steps_are_those_of_whole_matrices(ranks, case):
    """Those of a plain Newton–Schulz on one process, in float64, with clipping."""
    agrees(ranks, case, 5)


@planted(muon, "matrices_of")
def of_shards(matrices_of, weight):
    """Each rank orthogonalises its part, as if it were a matrix."""
    shape = tuple(weight.to_local().shape[-2:])
    return [Matrix(shape, ())] * len(matrices_of(weight))


@planted(Optimizer, "_orthogonalise")
def as_one(orthogonalised, self, each):
    """k and v, which have equal shapes, as one matrix; and so all experts'."""
    if not each:
        return []
    flat = [x if len(x) <= x.shape[1] else x.mT for x in each]
    (whole,) = orthogonalised(self, [torch.cat(flat)])
    found = whole.split([len(x) for x in flat])
    return [y if y.shape == x.shape else y.mT for x, y in zip(each, found, strict=True)]


@pytest.mark.parametrize(
    ("case", "mistake"),
    [(DENSE, of_shards), (replace(DENSE, layout=MeshSizes()), as_one), (EXPERTS, as_one)],
    ids=name_of,
)
def test_other_matrices_are_noticed(ranks, case, mistake):
    """Control."""
    is_found(check(ranks, case, 5, mistake), {"loss_steps", "norm_steps", "updated"})


MUON = {"name": "muon", "muon": {"qk_clip": 100.0}}


def test_another_layout_loads_the_same_bits(ranks, data, tmp_path):
    sections = {"train": {"steps": 2, "dtype": "float64"}, "checkpoint": {"interval": 2}}
    sections |= {"parallel": {"tp": 2, "dp_shard": 2}, "optimizer": MUON}
    config = runs.write_config(tmp_path, data, **sections)
    runs.run(ranks, 4, config)
    assert all(record["largest_logit"] > 0 for record in runs.metrics_of(tmp_path))
    path = runs.checkpoint_of(tmp_path, 2)
    stored = runs.stored_tensors(path)
    moments = {name.rpartition(".")[2] for name in stored if name.startswith("optimizer.")}
    assert {"momentum", "exp_avg", "exp_avg_sq"} <= moments
    overrides = ["parallel.tp=1", "parallel.pp=2", "parallel.dp_shard=-1"]
    state = ranks.run(runs.global_state, 4, [config, *overrides], str(path))[0]
    assert runs.same_tensors(state, stored)


def test_a_logit_is_kept_until_the_next_but_not_by_a_rollback(ranks, data, tmp_path):
    """Of steps 1 and 4, the second of which is made again: step 3 is not to show its logit."""
    every_third = {"name": "muon", "muon": {"qk_clip": 100.0, "qk_clip_interval": 3}}
    sections = {"train": {"steps": 4}, "optimizer": every_third, "model": {"num_layers": 2}}
    sections |= {"checkpoint": {"interval": 2}, "guard": {"max_bad_steps": 2}}
    config = runs.write_config(tmp_path, data, **sections)
    assert ranks.run(run_with_bad_steps, 1, [config], 0, {3, 4}) == [""]
    first, second, third, fourth = runs.metrics_of(tmp_path)
    assert first["largest_logit"] == second["largest_logit"] != fourth["largest_logit"]
    assert "largest_logit" not in third


@pytest.mark.parametrize(("name", "range_"), [("quintic", (0.68, 1.2)), ("varying", (0.97, 1.15))])
def test_singular_values_are_driven_towards_1(name, range_):
    """Those of a matrix with norm 1, by the product as it is computed."""
    values = torch.linspace(0.003, 1, 500, dtype=torch.float64)
    with patch.object(torch.linalg, "matrix_norm", lambda x, keepdim: torch.ones(1, 1, 1)):
        found = orthogonalise(values.diag().unsqueeze(0), COEFFICIENTS[name])[0].diagonal()
    assert range_[0] <= found.min() <= found.max() <= range_[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_fades_stays_finite(dtype):
    """That of an expert that no token chooses."""
    x = torch.randn(1, 64, 256).to(dtype)
    for size in (1e-10, 1e-24, 1e-38, 0.0):
        assert orthogonalise(x * size, COEFFICIENTS["quintic"]).isfinite().all(), size


def test_work_is_even():
    """Of the hidden matrices of 20 blocks of a 70B model over FSDP 16 × tp 4, and of 2 replicas:
    each has one owner, and none has much more to do than the mean."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)]
    shapes += [(28672, 8192), (28672, 8192), (8192, 28672)]
    for replicas in (1, 2):
        hops = (Hop("r", replicas, 0, None), Hop("fsdp", 16, 0, 0), Hop("tp", 4, 0, 0))
        matrices = [Matrix(shape, hops) for shape in shapes * 20]
        [rounds] = rounds_of(matrices)
        owners = {one.number: one.owner for each in rounds for one in each.owned}
        assert sorted(owners) == list(range(len(matrices)))
        work = dict.fromkeys(owners.values(), 0)
        for number, owner in owners.items():
            out, inner = matrices[number].shape
            work[owner] += min(out, inner) ** 2 * max(out, inner)
        largest = max(min(shape) ** 2 * max(shape) for shape in shapes)
        assert len(work) == 64 * replicas or max(work.values()) == largest
        assert max(work.values()) <= sum(work.values()) / (64 * replicas) + largest


def test_what_is_sent_travels_while_an_older_round_computes():
    """A round's sending begins before the round before it computes, and ends after that."""
    order = []

    def round_of(name):
        for stage in ("starts", "computes", "returns"):
            order.append((stage, name))
            yield

    interleave(map(round_of, "abc"))
    at = {each: place for place, each in enumerate(order)}
    for older, newer in ("ab", "bc"):
        assert at["starts", newer] < at["computes", older] < at["computes", newer]
        assert at["computes", newer] < at["returns", older]


@pytest.mark.parametrize(
    ("name", "rank", "keys"),
    [
        ("laptop", 5, ""),
        ("laptop_moe", 5, ""),
        ("laptop", 5, "parallel.offload=host"),
        # the replicas do not own equally many of three layers' matrices
        ("laptop", 7, "model.num_layers=3 parallel.pp=1 parallel.tp=1 parallel.dp_shard=4 "
                      "parallel.dp_replicate=2 train.micro_batch_size=8"),
    ],
)  # fmt: skip
def test_the_planned_messages_are_those_sent(name, rank, keys):
    overrides = ["optimizer.name=muon", "optimizer.muon.qk_clip=100", *keys.split()]
    config = load_config(str(ROOT / f"configs/{name}.yaml"), overrides)
    report = alone(rehearse, config, 8, rank)
    kinds = [kind for axis in report["collectives"].values() for kind in axis["kinds"]]
    assert kinds.count("all_to_all") >= 2, "over dp_shard and another axis, or efsdp"
    planned = beside_the_plan(config, report)
    assert planned["same_collectives"]
    assert abs(planned["error"]) < 0.002, "of a tiny model"
