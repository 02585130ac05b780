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
from tools.rehearse.rank import alone, rehearse, rows
from tools.rehearse.tape import Tape
from training.build import build_stages
from training.step import TrainStep

LAPTOP = str(ROOT / "configs/laptop.yaml")
TINY = ["model.dim=64", "model.ffn_dim=96", "model.vocab_size=128", "train.seq_len=32",
        "train.global_batch_size=8", "train.micro_batch_size=2", "parallel.fsdp_unit=block",
        "model.experts.count=8", "model.experts.per_token=2", "model.experts.ffn_dim=48",
        "model.experts.num_shared=1", "model.experts.num_dense_layers=1", "parallel.pp=1",
        "model.experts.router_aux_weight=0.01", "model.router=sigmoid_bias",
        "model.sigmoid_bias.bias_rate=0.001"]  # fmt: skip
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
    assert ("ep" in found[3]) == (layout != "no ep")
