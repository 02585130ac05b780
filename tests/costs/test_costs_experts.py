"""costs/ records blocks with experts: rows and operations of each rank, what travels, and what the
split of layers makes of it."""

from dataclasses import replace

import pytest

from costs.collectives import Call
from costs.parameters import num_active_parameters, num_parameters
from costs.routing import Routing, check_imbalance
from costs.seconds import Links
from costs.setting import Setting
from costs.summary import flops_per_token, layer_costs, model_flops
from costs.units import Unit, unit
from errors import UserError
from hardware import H100
from model.config import ModelConfig
from model.experts import Experts
from settings.checks import validate
from settings.load import load_config

D, F, X, K, LONG = 256, 128, 8, 2, 512
OF_EXPERTS = Experts(count=X, per_token=K, ffn_dim=F, num_shared=1, num_dense_layers=1)
DENSE = ModelConfig(dim=D, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=704, vocab_size=1000)
SMALL = replace(DENSE, feed_forward="experts", experts=OF_EXPERTS)
BALANCED = replace(SMALL, router="sigmoid_bias",
                   experts=replace(OF_EXPERTS, router_aux_weight=1e-2, router_z_weight=1e-3),
                   sigmoid_bias={"bias_rate": 1e-3})  # fmt: skip


def experts(setting: Setting) -> Unit:
    return unit(setting, "causal experts")


def test_routing_loses_no_row_and_is_balanced() -> None:
    """With an imbalance, the other ranks share equally what the busiest one leaves."""
    for rows, ep in ((13, 4), (3, 8), (7, 1)):
        for rank in range(ep):
            routing = Routing(rows, ep, rank)
            for numbers in (routing.send, routing.receive):
                assert sum(numbers) == rows
                assert max(numbers) - min(numbers) <= 1
            assert routing.send[rank] == routing.receive[rank]
    uneven = Routing(rows=100, ep=4, rank=2, imbalance=2.0)
    assert uneven.receive == [50] * 4
    assert uneven.send == [16, 17, 50, 17]


def test_no_rank_can_receive_more_than_all() -> None:
    """One rank of four would receive everything if all experts of all tokens were its own; but with
    4 of 8 experts for each token and 2 on a rank, at most half of the rows."""
    check_imbalance("--imbalance", 4.0, SMALL, 4)
    for model, imbalance, ep in [
        (SMALL, 4.1, 4),
        (SMALL, 0.9, 4),
        (SMALL, 1.1, 1),
        (replace(SMALL, experts=replace(OF_EXPERTS, per_token=4)), 2.1, 4),
        (DENSE, 1.1, 4),
    ]:
        with pytest.raises(UserError, match="--imbalance"):
            check_imbalance("--imbalance", imbalance, model, ep)


def test_flops_and_parameters_of_a_token() -> None:
    """6 for each element of a matrix that the token is multiplied with (PaLM, appendix B): of k
    experts, of the shared one, of the router; in dense layers of the whole feed-forward."""
    attention = D * D * 2 + D * SMALL.head_dim * 2 * SMALL.num_kv_heads
    sparse, dense = 3 * D * F * K + 3 * D * F + D * X, 3 * D * SMALL.ffn_dim
    matrices = 4 * attention + 3 * sparse + dense + 1000 * D
    assert flops_per_token(SMALL, LONG) == 6 * matrices + 6 * 4 * LONG * D
    others = 1000 * D + 9 * D  # embedding, norms
    assert num_active_parameters(SMALL) == matrices + others
    assert num_parameters(SMALL) == matrices + others + 3 * 3 * D * F * (X - K)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_ranks_share_what_one_computes(ep: int) -> None:
    """Balanced, each of 4 ranks that split a sequence computes a quarter; with imbalance its
    experts compute so much more, and nothing else does."""
    alone = model_flops(experts(Setting(SMALL, LONG)))
    of_rank = Setting(SMALL, LONG, tp=2, cp=2, ep=ep)
    assert model_flops(experts(of_rank)) == alone / 4
    local = [w.shape for w in experts(of_rank).weights if w.spec.is_expert]
    assert {shape[0] for shape in local} == {X // ep}
    if ep > 1:
        more = model_flops(experts(replace(of_rank, imbalance=1.5))) - alone / 4
        assert more == 0.5 * 6 * 3 * D * F * K * LONG / 4


def test_whole_sequences_are_counted_over_the_ranks_that_share_them() -> None:
    """The balance loss needs the counts of whole sequences, over cp and over tp."""
    plain, counted = (
        experts(Setting(model, LONG, tp=2, cp=2, ep=4)).phases()["forward"].sends
        for model in (SMALL, BALANCED)
    )
    assert counted - plain == {Call(axis, "all_reduce", 8 * X): 1 for axis in ("cp", "tp")}


def test_seconds_of_an_all_to_all() -> None:
    """Inside a node at the node's rate; over 4 nodes of 8 ranks, 24 of 32 parts go through each
    rank's own network link, which takes longer than the 7 in the node."""
    size, sent = 1e9, replace(H100, collective_seconds=0.0, hop_seconds=0.0)
    node = sent.node_bytes_per_second * sent.node_efficiency
    network = sent.network_bytes_per_second * sent.network_efficiency
    times = [Links(sent, 1, n, 1, n, ep=n).seconds("all_to_all", "ep", size) for n in (1, 8, 32)]
    assert times == pytest.approx([0.0, size * 7 / 8 / node, size * 24 / 32 / network])
    gather = Links(sent, 1, 8, 1, 8, ep=8).seconds("all_gather", "ep", size)
    assert gather == pytest.approx(times[1])


def test_stages_are_balanced_by_what_their_layers_cost() -> None:
    """A stage with a dense layer gets more layers than one of experts only."""
    keys = ["model.feed_forward=experts", "model.experts.count=8", "model.experts.per_token=4",
            "model.experts.num_dense_layers=2", "model.experts.ffn_dim=768", "parallel.ep=2",
            "parallel.layers_per_stage=auto"]  # fmt: skip
    config = load_config("configs/laptop.yaml", keys)
    validate(config, 8)
    assert config.setting().ep == 2
    assert [len(stage) for stage in config.split_layers()] == [3, 1]
    costs = layer_costs(config.setting())
    assert costs.blocks[0] == costs.blocks[1] < costs.blocks[2] == costs.blocks[3]
