"""Configurations with experts that cannot run, or would not do what they say, are refused before
anything starts: the message names key, value and remedy."""

from dataclasses import fields
from pathlib import Path

import pytest

from errors import UserError
from model.config import KEYS_OF_EXPERTS, ModelConfig
from proofs.ranks import Ranks
from settings.checks import validate
from settings.load import dump_config, load_config
from tests import ROOT
from tests.runs import messages, train_run, write_config

LAPTOP = str(ROOT / "configs/laptop.yaml")
ONE_AXIS = ("parallel.pp=1", "parallel.tp=1", "parallel.dp_shard=-1", "train.micro_batch_size=1")
BASE = (*ONE_AXIS, "model.feed_forward=experts", "model.num_experts=8",
        "model.experts_per_token=2")  # fmt: skip


def refusal(world: int, overrides: tuple[str, ...]) -> str:
    with pytest.raises(UserError) as error:
        validate(load_config(LAPTOP, list(overrides)), world)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "begins", "remedy"),
    [
        ("model.num_experts=0", "model.num_experts = 0: model.feed_forward has experts",
         "for example 8"),
        ("model.feed_forward=swiglu", "model.num_experts = 8: no layer has experts",
         "model.feed_forward=experts"),
        ("model.feed_forward=expert", "model.feed_forward = 'expert': there is no such kind",
         "['experts', 'swiglu']"),
        ("model.num_experts=-1", "model.num_experts = -1", "greater than or equal to 0"),
        ("model.experts_per_token=9",
         "model.experts_per_token = 9: a token would choose more than all model.num_experts=8",
         "a smaller number"),
        ("model.experts_per_token=0", "model.experts_per_token = 0", "greater than or equal to 1"),
        ("model.experts_per_token=1",
         "model.experts_per_token = 1: router softmax_renormalised divides weights by their sum",
         "model.router=softmax"),
        ("model.expert_ffn_dim=0", "model.expert_ffn_dim = 0", "greater than or equal to 1"),
        ("model.num_dense_layers=4",
         "model.num_dense_layers = 4: leaves none of the model.num_layers=4 layers for experts",
         "leave at least one"),
        ("model.num_dense_layers=-1", "model.num_dense_layers = -1", "greater than or equal to 0"),
        ("model.router=sigmoid", "model.router = 'sigmoid': there is no such router",
         "'sigmoid_bias'"),
        ("model.router_bias_rate=0.1",
         "model.router_bias_rate = 0.1: router softmax_renormalised has no bias",
         "model.router=sigmoid_bias"),
        ("model.router_bias_rate=-0.1", "model.router_bias_rate = -0.1", "for example 0.001"),
        ("model.router_aux_weight=-0.1", "model.router_aux_weight = -0.1", "for example 0.01"),
        ("model.router_z_weight=.nan", "model.router_z_weight = nan", "for example 0.001"),
        ("model.router_scale=0", "model.router_scale = 0", "for example 2.5"),
        ("train.compile=true", "train.compile = True: how many rows an expert gets is known",
         "train.compile=false"),
        ("parallel.ep=0", "parallel.ep = 0", "greater than or equal to 1"),
        ("parallel.ep=3", "parallel.ep = 3: must divide dp_shard · cp · tp = 8 · 1 · 1",
         "choose one of [1, 2, 4, 8]"),
    ],
)  # fmt: skip
def test_wrong_value(override: str, begins: str, remedy: str) -> None:
    message = refusal(8, (*BASE, override))
    assert message.startswith(begins)
    assert remedy in message


