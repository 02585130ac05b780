"""A rehearsal runs the training code of one rank of a large job on a fake GPU, and counts its bytes
and collectives."""

import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from model.router import BaseRouter
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from parallel.pipeline.actions import BACKWARD, FORWARD, Action
from proofs.ranks import Ranks
from settings.checks import validate
from settings.config import Config
from settings.load import load_config
from tests.proofs.parity_tiers import thorough_but
from tools.plan.layout import world_of
from tools.plan.traffic import by_axis
from tools.rehearse.__main__ import beside_the_plan, main
from tools.rehearse.fake_gpu import fake_gpu, one_rank
from tools.rehearse.rank import alone, rehearse, rows
from tools.rehearse.tape import Tape, measuring
from training.build import build_stages
from training.step import TrainStep

LLAMA_70B = "configs/llama3_70b.yaml"
TINY = ["model.dim=64", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=96",
        "model.vocab_size=128", "model.num_layers=4", "train.seq_len=32",
        "train.global_batch_size=8", "parallel.tp=2", "parallel.pp=2",
        "parallel.dp_shard=2", "parallel.schedule=1f1b", "parallel.stages_per_rank=1",
        "parallel.tp_pieces=1", "train.activation_checkpointing=none"]  # fmt: skip


STAGES = [("llama3_405b", "first"), ("llama3_405b", "last"), ("llama3_405b", "middle"),
          ("llama3_70b", "first"), ("llama3_70b", "last")]  # fmt: skip


@pytest.mark.parametrize(("name", "stage"), thorough_but(STAGES[:2], STAGES))
def test_every_kind_of_stage_goes_forward_and_backward(name: str, stage: str) -> None:
    """Every kind of stage runs forward and backward with the planned memory and collectives; with
    few micro-batches per pipeline (70B interleaves, which needs as many as ranks), and full
    recomputation, which runs the most code."""
    path, sequences = f"configs/{name}.yaml", 64 if name == "llama3_70b" else 8
    keys = [f"train.global_batch_size={sequences}", "train.activation_checkpointing=full"]
    config = load_config(path, keys)
    world, pp = world_of(path, config, None), config.parallel.pp
    pp_rank = {"first": 0, "middle": pp // 2, "last": pp - 1}[stage]
    report = alone(rehearse, config, world, pp_rank * (world // pp))
    assert report["stages"] == list(range(pp_rank, len(config.split_layers()), pp))
    assert report["host_bytes"] < 2 << 30
    planned = beside_the_plan(config, report)
    assert planned["same_collectives"]
    assert abs(planned["error"]) < 0.001


def test_a_second_step_needs_no_more_and_talks_as_much() -> None:
    config = load_config(LLAMA_70B, TINY)
    once, twice = alone(rehearse, config, 8, 0), alone(rehearse, config, 8, 0, 2)
    assert once["collectives"] == twice["collectives"]
    assert twice["peak_memory_bytes"] == pytest.approx(once["peak_memory_bytes"], rel=0.01)


def test_on_a_gpu_no_mask_is_in_memory() -> None:
    """Documents and windows on a GPU need no mask of S² elements, because flash attention takes
    them as arguments."""
    keys = ["data.document_mask=true", "model.attention=[sliding_window,causal]",
            "model.sliding_window.window=100"]  # fmt: skip
    long = [*TINY, "train.seq_len=512", "train.global_batch_size=4"]
    peaks = [
        alone(rehearse, load_config(LLAMA_70B, each), 8, 0)["peak_memory_bytes"]
        for each in (long, [*long, *keys])
    ]
    assert peaks[1] - peaks[0] < 512**2


def tape_of_tensors() -> list[object]:
    """The bytes that a tape counts for a few tensors with known lifetimes."""
    with (
        one_rank(MeshSizes(), 0, "meta") as mesh,
        fake_gpu() as device,
        measuring(mesh, device) as tape,
    ):
        with tape.record(Action(FORWARD, 0, 0)):
            kept = torch.empty(1024, device="meta")
            view = kept[100:]  # of the same storage
            torch.empty(1, device="meta")  # freed at once
            before = tape.peak
            kept.untyped_storage().resize_(0)
            other = torch.empty(1500, device="meta")
            after = tape.peak
        with tape.record(Action(BACKWARD, 0, 0)):
            torch.empty(2048, device="meta")
        del view, other
    report = tape.report()
    return [before, after, report["peak_memory_bytes"], report["peak_in"]]


def test_the_tape_knows_views_rounding_and_resized_storages() -> None:
    assert alone(tape_of_tensors) == [4096 + 512, 6144, 6144 + 8192, "B0.0"]


def test_a_killed_process_is_said_so() -> None:
    """It was waited for, forever."""
    with pytest.raises(UserError, match="was killed"):
        alone(os._exit, 9)


def test_what_cannot_be_rehearsed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        ("parallel.tp=1 train.compile=true", "train.compile = "),  # with tp no run would start
        ("--rank=256", "--rank = "),
        ("--json=nowhere/at/all.json", "--json = "),
        ("--races parallel.offload=host", "parallel.offload = 'host'"),
    ):
        assert main([LLAMA_70B, *given.split()]) == 2
        assert said in capsys.readouterr().err


# --- experts ---

EXPERTS = ["model.dim=64", "model.ffn_dim=96", "model.vocab_size=128", "train.seq_len=32",
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
    config = load_config("configs/laptop.yaml", [*EXPERTS, *keys])
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
