"""A rehearsal of one rank of a job with experts."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.router import BaseRouter
from parallel.mesh import build_mesh
from proofs.ranks import Ranks
from settings.checks import validate
from settings.config import Config
from settings.load import load_config
from tests import ROOT
from tests.proofs.parity_tiers import thorough_but
from tools.plan.traffic import by_axis
from tools.rehearse.__main__ import main
from tools.rehearse.rank import alone, rehearse, rows
from tools.rehearse.real import rehearse_for_real
from tools.rehearse.tape import Tape
from training.build import build_stages
from training.step import TrainStep

LAPTOP = str(ROOT / "configs/laptop.yaml")
D, F, X, K = 64, 48, 8, 2
TINY = [f"model.dim={D}", "model.ffn_dim=96", "model.vocab_size=128", "train.seq_len=32",
        "train.global_batch_size=8", "train.micro_batch_size=2", "model.feed_forward=experts",
        f"model.num_experts={X}", f"model.experts_per_token={K}", f"model.expert_ffn_dim={F}",
        "model.num_shared_experts=1", "model.num_dense_layers=1", "model.router=sigmoid_bias",
        "model.router_bias_rate=0.001", "model.router_aux_weight=0.01", "parallel.pp=1",
        "parallel.fsdp_unit=block"]  # fmt: skip
LAYOUTS = {
    "both views of the mesh cut": ["parallel.tp=2", "parallel.ep=2"],
    "ep is everything": ["parallel.tp=1", "parallel.ep=4", "parallel.dp_shard=4"],
    "no ep": ["parallel.tp=2", "parallel.ep=1", "train.activation_checkpointing=full"],
    "pipeline": ["parallel.tp=1", "parallel.pp=2", "parallel.ep=2", "parallel.schedule=zb_h1",
                 "parallel.zero_stage=2"],
}  # fmt: skip


def tiny(*keys: str) -> Config:
    config = load_config(LAPTOP, [*TINY, *keys])
    validate(config, 4)
    return config


def in_turn(router: BaseRouter, logits: Tensor) -> Tensor:
    """Preferences by which the tokens choose the experts in turn, so that each has as many."""
    tokens, experts = (torch.arange(n).float() for n in logits.shape)
    return -((experts - tokens.unsqueeze(1) * router.k) % router.num_experts)


def collectives_of_a_run(keys: list[str]) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    config = tiny(*keys)
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu", has_experts=True)
    train = TrainStep(config, mesh, build_stages(config, mesh), bos_id=0)
    with patch("model.router.sigmoid_bias.Router.preferences", in_turn), Tape(mesh) as tape:
        train(0, *rows(config, mesh))
    return by_axis(tape.collectives)


@pytest.mark.parametrize("layout", thorough_but({"both views of the mesh cut"}, LAYOUTS))
def test_a_run_with_balanced_experts_communicates_as_rehearsed(ranks: Ranks, layout: str) -> None:
    keys = LAYOUTS[layout]
    found = ranks.run(collectives_of_a_run, 4, keys)
    for rank in (0, 3):
        assert alone(rehearse, tiny(*keys), 4, rank)["collectives"] == found[rank]
    if layout == "no ep":
        assert "ep" not in found[3]
        return
    config = tiny(*keys)
    sizes = config.parallel.mesh_sizes(4)
    layers = 3 if sizes.pp == 1 else 2  # with experts, on the last rank
    # the numbers of rows; rows, weights and results in forward, and their gradients in backward
    calls = 7 * layers * config.num_microbatches(sizes.dp)
    assert found[3]["ep"]["kinds"]["all_to_all"]["count"] == calls


def test_experts_are_sharded_over_their_own_axis() -> None:
    """With ep 2 of tp 2 · dp_shard 2 ranks, the experts of a layer are sharded over the other 2.
    Each rank keeps a quarter of them, and a half of what tp does not split."""
    config = tiny(*LAYOUTS["both views of the mesh cut"])
    report = alone(rehearse, config, 4, 0)
    experts, layers = 3 * D * F * X, 3
    gather = report["collectives"]["efsdp"]["kinds"]["all_gather"]
    assert gather == {"count": layers, "bytes": layers * experts // 2 * 4}
    attention = D * D * 2 + D * 32 * 2  # 2 of 4 heads of keys and values
    shared, dense, vocabulary = 3 * D * F, 3 * D * 96, 2 * 128 * D
    split = 4 * attention + layers * shared + dense + vocabulary  # over tp
    whole = layers * D * X + 9 * D  # routers and norms
    numbers = layers * experts / 4 + split / 4 + whole / 2
    assert report["memory"]["sharded weights"] == pytest.approx(4 * numbers, rel=0.03)
    assert report["memory"]["optimizer state"] == pytest.approx(8 * numbers, rel=0.03)


@pytest.mark.parametrize("mode", thorough_but({"full"}, ["none", "selective", "full"]))
def test_received_rows_are_activations(mode: str) -> None:
    """With imbalance 1.5 each layer keeps half as many rows more; in mode full only their order."""
    keys = LAYOUTS["ep is everything"]
    config = tiny(*keys, f"train.activation_checkpointing={mode}")
    balanced, more = (alone(rehearse, config, 4, 0, 1, factor)["memory"] for factor in (1.0, 1.5))
    r = 32 * 2 * K
    numbers = {"none": D + 3 * F + 1, "selective": D + 2 * F + 1, "full": 0}
    kept = 3 * r // 2 * (4 * numbers[mode] + 8)  # of three layers
    assert more["activations"] - balanced["activations"] == pytest.approx(kept, abs=3 * 7 * 512)


def test_for_real_the_rows_of_other_ranks_are_balanced_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny(*LAYOUTS["pipeline"])
    for imbalance in (1.0, 2.0):
        report = alone(rehearse_for_real, config, 4, 3, imbalance)
        assert set(report["action_seconds"]["1"]) == {"F", "I", "W"}


def test_an_impossible_imbalance_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*TINY, *LAYOUTS["ep is everything"], "--gpus", "4"]
    assert main([LAPTOP, *keys, "--imbalance", "4.5"]) == 2
    assert "--imbalance" in capsys.readouterr().err
    assert main([LAPTOP, *keys, "--imbalance", "4"]) == 0
    told = capsys.readouterr().out
    assert "over ep" in told
    assert "planned" not in told  # the plan is for balanced experts