@pytest.mark.parametrize(
    ("world", "overrides", "begins", "remedy"),
    [
        (2, [*BASE, "model.num_layers=1", "model.feed_forward=[swiglu, experts]"],
         "model.feed_forward = ('swiglu', 'experts'): leaves none of", "leave at least one"),
        (4, [*BASE, "model.num_experts=6", "parallel.ep=4"],
         "parallel.ep = 4: does not divide model.num_experts=6", "choose one of [1, 2, 3, 6]"),
        (2, [*ONE_AXIS, "parallel.ep=2"], "parallel.ep = 2: the model has no experts",
         "parallel.ep=1, or model.num_experts"),
        (4, [*BASE, "parallel.tp=2", "parallel.sequence_parallel=false"],
         "parallel.sequence_parallel = False: tp ranks must have different tokens",
         "set it to true, or parallel.tp=1"),
        (2, [*BASE, "model.experts_per_token=1", "model.router=sigmoid_bias"],
         "model.experts_per_token = 1: router sigmoid_bias divides", "2 experts or more"),
        # 8 ranks shard 4 experts: each is cut in two, along F or along D
        (8, [*BASE, "model.num_experts=4", "model.expert_ffn_dim=100"],
         "model.expert_ffn_dim = 100: must be a multiple of 8", "give 96, or another parallel.ep"),
        (8, [*BASE, "model.num_experts=4", "model.dim=132", "model.num_heads=2"],
         "model.dim = 132: must be a multiple of 8", "give 128"),
        (2, [*BASE, "parallel.tp=2", "model.num_shared_experts=1", "model.expert_ffn_dim=33"],
         "parallel.tp = 2: does not divide model.num_shared_experts · model.expert_ffn_dim=33",
         "choose one of [1, 3, 11, 33]"),
        # of replicas, each has all experts
        (2, [*BASE, "parallel.zero_stage=0", "parallel.dp_shard=1", "parallel.dp_replicate=2",
             "parallel.ep=2"],
         "parallel.ep = 2: must divide dp_shard · cp · tp = 1 · 1 · 1", "choose one of [1]"),
    ],
)  # fmt: skip
def test_wrong_combination(world: int, overrides: list[str], begins: str, remedy: str) -> None:
    message = refusal(world, tuple(overrides))
    assert message.startswith(begins)
    assert remedy in message


def test_the_remedy_for_a_sequence_does_not_contradict_experts() -> None:
    """Without experts, one could also turn sequence parallelism off."""
    cut = ("parallel.tp=2", "train.seq_len=31")
    assert refusal(2, (*ONE_AXIS, *cut)).endswith("or parallel.sequence_parallel=false")
    assert refusal(2, (*BASE, *cut)).endswith("remedy: use a multiple of 2")


VALUES = {"experts_per_token": 2, "expert_ffn_dim": 64, "num_shared_experts": 1,
          "num_dense_layers": 1, "router": "softmax", "router_scale": 2.5,
          "router_aux_weight": 0.01, "router_z_weight": 0.01, "router_bias_rate": 0.01}  # fmt: skip


@pytest.mark.parametrize("key", sorted(KEYS_OF_EXPERTS))
def test_a_model_without_experts_takes_no_keys_of_them(key: str) -> None:
    message = refusal(1, (*ONE_AXIS, f"model.{key}={VALUES[key]}"))
    assert message.startswith(f"model.{key} = ")
    assert "the model has no experts" in message
    assert "leave it out, or set model.num_experts" in message


def test_every_key_of_experts_is_known() -> None:
    names = {each.name for each in fields(ModelConfig)}
    others = {"num_experts", "feed_forward"}
    assert {n for n in names if "expert" in n or "router" in n} - others <= KEYS_OF_EXPERTS <= names


def refused_weights(cases: dict[str, list[str]], dense: str) -> dict[str, str]:
    """Train a dense model; then, why other models may not start from the weights of a run."""
    assert train_run([dense]) == ""
    return messages(cases)


@pytest.fixture(scope="module")
def refused(
    ranks: Ranks, data: Path, saved_experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dense")
    dense = write_config(folder, data, train={"steps": 1}, checkpoint={"interval": 1})
    configs = {"experts": [str(saved_experts / "config.yaml"), "parallel.pp=1", "parallel.ep=1"],
               "swiglu": [dense]}  # fmt: skip
    cases = {
        kind: [*configs[kind], f"checkpoint.load_weights_only={other}/run", f"run.dir={folder}/new"]
        for kind, other in {"experts": folder, "swiglu": saved_experts}.items()
    }
    return ranks.run(refused_weights, 1, cases, dense)[0]


@pytest.mark.parametrize("kind", ["experts", "swiglu"])
def test_weights_of_a_dense_model_do_not_start_experts(refused: dict[str, str], kind: str) -> None:
    """Nor those of experts a dense model."""
    assert refused[kind].startswith(f"model.feed_forward = '{kind}'")
    assert "has model.feed_forward=" in refused[kind]


def test_a_number_of_experts_is_enough() -> None:
    """The configuration of a run then states the kind of its layers."""
    for keys, kind in (((), "swiglu"), (("model.num_experts=4",), "experts")):
        config = load_config(LAPTOP, ["model.experts_per_token=2"] * len(keys) + list(keys))
        assert config.model.feed_forward == kind
        assert f"feed_forward: {kind}" in dump_config(config)
