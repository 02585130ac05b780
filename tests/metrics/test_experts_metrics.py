"""Models with experts in a run: the figures of their load, when it is reported as collapsed, where
it is written; and what a checkpoint holds of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from declare import keys_of
from model.config import ModelConfig
from proofs.ranks import Ranks
from runtime.checkpoint.load import load as load_checkpoint
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.verify import parse_trainer
from runtime.metrics import metrics
from runtime.metrics.expert_load import ENOUGH_ROWS, LoadStatistics, figures_of
from runtime.metrics.tracker import scalars
from runtime.trainer_state import held_tensors
from settings.load import load_config
from tests import runs
from tests.metrics.report_page import charts_of, written
from tests.planted import planted
from tools import verify
from tools.report.run import read_run
from tools.report.tables import experts
from training.balance import Loads


def statistics(experts: int = 8, chosen: int = 2, layers: int = 3) -> LoadStatistics:
    """Of a model whose first layer is dense."""
    model = ModelConfig(
        dim=8, num_layers=layers, num_heads=2, num_kv_heads=2, ffn_dim=8, vocab_size=16,
        experts={"count": experts, "per_token": chosen, "num_dense_layers": 1},
    )  # fmt: skip
    return LoadStatistics(model, "cpu")


def warning(load: LoadStatistics, *layers: list[int], steps: int = 40) -> str:
    """The warning after an interval of steps which together have these counts in the layers with
    experts."""
    dense = [0] * len(layers[0])
    load.add(Loads(torch.tensor([dense, *layers]), torch.zeros(2)))
    load.steps += steps - 1
    return load.read(load.figures().tolist())[1]


def warnings(load: LoadStatistics, *layers: list[int]) -> str:
    """Those of three such intervals, after which layers are judged."""
    return "".join(warning(load, *layers) for _ in range(3))


def test_the_figures_are_those_of_the_definition() -> None:
    even, one_pair, uneven = [6] * 4, [12, 12, 0, 0], [12, 6, 6, 0]
    entropy, largest, dead, rows = figures_of(torch.tensor([even, one_pair, uneven, [0] * 4]))
    expected = [1, math.log(2) / math.log(4), 1.5 * math.log(2) / math.log(4), 0]
    assert entropy.tolist() == pytest.approx(expected)
    assert largest.tolist() == [1, 2, 2, 0]
    assert dead.tolist() == [0, 2, 1, 4]
    assert rows.tolist() == [24, 24, 24, 0]


def test_steps_since_the_last_logged_one_are_added() -> None:
    load = statistics(experts=4)
    for row in ([9, 0, 0, 0], [0, 3, 3, 3]):
        load.add(Loads(torch.tensor([[0] * 4, row, [3] * 4]), torch.zeros(2)))
    read, _ = load.read(load.figures().tolist())
    assert read.layers == [1, 2]
    assert read.dead == [0, 0], "over both steps"
    assert read.largest_share == [2, 1]
    assert read.record()["largest_expert_share"] == 2
    assert load.read(load.figures().tolist())[0].rows == [0, 0], "of a new interval"


def test_a_collapsed_layer_is_named_once_until_it_recovers() -> None:
    load, r = statistics(), ENOUGH_ROWS
    even = [r] * 8
    # 8 · r rows of 4 · r tokens; collapsed from (1 + 2/8) / 2 of them on: 2.5 · r
    busy = [int(2.6 * r), *[int(5.4 * r / 7) + 1] * 7]
    less_busy = [int(2.4 * r), *[int(5.6 * r / 7) + 1] * 7]
    dead = [3 * r, 3 * r, 1 * r, r, 0, 0, 0, 0]
    assert warnings(load, even, less_busy) == ""
    said = warnings(load, even, busy)
    assert "over the last 120 steps; layer 2: one expert had 65% of the tokens (even: 25%)" in said
    assert warnings(load, even, busy) == "", "said already"
    said = warnings(load, dead, busy)
    assert "over the last 120 steps; layer 1: 4 of 8 experts had no token" in said
    assert "layer 2" not in said
    assert warnings(load, even, even) == ""
    assert "layer 2" in warnings(load, even, busy)


def test_only_what_lasts_has_collapsed() -> None:
    """Not one interval, however uneven, nor what recovers, nor an expert that had one token."""
    even, uneven, all_to_two = [9000] * 4, [13860, 13860, 4140, 4140], [18000, 18000, 0, 0]
    load, dead, few, one = (statistics(experts=4, layers=2) for _ in range(4))
    for intervals in ([uneven, even, even], [uneven, uneven, even], [all_to_two, even, even]):
        assert "".join(warning(load, counts, steps=500) for counts in intervals) == ""
    assert "one expert had 77% of the tokens (even: 50%)" in warnings(load, uneven)
    assert "1 of 4 experts had no token" in warnings(dead, [12000, 12000, 12000, 0])
    assert "".join(warning(dead, [12000, 12000, 12000, n]) for n in (0, 1, 0)) == ""
    assert "".join(warning(few, uneven, steps=30) for _ in range(3)) == "", "90 steps"
    assert "over the last 120 steps" in warning(few, uneven, steps=30)
    assert warning(one, uneven, steps=1000) == "", "one interval"


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 2, 8), (4, 4, 64), (128, 8, 64)])
def test_random_choices_have_not_collapsed(experts: int, chosen: int, tokens: int) -> None:
    """However few tokens an interval has; but the same choices have if one expert is mostly among
    them, or never."""
    generator = torch.Generator().manual_seed(0)

    def said(bias: float, periods: int) -> str:
        """What is said of choices in which expert 0 has a bias, in so many periods to judge."""
        load, found = statistics(experts, chosen, layers=2), ""
        for _ in range(periods * max(3, ENOUGH_ROWS * experts // (chosen * tokens) + 1)):
            chance = torch.rand(tokens, experts, generator=generator)
            chance[:, 0] += bias
            counts = chance.topk(chosen).indices.flatten().bincount(minlength=experts)
            found += warning(load, counts.tolist())
        return found

    assert said(bias=0, periods=2) == ""
    if chosen < experts:
        assert "one expert had" in said(bias=0.8, periods=1)
        assert f"1 of {experts} experts had no token" in said(bias=-1, periods=1)


def test_trackers_get_one_number_per_layer() -> None:
    by_layer = {"layer": [1, 12], "entropy": [0.5, 0.75]}
    assert scalars({"step": 4, "mfu": None, "experts_by_layer": by_layer}) == {
        "step": 4, "experts_by_layer/entropy/001": 0.5, "experts_by_layer/entropy/012": 0.75,
    }  # fmt: skip


def train_and_count_waits(arguments: list[str]) -> list[int]:
    """Train; return the steps after which the measurements of a step were read."""
    steps: list[int] = []

    @planted(metrics.Metrics, "_read")
    def counted(read: Any, self: metrics.Metrics, *given: Any) -> Any:
        steps.append(self.step)
        return read(self, *given)

    with counted():
        assert runs.train_run(arguments) == ""
    return steps


def test_what_a_step_measured_is_read_when_it_is_logged(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = runs.write_config(
        tmp_path, data, model=runs.EXPERTS, train={"steps": 3, "micro_batch_size": 8}
    )
    assert ranks.run(train_and_count_waits, 1, [config, "run.log_interval=2"]) == [[2, 3]]
    assert [line["step"] for line in runs.metrics_of(tmp_path)] == [2, 3]


def test_a_run_logs_its_load_and_the_losses_of_its_routers(saved_experts: Path) -> None:
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


def test_the_report_shows_the_load(saved_experts: Path, tmp_path: Path) -> None:
    page = written(saved_experts / "run", tmp_path / "page.html")
    charts = charts_of(saved_experts / "run")
    largest = charts["Load of experts"].series["largest"]
    assert [step for step, _ in largest] == [1, 2, 3, 4]
    assert list(charts["Router losses"].series) == ["balance", "z"]
    assert "Load of experts at step 4" in page.text
    assert "entropy, 1 is even" in page.text
    # what no run wrote is not shown
    odd = {"layer": [1], "entropy": ["<b>"], "largest_share": [1], "dead": [0]}
    for by_layer in ("<b>", {"layer": 3}, odd):
        line = {"step": 1, "loss": 3.0, "experts_by_layer": by_layer}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert experts(read_run(tmp_path)) == ("", []), by_layer


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


def loaded_weights(arguments: list[str], path: str) -> tuple[dict[str, torch.Tensor], float]:
    """Load only the weights: the biases, and the largest moment."""
    step = runs.step_of(arguments)
    load_checkpoint(step, runs.saved_start(Path(path), weights_only=True))
    biases, largest = {}, 0.0
    for held in held_tensors(step):
        if held.name.endswith("bias"):
            biases[held.name] = held.tensor.to_local().clone()
        elif not held.of_model and held.tensor.to_local().numel():
            largest = max(largest, held.tensor.to_local().abs().max().item())
    return biases, largest


def test_weights_come_with_their_biases(ranks: Ranks, saved_experts: Path) -> None:
    """A new run that starts from weights gets the biases too, because they decide which experts
    these weights were trained for; its moments are new."""
    arguments = [str(saved_experts / "config.yaml"), "parallel.pp=1", "parallel.tp=2"]
    path = str(runs.checkpoint_of(saved_experts, 4))
    for found, largest_moment in ranks.run(loaded_weights, 2, arguments, path):
        assert runs.same_tensors(found, biases(saved_experts, 4))
        assert largest_moment == 0


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
