"""`parallel.layers_per_stage=auto` finds the split with the fastest slowest rank, and the simulated
step is shorter than with an even split."""

import random
from itertools import combinations, pairwise

import pytest

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
from settings.load import load_config


def every_split(layers, stages):
    """All splits with at least one layer in every stage except the first and the last."""
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
        costs = LayerCosts(rng.uniform(0, 2), (1.0,) * layers, rng.uniform(0, 5))
        ranks = rng.randint(1, stages)
        where = [s % ranks for s in range(stages)]
        found = balanced_split(costs, where)
        assert sum(found) == layers
        slowest = [
            max(rank_costs(stage_costs(split, costs), where))
            for split in (found, *every_split(layers, stages))
        ]
        assert slowest[0] == pytest.approx(min(slowest))


def test_layers_alone_are_split_evenly():
    assert (
        sorted(balanced_split(LayerCosts(0, (1,) * 10, 0), [0, 1, 2, 3]))
        == sorted(even_split(10, 4))
        == [2, 2, 3, 3]
    )


def test_layers_that_differ_are_dealt_by_their_own_costs():
    """With layers of two costs, grouped or alternating, the split is within 10% of the best of all
    splits, and no worse than one made from the mean cost."""
    for blocks in ((1.0,) * 6 + (3.0,) * 6, (1.0, 3.0) * 6, (5.0,) + (1.0,) * 11):
        costs = LayerCosts(0.5, blocks, 1.5)
        for where in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 1, 0]):
            split = balanced_split(costs, where)
            slowest, *others = (
                max(rank_costs(stage_costs(each, costs), where))
                for each in (split, *every_split(12, len(where)))
            )
            assert slowest <= 1.1 * min(others)
            mean = costs._replace(blocks=(sum(blocks) / 12,) * 12)
            unaware = balanced_split(mean, where)
            assert slowest <= max(rank_costs(stage_costs(unaware, costs), where))


def test_costs_are_of_the_layers_that_there_are():
    keys = ["model.attention=[causal,sliding_window]", "model.attention_window=256"]
    costs = load_config("configs/llama3_8b.yaml", keys).layer_costs()
    assert len(costs.blocks) == 32
    assert costs.blocks[0] == costs.blocks[2] > costs.blocks[1] == costs.blocks[31]
    again = load_config("configs/llama3_8b.yaml", ["train.activation_checkpointing=full"])
    # the last product of a block's forward is not computed again
    assert 1.2 < again.layer_costs().blocks[0] / costs.blocks[0] < 1.3


@pytest.mark.parametrize("pp", [4, 8])
def test_the_simulated_step_is_shorter(pp):
    """For Llama 3 8B with 4 micro-batches per rank, the automatic split shortens the step by over
    5%: the head costs about 2.5 blocks, and with an even split all ranks wait for it."""
    config = load_config(
        "configs/llama3_8b.yaml", [f"parallel.pp={pp}", "parallel.layers_per_stage=auto"]
    )
    costs = config.layer_costs()
    assert 1.5 < costs.head / costs.blocks[0] < 3.5
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
    """Two stages per rank are balanced together: with 80 layers on 8 ranks, the simulated step is
    at least 3% shorter than with an even split."""
    costs, where = LayerCosts(0.0, (1.0,) * 80, 2.0), [s % 8 for s in range(16)]
    times = []
    for split in (even_split(80, 16), balanced_split(costs, where)):
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


def test_a_search_over_hundreds_of_stages_ends() -> None:
    """It moved one layer at a time, for minutes; where it stops, the split is near the optimum."""
    costs = LayerCosts(1, tuple([1.0, 1.0, 2.5][layer % 3] for layer in range(4096)), 5)
    where = [stage % 2 for stage in range(512)]
    assert imbalance(balanced_split(costs, where), costs, where) < 1.001
