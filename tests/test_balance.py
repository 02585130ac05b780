"""`parallel.layers_per_stage=auto`: the split whose slowest stage is fastest, and no worse than an
even one."""

import random
from itertools import combinations, pairwise

import pytest

from costs.summary import flops_per_token, layer_costs
from errors import UserError
from parallel.pipeline.balance import (
    LayerCosts,
    balanced_split,
    even_split,
    imbalance,
    rank_costs,
    stage_costs,
)
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


def test_no_split_has_a_faster_slowest_rank():
    rng = random.Random(0)
    for _ in range(60):
        stages = rng.randint(1, 5)
        layers = rng.randint(stages, 10)
        costs = LayerCosts(rng.uniform(0, 2), 1.0, rng.uniform(0, 5))
        ranks = rng.randint(1, stages)
        where = [s % ranks for s in range(stages)]
        found = balanced_split(layers, costs, where)
        assert sum(found) == layers
        slowest = [
            max(rank_costs(stage_costs(split, costs), where))
            for split in (found, *every_split(layers, stages))
        ]
        assert slowest[0] == pytest.approx(min(slowest))


def test_layers_alone_are_split_evenly():
    assert (
        sorted(balanced_split(10, LayerCosts(0, 1, 0), [0, 1, 2, 3]))
        == sorted(even_split(10, 4))
        == [2, 2, 3, 3]
    )


def test_operations_are_those_of_the_model(monkeypatch):
    """Without the bytes that are moved they add up to `flops_per_token`, but for attention's
    backward, which computes the scores again: 5 products where 4 are counted."""
    model = load_config("configs/llama3_8b.yaml", []).model
    monkeypatch.setattr("costs.summary.OPERATIONS_PER_BYTE", 0)
    costs, whole = (layer_costs.__wrapped__(model, 8192, mode) for mode in ("none", "full"))
    attention = 6 * 8192 * model.attention_width
    counted = costs.block * model.num_layers + costs.head + costs.embedding
    flops = flops_per_token(model, 8192) + model.num_layers * attention / 6
    assert counted == pytest.approx(flops)
    assert whole.block - costs.block == pytest.approx((costs.block - attention / 6) / 3)


@pytest.mark.parametrize("pp", [4, 8])
def test_the_simulated_step_is_shorter(pp):
    """Llama 3 8B, 4 micro-batches a rank: the head is worth two and a half blocks, and an even
    split waits for it."""
    config = load_config(
        "configs/llama3_8b.yaml", [f"parallel.pp={pp}", "parallel.layers_per_stage=auto"]
    )
    costs = layer_costs(config.model, config.train.seq_len, "none")
    assert 1.5 < costs.head / costs.block < 3.5
    times = []
    for split in (even_split(32, pp), [len(layers) for layers in config.split_layers()]):
        stages = [cost / 3 for cost in stage_costs(split, costs)]
        times.append(
            simulate(build_schedule("1f1b", pp, 1, 4 * pp), Costs(stages, stages, stages)).step_time
        )
        times.append(imbalance(split, costs, range(pp)))
    even, uneven, auto, balanced = times
    assert auto < 0.95 * even
    assert balanced < uneven


def test_interleaved_stages_are_balanced_by_rank():
    """80 layers on 8 ranks with two stages each: the head's rank gets fewer layers in both of its
    stages."""
    costs, where = LayerCosts(0.0, 1.0, 2.0), [s % 8 for s in range(16)]
    times = []
    for split in (even_split(80, 16), balanced_split(80, costs, where)):
        stages = [cost / 3 for cost in stage_costs(split, costs)]
        times.append(
            simulate(
                build_schedule("interleaved_1f1b", 8, 2, 32), Costs(stages, stages, stages)
            ).step_time
        )
    assert times[1] < 0.97 * times[0]


def test_auto_is_a_value_and_other_words_are_not():
    config = load_config("configs/laptop.yaml", ["parallel.layers_per_stage=auto"])
    assert sum(len(layers) for layers in config.split_layers()) == config.model.num_layers
    with pytest.raises(UserError, match=r"parallel\.layers_per_stage"):
        load_config("configs/laptop.yaml", ["parallel.layers_per_stage=best"])
