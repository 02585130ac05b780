"""`parallel.layers_per_stage=auto`: the split whose slowest stage is fastest, and no worse than an even one."""

import random
from itertools import combinations, pairwise

import pytest

from errors import UserError
from model.cost import layer_costs
from parallel.pipeline.balance import LayerCosts, balanced_split, even_split, imbalance, stage_costs
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, simulate
from training.load_config import load_config


def every_split(layers, stages):
    """All splits with a layer at least for every stage in between."""
    for cuts in combinations(range(layers + stages - 1), stages - 1):
        edges = [-1, *cuts, layers + stages - 1]
        counts = [b - a - 1 for a, b in pairwise(edges)]
        if 0 not in counts[1:-1]:
            yield counts


def test_no_split_has_a_faster_slowest_stage():
    rng = random.Random(0)
    for _ in range(60):
        stages = rng.randint(1, 5)
        layers = rng.randint(stages, 10)
        costs = LayerCosts(rng.uniform(0, 2), 1.0, rng.uniform(0, 5))
        found = balanced_split(layers, stages, costs)
        assert sum(found) == layers
        best = min(max(stage_costs(split, costs)) for split in every_split(layers, stages))
        assert max(stage_costs(found, costs)) == pytest.approx(best)


def test_layers_alone_are_split_evenly():
    assert sorted(balanced_split(10, 4, LayerCosts(0, 1, 0))) == sorted(even_split(10, 4)) == [2, 2, 3, 3]


def test_operations_are_those_of_the_model():
    """The matrix part of the costs adds up to `flops_per_token`."""
    model = load_config("configs/llama3_8b.yaml", []).model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.cost.OPERATIONS_PER_BYTE", 0)
        costs = layer_costs(model, 8192, "none")
        assert costs.block * model.num_layers + costs.head + costs.embedding == model.flops_per_token(8192)
        assert layer_costs(model, 8192, "full").block == pytest.approx(costs.block * 4 / 3)


@pytest.mark.parametrize("pp", [4, 8])
def test_the_simulated_step_is_shorter(pp):
    """Llama 3 8B, 4 micro-batches a rank: the head is worth two and a half blocks, and an even split waits for it."""
    config = load_config("configs/llama3_8b.yaml", [f"parallel.pp={pp}", "parallel.layers_per_stage=auto"])
    costs = layer_costs(config.model, config.train.seq_len, "none")
    assert 1.5 < costs.head / costs.block < 3.5
    times = []
    for split in (even_split(32, pp), [len(layers) for layers in config.split_layers()]):
        stages = [cost / 3 for cost in stage_costs(split, costs)]
        times.append(simulate(build_schedule("1f1b", pp, 1, 4 * pp), Costs(stages, stages, stages)).step_time)
        times.append(imbalance(split, costs))
    even, uneven, auto, balanced = times
    assert auto < 0.95 * even
    assert balanced < uneven


def test_auto_is_a_value_and_other_words_are_not():
    config = load_config("configs/laptop.yaml", ["parallel.layers_per_stage=auto"])
    assert sum(len(layers) for layers in config.split_layers()) == config.model.num_layers
    with pytest.raises(UserError, match=r"parallel\.layers_per_stage"):
        load_config("configs/laptop.yaml", ["parallel.layers_per_stage=best"])
