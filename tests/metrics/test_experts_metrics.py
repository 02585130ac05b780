"""Models with experts in a run: the figures of their load, and where they are written; and what a
checkpoint holds of them."""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from declare import keys_of
from model.config import ModelConfig
from proofs.ranks import Ranks
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.verify import parse_trainer
from runtime.metrics.expert_load import LoadStatistics, figures_of
from runtime.metrics.metrics import Metrics
from settings.load import load_config
from tests import runs
from tools import verify
from tools.report.charts import charts
from tools.report.run import read_run
from training.balance import Loads


def test_the_figures_are_those_of_the_definition() -> None:
    even, one_pair, uneven = [6] * 4, [12, 12, 0, 0], [12, 6, 6, 0]
    entropy, largest, dead = figures_of(torch.tensor([even, one_pair, uneven, [0] * 4]))
    expected = [1, math.log(2) / math.log(4), 1.5 * math.log(2) / math.log(4), 0]
    assert entropy.tolist() == pytest.approx(expected)
    assert largest.tolist() == [1, 2, 2, 0]
    assert dead.tolist() == [0, 2, 1, 4]


def test_steps_since_the_last_logged_one_are_added() -> None:
    """Of a model whose first layer is dense."""
    model = ModelConfig(
        dim=8, num_layers=3, num_heads=2, num_kv_heads=2, ffn_dim=8, vocab_size=16,
        experts={"count": 4, "per_token": 2, "num_dense_layers": 1},
    )  # fmt: skip
    load = LoadStatistics(model, "cpu")
    for row in ([9, 0, 0, 0], [0, 3, 3, 3]):
        load.add(Loads(torch.tensor([[0] * 4, row, [3] * 4]), torch.zeros(2)))
    found = load.record(load.take().tolist())
    by_layer = found["experts_by_layer"]
    assert by_layer["layer"] == [1, 2]
    assert by_layer["dead"] == [0, 0], "over both steps"
    assert by_layer["largest_share"] == [2, 1]
    assert (found["largest_expert_share"], found["dead_experts"]) == (2, 0)
    assert load.record(load.take().tolist())["dead_experts"] == 8, "of a new interval"


def train_and_count_waits(arguments: list[str]) -> int:
    """Train; return how often the measurements of a step were read."""
    with patch.object(Metrics, "_read", autospec=True, side_effect=Metrics._read) as read:
        assert runs.train_run(arguments) == ""
    return read.call_count


def test_what_a_step_measured_is_read_when_it_is_logged(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    train = {"steps": 3, "micro_batch_size": 8}
    config = runs.write_config(tmp_path, data, model=runs.EXPERTS, train=train)
    assert ranks.run(train_and_count_waits, 1, [config, "run.log_interval=2"]) == [2]
    assert [line["step"] for line in runs.metrics_of(tmp_path)] == [2, 3]


def test_a_run_logs_its_load_and_the_losses_of_its_routers(saved_experts: Path) -> None:
    """And the report shows them."""
    for line in runs.metrics_of(saved_experts):
        by_layer = line["experts_by_layer"]
        assert by_layer["layer"] == [1, 2, 3]
        assert all(1 <= share <= 2 for share in by_layer["largest_share"]), "k 2 of X 4"
        assert all(0.5 <= entropy <= 1 for entropy in by_layer["entropy"])
        assert line["lowest_expert_entropy"] == pytest.approx(min(by_layer["entropy"]), abs=1e-4)
        assert line["largest_expert_share"] == pytest.approx(max(by_layer["largest_share"]), 1e-3)
        assert line["dead_experts"] == sum(by_layer["dead"])
        assert 0.002 < line["router_balance_loss"] < 0.01, "1e-3 of at least 1, in each of 3 layers"
        assert line["router_z_loss"] > 0
    series = {chart.title: chart.series for chart in charts(read_run(saved_experts / "run"))}
    assert [step for step, _ in series["Load of experts"]["largest"]] == [1, 2, 3, 4]
    assert list(series["Router losses"]) == ["balance", "z"]


BIASES = {f"model.blocks.{layer}.feed_forward.router.bias" for layer in (1, 2, 3)}


def biases(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = runs.stored_tensors(runs.checkpoint_of(folder, step))
    return {name: found[name] for name in BIASES}


def test_a_checkpoint_holds_experts_and_biases(
    saved_experts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.checkpoint_of(saved_experts, 4)
    tensors, state = read_manifest(path).tensors, runs.stored_tensors(path)
    assert tensors.keys() == state.keys()
    assert tensors["model.blocks.3.feed_forward.experts.gate.weight"] == ("F64", (4, 16, 32))
    assert {name for name in tensors if "bias" in name} == BIASES, "biases have no moments"
    assert {tensors[name] for name in BIASES} == {("F32", (4,))}
    assert any(state[name].any() for name in BIASES), "updates have changed them"
    moment = state["optimizer.blocks.1.feed_forward.experts.down.weight.exp_avg_sq"]
    assert (moment.amax((1, 2)) > 0).all(), "of every expert"
    assert verify.main([str(saved_experts / "run")]) == 0
    assert "good" in capsys.readouterr().out


def test_weights_come_with_their_biases(ranks: Ranks, saved_experts: Path) -> None:
    """A new run that starts from weights gets the biases too, because they decide which experts
    these weights were trained for; its moments are new."""
    arguments = [str(saved_experts / "config.yaml"), "parallel.pp=1", "parallel.tp=2"]
    path = str(runs.checkpoint_of(saved_experts, 4))
    for found in ranks.run(runs.global_state, 2, arguments, path, True):  # only the weights
        assert runs.same_tensors({name: found[name] for name in BIASES}, biases(saved_experts, 4))
        moments = [tensor for name, tensor in found.items() if name.startswith("optimizer.")]
        assert not any(moment.any() for moment in moments)
        assert moments


def test_how_the_load_is_evened_may_change(
    ranks: Ranks, saved_experts: Path, tmp_path: Path
) -> None:
    """Auxiliary losses and the rate of biases are not stored. With rate 0 biases stay."""
    config, _ = runs.copy_of(saved_experts, tmp_path)
    free = {"experts.router_aux_weight", "experts.router_z_weight", "sigmoid_bias.bias_rate"}
    every = {key.removeprefix("model.") for key, _, _ in keys_of(load_config(config, []).model)}
    stored = parse_trainer(runs.checkpoint_of(tmp_path, 4)).model
    assert free <= every
    assert "sigmoid_bias" not in stored
    assert not {key.removeprefix("experts.") for key in free} & stored["experts"].keys()
    changed = [f"model.{key}=0" for key in sorted(free)]
    runs.run(ranks, 1, config, "parallel.pp=1", "parallel.ep=1", *changed, "train.steps=5")
    assert runs.same_tensors(biases(tmp_path, 5), biases(tmp_path, 4))
    before, after = (runs.stored_tensors(runs.checkpoint_of(tmp_path, step)) for step in (4, 5))
    assert not runs.same_tensors(before, after), "weights do not"
